"""Waiting for several jobs: for one of them, for all, or for each as it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, Self, TypeVar

from spool.client.waiting import End
from spool.client.watch import EndWatch
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
        self._watches: dict[str, EndWatch] = {}
        for error in self.add(jobs).values():
            raise error

    def __len__(self) -> int:
        return sum(map(len, self._watches.values()))

    @property
    def pause_s(self) -> float:
        """How long to wait before the next look."""
        return max((watch.pause_s for watch in self._watches.values() if watch), default=0.0)

    def add(self, jobs: Iterable[Job]) -> dict[Job, NoSuchJob]:
        """Wait for *jobs* too, and return the errors of those that are unknown."""
        unknown: dict[Job, NoSuchJob] = {}
        by_root: dict[str, list[str]] = {}
        for job in jobs:
            by_root.setdefault(job.root, []).append(job.name)
        for root, names in by_root.items():
            if root not in self._watches:
                self._watches[root] = EndWatch(Spool(root))
            errors = self._watches[root].add(names)
            unknown |= {Job(Spool(root), name): error for name, error in errors.items()}
        return unknown

    def discard(self, job: Job) -> None:
        """Wait for a job no longer."""
        if job.root in self._watches:
            self._watches[job.root].discard(job.name)

    def poll(self) -> list[tuple[Job, End]]:
        """Return the jobs that have ended since the last look, with their ends."""
        return [
            (Job(Spool(root), end.name), end) for root, watch in self._watches.items() if watch for end in watch.poll()
        ]


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
    until = None if timeout_s is None else time.monotonic() + timeout_s
    waiting: dict[Job, list[_T]] = {}
    for waited in jobs:
        waiting.setdefault(job_of(waited), []).append(waited)
    return _yielded(WaitedJobs(waiting), waiting, until, shown(progress, len(jobs)))


def _yielded(
    waits: WaitedJobs, waiting: dict[Job, list[_T]], until: float | None, shown_by: ProgressBar
) -> Iterator[tuple[_T, End]]:
    with shown_by as bar:
        while waiting:
            for job, end in waits.poll():
                for waited in waiting.pop(job):
                    bar.step()
                    yield waited, end
            if not waiting:
                return
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"{bar.total - bar.done} of {bar.total} jobs have not ended in time")
            pause_s = waits.pause_s if until is None else min(waits.pause_s, max(0.0, until - time.monotonic()))
            time.sleep(pause_s)


class ProgressBar:
    """Counts the jobs that have ended, and shows nothing."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> None:
        """Count one more."""
        self.done += 1

    def close(self) -> None:
        """Show nothing any longer."""


class _Called(ProgressBar):
    """Tells a function."""

    def __init__(self, total: int, tell: Callable[[int, int], object]) -> None:
        super().__init__(total)
        self._tell = tell

    def step(self) -> None:
        """Count one more."""
        super().step()
        self._tell(self.done, self.total)


class _Tqdm(ProgressBar):
    """Shows the bar of tqdm, in a notebook that of notebooks."""

    def __init__(self, total: int, bar: Any) -> None:
        super().__init__(total)
        self._bar = bar

    def step(self) -> None:
        """Count one more."""
        super().step()
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


class _Line(ProgressBar):
    """Shows a line on stderr."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self._next_s = 0.0
        self._draw()

    def step(self) -> None:
        """Count one more."""
        super().step()
        if time.monotonic() >= self._next_s or self.done == self.total:
            self._draw()

    def close(self) -> None:
        """End the line."""
        self._draw()
        print(file=sys.stderr)

    def _draw(self) -> None:
        self._next_s = time.monotonic() + _EVERY_S
        print(f"\r{self.done} of {self.total} jobs have ended", end="", file=sys.stderr, flush=True)


def shown(progress: Progress, total: int) -> ProgressBar:
    """Return what shows the progress of *total* jobs, as `as_completed` says."""
    if callable(progress):
        return _Called(total, progress)
    if not progress:
        return ProgressBar(total)
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _Line(total) if sys.stderr.isatty() else ProgressBar(total)
    return _Tqdm(total, tqdm(total=total, unit="job"))
