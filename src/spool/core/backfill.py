"""When a job that does not fit could start, and what may start before it without delaying it.

EASY backfilling (Lifka 1995; Mu'alem and Feitelson 2001): one job at a time is protected, the first in the order that
does not fit. The others start only if they have ended by the time it could start, or leave it all that it needs.

If that time is an estimate, the protection is bounded: an estimate that keeps receding protects no job and would leave
the machine idle. The job is protected only while the idle resources until then cost at most a tenth of the whole pool
over the time that it has waited, minus what it has already held back.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import merge
from math import ceil

from msgspec import Struct, field

from spool.core.gpus import NEW_RUN
from spool.core.model import SECOND_NS, Grant, Running, Waiting
from spool.core.reasons import Reason, instant
from spool.core.resources import FreeResources
from spool.core.runtimes import RunTimes

FULL = frozenset({"memory", "cpus", "resources", "gpus", "reserved"})
"""Reasons that mean a lack of room: only holding other jobs back helps."""


class EarliestStart(Struct, frozen=True):
    """The time at which a job could start if the runs end as expected, and the machine at that time.

    `guessed`: the time rests on a guessed run time.
    """

    at_ns: int
    guessed: bool
    then: FreeResources


def earliest_start(job: Waiting, room: FreeResources) -> EarliestStart | None:
    """Return when *job* could start if the runs end as expected, ignoring other waiting jobs.

    None if it could not start even after every run has ended (it never fits, or processes outside spool are in the
    way).
    """
    now_ns = room.now_ns
    run_times = room.runs.run_times
    ends = room.runs.ends(now_ns)
    new = {run.name: run for run in room.started}
    if new:
        ends = merge(ends, sorted((now_ns + run_times.of_run(run).ns, run.name) for run in room.started))
    next_end = next(ends, None)
    opens = job.opens_at_ns
    not_before = now_ns if opens is None else max(opens, now_ns)
    then = room.then()
    moments = [not_before] if not_before > now_ns else []
    if job.request.gpus:
        moments += [at for each in room.reservations for at in (each.start_at_ns, each.end_at_ns) if at > now_ns]
    moments.sort()
    guessed = False
    waits_for_gpus = False  # from here on only the end of a run with GPUs can change the answer
    request = job.request
    at_ns, next_moment = now_ns, 0
    while True:
        if at_ns >= not_before and not waits_for_gpus and not then.lacks(request):
            then.now_ns = at_ns
            reason = next(then.reasons(job), None)
            if reason is None:
                return EarliestStart(at_ns, guessed, then)
            waits_for_gpus = reason.code == "gpus"
        end_ns = max(next_end[0], now_ns) if next_end is not None else None
        moment = moments[next_moment] if next_moment < len(moments) else None
        if end_ns is None and moment is None:
            return None
        if end_ns is None or (moment is not None and moment <= end_ns):
            assert moment is not None
            at_ns, next_moment, waits_for_gpus = moment, next_moment + 1, False
            if end_ns != moment:
                continue
        assert end_ns is not None
        at_ns = end_ns
        while next_end is not None and next_end[0] <= end_ns:
            over = new.get(next_end[1]) or room.runs[next_end[1]]
            then.release(over)
            waits_for_gpus = waits_for_gpus and not over.grant.gpu_uuids
            guessed = guessed or ((over.spec.time_limit_ns is None or over.suspended) and not over.stopping)
            next_end = next(ends, None)
        then.available_bytes = None  # after the first end, the memory that the kernel could give is unknown


class Holding(Struct, frozen=True):
    """Resources held back for jobs whose start rests on a guess, in seconds of the whole pool.

    For the job `name` the amount keeps growing by `rate` per second from `since_ns` on.
    """

    amounts: Mapping[str, float] = field(default_factory=dict)
    name: str | None = None
    rate: float = 0.0
    since_ns: int = 0

    def at(self, now_ns: int) -> Mapping[str, float]:
        """Return the amount held back for each job until then."""
        if self.name is None or not self.rate:
            return self.amounts
        more = self.rate * max(now_ns - self.since_ns, 0) / SECOND_NS
        return {**self.amounts, self.name: self.amounts.get(self.name, 0.0) + more}


class StrictOrder:
    """The rule of a strict order: no job overtakes the one that does not fit."""

    guessed = False

    def __init__(self, job: Waiting, now_ns: int) -> None:
        self.job = job
        self.at_ns = None
        self._now_ns = now_ns

    def grant(self, job: Waiting, room: FreeResources) -> Grant | None:
        """Return None: nothing more starts."""

    def started(self, run: Running) -> None:
        """Do nothing: no run starts under this rule."""

    def why_not(self, job: Waiting, room: FreeResources) -> Reason | None:
        """Return that *job* waits for its turn."""
        return None if job.name == self.job.name else _left_for(self.job, self._now_ns)


class BackfillReservation:
    """The room left for one job: the machine as it will be when that job can start."""

    def __init__(self, job: Waiting, foretold: EarliestStart, now_ns: int, run_times: RunTimes) -> None:
        self.job = job
        self.at_ns = foretold.at_ns
        self.guessed = foretold.guessed
        self._then = foretold.then
        self._now_ns = now_ns
        self._run_times = run_times
        request, spec = job.request, job.spec
        counts, machine = self._then.counts, self._then.machine
        # If processors and memory alone decide, the room beside the job is two numbers.
        limits = spec.group or spec.task or self._then.quotas.limited or self._then.policy.max_running is not None
        self._by_sums = not limits
        self._spare_cpus = machine.cpus - (counts.cpus + request.cpus if request.cpus else 0)
        memory = request.memory_bytes or 0
        self._spare_bytes = machine.memory_bytes - (counts.memory_bytes + memory if memory else 0)

    def grant(self, job: Waiting, room: FreeResources) -> Grant | None:
        """Return a grant for *job*, which fits *room*, that does not delay the protected job; None if there is none."""
        if self._now_ns + self._run_times.of_job(job).ns <= self.at_ns:  # it ends by then
            return room.grant(job)
        request, own = job.request, self.job.request
        if request.cpus > self._spare_cpus or (request.memory_bytes or 0) > self._spare_bytes:
            return None
        if self._by_sums and not (request.gpus and own.gpus) and not (request.resources and own.resources):
            return room.grant(job)
        grant = room.grant(job)
        if self._leaves_room(job, grant):
            return grant
        if not grant.gpu_uuids:
            return None
        # Other GPUs may do: try first those that the protected job could not use anyway.
        wanted = frozenset(card.gpu.uuid for card in self._then.cards.open_to(self.job.request))
        grant = room.grant(job, avoid=wanted)
        return grant if self._leaves_room(job, grant) else None

    def started(self, run: Running) -> None:
        """Count a run that starts now and will still be running when the protected job starts."""
        if run.started_at_ns + self._run_times.of_run(run).ns <= self.at_ns:
            return
        self._spare_cpus -= run.grant.cpus
        self._spare_bytes -= run.grant.memory_bytes or 0
        self._then.claim(run)

    def why_not(self, job: Waiting, room: FreeResources) -> Reason | None:
        """Return that *job*, which fits *room*, is held back for the protected one, or None if it is not."""
        if job.name == self.job.name or job.spec.priority > self.job.spec.priority:
            return None
        if self.grant(job, room) is not None:
            return None
        return _left_for(self.job, self._now_ns)

    def _leaves_room(self, job: Waiting, grant: Grant) -> bool:
        run = as_run(job, grant, self._now_ns)
        self._then.claim(run)
        try:
            return self._then.fits(self.job)
        finally:
            self._then.release(run)


def budget_s(job: Waiting, held_s: float, part: float, now_ns: int) -> float:
    """Return how much longer guesses may hold the whole pool for *job*, in seconds."""
    return part * (now_ns - job.arrived_at_ns) / SECOND_NS - held_s


def exhausted_at_ns(budget_s: float, rate: float, part: float, now_ns: int) -> int | None:
    """Return when a budget that loses *rate* and gains *part* per second runs out; None if never."""
    growth = rate - part
    if growth <= 0 or budget_s / growth > 1e9:
        return None
    return now_ns + max(1, ceil(budget_s / growth) + 1) * SECOND_NS


def _left_for(job: Waiting, now_ns: int) -> Reason:
    return Reason("left", f"kept free for {job.name} (waiting since {instant(now_ns - job.waited_ns(now_ns))})")


def as_run(job: Waiting, grant: Grant, now_ns: int) -> Running:
    """Return the run that *job* becomes if it starts now with that grant."""
    return Running(
        job.name,
        NEW_RUN,
        job.user,
        job.spec,
        grant,
        now_ns,
        job.attempt,
        elsewhere=job.elsewhere,
        submitted=job.elsewhere is not None,
        arrived_at_ns=job.arrived_at_ns,
        preempted_at_ns=job.preempted_at_ns,
    )
