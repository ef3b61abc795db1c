"""What ended runs waited, took and used, by user, project and so on: the sums of `spool stats`.

A run belongs to the period in which it ended: counts, waits and run times are of those. What runs were given (hours,
peaks) is cut at the edges of the period instead, and of each day, so that no day has more than it can hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from spool.core.days import Day, Days, utc_day
from spool.core.model import State
from spool.core.tally import Account, Tally, Totals
from spool.core.units import LARGEST


class By(StrEnum):
    """What runs are grouped by. A run with several tags is in several groups."""

    USER = "user"
    PROJECT = "project"
    STATE = "state"
    GROUP = "group"
    TAG = "tag"
    DAY = "day"
    EXECUTOR = "executor"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which runs are counted: those that ended from `since` up to, not including, `until`, of that user and project."""

    since_at_ns: int | None = None
    until_at_ns: int | None = None
    user: str | None = None
    project: str | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """What `Ledger` has counted. `groups` are by their key, None for runs that have none."""

    total: Totals
    groups: tuple[tuple[str | None, Totals], ...]
    first_at_ns: int | None  # the first and the last end of a run
    last_at_ns: int | None
    duplicates: int  # lines that said what another had said
    clock_set: int  # runs that ended before they began, or centuries after; they have no run time


class Ledger:
    """Counts runs in the order in which they ended.

    Of each run it keeps some dozens of bytes: its waiting and running time for the quantiles, its interval for the
    peaks, and a number to know it again by.
    """

    def __init__(self, wanted: Wanted, by: By | None = None, look: Callable[[int], Day] = utc_day) -> None:
        self._wanted = wanted
        self._by = by
        self._days = Days(look)
        self._since = wanted.since_at_ns if wanted.since_at_ns is not None else -LARGEST
        self._until = wanted.until_at_ns if wanted.until_at_ns is not None else LARGEST
        self._total = Tally()
        self._groups: defaultdict[str | None, Tally] = defaultdict(Tally)
        self._tallies_of = self._counted_in()
        self._seen: set[int] = set()
        self._going_on: dict[str, int | None] = {}  # jobs that go on, and the end of their last run
        self._gpus: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._first = LARGEST
        self._last = -LARGEST
        self._duplicates = 0
        self._clock_set = 0

    def add(self, runs: Iterable[Account]) -> None:
        """Count those of the *runs* that are wanted. In one loop: its million turns are what takes the time."""
        wanted, since, until = self._wanted, self._since, self._until
        anyone = wanted.user is None and wanted.project is None
        always = wanted.since_at_ns is None and wanted.until_at_ns is None
        seen, going_on, gpu_sets = self._seen, self._going_on, self._gpus
        by_day, tallies_of = self._by is By.DAY, self._tallies_of
        for run in runs:
            if not anyone and not _is_of(run, wanted):
                continue
            start, end, ready = run.started_at_ns, run.ended_at_ns, run.submitted_at_ns
            mark = hash((run.job, run.run, ready if start is None else start))
            if mark in seen:
                self._duplicates += 1
                continue
            seen.add(mark)
            if run.again is not None or run.attempt > 1 or run.requeues or run.job in going_on:
                ready = self._ready(run)
            counts = always if end is None else since <= end < until
            waited_ns = ran_ns = None
            given_from = given_until = 0
            if start is not None:
                if ready is not None and 0 <= start - ready <= LARGEST:  # else the clock was set meanwhile
                    waited_ns = start - ready
                if end is not None:
                    if 0 <= end - start <= LARGEST:
                        ran_ns = end - start
                        if run.cpus or run.gpus or run.resources:
                            given_from, given_until = (start, end) if always else (max(start, since), min(end, until))
                    elif counts:
                        self._clock_set += 1
            if counts:
                if end is not None:
                    if end > self._last:
                        self._last = end
                    if end < self._first:
                        self._first = end
                for tally in tallies_of(run):
                    tally.count(run, waited_ns, ran_ns)
            if given_from < given_until:
                gpus = gpu_sets.setdefault(run.gpus, run.gpus)
                if by_day:
                    for day, begin, finish in self._days.parts(given_from, given_until):
                        self._groups[day].given.add(begin, finish, run.cpus, gpus)
                        if run.resources:
                            self._groups[day].give(run.resources, finish - begin)
                else:
                    for tally in tallies_of(run):
                        tally.given.add(given_from, given_until, run.cpus, gpus)
                        if run.resources:
                            tally.give(run.resources, given_until - given_from)

    def statistics(self) -> Statistics:
        """Return the sums. Groups are in the order of their days, of the states, or of what they have used."""
        total = self._total
        if self._by not in (None, By.TAG):  # every run is in one group, and the total is their sum
            total = Tally()
            for tally in self._groups.values():
                total.merge(tally)
        groups = [(key, tally.totals()) for key, tally in self._groups.items()]
        groups.sort(key=self._rank)
        first, last = (self._first, self._last) if self._first <= self._last else (None, None)
        return Statistics(total.totals(), tuple(groups), first, last, self._duplicates, self._clock_set)

    def _rank(self, group: tuple[str | None, Totals]) -> tuple[float, ...] | tuple[str, ...]:
        key, totals = group
        if self._by is By.DAY:
            return (key or "~",)  # what has no end comes last
        if self._by is By.STATE:
            return (list(State).index(State(key or "invalid")),)
        return -totals.gpu_hours, -totals.cpu_hours, -totals.runs

    def _ready(self, run: Account) -> int | None:
        """Return since when a run waits that is one of several of its submission: since the end of the one before.

        None if the run before is not known.
        """
        ready = run.submitted_at_ns
        if run.job in self._going_on:
            ready = self._going_on.pop(run.job)
        elif run.attempt > 1 or run.requeues:
            ready = None
        if run.again is not None:
            self._going_on[run.job] = run.ended_at_ns
        return ready

    def _counted_in(self) -> Callable[[Account], Sequence[Tally]]:
        """Return what tells which tallies a run is counted in."""
        groups, total, days = self._groups, self._total, self._days
        match self._by:
            case None:
                only = (total,)
                return lambda run: only
            case By.DAY:
                return lambda run: (groups[None if run.ended_at_ns is None else days.of(run.ended_at_ns)],)
            case By.TAG:
                return lambda run: (total, *(groups[tag] for tag in dict.fromkeys(run.tags) or (None,)))
            case by:
                key = _KEY[by]
                return lambda run: (groups[key(run)],)


def _is_of(run: Account, wanted: Wanted) -> bool:
    return wanted.user in (None, run.user) and wanted.project in (None, run.project)


_KEY: dict[By, Callable[[Account], str | None]] = {
    By.USER: attrgetter("user"),
    By.PROJECT: attrgetter("project"),
    By.STATE: attrgetter("outcome"),
    By.GROUP: attrgetter("group"),
    By.EXECUTOR: attrgetter("executor"),
}
