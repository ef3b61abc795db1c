"""Events that are not caused by a step of the dispatcher.

These are: engines have accepted runs, wrappers have begun, runs go on, reservations begin and end, GPUs are used and
free again, and a dispatcher is running. Lasting conditions are noted in the journal, so that the next dispatcher
neither skips nor repeats their events.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from spool.core.events import EventName
from spool.core.gpus import stranger
from spool.core.lifecycle import Liveness
from spool.core.model import SECOND_NS, Gpu, Jid, Machine, Running, Stop, StopKind
from spool.core.reservations import is_active
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Component, Context
from spool.dispatcher.events import ConditionKind, OngoingCondition, conditions
from spool.dispatcher.scanner import Reservations
from spool.formats import journal
from spool.formats.capabilities import engine_title
from spool.state.run import ActiveRun
from spool.state.world import MachineMonitor

_SOON_NS, _LATER_NS = 5_000_000, SECOND_NS // 4  # how soon to look for a jid again
_POLL_NS = 60 * SECOND_NS
_OF_RUNS = (EventName.HANDED_OVER, EventName.STARTED, EventName.CANCELLING)  # noted conditions of a run
_OF_RESERVATIONS = frozenset({EventName.RESERVATION_STARTED, EventName.RESERVATION_ENDED})
_OF_GPUS = frozenset({EventName.GPU_TAKEN, EventName.GPU_FREE})


class Monitor(Component):
    """Watches for such events, and remembers those reported. Without listeners it does nothing."""

    def __init__(self, context: Context, reservations: Reservations, world: MachineMonitor) -> None:
        super().__init__(context)
        self._reservations = reservations
        self._world = world
        self._timer = context.timers.timer("conditions")
        self._reservations_timer = context.timers.timer("conditions", context.clock)
        self._told: set[str] = set()  # conditions that are, or will be, in the journal
        self.silent: dict[tuple[str, int], ActiveRun] = {}  # runs whose start will be reported once they have a jid
        self._look_at_ns = 0
        self._pause_ns = _SOON_NS
        self._poll_at_ns = time.monotonic_ns() + _POLL_NS

    def open(self, told: Iterable[str]) -> None:
        """Restore the reported conditions from the journal."""
        self._told = set(told)

    def turn(self, machine: Machine | None) -> None:
        """Report every condition that is new."""
        try:
            self._turn(machine)
        finally:
            self._set_timers()

    def _turn(self, machine: Machine | None) -> None:
        self._see_started()
        wanted = self._events.wanted
        self._world.want_gpus(wanted=bool(wanted & _OF_GPUS) or self._reservations.ask_for_gpus)
        if not wanted:
            return
        if EventName.POLLING in wanted:
            self._see_going_on()
        if wanted & _OF_RESERVATIONS:
            self._see_reservations(self._clock())
        if wanted & _OF_GPUS and machine is not None and machine.gpu_problem is None:
            self._see_gpus(machine, self._clock())

    def _set_timers(self) -> None:
        self._timer.set(self._look_at_ns if self.silent else None)
        if EventName.POLLING in self._events.wanted and self._state.live:
            self._timer.advance(self._poll_at_ns)
        moments: list[int] = []
        if self._events.wanted & _OF_RESERVATIONS:
            moments = [at for one in self._reservations.standing for at in (one.start_at_ns, one.end_at_ns)]
        now = self._clock() if moments else 0
        self._reservations_timer.set(min((at for at in moments if at > now), default=None))

    # The journal.

    def has_told(self, name: EventName, live: ActiveRun) -> bool:
        """Whether the journal has that this was reported for a run."""
        return _key(live, name) in self._told

    def worth_remembering(self) -> list[journal.Line]:
        """Return the lines that the next dispatcher needs."""
        return [journal.Told(key) for key in self._told]

    def _note(self, key: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._journal.note(journal.Told(key))

    def _forget(self, key: str) -> None:
        if key in self._told:
            self._told.discard(key)
            self._journal.note(journal.Told(key, True))

    # The dispatcher.

    def begins(self) -> None:
        """Report that the dispatcher is running, and that the previous one was killed, if so."""
        now = self._clock()
        self._forget_the_gone()
        for before in conditions(self._told, ConditionKind.DISPATCHER):
            why = "it was killed, or the machine went down"
            self._events.condition(EventName.DISPATCHER_STOPPED, before, now, why)
            self._forget(before.key)
        this = OngoingCondition(ConditionKind.DISPATCHER, "", now)
        if self._events.wanted & {EventName.DISPATCHER_STARTED, EventName.DISPATCHER_STOPPED}:
            # Noted first, so that every listener told of a dispatcher will also be told of its end.
            self._note(this.key)
            self._journal.commit()
        self._events.condition(EventName.DISPATCHER_STARTED, this, now)

    def _forget_the_gone(self) -> None:
        """Forget conditions of runs that are over, if a power cut destroyed the lines about that."""
        live = {_key(each, name) for each in self._state.live.values() for name in _OF_RUNS}
        for key in [key for key in self._told if key.endswith(_OF_RUNS) and key not in live]:
            self._forget(key)

    def leaves(self) -> None:
        """Report that the dispatcher is leaving."""
        for this in conditions(self._told, ConditionKind.DISPATCHER):
            self._events.condition(EventName.DISPATCHER_STOPPED, this, self._clock())
            self._forget(this.key)

    # Runs.

    def watch_run(self, live: ActiveRun) -> None:
        """Watch for the wrapper's report, and report what an earlier dispatcher could not."""
        if live.adopted:
            with self._confinement.of(Thing.of_run(live.key), "read the record kept of"):
                live.stop_answered(self._spool.cancel_denial(live.name, live.run))
        if self._events.wants(EventName.STARTED, live.spec) and not self.has_told(EventName.STARTED, live):
            self.silent[live.key] = live
            self._look_at_ns, self._pause_ns = time.monotonic_ns() + _SOON_NS, _SOON_NS

    def handed_over(self, live: ActiveRun) -> None:
        """Report that the engine of a run has accepted it, if no earlier dispatcher has."""
        name = EventName.HANDED_OVER
        if self._events.wants(name, live.spec) and not self.has_told(name, live):
            has_it = f"{engine_title(live.executor)} has it as job {live.engine_id}"
            self._events.run(name, live, self._clock(), has_it)
            self._note(_key(live, name))

    def stopping(self, live: ActiveRun, stop: Stop) -> None:
        """Report that a run is about to be cancelled, before that is on record."""
        if stop.kind is not StopKind.CANCEL or self.has_told(EventName.CANCELLING, live):
            return
        if self._events.wants(EventName.CANCELLING, live.spec) or EventName.CANCELLING in self._events.asked:
            self._events.cancelling(live, stop, self._clock())
            self._note(_key(live, EventName.CANCELLING))
            self._events.flush()

    def ended(self, lives: list[ActiveRun]) -> None:
        """Report the start of runs that ended before their start was noticed."""
        if not self.silent and not self._told:
            return
        for live in lives:
            silent = self.silent.pop(live.key, None) is not None
            ended = live.ended if silent else None  # None: a void one, too, which may have begun
            spoke = ended is not None and (live.jid is not None or ended.exit_code is not None)
            if spoke or (ended is not None and isinstance(self._jid(live), Jid)):
                self._events.run(EventName.STARTED, live, self._clock())
        for live in lives:
            for name in _OF_RUNS:
                self._forget(_key(live, name))

    def _jid(self, live: ActiveRun) -> Jid | Liveness:
        """Return the wrapper's identity; an unreadable one counts as missing for now."""
        with self._confinement.of(Thing.of_run(live.key), "notice the start of"):
            return self._spool.jid(live.name, live.run)
        return Liveness.ABSENT

    def _see_started(self) -> None:
        now = time.monotonic_ns()
        if not self.silent or now < self._look_at_ns:
            return
        for live in list(self.silent.values()):
            if live.submitted is not None:
                continue  # its supervisor notices its start
            found = self._jid(live)
            if isinstance(found, Jid):
                self._events.run(EventName.STARTED, live, self._clock())
                self._note(_key(live, EventName.STARTED))
            if found is not Liveness.ABSENT:
                self.silent.pop(live.key)
        self._pause_ns = min(2 * self._pause_ns, _LATER_NS)
        self._look_at_ns = now + self._pause_ns

    def _see_going_on(self) -> None:
        now = time.monotonic_ns()
        if now < self._poll_at_ns:
            return
        self._poll_at_ns = now + _POLL_NS
        at_ns = self._clock()
        for live in self._state.live.values():
            if live.holds_room and live.key not in self.silent and live.ran_from_ns is not None:
                minutes = max(0, at_ns - live.ran_from_ns) // _POLL_NS
                self._events.run(EventName.POLLING, live, at_ns, part=str(minutes))

    # Reservations and GPUs.

    def _see_reservations(self, now: int) -> None:
        standing = {
            OngoingCondition(ConditionKind.RESERVATION, one.name, one.created_at_ns): one
            for one in self._reservations.standing
        }
        for this, one in standing.items():
            if this.key not in self._told and is_active(one, now):
                self._events.reservation(EventName.RESERVATION_STARTED, this, now, one)
                self._note(this.key)
        for this in conditions(self._told, ConditionKind.RESERVATION):
            left = standing.get(this)
            if left is None or not is_active(left, now):
                self._events.reservation(EventName.RESERVATION_ENDED, this, now, left)
                self._forget(this.key)

    def _see_gpus(self, machine: Machine, now: int) -> None:
        holders: dict[str, list[Running]] = {}
        for run in self._state.runs.with_gpus.values():
            for uuid in run.grant.gpu_uuids:
                holders.setdefault(uuid, []).append(run)
        taken = {this.name: this for this in conditions(self._told, ConditionKind.GPU)}
        for gpu in machine.gpus:
            runs, this = holders.get(gpu.uuid, []), taken.get(gpu.uuid)
            is_taken = bool(runs or gpu.foreign) or gpu.problem is not None
            if is_taken and this is None:
                # Derived from a run's start time, so that a repetition after a crash has the same id.
                since_ns = min((run.started_at_ns for run in runs), default=now)
                new = OngoingCondition(ConditionKind.GPU, gpu.uuid, since_ns)
                self._events.condition(EventName.GPU_TAKEN, new, now, _taker(gpu, runs))
                self._note(new.key)
            elif not is_taken and this is not None:
                self._events.condition(EventName.GPU_FREE, this, now)
                self._forget(this.key)


def _taker(gpu: Gpu, runs: list[Running]) -> str:
    """Return the user of a GPU, or why it is unusable."""
    if runs:
        return ", ".join(f"job {name}" for name in sorted({run.name for run in runs}))
    return gpu.problem if gpu.problem is not None else stranger(gpu.foreign[0], "")


def _key(live: ActiveRun, name: EventName) -> str:
    return f"{live.name}:{live.run}:{name}"
