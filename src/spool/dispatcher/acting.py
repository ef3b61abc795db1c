"""What a pass decides, and that it is done: the plan is made, and what it says ends or starts."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from spool.core.events import EventName
from spool.core.layout import HELD, QUEUED
from spool.core.model import Grant, Machine
from spool.core.plan import Plan, Start, View, decide

if TYPE_CHECKING:
    from spool.dispatcher.loop import Dispatcher

log = logging.getLogger(__name__)

_FEW_HELD = 64  # whose dependencies are looked at by every decision

LOCAL_ZONE = datetime.now().astimezone().tzinfo or UTC


class Acting:
    """The part of a dispatcher that decides and acts."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._of = dispatcher
        self._decided: tuple[int, object] | None = None  # what the plan was made of
        self._foreseen: tuple[int, Start | None] = (-1, None)  # at which version of the table, what

    def work(self) -> bool:
        """Decide anew if anything has changed, and do what was decided; return whether anything was started."""
        of, now = self._of, self._of.clock()
        machine = of.machine = of.world.machine(now)
        if machine.gpus and machine.gpu_problem is None:
            of.bookings.machine_has(frozenset(gpu.index for gpu in machine.gpus))
        made_of = (of.table.version, of.world.what_counts(machine))
        plan = of.plan
        if plan is not None and made_of == self._decided and (plan.next_at_ns is None or now < plan.next_at_ns):
            return False
        plan = of.plan = self._decide(machine, now, plan)
        self._decided = None  # until all of it is done: after an error it is made again
        of.report.changed()
        for ending in plan.endings:
            job = of.table.jobs.get(ending.name)
            if job is not None and job.live is None and (job.queued is not None or job.held is not None):
                place = QUEUED if job.queued is not None else HELD
                log.info("job %s: %s (%s)", ending.name, ending.outcome, ending.reason)
                of.finisher.end_unstarted(job, place, ending.outcome, str(ending.reason), of.logs.account, now)
        if not plan.starts:
            self._decided = made_of
            return False
        started = self._start(plan, now)
        self._decided = made_of
        return started

    def foreseen(self) -> Start | None:
        """Return what would start if the run that has lasted longest left its room now; None if that is not known.

        The run is imagined to go on without anything, so that nothing that depends on it is thought of, and no limit
        on how many may run.
        """
        of = self._of
        if of.table.version != self._foreseen[0]:
            self._foreseen = (of.table.version, self._imagined())
        return self._foreseen[1]

    def _imagined(self) -> Start | None:
        of = self._of
        runs = [live.view for live in of.table.live.values() if live.proof is None]
        if not runs or of.plan is None or of.machine is None:
            return None
        if EventName.SUBMITTING in of.telling.asked:
            return None  # who is asked may have texts for the script
        if not of.table.queue.is_simple or len(of.table.held) > _FEW_HELD:
            return None  # it would cost more than it saves
        runs[0] = replace(runs[0], grant=Grant())
        now = of.clock()
        view = replace(self._view(of.machine, now, of.plan), running=tuple(runs))
        return next(iter(decide(view, now, of.settings.config.policy).starts), None)

    def _decide(self, machine: Machine, now: int, before: Plan | None) -> Plan:
        return decide(self._view(machine, now, before), now, self._of.settings.config.policy)

    def _view(self, machine: Machine, now: int, before: Plan | None) -> View:
        of, policy = self._of, self._of.settings.config.policy
        return View(
            machine=machine,
            queue=of.table.queue,
            held=of.table.held,
            running=tuple(live.view for live in of.table.live.values() if live.proof is None),
            ended=of.outcomes,
            arrays=of.arrays.names,
            held_arrays=of.table.held_arrays,
            reservations=of.bookings.standing,
            usage=of.usage.at(now, policy),
            paused=of.sight.paused,
            zone=LOCAL_ZONE,
            protected=before.protected if before is not None else None,
        )

    def _start(self, plan: Plan, now: int) -> bool:
        of = self._of
        starts = of.gates.allowed(plan.starts, now)
        if not starts:
            return False
        # What a look found goes to the journal before a start that follows from it.
        of.flush()
        runs, blocked = of.starter.start(starts, now)
        for live in runs:
            of.watch_run(live)
            of.outcomes.forget(live.name)
            of.arrays.names.forget(live.name)
            of.report.blocked.pop(live.name, None)
        for one in blocked:
            if of.report.blocked.get(one.name) != one.why:
                log.error("cannot start job %s: %s", one.name, one.why)
            job = of.table.job(one.name)
            job.blocked = of.report.blocked[one.name] = one.why
            of.table.settle(job)  # it keeps nobody else waiting, and is tried again after the next look
        return True
