"""The sums of `spool stats`: waits, run times and resource use of ended runs, by user, project and so on.

A run belongs to the period in which it ended: it is counted there, with its wait and its run time. Granted resources
(hours, peaks) are cut at the edges of the period instead, and of each day, so that no day exceeds its capacity. Peak
use comes from a sweep over the intervals in which runs held their grants.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import chain, count, repeat
from operator import attrgetter, mul, sub
from typing import Protocol

from msgspec import Struct

from spool.core.model import SECOND_NS, Grant, Result, State
from spool.core.units import LARGEST, nearest_rank

Day = tuple[str, int, int]
"""A day: its name, its first instant, and that of the next."""

_DAY_NS = 24 * 3600 * SECOND_NS
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_HOUR_NS = 3600 * SECOND_NS
_NOTHING = Grant()

MJ_PER_KWH = 3_600_000_000
"""Millijoules in a kilowatt-hour."""


class Peak(Struct, frozen=True):
    """The most at one moment, and the first moment of it; 0 and None where there was nothing."""

    count: int = 0
    at_ns: int | None = None


class Intervals:
    """The intervals during which runs held CPUs and GPUs. They exclude their ends; an empty interval does not count.

    A GPU that several runs share counts once while any of them has it. GPUs are told apart by UUID, so GPUs of several
    hosts add up.
    """

    __slots__ = ("_cpus", "_ends", "_gpus", "_starts")

    def __init__(self) -> None:
        self._starts = array("q")
        self._ends = array("q")
        self._cpus = array("q")
        self._gpus: list[tuple[str, ...]] = []

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start_at_ns: int, end_at_ns: int, cpus: int, gpus: tuple[str, ...] = ()) -> None:
        """Record a run. Pass equal *gpus* as one object: there may be a million of them."""
        if start_at_ns < end_at_ns and (cpus or gpus):
            self._starts.append(start_at_ns)
            self._ends.append(end_at_ns)
            self._cpus.append(cpus)
            self._gpus.append(gpus)

    def sums(self) -> tuple[int, int]:
        """Return CPUs times ns, and GPUs times ns; a shared GPU counts for each run that has it."""
        lengths = list(map(sub, self._ends, self._starts))
        return sum(map(mul, self._cpus, lengths)), sum(map(mul, map(len, self._gpus), lengths))

    def peaks(self) -> tuple[Peak, Peak]:
        """Return the peak of the CPUs and that of the GPUs."""
        cpus, gpus, level, users = Peak(), Peak(), 0, Counter[str]()
        # At one instant ends come before starts, so that an interval excludes its end.
        for at_ns, begins, each in sorted(chain(zip(self._ends, repeat(False), count()),
                                                zip(self._starts, repeat(True), count()))):  # fmt: skip
            sign = 1 if begins else -1
            level += sign * self._cpus[each]
            for gpu in self._gpus[each]:
                users[gpu] += sign
                if not users[gpu]:
                    del users[gpu]
            if level > cpus.count:
                cpus = Peak(level, at_ns)
            if len(users) > gpus.count:
                gpus = Peak(len(users), at_ns)
        return cpus, gpus


class Days:
    """Maps an instant to its day; a day has 23 to 25 hours when the clocks change.

    *look* returns the day of an instant in the chosen time zone: its name, its start and its end.
    """

    def __init__(self, look: Callable[[int], Day]) -> None:
        self._look = look
        self._last: Day = ("", 0, 0)
        self._known: dict[int, list[Day]] = {}  # by day since 1970 in UTC

    def of(self, at_ns: int) -> str:
        """Return the day, "2026-01-31"."""
        return self._day(at_ns)[0]

    def parts(self, start_at_ns: int, end_at_ns: int) -> Iterator[Day]:
        """Yield the part of an interval within each day that it touches."""
        while start_at_ns < end_at_ns:
            name, _, until = self._day(start_at_ns)
            until = min(until, end_at_ns)
            yield name, start_at_ns, until
            start_at_ns = until

    def _day(self, at_ns: int) -> Day:
        if self._last[1] <= at_ns < self._last[2]:
            return self._last
        near = self._known.setdefault(at_ns // _DAY_NS, [])
        found = next((day for day in near if day[1] <= at_ns < day[2]), None)
        if found is None:
            name, start, end = self._look(at_ns)
            found = (name, min(start, at_ns), max(end, at_ns + 1))  # when a midnight is skipped
            near.append(found)
        self._last = found
        return found


def utc_day(at_ns: int) -> Day:
    """Return the day in UTC."""
    start = at_ns - at_ns % _DAY_NS
    return (_EPOCH + timedelta(microseconds=start // 1000)).date().isoformat(), start, start + _DAY_NS


class Totals(Struct, frozen=True):
    """The sums over some runs. A value is None where there is no data; quantiles are times that a run really had.

    A job counts once it has ended for good; a run that is followed by a retry counts as a run but not as a job.
    """

    runs: int
    jobs: int
    outcomes: dict[str, int]  # of runs; zero counts included
    ended: dict[str, int]  # of jobs
    success_rate: float | None  # share of finished jobs among those not cancelled
    retries: int  # runs that were followed by another attempt
    requeues: int  # runs that were repeated without counting as an attempt
    wait_median_ns: int | None
    wait_p90_ns: int | None
    wait_mean_ns: int | None
    timed_runs: int  # runs with a run time: they started, and the clock was not set meanwhile
    run_time_median_ns: int | None
    run_time_p90_ns: int | None
    run_time_sum_ns: int
    cpu_hours: float  # granted CPUs times run time
    cpu_used_hours: float | None  # CPU time of the runs whose CPU time is known
    cpu_used_runs: int  # the number of those runs
    cpu_efficiency: float | None  # CPU time divided by the grants of these runs; above 1 if they used more
    gpu_hours: float  # granted GPUs times run time; a shared GPU counts for each of its runs
    gpu_used_hours: float | None  # GPU hours spent computing, of the runs where this is known
    gpu_used_runs: int  # the number of those runs
    gpu_efficiency: float | None  # their share of the GPU hours granted to these runs
    gpu_kwh: float | None  # energy of the GPUs of the runs where it is known
    gpu_kwh_runs: int  # the number of those runs
    resource_hours: dict[str, float]  # granted named resources times run time
    peak_cpus: int
    peak_cpus_at_ns: int | None
    peak_gpus: int  # different GPUs in use at one moment
    peak_gpus_at_ns: int | None
    peak_memory_bytes: int | None  # of the largest run
    peak_memory_job: str | None


class GroupSums:
    """The growing sums of one group."""

    def __init__(self) -> None:
        self._outcomes = Counter[State]()  # of all runs …
        self._final = Counter[State]()  # … and of those that are a job's last
        self._again = Counter[str | None]()
        self._waits = array("q")
        self._ran = array("q")
        self._cpu_known_ns = self._cpu_given_ns = self._cpu_known_runs = 0
        self._gpu_used_ns = 0.0
        self._gpu_given_ns = self._gpu_known_runs = 0
        self._energy_mj = self._energy_runs = 0
        self._largest: tuple[int | None, str | None] = (None, None)
        self._resource_ns = Counter[str]()
        self._given = Intervals()  # grants within the period, whenever their runs ended

    def count(self, run: Result, waited_ns: int | None, ran_ns: int | None) -> None:
        """Count a run that ended in the period."""
        self._outcomes[run.outcome] += 1
        self._final[run.outcome] += run.again is None
        self._again[run.again] += 1
        if waited_ns is not None:
            self._waits.append(waited_ns)
        if ran_ns is not None:
            self._ran.append(ran_ns)
            if run.cpu_time_ns is not None:
                self._cpu_known_runs += 1
                self._cpu_known_ns += run.cpu_time_ns
                self._cpu_given_ns += run.grant.cpus * ran_ns
            percents = [use.mean_percent for use in run.gpu_use if use.mean_percent is not None]
            if percents:
                given_ns = len(run.gpus) * ran_ns
                self._gpu_known_runs += 1
                self._gpu_used_ns += sum(percents) / len(percents) / 100 * given_ns
                self._gpu_given_ns += given_ns
        energies = [use.energy_mj for use in run.gpu_use if use.energy_mj is not None]
        self._energy_runs += bool(energies)
        self._energy_mj += sum(energies)
        peak = run.peak_memory_bytes
        if peak is not None and (self._largest[0] is None or peak > self._largest[0]):
            self._largest = peak, run.job

    def give(self, run: Result, gpus: tuple[str, ...], start_at_ns: int, end_at_ns: int) -> None:
        """Count what a run held within the period; equal *gpus* are one object."""
        self._given.add(start_at_ns, end_at_ns, run.grant.cpus, gpus)
        for name, number in run.grant.resources:
            self._resource_ns[name] += number * (end_at_ns - start_at_ns)

    def totals(self) -> Totals:
        """Return the sums so far."""
        wait_median, wait_p90 = _quantiles(self._waits)
        ran_median, ran_p90 = _quantiles(self._ran)
        cpus, gpus = self._given.peaks()
        cpu_ns, gpu_ns = self._given.sums()
        resolved = self._final.total() - self._final[State.CANCELLED]
        return Totals(
            runs=self._outcomes.total(),
            jobs=self._final.total(),
            outcomes={state.value: self._outcomes[state] for state in State if state.ended},
            ended={state.value: self._final[state] for state in State if state.ended},
            success_rate=self._final[State.FINISHED] / resolved if resolved else None,
            retries=self._again["retry"],
            requeues=self._again["requeue"],
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
            gpu_used_hours=self._gpu_used_ns / _HOUR_NS if self._gpu_known_runs else None,
            gpu_used_runs=self._gpu_known_runs,
            gpu_efficiency=self._gpu_used_ns / self._gpu_given_ns if self._gpu_given_ns else None,
            gpu_kwh=self._energy_mj / MJ_PER_KWH if self._energy_runs else None,
            gpu_kwh_runs=self._energy_runs,
            resource_hours={name: held_ns / _HOUR_NS for name, held_ns in sorted(self._resource_ns.items())},
            peak_cpus=cpus.count,
            peak_cpus_at_ns=cpus.at_ns,
            peak_gpus=gpus.count,
            peak_gpus_at_ns=gpus.at_ns,
            peak_memory_bytes=self._largest[0],
            peak_memory_job=self._largest[1],
        )


def _quantiles(times: array[int]) -> tuple[int | None, int | None]:
    ordered = sorted(times)
    return nearest_rank(ordered, 50), nearest_rank(ordered, 90)


def _length(from_ns: int | None, until_ns: int | None) -> int | None:
    """Return the time between two instants; None if one is unknown, or the clock was set meanwhile."""
    if from_ns is None or until_ns is None or not 0 <= until_ns - from_ns <= LARGEST:
        return None
    return until_ns - from_ns


class By(StrEnum):
    """Keys to group runs by. A run with several tags is in several groups."""

    USER = "user"
    PROJECT = "project"
    STATE = "state"
    GROUP = "group"
    TAG = "tag"
    DAY = "day"
    EXECUTOR = "executor"


class Tagged(Protocol):
    """The attributes that select a run or a job."""

    @property
    def user(self) -> str | None:
        """The owner."""

    @property
    def project(self) -> str | None:
        """The project, if any."""

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of its job file."""


class RunFilter(Struct, frozen=True):
    """The runs to count: those that ended from `since` up to, not including, `until`, and match every other field."""

    since_at_ns: int | None = None
    until_at_ns: int | None = None
    user: str | None = None
    project: str | None = None
    tag: str | None = None

    @property
    def anyone(self) -> bool:
        """Whether no user, project or tag is selected."""
        return self.user is None and self.project is None and self.tag is None

    def wants(self, run: Tagged) -> bool:
        """Whether *run* matches the user, project and tag."""
        return (
            self.user in (None, run.user)
            and self.project in (None, run.project)
            and (self.tag is None or self.tag in run.tags)
        )


class Statistics(Struct, frozen=True):
    """The counts of a `Ledger`. `groups` are by key; None holds the runs without one."""

    total: Totals
    groups: tuple[tuple[str | None, Totals], ...]
    first_at_ns: int | None  # the first and the last end of a run
    last_at_ns: int | None
    duplicates: int  # lines that repeated another line
    clock_set: int  # runs that ended before they began, or centuries later; they have no run time


class Ledger:
    """Counts runs in the order of their ends.

    It keeps some dozens of bytes per run: waiting and running time for the quantiles, the interval for the peaks, and a
    hash to recognise duplicates.
    """

    def __init__(self, wanted: RunFilter, by: By | None = None, look: Callable[[int], Day] = utc_day) -> None:
        self._wanted = wanted
        self._by = by
        self._days = Days(look)
        self._since = -LARGEST if wanted.since_at_ns is None else wanted.since_at_ns
        self._until = LARGEST if wanted.until_at_ns is None else wanted.until_at_ns
        self._always = wanted.since_at_ns is None and wanted.until_at_ns is None
        self._total = GroupSums()
        self._groups: defaultdict[str | None, GroupSums] = defaultdict(GroupSums)
        self._seen: set[int] = set()
        self._going_on: dict[str, int | None] = {}  # jobs with another run to come, and the end of their last run
        self._gpus: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._first = LARGEST
        self._last = -LARGEST
        self._duplicates = 0
        self._clock_set = 0

    def add(self, runs: Iterable[Result]) -> None:
        """Count those of *runs* that the filter selects."""
        for run in runs:
            if self._wanted.anyone or self._wanted.wants(run):
                mark = hash((run.job, run.run, run.started_at_ns or run.submitted_at_ns))
                if mark in self._seen:
                    self._duplicates += 1
                else:
                    self._seen.add(mark)
                    self._count(run)

    def _count(self, run: Result) -> None:
        start, end = run.started_at_ns, run.ended_at_ns
        waited_ns, length_ns = _length(self._ready_ns(run), start), _length(start, end)
        if self._always if end is None else self._since <= end < self._until:
            if end is not None:
                self._first, self._last = min(self._first, end), max(self._last, end)
                self._clock_set += start is not None and length_ns is None
            # If the clock was set while it was suspended, it was suspended longer than it ran.
            ran_ns = None if length_ns is None else max(length_ns - run.suspended_ns, 0)
            for sums in self._sums_of(run):
                sums.count(run, waited_ns, ran_ns)
        if length_ns is None or start is None or end is None or run.grant == _NOTHING:
            return
        start, end = max(start, self._since), min(end, self._until)
        if start < end:
            gpus = self._gpus.setdefault(run.gpus, run.gpus)
            by_day = self._by is By.DAY
            for sums in (self._total,) if by_day else self._sums_of(run):
                sums.give(run, gpus, start, end)
            for day, begin, finish in self._days.parts(start, end) if by_day else ():
                self._groups[day].give(run, gpus, begin, finish)

    def _ready_ns(self, run: Result) -> int | None:
        """Return when a run's wait began: at its submission, or at the end of the run before it; None: unknown."""
        ready_ns = run.submitted_at_ns
        if run.job in self._going_on:
            ready_ns = self._going_on.pop(run.job)
        elif run.attempt > 1 or run.requeues:
            ready_ns = None
        if run.again is not None:
            self._going_on[run.job] = run.ended_at_ns
        return ready_ns

    def statistics(self) -> Statistics:
        """Return the sums. Groups are ordered by day, by state, or by usage."""
        groups = [(key, sums.totals()) for key, sums in self._groups.items()]
        groups.sort(key=self._rank)
        first, last = (self._first, self._last) if self._first <= self._last else (None, None)
        return Statistics(self._total.totals(), tuple(groups), first, last, self._duplicates, self._clock_set)

    def _rank(self, group: tuple[str | None, Totals]) -> tuple[float, ...] | tuple[str, ...]:
        key, totals = group
        if self._by is By.DAY:
            return (key or "~",)  # runs without a key come last
        if self._by is By.STATE:
            return (list(State).index(State(key or "invalid")),)
        return -totals.gpu_hours, -totals.cpu_hours, -totals.runs

    def _sums_of(self, run: Result) -> Sequence[GroupSums]:
        """Return the sums in which a run counts."""
        groups = self._groups
        match self._by:
            case None:
                return (self._total,)
            case By.DAY:
                return self._total, groups[None if run.ended_at_ns is None else self._days.of(run.ended_at_ns)]
            case By.TAG:
                return self._total, *(groups[tag] for tag in dict.fromkeys(run.tags) or (None,))
            case by:
                return self._total, groups[GROUP_KEYS[by](run)]


GROUP_KEYS: dict[By, Callable[[object], str | None]] = {
    By.USER: attrgetter("user"),
    By.PROJECT: attrgetter("project"),
    By.STATE: attrgetter("outcome.value"),
    By.GROUP: attrgetter("group"),
    By.EXECUTOR: attrgetter("executor"),
}
"""The group name of a run, for keys that put a run in one group; None means that it has none."""
