"""Waiting for several jobs: for one of them, for all, or for each as it ends."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, Protocol, TypeVar

from spool.client.waiting import End, Waiter, wait_for_ends
from spool.core.errors import NoSuchJob
from spool.python.job import Job
from spool.store.spool import Spool

_EVERY_S = 0.1  # how often to draw a line of progress


class HasJob(Protocol):
    """What stands for a job, like the futures of an executor."""

    @property
    def job(self) -> Job:
        """The job."""
        ...


_T = TypeVar("_T", bound=Job | HasJob)
Progress = bool | Callable[[int, int], object]
"""Whether to show progress, or a function that is called with the number of ended jobs, and of all."""


def job_of(waited: Job | HasJob) -> Job:
    """Return the job of what is waited for. Raises TypeError."""
    job = waited if isinstance(waited, Job) else getattr(waited, "job", None)
    if not isinstance(job, Job):
        raise TypeError(f"cannot wait for {waited!r}: it is neither a Job nor has one as its attribute `job`")
    return job


class WaitedJobs:
    """Jobs that are waited for, of any spools."""

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        """Wait for *jobs*. Raises NoSuchJob for the first that is unknown."""
        self._waiters: dict[str, Waiter] = {}
        for error in self.add(jobs).values():
            raise error

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values()))

    @property
    def pause_s(self) -> float:
        """How long to wait before the next look."""
        return max((waiter.pause_s for waiter in self._waiters.values() if waiter), default=0.0)

    def add(self, jobs: Iterable[Job]) -> dict[Job, NoSuchJob]:
        """Wait for *jobs* too, and return the errors of those that are unknown."""
        unknown: dict[Job, NoSuchJob] = {}
        by_root: dict[str, list[str]] = {}
        for job in jobs:
            by_root.setdefault(job.root, []).append(job.name)
        for root, names in by_root.items():
            waiter = self._waiters.setdefault(root, Waiter(Spool(root)))
            unknown |= {job_in(waiter, name): error for name, error in waiter.add(names).items()}
        return unknown

    def discard(self, job: Job) -> None:
        """Wait for a job no longer."""
        if job.root in self._waiters:
            self._waiters[job.root].discard(job.name)

    def poll(self) -> list[tuple[Job, End]]:
        """Return the jobs that have ended since the last look, with their ends."""
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> list[tuple[Job, End]]:
        """Wait until a job has ended, and return what `poll` does; nothing after a timeout, or if no job is left."""
        ends = wait_for_ends(self._waiters.values(), timeout_s)
        return [(job_in(waiter, end.name), end) for waiter, end in ends]


def job_in(waiter: Waiter, name: str) -> Job:
    """Return the job of that name in the spool of *waiter*."""
    return Job(Spool(waiter.root), name)


def as_completed(jobs: Iterable[_T], *, timeout_s: float | None = None, progress: Progress = False) -> Iterator[_T]:
    """Yield each of *jobs* when it has ended, whatever its outcome. Raises NoSuchJob, and TimeoutError.

    *jobs* are Jobs, or objects with a Job as their attribute `job`, such as the futures of calls. *progress*:
    show how many have ended, by tqdm if that is installed, else on a terminal by a line on stderr; or a function that
    is called with the number of ended jobs and that of all.
    """
    return (waited for waited, _ in _ends(list(jobs), timeout_s, progress))


def wait_all(
    jobs: Iterable[Job | HasJob], *, timeout_s: float | None = None, progress: Progress = False
) -> tuple[End | None, ...]:
    """Wait until all *jobs* have ended, and return their ends in the order of *jobs*. Raises NoSuchJob.

    After a timeout the end of a job that has not ended is None. *progress* is that of `as_completed`.
    """
    wanted = list(jobs)
    found: dict[Job, End] = {}
    try:
        for waited, end in _ends(wanted, timeout_s, progress):
            found[job_of(waited)] = end
    except TimeoutError:
        pass
    return tuple(found.get(job_of(waited)) for waited in wanted)


def wait_any(jobs: Iterable[_T], *, timeout_s: float | None = None) -> _T | None:
    """Wait until one of *jobs* has ended, and return it; None after a timeout, or if there are no jobs.

    Raises NoSuchJob.
    """
    try:
        return next((waited for waited, _ in _ends(list(jobs), timeout_s, False)), None)
    except TimeoutError:
        return None


def _ends(jobs: Sequence[_T], timeout_s: float | None, progress: Progress) -> Iterator[tuple[_T, End]]:
    """Begin to wait, at once, and return what yields the ends. Raises NoSuchJob."""
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    left: dict[Job, list[_T]] = {}
    for waited in jobs:
        left.setdefault(job_of(waited), []).append(waited)
    waits = WaitedJobs(left)

    def ends() -> Iterator[tuple[_T, End]]:
        done = 0
        with shown(progress, len(jobs)) as show:
            while left:
                found = waits.wait(max(0.0, until - time.monotonic()))
                if not found:
                    raise TimeoutError(f"{len(jobs) - done} of {len(jobs)} jobs have not ended in time")
                for job, end in found:
                    for waited in left.pop(job):
                        done += 1
                        show(done)
                        yield waited, end

    return ends()


@contextmanager
def shown(progress: Progress, total: int) -> Iterator[Callable[[int], object]]:
    """Yield what to call with the number of jobs that have ended, to show it as `as_completed` says."""
    if callable(progress):
        yield lambda done: progress(done, total)
        return
    bar: Any = None
    if progress:
        with suppress(ImportError):
            from tqdm.auto import tqdm

            bar = tqdm(total=total, unit="job")
    if bar is not None:
        with closing(bar):
            yield lambda done: bar.update()
    elif progress and sys.stderr.isatty():
        yield from _on_a_line(total)
    else:
        yield lambda done: None


def _on_a_line(total: int) -> Iterator[Callable[[int], object]]:
    """Yield what shows the number of jobs that have ended on a line of stderr, and end the line."""
    next_s = 0.0

    def draw(done: int) -> None:
        nonlocal next_s
        if done == total or time.monotonic() >= next_s:
            next_s = time.monotonic() + _EVERY_S
            print(f"\r{done} of {total} jobs have ended", end="", file=sys.stderr, flush=True)

    draw(0)
    try:
        yield draw
    finally:
        print(file=sys.stderr)
