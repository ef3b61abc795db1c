"""The sums of some runs, while they grow and when they are done."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from spool.core.measures import nearest_rank
from spool.core.model import SECOND_NS, State
from spool.core.peaks import Intervals

_HOUR_NS = 3600 * SECOND_NS
_RETRY, _REQUEUE = "retry", "requeue"


@dataclass(slots=True)
class Account:
    """One ended run: what the accounting needs of its line of history. Not frozen, for there may be millions."""

    job: str
    run: int
    outcome: str
    submitted_at_ns: int | None
    started_at_ns: int | None
    ended_at_ns: int | None
    cpus: int = 0  # what it was given
    gpus: tuple[str, ...] = ()
    cpu_time_ns: int | None = None
    peak_memory_bytes: int | None = None
    attempt: int = 1
    requeues: int = 0
    again: str | None = None
    user: str | None = None
    project: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    executor: str | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of some runs. None where there is nothing to say; quantiles are times that a run really had.

    A job counts once it has ended for good; a run that is followed by a retry is a run and no job.
    """

    runs: int
    jobs: int
    outcomes: dict[str, int]  # of runs; those that there were none of, too
    success_rate: float | None  # jobs that finished, of those that were not cancelled
    retries: int  # runs that were followed by another attempt
    requeues: int  # runs that were run again uncounted
    wait_median_ns: int | None
    wait_p90_ns: int | None
    wait_mean_ns: int | None
    timed_runs: int  # runs that have a run time: they started, and the clock was not set
    run_time_median_ns: int | None
    run_time_p90_ns: int | None
    run_time_sum_ns: int
    cpu_hours: float  # CPUs given, times run time
    cpu_used_hours: float | None  # CPU time, of the runs of which it is known
    cpu_used_runs: int  # so many
    cpu_efficiency: float | None  # CPU time of what these were given; above 1 if they took more
    gpu_hours: float  # GPUs given, times run time; a shared one counts for each run that has it
    peak_cpus: int
    peak_cpus_at_ns: int | None
    peak_gpus: int  # different GPUs in use at one moment
    peak_gpus_at_ns: int | None
    peak_memory_bytes: int | None  # of the largest run
    peak_memory_job: str | None


_SUMS = (
    "cpu_given_ns", "cpu_known_ns", "cpu_known_runs", "cpu_ns", "finished", "gpu_ns", "jobs", "requeues", "retries",
    "runs", "unjudged",
)  # fmt: skip


class Tally:
    """The sums of one group, while they grow."""

    __slots__ = (*_SUMS, "intervals", "largest", "largest_job", "outcomes", "ran", "waits")

    def __init__(self) -> None:
        self.runs = self.jobs = self.finished = self.unjudged = self.retries = self.requeues = 0
        self.cpu_ns = self.gpu_ns = self.cpu_known_ns = self.cpu_given_ns = self.cpu_known_runs = 0
        self.outcomes: dict[str, int] = {}
        self.waits = array("q")
        self.ran = array("q")
        self.largest: int | None = None
        self.largest_job: str | None = None
        self.intervals = Intervals()

    def count(self, run: Account, waited_ns: int | None, ran_ns: int | None) -> None:
        """Count a run that ended in the period."""
        self.runs += 1
        outcome = run.outcome
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if run.again is None:
            self.jobs += 1
            self.finished += outcome == "finished"
            self.unjudged += outcome == "cancelled"
        else:
            self.retries += run.again == _RETRY
            self.requeues += run.again == _REQUEUE
        if waited_ns is not None:
            self.waits.append(waited_ns)
        if ran_ns is not None:
            self.ran.append(ran_ns)
            if run.cpu_time_ns is not None:
                self.cpu_known_ns += run.cpu_time_ns
                self.cpu_known_runs += 1
                self.cpu_given_ns += run.cpus * ran_ns
        if run.peak_memory_bytes is not None and (self.largest is None or run.peak_memory_bytes > self.largest):
            self.largest, self.largest_job = run.peak_memory_bytes, run.job

    def use(self, start: int, end: int, cpus: int, gpus: tuple[str, ...]) -> None:
        """Count what a run was given within the period."""
        self.cpu_ns += cpus * (end - start)
        if gpus:
            self.gpu_ns += len(gpus) * (end - start)
        self.intervals.add(start, end, cpus, gpus)

    def merge(self, other: Tally) -> None:
        """Count all that *other*, which has none of the same runs, has counted."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for outcome, count in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count
        self.waits.extend(other.waits)
        self.ran.extend(other.ran)
        if other.largest is not None and (self.largest is None or other.largest > self.largest):
            self.largest, self.largest_job = other.largest, other.largest_job
        self.intervals.merge(other.intervals)

    def totals(self) -> Totals:
        """Return the sums so far."""
        wait_median, wait_p90 = _quantiles(self.waits)
        ran_median, ran_p90 = _quantiles(self.ran)
        cpus, gpus = self.intervals.peaks()
        judged = self.jobs - self.unjudged
        return Totals(
            runs=self.runs,
            jobs=self.jobs,
            outcomes={state.value: self.outcomes.get(state, 0) for state in State if state.ended},
            success_rate=self.finished / judged if judged else None,
            retries=self.retries,
            requeues=self.requeues,
            wait_median_ns=wait_median,
            wait_p90_ns=wait_p90,
            wait_mean_ns=sum(self.waits) // len(self.waits) if self.waits else None,
            timed_runs=len(self.ran),
            run_time_median_ns=ran_median,
            run_time_p90_ns=ran_p90,
            run_time_sum_ns=sum(self.ran),
            cpu_hours=self.cpu_ns / _HOUR_NS,
            cpu_used_hours=self.cpu_known_ns / _HOUR_NS if self.cpu_known_runs else None,
            cpu_used_runs=self.cpu_known_runs,
            cpu_efficiency=self.cpu_known_ns / self.cpu_given_ns if self.cpu_given_ns else None,
            gpu_hours=self.gpu_ns / _HOUR_NS,
            peak_cpus=cpus.count,
            peak_cpus_at_ns=cpus.at_ns,
            peak_gpus=gpus.count,
            peak_gpus_at_ns=gpus.at_ns,
            peak_memory_bytes=self.largest,
            peak_memory_job=self.largest_job,
        )


def _quantiles(times: array[int]) -> tuple[int | None, int | None]:
    ordered = sorted(times)
    return nearest_rank(ordered, 50), nearest_rank(ordered, 90)
