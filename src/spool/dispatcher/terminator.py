"""Stop runs: an order is reviewed, told and recorded; then ask, give the grace, force, until nothing is left."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from spool.core.model import SECOND_NS, Stop, StopKind
from spool.dispatcher.admission import Admission
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Context
from spool.dispatcher.journal import stopping_line
from spool.dispatcher.monitor import Monitor
from spool.dispatcher.timers import Timer
from spool.executors import Engine, RunHandle
from spool.state.run import ActiveRun

log = logging.getLogger(__name__)

_RECORD = "record the stop of"
_FIRST_LOOK_NS = SECOND_NS // 100
_LONGEST_LOOK_NS = SECOND_NS // 4


class StopOrders:
    """Takes in what is to be stopped, by whom and why."""

    def __init__(self, context: Context, admission: Admission, monitor: Monitor, terminator: Terminator) -> None:
        self._context = context
        self._admission = admission
        self._monitor = monitor
        self._terminator = terminator
        self._unrecorded: dict[tuple[str, int], ActiveRun] = {}  # runs that are stopped, which no record says yet

    def order(self, live: ActiveRun, stop: Stop) -> None:
        """Record that *live* is to be stopped, and begin to stop it; unless that may be refused, and is not settled.

        It is stopped also where that cannot be recorded: the record is tried again.
        """
        if not self._admission.may_stop(live, stop):
            return
        live.stop_ordered(stop)
        self._terminator.add(live)
        self._context.state.recount(live)
        with suppress(OSError):  # what is to be told stays noted
            self._monitor.stopping(live, stop)
            if stop.kind is StopKind.CANCEL and self._context.journal.has_notes:
                self._context.journal.commit()  # the next dispatcher is not to ask again about a run that ends already
        self._record(live)
        log.info("job %s run %d: stopping (%s by %s)", live.name, live.run, stop.kind, stop.by)

    def resume(self, live: ActiveRun) -> None:
        """Go on stopping a run that an earlier dispatcher was to stop, unless that is to be asked about first."""
        if live.stop is not None and self._admission.may_stop(live, live.stop):
            self._monitor.stopping(live, live.stop)
            self._terminator.add(live, live.stop.at_ns)

    def record_again(self) -> None:
        """Try again to record the stops that no record says yet."""
        for key, live in list(self._unrecorded.items()):
            if key in self._context.state.live and live.result is None:
                self._record(live)
            else:
                del self._unrecorded[key]

    def forget(self, live: ActiveRun) -> None:
        """Let go of a run whose paperwork is done."""
        self._unrecorded.pop(live.key, None)

    def _record(self, live: ActiveRun) -> None:
        stop, confinement, spool = live.stop, self._context.confinement, self._context.spool
        if stop is None or confinement.pauses(Thing.of_run(live.key), _RECORD):
            return
        known = live.key in self._unrecorded
        with confinement.of(Thing.of_run(live.key), _RECORD) as piece:
            written = spool.order_stop(live.name, live.run, stop)
            live.stop_on_record(None if written else spool.stop(live.name, live.run))
            self._unrecorded.pop(live.key, None)
        if piece.failed and not known:  # until then the journal tells the next dispatcher
            self._unrecorded[live.key] = live
            self._context.journal.note(stopping_line(live))


@dataclass(slots=True, eq=False)
class _Terminating:
    live: ActiveRun
    handle: RunHandle
    kill_at_ns: int  # monotonic
    look_at_ns: int = 0
    pause_ns: int = _FIRST_LOOK_NS


class Terminator:
    """The runs that are being ended. *timer* tells when :meth:`tick` is due."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._runs: dict[tuple[str, int], _Terminating] = {}
        self._blind = False  # said so, and nothing was seen since

    def add(self, live: ActiveRun, since_ns: int | None = None) -> None:
        """Begin to end *live*. *since_ns*, on the wall clock, is when it was ordered: the grace runs from there."""
        if live.key in self._runs or live.handle is None:
            return
        elapsed = max(0, time.time_ns() - since_ns) if since_ns is not None else 0
        kill_at = time.monotonic_ns() + max(0, live.spec.kill_grace_ns - elapsed)
        self._runs[live.key] = _Terminating(live, live.handle, kill_at)
        self._timer.set(0)

    def hurry(self, live: ActiveRun) -> None:
        """Look at *live* at the next tick: its wrapper has ended, which may have been the last of it."""
        self.add(live)
        run = self._runs[live.key]
        run.look_at_ns, run.pause_ns = 0, _FIRST_LOOK_NS
        self._timer.set(0)

    def forget(self, live: ActiveRun) -> None:
        """Let go of a run that is over."""
        if self._runs.pop(live.key, None) is not None:
            self._set_timer()

    def __contains__(self, live: ActiveRun) -> bool:
        return live.key in self._runs

    def tick(self) -> list[ActiveRun]:
        """Go on with every run that is due; return those of which nothing is left."""
        now = time.monotonic_ns()
        due: dict[Engine, list[_Terminating]] = {}
        for run in self._runs.values():
            if run.look_at_ns <= now:
                due.setdefault(run.handle.engine, []).append(run)
        gone = [live for engine, runs in due.items() for live in self._go_on(engine, runs, now)]
        self._set_timer()
        return gone

    def _set_timer(self) -> None:
        self._timer.set(min((run.look_at_ns for run in self._runs.values()), default=None))

    def _go_on(self, engine: Engine, runs: list[_Terminating], now: int) -> Iterable[ActiveRun]:
        """Go on with the runs of one engine; return those of which nothing is left."""
        try:
            gone = engine.terminate({run.handle: now >= run.kill_at_ns for run in runs})
        except OSError as error:
            self._look_later(runs, now, error)
            return []
        self._blind = False
        for run in runs:
            run.look_at_ns = now + run.pause_ns
            run.pause_ns = min(2 * run.pause_ns, _LONGEST_LOOK_NS)
        return [run.live for run in runs if run.handle in gone]

    def _look_later(self, runs: list[_Terminating], now: int, error: OSError) -> None:
        """Wait for a machine that has too little left to say which processes there are."""
        if not self._blind:
            log.error("cannot see which processes are to be ended: %s; trying again", error.strerror)
        self._blind = True
        for run in runs:
            run.look_at_ns = now + _LONGEST_LOOK_NS
