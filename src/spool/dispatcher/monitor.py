"""What no step of the dispatcher's makes happen, and listeners want to hear of: it is noticed in passing.

That wrappers have begun, that runs go on, that reservations begin and end, that GPUs are free again, and that there is
a dispatcher. What lasts is noted in the journal, so that the next dispatcher neither leaves it out nor tells it anew.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from spool.core.events import EventName
from spool.core.lifecycle import Liveness, Verdict
from spool.core.model import SECOND_NS, Jid, Machine, Stop, StopKind
from spool.core.reservations import is_active
from spool.dispatcher import events
from spool.dispatcher.confinement import Thing
from spool.dispatcher.events import Kind, Lasting, lasting
from spool.state.table import Live

if TYPE_CHECKING:
    from spool.dispatcher.loop import Dispatcher

_SOON_NS, _LATER_NS = 5_000_000, SECOND_NS // 4  # how soon a jid is looked for again
_POLL_NS = 60 * SECOND_NS
_OF_RUNS = (EventName.STARTED, EventName.CANCELLING)  # what is noted of a run


class Monitor:
    """The part of a dispatcher that notices. Where nobody listens it does nothing."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._of = dispatcher
        self._events = dispatcher.events
        self._root = dispatcher.spool.root
        self._silent: dict[tuple[str, int], Live] = {}  # runs that are to be told as started, and have no jid yet
        self._look_at_ns = 0
        self._pause_ns = _SOON_NS
        self._poll_at_ns = time.monotonic_ns() + _POLL_NS

    def next_due_ns(self) -> int | None:
        """Return when there is something to look for, on the monotonic clock."""
        due = [self._look_at_ns] if self._silent else []
        if EventName.POLLING in self._events.wanted and self._of.state.live:
            due.append(self._poll_at_ns)
        if self._wants_reservations:
            at = self._of.clock()
            turns = [moment for one in self._of.reservations.standing for moment in (one.start_at_ns, one.end_at_ns)]
            due += [time.monotonic_ns() + moment - at for moment in turns if moment > at]
        return min(due, default=None)

    def turn(self, machine: Machine | None) -> None:
        """Tell of what is so now and was not before."""
        self._see_started()
        wanted = self._events.wanted
        self._of.world.want_gpus(wanted=EventName.GPU_FREE in wanted or self._of.reservations.ask_for_gpus)
        if not wanted:
            return
        if EventName.POLLING in wanted:
            self._see_going_on()
        if self._wants_reservations:
            self._see_reservations(self._of.clock())
        if EventName.GPU_FREE in wanted and machine is not None and machine.gpu_problem is None:
            self._see_gpus(machine, self._of.clock())

    # The dispatcher.

    def begins(self) -> None:
        """Tell that the dispatcher serves, and that the one before it was killed."""
        telling, now = self._events, self._of.clock()
        self._forget_the_gone()
        for before in lasting(telling.known, Kind.DISPATCHER):
            if telling.wants(EventName.DISPATCHER_STOPPED):
                why = "it was killed, or the machine went down"
                telling.tell(events.of_spool(EventName.DISPATCHER_STOPPED, before, self._root, now, why))
            telling.forget(before.key)
        this = Lasting(Kind.DISPATCHER, "", now)
        if telling.wanted & {EventName.DISPATCHER_STARTED, EventName.DISPATCHER_STOPPED}:
            # Noted first: whoever is told of a dispatcher will be told that it is no more.
            telling.note(this.key)
            self._of.journal.write(telling.take_notes())
        if telling.wants(EventName.DISPATCHER_STARTED):
            telling.tell(events.of_spool(EventName.DISPATCHER_STARTED, this, self._root, now))

    def _forget_the_gone(self) -> None:
        """Forget what was told of runs that are over, where a power cut took the line that says so."""
        live = {_key(each, name) for each in self._of.state.live.values() for name in _OF_RUNS}
        for key in [key for key in self._events.known if key.endswith(_OF_RUNS) and key not in live]:
            self._events.forget(key)

    def leaves(self) -> None:
        """Tell that the dispatcher leaves."""
        telling = self._events
        for this in lasting(telling.known, Kind.DISPATCHER):
            if telling.wants(EventName.DISPATCHER_STOPPED):
                telling.tell(events.of_spool(EventName.DISPATCHER_STOPPED, this, self._root, self._of.clock()))
            telling.forget(this.key)

    # Runs.

    def watch_run(self, live: Live) -> None:
        """Look for the first word of a wrapper, and tell what an earlier dispatcher could not."""
        telling = self._events
        if live.adopted:
            with self._of.confinement.of(Thing.of_run(live.key), "read the record kept of"):
                live.kept = self._of.spool.why_kept(live.name, live.run)
        if telling.wants(EventName.STARTED, live.spec) and _key(live, EventName.STARTED) not in telling.known:
            self._silent[live.key] = live
            self._look_at_ns, self._pause_ns = time.monotonic_ns() + _SOON_NS, _SOON_NS

    def stopping(self, live: Live, stop: Stop) -> None:
        """Tell that a run is about to be cancelled, before that is on record."""
        telling, key = self._events, _key(live, EventName.CANCELLING)
        if stop.kind is not StopKind.CANCEL or key in telling.known:
            return
        if telling.wants(EventName.CANCELLING, live.spec) or EventName.CANCELLING in telling.asked:
            telling.run(EventName.CANCELLING, live, self._of.clock(), _by(stop))
            telling.note(key)
            telling.flush()

    def ended(self, lives: list[Live]) -> None:
        """Tell that those have started of which that was not noticed before they were over."""
        if not self._silent and not self._events.known:
            return
        for live in lives:
            void = live.proof is not None and live.proof.verdict is Verdict.VOID  # its wrapper may have begun
            if self._silent.pop(live.key, None) is not None and not void and self._has_begun(live):
                self._events.run(EventName.STARTED, live, self._of.clock())
        for live in lives:
            for name in _OF_RUNS:
                self._events.forget(_key(live, name))

    def _has_begun(self, live: Live) -> bool:
        if live.jid is not None or live.exit_code is not None:
            return True
        return isinstance(self._jid(live), Jid)

    def _jid(self, live: Live) -> Jid | Liveness:
        """Return who the wrapper is; what cannot be read now has not been said yet."""
        with self._of.confinement.of(Thing.of_run(live.key), "see the start of"):
            return self._of.spool.jid(live.name, live.run)
        return Liveness.ABSENT

    def _see_started(self) -> None:
        now = time.monotonic_ns()
        if not self._silent or now < self._look_at_ns:
            return
        for live in list(self._silent.values()):
            found = self._jid(live)
            if isinstance(found, Jid):
                self._events.run(EventName.STARTED, live, self._of.clock())
                self._events.note(_key(live, EventName.STARTED))
            if found is not Liveness.ABSENT:
                self._silent.pop(live.key)
        self._pause_ns = min(2 * self._pause_ns, _LATER_NS)
        self._look_at_ns = now + self._pause_ns

    def _see_going_on(self) -> None:
        now = time.monotonic_ns()
        if now < self._poll_at_ns:
            return
        self._poll_at_ns = now + _POLL_NS
        at_ns = self._of.clock()
        for live in self._of.state.live.values():
            if live.holds_room and live.key not in self._silent:
                minutes = max(0, at_ns - live.started_at_ns) // _POLL_NS
                self._events.run(EventName.POLLING, live, at_ns, part=str(minutes))

    # Reservations and GPUs.

    @property
    def _wants_reservations(self) -> bool:
        return bool(self._events.wanted & {EventName.RESERVATION_STARTED, EventName.RESERVATION_ENDED})

    def _see_reservations(self, now: int) -> None:
        telling = self._events
        standing = {
            Lasting(Kind.RESERVATION, one.name, one.created_at_ns): one for one in self._of.reservations.standing
        }
        for this, one in standing.items():
            if this.key not in telling.known and is_active(one, now):
                if telling.wants(EventName.RESERVATION_STARTED):
                    telling.tell(events.of_reservation(EventName.RESERVATION_STARTED, this, self._root, now, one))
                telling.note(this.key)
        for this in lasting(telling.known, Kind.RESERVATION):
            left = standing.get(this)
            if left is None or not is_active(left, now):
                if telling.wants(EventName.RESERVATION_ENDED):
                    telling.tell(events.of_reservation(EventName.RESERVATION_ENDED, this, self._root, now, left))
                telling.forget(this.key)

    def _see_gpus(self, machine: Machine, now: int) -> None:
        telling = self._events
        granted = {uuid for run in self._of.state.runs.with_gpus.values() for uuid in run.grant.gpu_uuids}
        taken = {this.name: this for this in lasting(telling.known, Kind.GPU)}
        for gpu in machine.gpus:
            is_taken = gpu.uuid in granted or bool(gpu.foreign) or gpu.problem is not None
            this = taken.get(gpu.uuid)
            if is_taken and this is None:
                telling.note(Lasting(Kind.GPU, gpu.uuid, now).key)
            elif not is_taken and this is not None:
                telling.tell(events.of_spool(EventName.GPU_FREE, this, self._root, now))
                telling.forget(this.key)


def _key(live: Live, name: EventName) -> str:
    return f"{live.name}:{live.run}:{name}"


def _by(stop: Stop) -> str:
    return f"by {stop.by}" + (f": {stop.reason}" if stop.reason else "")
