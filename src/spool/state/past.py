"""Lessons of the history: what jobs may expect, and the sizes of those that leave theirs to spool.

A dispatcher reads it once there are jobs to put in order; a command reads it for every job that it shows, so that
`why`, `plan` and `show` expect the same of a job, however many others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

from spool.core.errors import SpoolError
from spool.core.gpus import chosen, is_of_type
from spool.core.model import Machine, Policy, Result, Sized, Spec, Waiting
from spool.core.priority import HALF_LIFE_NS, Past
from spool.core.quotas import limits_of
from spool.core.runtimes import stem
from spool.core.sizes import Most, Sizes, may_grow, sized
from spool.store.spool import Spool

_MOST = 10_000  # newest runs that are read
_HALF_LIVES = 10  # older runs count less than a thousandth


def past_of(spool: Spool, now_ns: int, policy: Policy, *, sizes: bool = False) -> Past:
    """Return the lessons of the newest runs in the history; *sizes*: whether their peaks count."""
    past = Past(policy)
    if sizes:
        past.sizes = Sizes()
    known = islice(spool.accounts_since(now_ns - _HALF_LIVES * HALF_LIFE_NS), _MOST)
    for result in reversed(list(known)):
        user, began_ns = result.user or "", result.started_at_ns
        if began_ns is not None and result.ended_at_ns is not None:
            past.begin(user, result.project, result.grant, began_ns)
            past.end(user, result.project, result.grant, max(result.ended_at_ns, began_ns))
        past.learn(user, result)
    return past


class Sizing:
    """The jobs of one spool that are sized, and what they can have at most.

    Made for the first such job: without one, no record of a run is read for it and no peak is learnt.
    """

    def __init__(self, newest_result: Callable[[str], Result | None]) -> None:
        self._newest_result = newest_result
        self._last: dict[str, Result | None] = {}  # of each waiting job, read once
        self._policy = Policy()
        self._memory_bytes: int | None = None
        self._gpus: tuple[tuple[str, int | None], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The waiting jobs that are sized."""
        return tuple(self._last)

    def fit(self, machine: Machine, policy: Policy) -> bool:
        """Set the resources and the quotas; return whether that is news."""
        gpus = tuple((gpu.name, gpu.memory_total_bytes) for gpu in machine.gpus if chosen(gpu, policy.gpu_use))
        seen = machine.memory_bytes, gpus, policy
        if seen == (self._memory_bytes, self._gpus, self._policy):
            return False
        self._memory_bytes, self._gpus, self._policy = seen
        return True

    def of(self, job: Waiting, past: Past) -> Sized | None:
        """Return what the next run of a waiting job requests; None: what its file states."""
        if job.name not in self._last:
            self._last[job.name] = None
            with suppress(OSError, SpoolError):  # a smaller size is only a worse guess
                self._last[job.name] = self._newest_result(job.name)
        return sized(job, self._last[job.name], past.sizes, self._most_for(job.spec, job.user, job.elsewhere))

    def of_task(self, job: Waiting, past: Past) -> Sized | None:
        """Return the same of a task that has no file yet."""
        return sized(job, None, past.sizes, self._most_for(job.spec, job.user, job.elsewhere))

    def forget(self, name: str) -> None:
        """Remove a job that does not wait any more, or that a new result changes."""
        self._last.pop(name, None)

    def like(self, name: str) -> Iterator[str]:
        """Yield the waiting jobs whose name is like that one."""
        common = stem(name)
        return (other for other in self.names if stem(other) == common)

    def retried(self, spec: Spec, result: Result, elsewhere: str | None) -> Spec:
        """Return *spec* with the retry that a run deserves if spool had worked out too little for it."""
        return may_grow(spec, result, self._most_for(spec, result.user or "", elsewhere))

    def _most_for(self, spec: Spec, user: str, elsewhere: str | None) -> Most:
        if elsewhere is not None:
            return Most()
        policy = self._policy
        quotas = [limits_of(policy.default_user_limits, policy.user_limits, user)]
        if spec.project is not None:
            quotas.append(limits_of(policy.default_project_limits, policy.project_limits, spec.project))
        bounds = [self._memory_bytes, *(quota.max_running_memory_bytes for quota in quotas)]
        types = spec.request.gpu_types
        totals = [size for name, size in self._gpus if not types or any(is_of_type(name, each) for each in types)]
        known = sorted((total for total in totals if total is not None), reverse=True)
        count = max(spec.request.gpus, 1)
        each = known[count - 1] if len(known) == len(totals) >= count else None  # that number of GPUs has it
        return Most(min((bound for bound in bounds if bound is not None), default=None), each)
