"""Suspend runs and let them go on, as users ask for it by a file beside the job file in `running/`.

A run is suspended from the moment at which that is on record, before its first process stands still, until it is on
record that it goes on, after its last process was told to. So a crash never counts time against its limit in which it
could not run. The file is all that says whether it is to be suspended: the next dispatcher goes on from there.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from spool.core import layout
from spool.core.model import SECOND_NS, Suspension
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Context
from spool.dispatcher.supervisor import LimitEnforcer
from spool.dispatcher.timers import boot_clock
from spool.executors import Engine
from spool.formats.run_records import render_suspended
from spool.state.run import ActiveRun

log = logging.getLogger(__name__)

_FIRST_LOOK_NS, _LONGEST_LOOK_NS = SECOND_NS // 100, 2 * SECOND_NS
_VERB = "suspend or continue"


@dataclass(slots=True, eq=False)
class _Changing:
    """A run of which some processes may not be as they are to be."""

    live: ActiveRun
    look_at_ns: int = 0  # monotonic
    pause_ns: int = _FIRST_LOOK_NS


class Suspender:
    """Makes the runs stand still that are to, and the others go on."""

    def __init__(self, context: Context, limits: LimitEnforcer) -> None:
        self._spool = context.spool
        self._state = context.state
        self._changes = context.changes
        self._confinement = context.confinement
        self._clock = context.clock
        self._limits = limits
        self._timer = context.timers.timer(always=True)
        self._changing: dict[tuple[str, int], _Changing] = {}

    def work(self) -> None:
        """See to what users have asked for, and to the runs that have not come to a halt yet, or not begun to move."""
        for name in self._changes.suspensions:
            job = self._state.jobs.get(name)
            live = job.live if job is not None else None
            thing = Thing.of_run(live.key) if live is not None else Thing.of_job(name)
            if self._confinement.pauses(thing, _VERB):
                continue
            with self._confinement.of(thing, _VERB) as piece:
                if live is not None:
                    self._see(live)
                else:
                    self._see_stray(name)
            if not piece.failed:
                self._changes.suspensions.done(name)
        if self._changing:
            self._look()

    def forget(self, live: ActiveRun) -> None:
        """Take away what suspends a run that is over; the next one of its name is another."""
        self._changing.pop(live.key, None)
        if live.suspended:
            with self._confinement.of(Thing.of_job(live.name), _VERB):
                self._spool.withdraw_suspend_order(live.name)

    def _see_stray(self, name: str) -> None:
        """Take away a file that suspends no run."""
        if name in self._state.unsettled:
            return
        if name in self._state.arrays and self._spool.suspend_order(name) is not None:
            log.warning("array %s: an array cannot be suspended; its tasks can", name)
        self._spool.withdraw_suspend_order(name)

    def _see(self, live: ActiveRun) -> None:
        if live.unread or live.stop is not None or not live.holds_room or live.leftovers:
            return  # what ends needs no clock, and has to move
        by = self._spool.suspend_order(live.name)
        if by is None and live.suspended:
            self._go_on(live)
        elif by is not None and not live.suspended:
            since = Suspension(live.suspension.before_ns, self._clock(), boot_clock())
            self._record(live, since, by)
            log.info("job %s run %d: suspended", live.name, live.run)
        elif by is not None:
            live.suspends(live.suspension, by)
            self._changing.setdefault(live.key, _Changing(live))  # somebody else may have let it go on

    def _go_on(self, live: ActiveRun) -> None:
        if live.handle is not None:
            live.handle.engine.suspend({live.handle: False})
        lasted_ns = max(0, boot_clock() - (live.suspension.since_boot_ns or 0))
        self._record(live, Suspension(live.suspension.before_ns + lasted_ns))
        self._limits.add(live)
        log.info("job %s run %d: goes on", live.name, live.run)

    def _record(self, live: ActiveRun, suspension: Suspension, by: str = "") -> None:
        self._spool.put_record(live.name, live.run, layout.SUSPENDED, render_suspended(suspension))
        live.suspends(suspension, by)
        self._changing[live.key] = _Changing(live)
        self._state.recount(live)

    def _look(self) -> None:
        """Signal those again that are not as they are to be: who forks in the moment of the signal escapes it."""
        now = time.monotonic_ns()
        due: dict[Engine, list[_Changing]] = {}
        for key, one in list(self._changing.items()):
            live = one.live
            if live.handle is None or live.stop is not None or not live.holds_room or live.leftovers:
                del self._changing[key]
            elif one.look_at_ns <= now:
                due.setdefault(live.handle.engine, []).append(one)
        for engine, those in due.items():
            with self._confinement.service(_VERB, "runs"):
                runs = {one.live.handle: one.live.suspended for one in those if one.live.handle is not None}
                settled = engine.suspend(runs)
                for one in those:
                    if one.live.handle in settled:
                        del self._changing[one.live.key]
            for one in those:
                one.look_at_ns, one.pause_ns = now + one.pause_ns, min(2 * one.pause_ns, _LONGEST_LOOK_NS)
        self._timer.set(min((one.look_at_ns for one in self._changing.values()), default=None))
