"""Terminate runs: ask them to end, give them their grace, force them, look after look until nothing is left.

A run whose command has ended and left processes behind goes the same way: its resources are free when all are gone.
How a run is asked and forced, its executor knows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from spool.core.model import SECOND_NS
from spool.dispatcher.timers import Timer
from spool.executors import Engine, RunHandle
from spool.state.run import ActiveRun

log = logging.getLogger(__name__)

_FIRST_LOOK_NS = SECOND_NS // 100
_LONGEST_LOOK_NS = SECOND_NS // 4


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
