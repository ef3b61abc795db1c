"""What a pass decides, and that it is done: the plan is made, and what it says ends or starts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from spool.core.backfill import Holding
from spool.core.events import EventName
from spool.core.layout import HELD, QUEUED
from spool.core.model import Grant, Machine
from spool.core.scheduler import Ending, Plan, Start, View, decide
from spool.dispatcher.confinement import Thing

if TYPE_CHECKING:
    from spool.dispatcher.loop import Dispatcher

log = logging.getLogger(__name__)

_END = "end"
_FEW_HELD = 64  # whose dependencies are looked at by every decision


class Scheduling:
    """The part of a dispatcher that decides and acts."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._of = dispatcher
        self._decided: tuple[int, object] | None = None  # what the plan was made of
        self._waits_for_gpus: list[Start] = []
        self._foreseen: tuple[int, Start | None] = (-1, None)  # at which version of the table, what

    def work(self) -> bool:
        """Decide anew if anything has changed, and do what was decided; return whether anything was started."""
        of, now = self._of, self._of.clock()
        before, machine = of.machine, of.world.machine(now)
        if refusal := of.launcher.shortage.words(now):
            machine = replace(machine, refusal=refusal)
        of.machine = machine
        if before is None or machine.gpus != before.gpus:
            of.status.changed()
        of.reservations.machine_has(of.world.gpu_indices)
        made_of = (of.table.version, of.world.what_counts(machine))
        plan = of.plan
        if (
            plan is not None
            and made_of == self._decided
            and (plan.next_at_ns is None or now < plan.next_at_ns)
            and not (self._waits_for_gpus and of.world.gpus_are_new)
        ):
            return False
        plan = of.plan = self._decide(machine, now, plan)
        self._decided = None  # until all of it is done: after an error it is made again
        of.status.changed()
        left = [ending for ending in plan.endings if not self._end(ending, now)]
        self._waits_for_gpus = [start for start in plan.starts if not of.world.may_start_on(start.grant)]
        if self._waits_for_gpus:
            of.world.ask_gpus_again(now)
        started = self._start([start for start in plan.starts if start not in self._waits_for_gpus], now)
        self._decided = made_of if not left else None
        return started

    def _end(self, ending: Ending, now: int) -> bool:
        """End a job that will never start; return whether that is done, else the next plan says it again."""
        of, thing = self._of, Thing.of_job(ending.name)
        job = of.table.jobs.get(ending.name)
        if job is None or job.live is not None or (job.queued is None and job.held is None):
            return True
        if of.confinement.pauses(thing, _END):
            return False
        with of.confinement.of(thing, _END) as piece:
            place = QUEUED if job.queued is not None else HELD
            of.finalizer.end_unstarted(job, place, ending.outcome, str(ending.reason), of.logs.account, now)
            log.info("job %s: %s (%s)", ending.name, ending.outcome, ending.reason)
        return not piece.failed

    @property
    def awaits_gpus(self) -> bool:
        """Whether a start waits for NVML to tell who is on its GPUs now, or anything for its first answer."""
        return bool(self._waits_for_gpus) or self._of.world.gpus_are_asked

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
        runs = of.table.runs
        if not runs or of.plan is None or of.machine is None:
            return None
        if EventName.SUBMITTING in of.events.asked:
            return None  # who is asked may have texts for the script
        if not of.table.queue.is_simple or len(of.table.held) > _FEW_HELD:
            return None  # it would cost more than it saves
        now, oldest = of.clock(), next(iter(runs.values()))
        runs.put(replace(oldest, grant=Grant()))
        try:
            return next(iter(self._decide(of.machine, now, of.plan).starts), None)
        finally:
            runs.put(oldest)

    def _decide(self, machine: Machine, now: int, before: Plan | None) -> Plan:
        return decide(self.view(machine, now, before), now, self._of.settings.config.policy)

    def view(self, machine: Machine, now: int, before: Plan | None) -> View:
        """Return what the next plan is made of; *before* is the plan that holds."""
        of = self._of
        of.past.see_to(now, of.settings.config.policy)
        return of.table.view(
            machine,
            ended=of.outcomes,
            arrays=of.arrays.names,
            reservations=of.reservations.standing,
            paused=of.observer.paused,
            holding=before.holding if before is not None else Holding(),
        )

    def _start(self, wanted: Sequence[Start], now: int) -> bool:
        of = self._of
        # Last of all those who are asked: a yes is used up, and what NVML said is old by the next pass.
        starts = of.admission.allowed(tuple(wanted), now) if wanted else ()
        if not starts:
            return False
        # What a look found goes to the journal before a start that follows from it.
        of.flush()
        runs, blocked, trouble = of.launcher.start(starts, now)
        for live in runs:
            of.watch_run(live)
            of.outcomes.forget(live.name)
            of.arrays.names.forget(live.name)
            of.status.blocked.pop(live.name, None)
        for one in blocked:
            if not one.told and of.status.blocked.get(one.name) != one.why:
                log.error("cannot start job %s: %s", one.name, one.why)
            job = of.table.job(one.name)
            job.blocked = of.status.blocked[one.name] = one.why
            of.table.settle(job)  # it keeps nobody else waiting, and is tried again after the next look
        if trouble is not None:
            raise trouble
        return True
