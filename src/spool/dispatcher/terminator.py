"""Stop runs: an order is reviewed, reported and recorded; then ask, wait for the grace, force, until nothing is left.

Or suspend them until they are continued.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from msgspec import Struct

from spool.core import layout
from spool.core.forecast import preempt
from spool.core.layout import QUEUED
from spool.core.lifecycle import EPILOG_NS, Outlived, Unread
from spool.core.model import SECOND_NS, State, Stop, StopKind, Suspension
from spool.core.scheduler import Plan
from spool.dispatcher.admission import Admission
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Component, Context, stopping_line
from spool.dispatcher.monitor import Monitor
from spool.dispatcher.wakeup import Timer, boot_clock
from spool.executors import Engine, RunHandle
from spool.formats.run_records import render_suspended
from spool.state.run import ActiveRun, JobEntry
from spool.state.table import Array

log = logging.getLogger(__name__)

_RECORD = "record the stop of"
_FIRST_LOOK_NS = SECOND_NS // 100
_LONGEST_LOOK_NS = SECOND_NS // 4
_LONGEST_HALT_NS = 2 * SECOND_NS
_SUSPEND = "suspend or continue"
_LOOK_EVERY_NS = 10 * SECOND_NS  # for a run to preempt
_SOON_NS = SECOND_NS  # after one was found
_LOOK_SHARE = 50  # and it may use one part in N of the time

_END = "end"
_HALT_BUDGET_NS = 20_000_000  # time for a halt in one pass


class Halt(Component):
    """Cancels waiting jobs and stops runs after a job has failed for good, if so configured.

    While that is unfinished, the file `.halt` has the time of its begin, so that the next dispatcher goes on with it.
    Held jobs stay held, and later jobs run. *end* ends a waiting job, *cancel* an array.
    """

    def __init__(
        self,
        context: Context,
        stops: StopOrders,
        end: Callable[[JobEntry, str, State, str, int], None],
        cancel: Callable[[Array, Stop], None],
    ) -> None:
        super().__init__(context)
        self._stops = stops
        self._end = end
        self._cancel = cancel
        self.order: Stop | None = None  # something may be left to cancel, so that nothing must start
        self._stopped: set[tuple[str, int]] = set()  # runs that were ordered to stop; a hook may have refused

    def open(self) -> None:
        """Read what an earlier dispatcher has not finished."""
        self.order = self._spool.halt()

    def failed(self, name: str, why: str) -> None:
        """Begin, if so configured, because a job has failed for good."""
        if self._settings.config.policy.on_failure != "halt" or self.order is not None:
            return
        order = Stop(StopKind.CANCEL, "on_failure", self._clock(), f"halted: job {name} {why}")
        self.order = order
        log.warning("job %s has finally failed: cancelling waiting jobs and stopping active runs", name)
        self._spool.order_halt(order)

    def work(self) -> bool:
        """Cancel as much as a pass has time for; return whether more is left that can be done at once."""
        order, until_ns = self.order, time.monotonic_ns() + _HALT_BUDGET_NS
        if order is None:
            return False
        state = self._state
        for array in list(state.arrays.values()):
            if array.cancelled is None and array.result is None and not array.held:
                self._cancel(array, order)
        for live in list(state.live.values()):
            if live.order is None and not live.is_over and live.key not in self._stopped:
                self._stopped.add(live.key)
                self._stops.order(live, order)
        left = False
        for job in list(state.jobs.values()):
            if time.monotonic_ns() >= until_ns:
                return True
            if job.queued is not None and job.wait is not None and job.wait.arrived_at_ns <= order.at_ns:
                ended = self._confinement.attempt(Thing.of_job(job.name), _END, self._end_waiting, job, order)
                left = left or not ended
        if not left:
            self._spool.disk.discard(self._spool.layout.at(layout.HALT))
            self.order = None
            self._stopped.clear()
        return False

    def _end_waiting(self, job: JobEntry, order: Stop) -> None:
        """End a waiting job. If a run of its name is alive, only the file is moved."""
        if job.live is None:
            self._end(job, QUEUED, State.CANCELLED, order.reason, self._clock())
        elif self._spool.archive_file(job.name, QUEUED):
            self._changes.vanished.add(job.name)


class StopOrders(Component):
    """Receives the orders to stop runs, with their originators and reasons."""

    def __init__(self, context: Context, admission: Admission, monitor: Monitor, terminator: Terminator) -> None:
        super().__init__(context)
        self._admission = admission
        self._monitor = monitor
        self._terminator = terminator
        self.unrecorded: dict[tuple[str, int], ActiveRun] = {}  # runs being stopped without a record of it yet

    def order(self, live: ActiveRun, stop: Stop) -> None:
        """Record the order to stop *live*, and begin to stop it, unless a review is open that may refuse it.

        It is stopped even if that cannot be recorded: recording is tried again. After the end of its command an order
        changes nothing any more: only its epilog, or what its command has left behind, is ended.
        """
        with suppress(OSError):  # where the exit code of its command cannot be read, it is stopped
            if self._spool.command_exit(*live.key) is not None:
                self._end_rest(live, stop, in_epilog=self._spool.exit(*live.key) is None)
                return
        if not self._admission.may_stop(live, stop):
            return
        live.stop_ordered(stop)
        self._terminator.add(live)
        self._state.recount(live)
        with suppress(OSError):  # the event stays noted
            self._monitor.stopping(live, stop)
            if stop.kind is StopKind.CANCEL and self._journal.lines:
                self._journal.commit()  # the next dispatcher must not ask again about a run that ends already
        self._record(live)
        log.info("job %s run %d: stopping (%s by %s)", live.name, live.run, stop.kind, stop.by)

    def _end_rest(self, live: ActiveRun, stop: Stop, *, in_epilog: bool) -> None:
        """End what goes on after the command. An epilog is not preempted: its work would not be done again."""
        until_ns = live.counts_from_boot_ns + (live.spec.time_limit_ns or 0) + EPILOG_NS
        spared = stop.kind is StopKind.PREEMPT or (stop.kind is StopKind.TIMEOUT and boot_clock() < until_ns)
        if not in_epilog and live.elsewhere is None:
            self._terminator.add(live)
        elif in_epilog and not spared and not live.is_outlived:
            live.epilog_stopped(stop, self._clock())
            self._state.recount(live)
            self._terminator.hurry(live)
            log.info("job %s run %d: %s", live.name, live.run, live.cut_short)

    def resume(self, live: ActiveRun) -> None:
        """Continue stopping a run that an earlier dispatcher was about to stop, unless that needs a review first."""
        if live.stop is not None and self._admission.may_stop(live, live.stop):
            self._monitor.stopping(live, live.stop)
            self._terminator.add(live, live.stop.at_ns)

    def record_again(self) -> None:
        """Try again to record the stops without a record."""
        for key, live in list(self.unrecorded.items()):
            if key in self._state.live and live.result is None:
                self._record(live)
            else:
                del self.unrecorded[key]

    def _record(self, live: ActiveRun) -> None:
        stop, confinement, spool = live.stop, self._confinement, self._spool
        if stop is None or confinement.pauses(Thing.of_run(live.key), _RECORD):
            return
        known = live.key in self.unrecorded
        with confinement.of(Thing.of_run(live.key), _RECORD) as piece:
            written = spool.order_stop(live.name, live.run, stop)
            live.stop_on_record(None if written else spool.stop(live.name, live.run))
            self.unrecorded.pop(live.key, None)
        if piece.failed and not known:  # until then the journal tells the next dispatcher
            self.unrecorded[live.key] = live
            self._journal.note(stopping_line(live))


class _Terminating(Struct, eq=False):
    live: ActiveRun
    handle: RunHandle
    kill_at_ns: int  # monotonic
    kills: bool = False  # the grace is over
    look_at_ns: int = 0
    pause_ns: int = _FIRST_LOOK_NS


class Terminator:
    """The runs that are being ended. *timer* is due when :meth:`tick` is."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self.runs: dict[tuple[str, int], _Terminating] = {}
        self._blind = False  # logged, and no process was seen since

    def add(self, live: ActiveRun, since_ns: int | None = None) -> None:
        """Begin to end *live*. *since_ns*, on the wall clock, is the time of the order: the grace runs from there."""
        if live.key in self.runs or live.handle is None:
            return
        elapsed = max(0, time.time_ns() - since_ns) if since_ns is not None else 0
        now, warning_ns, signal = time.monotonic_ns(), 0, live.spec.signal
        if signal is not None and live.stop_kind is StopKind.PREEMPT:
            warning_ns = signal.before_ns  # from the warning to TERM
            if elapsed < warning_ns:  # after a crash once more: late is better than never
                with suppress(OSError):
                    live.handle.signal(signal.name, live.spec.signal_to)
        kill_at = now + max(0, warning_ns + live.spec.kill_grace_ns - elapsed)
        run = self.runs[live.key] = _Terminating(live, live.handle, kill_at)
        if warning_ns > elapsed:
            run.look_at_ns = now + warning_ns - elapsed
        self._timer.set(0)

    def hurry(self, live: ActiveRun) -> None:
        """Look at *live* at the next tick: its wrapper has ended, which may have been its last process."""
        self.add(live, live.phase.since_ns if isinstance(live.phase, Outlived) else None)
        run = self.runs[live.key]
        run.look_at_ns, run.pause_ns = 0, _FIRST_LOOK_NS
        self._timer.set(0)

    def forget(self, live: ActiveRun) -> None:
        """Drop a run that is over."""
        if self.runs.pop(live.key, None) is not None and not self.runs:
            self._timer.set(None)  # else the next tick sets it: only once for a thousand ends

    def __contains__(self, live: ActiveRun) -> bool:
        return live.key in self.runs

    @property
    def searching(self) -> bool:
        """Whether the next look may be the first that tells whether a run is over."""
        return any(not run.look_at_ns or run.handle.doubtful for run in self.runs.values())

    def tick(self) -> list[ActiveRun]:
        """Continue with every due run; return the runs without processes."""
        now = time.monotonic_ns()
        due: dict[Engine, list[_Terminating]] = {}
        for run in self.runs.values():
            if run.look_at_ns <= now:
                due.setdefault(run.handle.engine, []).append(run)
        gone = [live for engine, runs in due.items() for live in self._go_on(engine, runs, now)]
        self._timer.set(min((run.look_at_ns for run in self.runs.values()), default=None))
        return gone

    def _go_on(self, engine: Engine, runs: list[_Terminating], now: int) -> Iterable[ActiveRun]:
        """Continue with the runs of one engine; return the runs without processes."""
        try:
            for run in runs:
                if now >= run.kill_at_ns and not run.kills:  # from now on it may take some looks, but no waiting
                    run.kills, run.pause_ns = True, _FIRST_LOOK_NS
            # One that lingers waits for what is not the run's, such as a dispatcher.
            lingers = {run.handle: run.live.is_outlived and run.handle.lingers for run in runs}
            gone = engine.terminate({run.handle: run.kills or lingers[run.handle] for run in runs})
        except OSError as error:  # the machine has too few resources left to tell which processes exist
            if not self._blind:
                log.error("cannot find out which processes to end: %s; trying again", error.strerror)
            self._blind = True
            for run in runs:
                run.look_at_ns = now + _LONGEST_LOOK_NS
            return []
        self._blind = False
        for run in runs:
            run.look_at_ns = now + run.pause_ns
            run.pause_ns = min(2 * run.pause_ns, _LONGEST_LOOK_NS)
        return [run.live for run in runs if run.handle in gone]


class Preempter(Component):
    """Stops preemptible runs so that short jobs can start. *plan* makes a plan for now.

    The order to stop a run, its record `stop`, names the job that it makes room for. Everything else follows from that
    record, also for the next dispatcher: that the run waits again, uncounted and at its place, and that the other job
    goes first.
    """

    def __init__(self, context: Context, stops: StopOrders, plan: Callable[[int], Plan | None]) -> None:
        super().__init__(context)
        self._stops = stops
        self._plan = plan
        self._timer = context.timers.timer("preemption")
        self._look_at_ns = 0  # monotonic

    @property
    def has_work(self) -> bool:
        """Whether a run may be preempted now or later, and jobs wait."""
        state = self._state
        return bool(state.runs.preemptible and state.queue)

    def turn(self) -> None:
        """Order one run to stop, if a short job waits for its room. A look is as long as a plan, and so it is rare."""
        if not self.has_work:
            self._timer.set(None)
            return
        if time.monotonic_ns() >= self._look_at_ns:
            begun_ns = time.monotonic_ns()
            plan = self._plan(self._clock())
            found = preempt(plan) if plan is not None else None
            live = self._state.live_of(found.victim) if found is not None else None
            if found is not None and live is not None and live.order is None:
                self._stops.order(live, Stop(StopKind.PREEMPT, "spool", self._clock(), found.winner))
            now_ns = time.monotonic_ns()
            pause_ns = _SOON_NS if found is not None else _LOOK_EVERY_NS
            self._look_at_ns = now_ns + max(pause_ns, _LOOK_SHARE * (now_ns - begun_ns))
        self._timer.set(self._look_at_ns)


class _Changing(Struct, eq=False):
    """A run with processes that may not be in the wanted state yet."""

    live: ActiveRun
    look_at_ns: int = 0  # monotonic
    pause_ns: int = _FIRST_LOOK_NS


class Suspender(Component):
    """Suspends the runs that users suspend by a file in `running/`, and continues them.

    A run elsewhere is suspended when its engine says so, and no time counts against its limit meanwhile.

    A run is suspended from the moment of the record of that, before its first process is stopped, until its
    continuation is on record, after its last process was continued. So a crash never counts time against its limit in
    which it could not run. Only the file decides whether it stays suspended: the next dispatcher goes on from there.
    *continued* is called for each continued run: its limit comes later.
    """

    def __init__(self, context: Context, continued: Callable[[ActiveRun], None]) -> None:
        super().__init__(context)
        self._continued = continued
        self._timer = context.timers.timer("suspensions", always=True)
        self.changing: dict[tuple[str, int], _Changing] = {}

    def work(self) -> None:
        """Process the requests of users, and the runs that are not suspended or continued completely yet."""
        for name in list(self._changes.suspensions.names):
            live = self._state.live_of(name)
            thing = Thing.of_run(live.key) if live is not None else Thing.of_job(name)
            if self._confinement.attempt(thing, _SUSPEND, self._see, name, live):
                self._changes.suspensions.done(name)
        if self.changing:
            self._look()

    def forget(self, live: ActiveRun) -> None:
        """Remove the suspension of a run that is over; the next run of its name is another."""
        self.changing.pop(live.key, None)
        if live.suspended:
            with self._confinement.of(Thing.of_job(live.name), _SUSPEND):
                self._spool.disk.discard(self._spool.layout.suspend_file(live.name))

    def _see(self, name: str, live: ActiveRun | None) -> None:
        if live is None:
            if name not in self._state.unsettled and self._spool.suspend_order(name) is not None:
                if name in self._state.arrays:
                    log.warning("array %s: an array cannot be suspended; its tasks can", name)
                self._spool.disk.discard(self._spool.layout.suspend_file(name))
            return
        if isinstance(live.phase, Unread) or live.stop is not None or not live.holds_room or live.is_outlived:
            return  # a run that ends needs no clock, and must not be suspended
        by = self._spool.suspend_order(live.name)
        if live.elsewhere is not None:
            if by is not None:
                live.cannot_be_suspended()
                log.warning("job %s run %d: %s", live.name, live.run, live.kept)
                self._spool.disk.discard(self._spool.layout.suspend_file(live.name))
            halted = live.handle.halted if live.handle is not None else None
            if halted is None:
                return  # its engine decides, and has not answered yet
            by = halted or None
        if by is None and live.suspended:
            self._go_on(live)
        elif by is not None and not live.suspended:
            since = Suspension(live.suspension.before_ns, self._clock(), boot_clock())
            self._record(live, since, by)
            log.info("job %s run %d: suspended", live.name, live.run)
        elif by is not None:
            if by != live.suspended_by:
                live.suspends(live.suspension, by)
                self._state.recount(live)
            self.changing.setdefault(live.key, _Changing(live))  # another program may have continued it

    def _go_on(self, live: ActiveRun) -> None:
        if live.handle is not None:
            live.handle.engine.suspend({live.handle: False})
        lasted_ns = max(0, boot_clock() - (live.suspension.since_boot_ns or 0))
        self._record(live, Suspension(live.suspension.before_ns + lasted_ns))
        self._continued(live)
        log.info("job %s run %d: continued", live.name, live.run)

    def _record(self, live: ActiveRun, suspension: Suspension, by: str = "") -> None:
        self._spool.put_record(live.name, live.run, layout.SUSPENDED, render_suspended(suspension))
        live.suspends(suspension, by)
        self.changing[live.key] = _Changing(live)
        self._state.recount(live)

    def _look(self) -> None:
        """Signal the unsettled runs again: a process forked at the moment of the signal escapes it."""
        now = time.monotonic_ns()
        due: dict[Engine, list[_Changing]] = {}
        for key, one in list(self.changing.items()):
            live = one.live
            if live.handle is None or live.stop is not None or not live.holds_room or live.is_outlived:
                del self.changing[key]
            elif one.look_at_ns <= now:
                due.setdefault(live.handle.engine, []).append(one)
        for engine, those in due.items():
            with self._confinement.service(_SUSPEND, "runs"):
                runs = {one.live.handle: one.live.suspended for one in those if one.live.handle is not None}
                settled = engine.suspend(runs)
                for one in those:
                    if one.live.handle in settled:
                        del self.changing[one.live.key]
            for one in those:
                one.look_at_ns, one.pause_ns = now + one.pause_ns, min(2 * one.pause_ns, _LONGEST_HALT_NS)
        self._timer.set(min((one.look_at_ns for one in self.changing.values()), default=None))
