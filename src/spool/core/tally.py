"""The sums of some runs, while they grow and when they are done."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from spool.core.model import SECOND_NS, State
from spool.core.peaks import Intervals

_HOUR_NS = 3600 * SECOND_NS
_COARSE_BITS = 16


class Account(Protocol):
    """One ended run: what the accounting needs of its line of history.

    A protocol, for of millions it is the copying that takes the time: what read the line has these already.
    """

    job: str
    run: int
    outcome: str
    submitted_at_ns: int | None
    started_at_ns: int | None
    ended_at_ns: int | None
    cpus: int  # what it was given
    gpus: tuple[str, ...]
    resources: dict[str, int] | None
    cpu_time_ns: int | None
    peak_memory_bytes: int | None
    attempt: int
    requeues: int
    again: str | None
    user: str | None
    project: str | None
    group: str | None
    tags: tuple[str, ...]
    executor: str | None


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
    resource_hours: dict[str, float]  # named resources given, times run time
    peak_cpus: int
    peak_cpus_at_ns: int | None
    peak_gpus: int  # different GPUs in use at one moment
    peak_gpus_at_ns: int | None
    peak_memory_bytes: int | None  # of the largest run
    peak_memory_job: str | None


class Tally:
    """The sums of one group, while they grow."""

    __slots__ = (
        "_cpu_given_ns",
        "_cpu_known_ns",
        "_cpu_known_runs",
        "_kinds",
        "_largest",
        "_ran",
        "_resource_ns",
        "_waits",
        "given",
    )

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str | None], int] = {}  # runs by outcome, and by how the submission goes on
        self._waits = array("q")
        self._ran = array("q")
        self._cpu_known_ns = self._cpu_given_ns = self._cpu_known_runs = 0
        self._largest: tuple[int | None, str | None] = (None, None)
        self._resource_ns: dict[str, int] = {}
        self.given = Intervals()  # what runs were given within the period, whenever they ended

    def count(self, run: Account, waited_ns: int | None, ran_ns: int | None) -> None:
        """Count a run that ended in the period."""
        kind = run.outcome, run.again
        self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if waited_ns is not None:
            self._waits.append(waited_ns)
        if ran_ns is not None:
            self._ran.append(ran_ns)
            if run.cpu_time_ns is not None:
                self._cpu_known_runs += 1
                self._cpu_known_ns += run.cpu_time_ns
                self._cpu_given_ns += run.cpus * ran_ns
        peak = run.peak_memory_bytes
        if peak is not None and (self._largest[0] is None or peak > self._largest[0]):
            self._largest = peak, run.job

    def give(self, resources: dict[str, int], given_ns: int) -> None:
        """Count named resources that a run was given for so long within the period."""
        for name, count in resources.items():
            self._resource_ns[name] = self._resource_ns.get(name, 0) + count * given_ns

    def merge(self, other: Tally) -> None:
        """Count all that *other*, which has none of the same runs, has counted."""
        for kind, count in other._kinds.items():
            self._kinds[kind] = self._kinds.get(kind, 0) + count
        self._waits.extend(other._waits)
        self._ran.extend(other._ran)
        self._cpu_known_runs += other._cpu_known_runs
        self._cpu_known_ns += other._cpu_known_ns
        self._cpu_given_ns += other._cpu_given_ns
        self._largest = max(self._largest, other._largest, key=lambda each: -1 if each[0] is None else each[0])
        self.given.merge(other.given)
        self.give(other._resource_ns, 1)

    def _runs(self, outcome: State | None = None, *, again: str | None = None, any_way: bool = False) -> int:
        """Return how many runs there were, of an outcome or of any, that went on like that, or in any way."""
        return sum(
            count
            for (word, goes_on), count in self._kinds.items()
            if (any_way or goes_on == again) and (outcome is None or word == outcome)
        )

    def totals(self) -> Totals:
        """Return the sums so far."""
        wait_median, wait_p90 = _quantiles(self._waits)
        ran_median, ran_p90 = _quantiles(self._ran)
        cpus, gpus = self.given.peaks()
        cpu_ns, gpu_ns = self.given.sums()
        jobs = self._runs()
        judged = jobs - self._runs(State.CANCELLED)
        return Totals(
            runs=self._runs(any_way=True),
            jobs=jobs,
            outcomes={state.value: self._runs(state, any_way=True) for state in State if state.ended},
            success_rate=self._runs(State.FINISHED) / judged if judged else None,
            retries=self._runs(again="retry"),
            requeues=self._runs(again="requeue"),
            wait_median_ns=wait_median,
            wait_p90_ns=wait_p90,
            wait_mean_ns=sum(self._waits) // len(self._waits) if self._waits else None,
            timed_runs=len(self._ran),
            run_time_median_ns=ran_median,
            run_time_p90_ns=ran_p90,
            run_time_sum_ns=sum(self._ran),
            cpu_hours=cpu_ns / _HOUR_NS,
            cpu_used_hours=self._cpu_known_ns / _HOUR_NS if self._cpu_known_runs else None,
            cpu_used_runs=self._cpu_known_runs,
            cpu_efficiency=self._cpu_known_ns / self._cpu_given_ns if self._cpu_given_ns else None,
            gpu_hours=gpu_ns / _HOUR_NS,
            resource_hours={name: held_ns / _HOUR_NS for name, held_ns in sorted(self._resource_ns.items())},
            peak_cpus=cpus.count,
            peak_cpus_at_ns=cpus.at_ns,
            peak_gpus=gpus.count,
            peak_gpus_at_ns=gpus.at_ns,
            peak_memory_bytes=self._largest[0],
            peak_memory_job=self._largest[1],
        )


def _quantiles(times: array[int]) -> tuple[int | None, int | None]:
    """Return the median and the 90th percentile, by nearest rank."""
    if not times:
        return None, None
    # Sorted is only what is near them: the times are first counted by their leading bits.
    shift = max(max(times).bit_length() - _COARSE_BITS, 0)
    counts = sorted(Counter([each >> shift for each in times]).items())
    return _of_rank(times, 50, counts, shift), _of_rank(times, 90, counts, shift)


def _of_rank(times: array[int], percent: int, counts: Sequence[tuple[int, int]], shift: int) -> int:
    rank = -(-len(times) * percent // 100) - 1  # from 0
    at = 0
    while counts[at][1] <= rank:
        rank -= counts[at][1]
        at += 1
    leading = counts[at][0]
    least, above = leading << shift, (leading + 1) << shift
    return sorted([each for each in times if least <= each < above])[rank]
