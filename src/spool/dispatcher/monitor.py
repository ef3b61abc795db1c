"""What only watching shows of runs and of the spool: limits, GPUs that runs leave idle, and events that no step causes.

These are: engines have accepted runs, wrappers have begun, runs go on, reservations begin and end, GPUs are used and
free again, and a dispatcher is running. Lasting conditions are noted in the journal, so that the next dispatcher
neither skips nor repeats their events.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from spool.core import layout
from spool.core.gpus import is_active, stranger
from spool.core.gpuuse import GpuWatch
from spool.core.lifecycle import EPILOG_NS, Liveness
from spool.core.model import SECOND_NS, EventName, GpuWork, Jid, Machine, Reservation, Stop, StopKind
from spool.core.units import format_duration, show_duration, show_size
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Component, Context
from spool.dispatcher.events import ConditionKind, OngoingCondition, conditions
from spool.dispatcher.launcher import SILENT_NS
from spool.dispatcher.scanner import Reservations
from spool.dispatcher.wakeup import Pace, boot_clock
from spool.formats import journal
from spool.formats.capabilities import engine_title
from spool.formats.run_records import render_gpus
from spool.machine.gpus import GpuWatcher
from spool.state.run import ActiveRun
from spool.state.world import MachineMonitor

_SOON_NS, _LATER_NS = 5_000_000, SECOND_NS // 4  # how soon to look for a jid again
_POLL_NS = 60 * SECOND_NS
_OF_RUNS = (EventName.HANDED_OVER, EventName.STARTED, EventName.CANCELLING)  # noted conditions of a run
_OF_GPUS = frozenset({EventName.GPU_TAKEN, EventName.GPU_FREE})


class Monitor(Component):
    """Watches for such events, and remembers those reported. Without listeners it does nothing."""

    def __init__(self, context: Context, reservations: Reservations, world: MachineMonitor) -> None:
        super().__init__(context)
        self._reservations = reservations
        self._world = world
        self._timer = context.timers.timer("conditions")
        self._reservations_timer = context.timers.timer("conditions", context.clock)
        self._told: dict[str, journal.Told] = {}  # conditions that are, or will be, in the journal
        self.silent: dict[tuple[str, int], ActiveRun] = {}  # runs whose start will be reported once they have a jid
        self._look_at_ns = 0
        self._pause_ns = _SOON_NS
        self._poll_at_ns = time.monotonic_ns() + _POLL_NS

    def open(self, told: Iterable[journal.Told]) -> None:
        """Restore the reported conditions from the journal."""
        self._told = {line.id: line for line in told}

    @property
    def has_work(self) -> bool:
        """Whether there is something to watch, even if no listener wants to be told."""
        return bool(self.silent or self._reservations.files or self._told or self._world.wants_gpus)

    def turn(self, machine: Machine | None) -> None:
        """Report every condition that is new."""
        wanted = self._events.wanted
        try:
            self._see_started()
            self._world.want_gpus(wanted=bool(wanted & _OF_GPUS) or self._reservations.ask_for_gpus)
            # Without a listener too: one that comes later is not told of those that were there before.
            self._see_reservations(self._clock())
            if EventName.POLLING in wanted:
                self._see_going_on()
            if wanted & _OF_GPUS and machine is not None and machine.gpu_problem is None:
                self._see_gpus(machine, self._clock())
        finally:
            self._timer.set(self._look_at_ns if self.silent else None)
            if EventName.POLLING in wanted and self._state.live:
                self._timer.advance(self._poll_at_ns)
            moments = [at for one in self._reservations.standing for at in (one.start_at_ns, one.end_at_ns)]
            now = self._clock() if moments else 0
            self._reservations_timer.set(min((at for at in moments if at > now), default=None))

    # The journal.

    def has_told(self, name: EventName, live: ActiveRun) -> bool:
        """Whether the journal has that this was reported for a run."""
        return _key(live, name) in self._told

    def worth_remembering(self) -> list[journal.Line]:
        """Return the lines that the next dispatcher needs."""
        return [*self._told.values()]

    def _note(self, key: str, reservation: Reservation | None = None) -> None:
        if key not in self._told:
            self._told[key] = journal.Told(key, reservation=reservation)
            self._journal.note(self._told[key])

    def _forget(self, key: str) -> None:
        if self._told.pop(key, None) is not None:
            self._journal.note(journal.Told(key, True))

    # The dispatcher.

    def begins(self) -> None:
        """Report that the dispatcher is running, and that the previous one was killed, if so."""
        now = self._clock()
        live = {_key(each, name) for each in self._state.live.values() for name in _OF_RUNS}
        for key in [key for key in self._told if key.endswith(_OF_RUNS) and key not in live]:
            self._forget(key)  # of a run that is over: a power cut destroyed the lines about that
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
            self._events.run(EventName.CANCELLING, live, self._clock(), stop.by_whom)
            self._note(_key(live, EventName.CANCELLING))
            self._events.flush()

    def ended(self, lives: list[ActiveRun]) -> None:
        """Report the start of runs that ended before their start was noticed."""
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
        with self._confinement.of(Thing.of_run(live.key), "notice the start of") as piece:
            found = self._spool.jid(live.name, live.run)
        return Liveness.ABSENT if piece.failed else found

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
        """Report the reservations that were made, have begun or ended, or were cancelled, each once."""
        standing = {(one.name, one.created_at_ns): one for one in self._reservations.standing}
        for one in standing.values():
            for kind, name, holds in (
                (ConditionKind.RESERVED, EventName.RESERVATION_CREATED, now < one.end_at_ns),
                (ConditionKind.RESERVATION, EventName.RESERVATION_STARTED, is_active(one, now)),
            ):
                this = OngoingCondition(kind, one.name, one.created_at_ns)
                if holds and this.key not in self._told:
                    self._events.condition(name, this, now, one.comment or "", one)
                    self._note(this.key, one)
        for this in conditions(self._told, ConditionKind.RESERVATION):
            left, was = standing.get((this.name, this.since_ns)), self._told[this.key].reservation
            if left is None or not is_active(left, now):
                reason = "it was removed" if left is None else left.comment or ""
                self._events.condition(EventName.RESERVATION_ENDED, this, now, reason, left or was)
                self._forget(this.key)
        for this in conditions(self._told, ConditionKind.RESERVED):
            was, why = self._told[this.key].reservation, self._reservations.why_gone(this.name, this.since_ns)
            if why:
                if was is not None and now < was.end_at_ns:
                    self._events.condition(EventName.RESERVATION_CANCELLED, this, now, why, was)
                self._forget(this.key)

    def _see_gpus(self, machine: Machine, now: int) -> None:
        holders = self._state.runs.on_gpus()
        taken = {this.name: this for this in conditions(self._told, ConditionKind.GPU)}
        for gpu in machine.gpus:
            runs, this = holders[gpu.uuid], taken.get(gpu.uuid)
            is_taken = bool(runs or gpu.foreign) or gpu.problem is not None
            if is_taken and this is None:
                # Derived from a run's start time, so that a repetition after a crash has the same id.
                since_ns = min((run.started_at_ns for run in runs), default=now)
                new = OngoingCondition(ConditionKind.GPU, gpu.uuid, since_ns)
                who = ", ".join(f"job {name}" for name in sorted({run.name for run in runs}))  # or why it is unusable
                who = who or (gpu.problem if gpu.problem is not None else stranger(gpu.foreign[0], ""))
                self._events.condition(EventName.GPU_TAKEN, new, now, who)
                self._note(new.key)
            elif not is_taken and this is not None:
                self._events.condition(EventName.GPU_FREE, this, now)
                self._forget(this.key)


def _key(live: ActiveRun, name: EventName) -> str:
    return f"{live.name}:{live.run}:{name}"


log = logging.getLogger(__name__)

MEMORY_EVERY_NS = SECOND_NS
_SHARE = 50  # and it may use one part in N of a processor
_AGAIN_NS = SECOND_NS // 4  # after an error

_WRITE_GPUS_EVERY_NS = 15 * SECOND_NS
_READ_GPUS, _WRITE_GPUS, _JUDGE_GPUS = "read the GPU use of", "write the GPU use of", "warn of the idle GPUs of"
_MOST_LOOKS = 2  # a look counts for at most the time of this many intervals between looks


class _Moment(Struct, frozen=True, order=True):
    at_ns: int  # on the clock since boot
    key: tuple[str, int]
    warning: bool


def _moment_of(live: ActiveRun, *, warning: bool) -> _Moment | None:
    """Return when a run must end, or be warned of that; None: never, as long as nothing changes."""
    limit, signal = live.spec.time_limit_ns, live.spec.signal
    if live.submitted is not None:
        at_ns = None if warning else live.gives_up_boot_ns
    elif limit is None or live.suspended or (warning and signal is None):
        at_ns = None
    else:
        at_ns = live.counts_from_boot_ns + limit - (signal.before_ns if warning and signal is not None else 0)
    return _Moment(at_ns, live.key, warning) if at_ns is not None else None


class LimitEnforcer(Component):
    """Enforces the limits of live runs. *order* orders a run to be stopped."""

    def __init__(self, context: Context, order: Callable[[ActiveRun, Stop], None]) -> None:
        super().__init__(context)
        self._order = order
        self._timer = context.timers.timer("limits", boot_clock, always=True)
        self._memory_timer = context.timers.timer("limits", always=True)
        self.moments: list[_Moment] = []
        self.with_memory: set[tuple[str, int]] = set()
        self._pace = Pace(_SHARE)
        self._memory_at_ns = 0

    def add(self, live: ActiveRun) -> None:
        """Watch a run that was started, adopted or continued, or whose limit has changed."""
        for warning in (False, True):  # which for an adopted run may be late: that is better than never
            if (moment := _moment_of(live, warning=warning)) is not None:
                heapq.heappush(self.moments, moment)
        if live.grant.memory_bytes is not None:
            self.with_memory.add(live.key)
            self._memory_timer.set(self._memory_at_ns)
        self._timer.set(self.moments[0].at_ns if self.moments else None)

    def check(self) -> None:
        """Warn and stop runs that exceed a limit."""
        now = boot_clock()
        while self.moments and self.moments[0].at_ns <= now:
            moment = heapq.heappop(self.moments)
            live = self._state.live.get(moment.key)
            if live is None or not live.holds_room or live.is_outlived or live.stop is not None:
                continue
            if (limit := _moment_of(live, warning=moment.warning)) is None or limit.at_ns > now:
                continue  # it has changed since, and the new one was added
            if self._begins_late(live):
                heapq.heappush(self.moments, replace(moment, at_ns=now + _AGAIN_NS))
                continue
            if (limit := _moment_of(live, warning=moment.warning)) is None or limit.at_ns > now:
                self.add(live)
                continue
            with self._confinement.of(Thing.of_run(live.key), "limit") as piece:
                self._enforce(live, warning=moment.warning)
            if piece.failed:
                heapq.heappush(self.moments, replace(moment, at_ns=now + _AGAIN_NS))
            elif live.stop is None and not moment.warning and limit.at_ns + EPILOG_NS > now:  # its epilog has more time
                heapq.heappush(self.moments, replace(moment, at_ns=limit.at_ns + EPILOG_NS))
        self._timer.set(self.moments[0].at_ns if self.moments else None)
        if self.with_memory and time.monotonic_ns() >= self._memory_at_ns:
            with self._confinement.service("watch", "the memory of runs"), self._pace:
                self._check_memory()
            self._memory_at_ns = time.monotonic_ns() + max(MEMORY_EVERY_NS, self._pace.pause_ns)
            self._memory_timer.set(self._memory_at_ns if self.with_memory else None)

    def _begins_late(self, live: ActiveRun) -> bool:
        """Whether the command of a run is still to begin; once it has, its time counts from then.

        On a busy machine that can take longer than a short limit. What takes longer than a wrapper may take to register
        counts as run time.
        """
        if live.elsewhere is not None or live.begun_at_ns is not None:
            return False
        with suppress(OSError):
            since = self._spool.dated_record(*live.key, layout.JID if live.adopted else layout.GRANT)
            begun = self._spool.dated_record(*live.key, layout.STATUS)
            if begun is None:
                return since is not None and time.monotonic_ns() < live.unregistered_until_ns
            if since is not None:
                live.began(live.started_boot_ns + min(max(0, begun[1] - since[1]), SILENT_NS), begun[1])
        return False

    def _enforce(self, live: ActiveRun, *, warning: bool) -> None:
        signal = live.spec.signal
        if live.submitted is not None:
            allowed = show_duration(live.spec.scheduling_timeout_ns or 0)
            words = f"it has waited longer than {allowed} ({live.submitted})"
            self._order(live, Stop(StopKind.UNSCHEDULABLE, "spool", time.time_ns(), words))
        elif warning and signal is not None and self._spool.command_exit(*live.key) is None:
            log.info("job %s: %s before its time limit", live.name, signal.name)
            if live.handle is not None:
                live.handle.signal(signal.name, live.spec.signal_to)
        elif not warning:
            limit = live.spec.time_limit_ns or 0
            self._order(live, Stop(StopKind.TIMEOUT, "spool", time.time_ns(), f"limit {format_duration(limit)}"))

    def _check_memory(self) -> None:
        runs: dict[Any, ActiveRun] = {}  # all of this machine: elsewhere the engine enforces the limit
        for key in self.with_memory:
            live = self._state.live.get(key)
            if live is not None and live.holds_room and live.handle is not None and not live.handle.holds_memory:
                runs[live.handle] = live
        self.with_memory = {live.key for live in runs.values()}
        if not runs:
            return  # a walk over all processes would be useless
        limits = {handle: live.grant.memory_bytes or 0 for handle, live in runs.items()}
        for handle, used in self._executors.local.memory_bytes(limits).items():
            live, limit = runs[handle], limits[handle]
            live.used_memory(used)
            if used > limit and live.stop is None and not live.is_outlived:
                words = f"used {show_size(used)} of {show_size(limit)}"
                self._order(live, Stop(StopKind.MEMORY, "spool", time.time_ns(), words))


class GpuUseRecorder(Component):
    """Sums up the GPU use of runs, and notices runs that leave their GPUs idle. *order* orders a run to be stopped.

    It uses the looks that the planner takes anyway while jobs with GPUs run (`gpu.poll`), and asks NVML nothing itself.
    Its sums are in the metadir (`gpus.toml`), written once in a while, so that the mean of a run is right across a
    restart of the dispatcher.
    """

    def __init__(self, context: Context, world: MachineMonitor, order: Callable[[ActiveRun, Stop], None]) -> None:
        super().__init__(context)
        self._world = world
        self._order = order
        self._seen_at_ns: int | None = None  # the time of the last processed look of NVML
        self._written_ns: dict[tuple[str, int], int] = {}  # monotonic: when the sums of a run were written last

    def watch_run(self, live: ActiveRun) -> None:
        """Read the sums of a run that an earlier dispatcher has begun."""
        if not live.grant.gpu_uuids:
            return
        with self._confinement.of(Thing.of_run(live.key), _READ_GPUS):
            watch = self._spool.gpu_watch(live.name, live.run)
            if watch is not None and len(watch.gpus) == len(live.grant.gpu_uuids):
                live.gpus_watched(watch)
                self._written_ns[live.key] = time.monotonic_ns()

    def turn(self, machine: Machine | None) -> None:
        """Process a new look at the GPUs, if there is one."""
        at_ns = self._world.gpus_at_ns
        if machine is None or at_ns is None or at_ns == self._seen_at_ns:
            return
        self._seen_at_ns = at_ns
        asked_boot_ns = boot_clock() - (self._clock() - at_ns)  # the clock may have been set since a run began
        state = self._state
        state.recent.note(at_ns, {gpu.uuid: gpu.utilisation_percent for gpu in machine.gpus})
        work = {gpu.uuid: {done.job: done for done in gpu.work} for gpu in machine.gpus}
        for name in list(state.runs.with_gpus):
            live = state.live_of(name)
            if live is None or live.started_boot_ns > asked_boot_ns or not live.holds_room:
                continue
            self._take_in(live, at_ns, [work.get(uuid, {}).get(name) for uuid in live.grant.gpu_uuids])
        self._written_ns = {key: at for key, at in self._written_ns.items() if key in state.live}

    def leave(self) -> None:
        """Write the sums since the last writing."""
        for live in list(self._state.live.values()):
            self._write(live)

    def _take_in(self, live: ActiveRun, at_ns: int, work: list[GpuWork | None]) -> None:
        before = live.gpu_watch or GpuWatch.since(live.started_at_ns, len(live.grant.gpu_uuids))
        if live.stop is not None or live.is_outlived:
            return  # its use while it is being ended is not typical of it
        if live.suspension.since_ns is not None:
            live.gpus_watched(before.passed_over(at_ns))
            return
        watch = before.looked(at_ns, work, _MOST_LOOKS * GpuWatcher.every_ns)
        live.gpus_watched(watch)
        if watch.is_due(live.spec) and not live.asking:
            with self._confinement.of(Thing.of_run(live.key), _JUDGE_GPUS):
                self._judge(live, watch, at_ns)
            return
        # After the first look, so that short runs have some, later rarely.
        written_ns = self._written_ns.get(live.key)
        is_due = written_ns is None or time.monotonic_ns() - written_ns >= _WRITE_GPUS_EVERY_NS
        if is_due or before.is_told != watch.is_told:
            self._write(live)

    def _judge(self, live: ActiveRun, watch: GpuWatch, at_ns: int) -> None:
        """Report that a run leaves its GPUs idle, and stop it if its job file says so."""
        words, stops = watch.words(live.spec), live.spec.gpu_idle_action == "stop"
        log.warning("job %s run %d: %s%s", live.name, live.run, words, "; stopping it" if stops else "")
        self._events.run(EventName.GPU_IDLE, live, at_ns, words, part=str(watch.told + 1))
        # If a hook prevents the stop, it is asked again after the same time, not at every look.
        live.gpus_watched(watch.telling(again=stops))
        flushed = False
        with suppress(OSError):  # on a full disk it is stopped all the same
            self._events.flush()
            flushed = True
        if stops:
            self._order(live, Stop(StopKind.CANCEL, "spool", self._clock(), words))
        if flushed:  # else the next dispatcher repeats the report: the record of it comes last
            self._write(live)

    def _write(self, live: ActiveRun) -> None:
        thing = Thing.of_run(live.key)
        if live.gpu_watch is None or self._confinement.pauses(thing, _WRITE_GPUS):
            return
        self._written_ns[live.key] = time.monotonic_ns()
        with self._confinement.of(thing, _WRITE_GPUS):
            self._spool.put_note(live.name, live.run, layout.GPUS, render_gpus(live.gpu_watch))
