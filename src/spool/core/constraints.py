"""Every rule that can keep a job from running, in one order, for the pass and for `why`; the last is backfilling.

EASY backfilling (Lifka 1995; Mu'alem and Feitelson 2001): one job at a time is protected, the first in the order that
does not fit. The others start only if they have ended by the time it could start, or leave it all that it needs.

If that time is an estimate, the protection is bounded: an estimate that keeps receding protects no job and would leave
the machine idle. The job is protected only while the idle resources until then cost at most a tenth of the whole pool
over the time that it has waited, minus what it has already held back.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from heapq import merge
from itertools import chain, groupby
from operator import itemgetter

from msgspec import Struct

from spool.core.dependencies import DependencyResolver, DependencyStatus, circle_through, stuck_jobs
from spool.core.gpus import NEW_RUN
from spool.core.model import SECOND_NS, Grant, Policy, Running, Waiting
from spool.core.queue import WaitingQueue
from spool.core.reasons import FULL, Reason, count_of, instant
from spool.core.resources import FreeResources
from spool.core.runtimes import RunTimes
from spool.core.units import show_duration, show_size

_MOMENT = ""  # among the names of ending runs: an instant at which something else than a run changes


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
    now_ns, run_times, request = room.now_ns, room.runs.run_times, job.request
    new = {run.name: run for run in room.started}
    new_ends = sorted((now_ns + run_times.of_job(run).ns, run.name) for run in room.started)
    not_before = max(job.opens_at_ns or now_ns, now_ns)
    moments = {not_before}
    if request.gpus:
        moments |= {at for each in room.reservations for at in (each.start_at_ns, each.end_at_ns)}
    marks = [(at, _MOMENT) for at in sorted(moments) if at > now_ns]
    steps = ((max(at, now_ns), name) for at, name in merge(room.runs.ends(now_ns), new_ends, marks))
    then, guessed = room.then(), False
    waits_for_gpus = False  # from here on only the end of a run with GPUs can change the answer
    for at_ns, names in chain([(now_ns, iter(()))], groupby(steps, key=itemgetter(0))):
        for _, name in names:
            if name == _MOMENT:
                waits_for_gpus = False
                continue
            over = new.get(name) or room.runs[name]
            then.release(over)
            then.available_bytes = None  # after the first end, the memory that the kernel could give is unknown
            waits_for_gpus = waits_for_gpus and not over.grant.gpu_uuids
            guessed = guessed or ((over.spec.time_limit_ns is None or over.suspended) and not over.stopping)
        if at_ns >= not_before and not waits_for_gpus and not then.lacks(request):
            then.now_ns = at_ns
            reason = next(then.reasons(job), None)
            if reason is None:
                return EarliestStart(at_ns, guessed, then)
            waits_for_gpus = reason.code == "gpus"
    return None


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
        if run.started_at_ns + self._run_times.of_job(run).ns <= self.at_ns:
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


_BEFORE_QUEUED_QUOTA = frozenset({"group", "array"})


class Constraints:
    """The rules of one pass, applied to one job at a time. They change nothing."""

    def __init__(self, queue: WaitingQueue, room: FreeResources, names: DependencyResolver, *, paused: bool) -> None:
        self.room = room
        self.now_ns = room.now_ns
        self.policy: Policy = room.policy
        self._protection: BackfillReservation | StrictOrder | None = None
        self._stuck: dict[str, Waiting] | None = None  # the jobs in cycles, once asked for
        self._queue = queue
        self._names = names
        self._running = room.runs.keys()
        self._paused = paused
        limits = (self.policy.default_user_limits, self.policy.default_project_limits)
        named = (*self.policy.user_limits.values(), *self.policy.project_limits.values())
        self._ranks: dict[tuple[str, str], dict[str, int]] = {}  # of jobs by owner, made on first use
        self.counts_queued = any(each.max_queued_jobs is not None for each in (*limits, *named))

    def after(self, protection: BackfillReservation | StrictOrder | None) -> Constraints:
        """Return the rules as the pass leaves them: it protects a job."""
        after = copy(self)
        after._protection, after._ranks = protection, {}
        return after

    def reasons(self, job: Waiting) -> Iterator[Reason]:
        """Yield every reason against *job*, in order."""
        yield from self.job_reasons(job)
        queued = self.queued_quota(job)
        for reason in self.class_reasons(job):
            if queued is not None and reason.code not in _BEFORE_QUEUED_QUOTA:
                yield queued
                queued = None
            yield reason
        if queued is not None:
            yield queued

    def may_be_tried(self, job: Waiting) -> bool:
        """Tell whether *job* itself has no reason to wait."""
        if job.name in self._names.ended_now or next(self.job_reasons(job), None) is not None:
            return False
        return self.queued_quota(job) is None

    def job_reasons(self, job: Waiting) -> Iterator[Reason]:
        """Yield the reasons of *job* that other jobs of its shape may not have."""
        now_ns = self.now_ns
        if self._paused:
            yield Reason("paused", "spool paused")
        deadline = job.deadline_ns
        task = job.spec.task
        stands = self._paused or (task is not None and task.array in self.room.limits.held)
        if deadline is not None and now_ns > deadline and not stands:
            allowed = show_duration(job.spec.scheduling_timeout_ns or 0)
            waited = show_duration(job.waited_ns(now_ns))
            yield Reason("scheduling_timeout", f"scheduling timeout: waited {waited}, the limit is {allowed}")
        refusal = self._refusal(job)
        if refusal:
            yield Reason("refused", f"refused: {refusal}")
        if (no_leases := self.room.machine.no_leases) is not None and job.elsewhere is None:
            since = f" since {instant(no_leases.since_ns)}" if no_leases.since_ns is not None else ""
            why = "; ".join(filter(None, (f"{no_leases.problem}{since}", no_leases.remedy)))
            yield Reason("machine", f"machine: {why}")
        opens = job.opens_at_ns
        if opens is not None and opens > now_ns:
            retry_ns = job.not_before_ns
            begins = job.begins_at_ns
            if begins is not None and begins > now_ns:
                yield Reason("begins", f"begins at {instant(begins)}")
            if retry_ns is not None and retry_ns > now_ns and not job.refused:
                yield Reason("retry", f"retry due {instant(retry_ns)}")
        if job.name in self._running:
            yield Reason("running", "another run of this name is running")
        if job.spec.depends_on is not None:
            resolution = self._names.resolution(job)
            if resolution.verdict is not DependencyStatus.SATISFIED:
                yield Reason("dependency", lambda: f"dependency: {self._circle(job) or resolution.text}")

    def queued_quota(self, job: Waiting) -> Reason | None:
        """Limit the waiting jobs of a user and of a project: only the oldest ones up to the limit are considered."""
        if not self.counts_queued or job.name not in self._queue:
            return None
        for kind, name in _owners(job):
            most = self.room.quotas.limits(kind, name).max_queued_jobs
            if most is None:
                continue
            ranks = self._ranks_of(kind, name, job)
            if ranks.get(job.name, 0) >= most:
                whose = name if kind == "user" else f"project {name}"
                text = f"quota: {whose} has {count_of(len(ranks), 'queued job')}, the limit is {most}"
                return Reason("quota", text) if most else Reason("never_fits", text)
        return None

    def _ranks_of(self, kind: str, name: str, job: Waiting) -> dict[str, int]:
        """Return how many others of that user or project arrived before each of their waiting jobs."""
        if job.name not in self._ranks.get((kind, name), ()):
            self._ranks = {}
            for each in sorted(self._queue.values(), key=lambda each: (each.arrived_at_ns, each.name)):
                for owner in _owners(each):
                    ranks = self._ranks.setdefault(owner, {})
                    ranks[each.name] = len(ranks)
        return self._ranks.get((kind, name), {})

    def room_helps(self, name: str) -> bool:
        """Whether the job *name* can start now, or as soon as running jobs have ended."""
        job = self._queue[name]
        if not self.may_be_tried(job):
            return False
        reason = next(self.blockers(job), None)
        if reason is None or job.elsewhere is not None:
            return reason is None
        return reason.code in FULL and earliest_start(job, self.room) is not None

    def blockers(self, job: Waiting) -> Iterator[Reason]:
        """Yield the reasons that keep every job of this shape waiting, regardless of which job is protected."""
        yield from self.room.reasons(job)
        yield from self._beyond(job)

    def class_reasons(self, job: Waiting) -> Iterator[Reason]:
        """Yield the reasons that keep every job of this shape and priority waiting."""
        full = False
        for reason in self.room.reasons(job):
            full = full or reason.code in FULL or reason.code == "never_fits"
            yield reason
        if self._protection is not None and not full and job.elsewhere is None:
            left = self._protection.why_not(job, self.room)
            if left is not None:
                yield left
        yield from self._beyond(job)

    def _beyond(self, job: Waiting) -> Iterator[Reason]:
        short = short_of_disk(self.room.machine.disk_free_bytes, self.policy)
        if short is not None:
            yield short
        if job.executor_problem is not None:
            yield Reason("executor", f"executor: {job.executor_problem}")

    def _refusal(self, job: Waiting) -> str:
        """Return what the machine refused, and when that is tried again; "" if it does not keep *job* waiting."""
        if self.room.machine.refusal:
            return self.room.machine.refusal
        until_ns = job.not_before_ns
        if not job.refused or until_ns is None or until_ns <= self.now_ns:
            return ""
        return f"{job.refused}; tried again at {instant(until_ns)}"

    def _circle(self, job: Waiting) -> str:
        if self._stuck is None:
            self._stuck = stuck_jobs(self._queue.watch, self._names)
        circle = circle_through(job, self._stuck, self._names)
        shown = circle if len(circle) <= 6 else (*circle[:4], "…", circle[-1])
        return f"a cycle, {' waits for '.join(shown)}" if circle else ""


def _owners(job: Waiting) -> tuple[tuple[str, str], ...]:
    project = job.spec.project
    return (("user", job.user),) if project is None else (("user", job.user), ("project", project))


def short_of_disk(free_bytes: int | None, policy: Policy) -> Reason | None:
    """Return why no job starts with this little free disk space; None if it is enough or unknown."""
    floor = policy.disk_floor_bytes
    if free_bytes is None or free_bytes >= floor:
        return None
    return Reason("disk", f"disk: {show_size(free_bytes)} free, floor {show_size(floor)}")
