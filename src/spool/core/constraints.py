"""Every rule that can keep a job from running, in one order, for the pass and for `why`."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

from spool.core.backfill import FULL, BackfillReservation, StrictOrder, earliest_start
from spool.core.dependencies import Cycles, DependencyResolver, DependencyStatus
from spool.core.model import NoLeases, Policy, Waiting
from spool.core.queue import WaitingQueue
from spool.core.reasons import Reason, count_of, instant
from spool.core.resources import FreeResources
from spool.core.units import show_duration, show_size

_BEFORE_QUEUED_QUOTA = frozenset({"group", "array"})


class Constraints:
    """The rules of one pass, applied to one job at a time. They change nothing."""

    def __init__(self, queue: WaitingQueue, room: FreeResources, names: DependencyResolver, *, paused: bool) -> None:
        self.room = room
        self.now_ns = room.now_ns
        self.policy: Policy = room.policy
        self._protection: BackfillReservation | StrictOrder | None = None
        self._cycles: Cycles | None = None
        self._queue = queue
        self._names = names
        self._running = room.runs.keys()
        self._paused = paused
        limits = (self.policy.default_user_limits, self.policy.default_project_limits)
        named = (*self.policy.user_limits.values(), *self.policy.project_limits.values())
        self.counts_queued = any(each.max_queued_jobs is not None for each in (*limits, *named))

    def after(self, protection: BackfillReservation | StrictOrder | None, cycles: Cycles) -> Constraints:
        """Return the rules as the pass leaves them: it protects a job, and knows which dependencies are circular."""
        after = copy(self)
        after._protection, after._cycles = protection, cycles
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
        """Tell whether *job* itself has no reason to wait; the same rules as `job_reasons`, without texts."""
        if job.name in self._running or job.name in self._names.ended_now or self.room.machine.refusal:
            return False
        if self.room.machine.no_leases is not None and job.elsewhere is None:
            return False
        opens = job.opens_at_ns
        if opens is not None and opens > self.now_ns:
            return False
        if job.spec.depends_on is not None and self._names.resolution(job).verdict is not DependencyStatus.SATISFIED:
            return False
        return not self.counts_queued or self.queued_quota(job) is None

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
            yield Reason("machine", f"machine: {why_no_leases(no_leases)}")
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
                yield Reason("dependency", f"dependency: {self._circle(job) or resolution.text}")

    def queued_quota(self, job: Waiting) -> Reason | None:
        """Limit the waiting jobs of a user and of a project: only the oldest ones up to the limit are considered."""
        if not self.counts_queued or job.name not in self._queue:
            return None
        quotas = self.room.quotas
        most = quotas.limits("user", job.user).max_queued_jobs
        if most is not None and not self._queue.is_among_first(job, most):
            return _queued(job.user, self._queue.users[job.user], most)
        project = job.spec.project
        most = None if project is None else quotas.limits("project", project).max_queued_jobs
        if most is not None and not self._queue.is_among_first(job, most, by_project=True):
            return _queued(f"project {project}", self._queue.projects[project], most)
        return None

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

    def _circle(self, job: Waiting) -> str | None:
        circle = () if self._cycles is None else self._cycles.through(job)
        if not circle:
            return None
        shown = circle if len(circle) <= 6 else (*circle[:4], "…", circle[-1])
        return f"a cycle, {' waits for '.join(shown)}"


def _queued(whose: str, count: int, most: int) -> Reason:
    text = f"quota: {whose} has {count_of(count, 'queued job')}, the limit is {most}"
    return Reason("quota", text) if most else Reason("never_fits", text)


def why_no_leases(no_leases: NoLeases) -> str:
    """Return why the arbiter of a shared machine grants nothing, since when, and what to do."""
    since = f" since {instant(no_leases.since_ns)}" if no_leases.since_ns is not None else ""
    return "; ".join(filter(None, (f"{no_leases.problem}{since}", no_leases.remedy)))


def short_of_disk(free_bytes: int | None, policy: Policy) -> Reason | None:
    """Return why no job starts with this little free disk space; None if it is enough or unknown."""
    floor = policy.disk_floor_bytes
    if free_bytes is None or free_bytes >= floor:
        return None
    return Reason("disk", f"disk: {show_size(free_bytes)} free, floor {show_size(floor)}")
