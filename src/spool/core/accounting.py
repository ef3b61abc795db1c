"""What ended runs waited, took and used, by user, project and so on: the sums of `spool stats`.

A run belongs to the period in which it ended: counts, waits and run times are of those. What runs were given (hours,
peaks) is cut at the edges of the period instead, and of each day, so that no day has more than it can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

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
    clock_set: int  # runs that ended before they began; they have no run time


class Ledger:
    """Counts runs, one after the other, in the order in which they ended.

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
        self._only_total = (self._total,)
        self._key = _KEY.get(by) if by is not None else None
        self._groups: dict[str | None, Tally] = {}
        self._seen: set[int] = set()
        self._open: dict[str, int | None] = {}  # jobs that go on, and the end of their last run
        self._gpus: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._first: int | None = None
        self._last: int | None = None
        self._duplicates = 0
        self._clock_set = 0

    def add(self, run: Account) -> None:
        """Count a run, if it is one of those wanted."""
        wanted = self._wanted
        if (wanted.user is not None and run.user != wanted.user) or (
            wanted.project is not None and run.project != wanted.project
        ):
            return
        start, end = run.started_at_ns, run.ended_at_ns
        mark = hash((run.job, run.run, run.submitted_at_ns if start is None else start))
        if mark in self._seen:
            self._duplicates += 1
            return
        self._seen.add(mark)
        waited_ns = self._waited(run)
        if end is None:
            if wanted.since_at_ns is None and wanted.until_at_ns is None:
                self._count(run, waited_ns, None)
            return
        if self._since <= end < self._until:
            ran_ns = None
            if start is not None:
                ran_ns = end - start
                if ran_ns < 0:
                    self._clock_set += 1
                    ran_ns = None
            if self._last is None or end > self._last:
                self._last = end
            if self._first is None or end < self._first:
                self._first = end
            self._count(run, waited_ns, ran_ns)
        if start is not None and (run.cpus or run.gpus):
            start, end = max(start, self._since), min(end, self._until)
            if start < end:
                self._use(run, start, end)

    def statistics(self) -> Statistics:
        """Return the sums. Groups are in the order of their days, of the states, or of what they have used."""
        total = self._total
        if self._by not in (None, By.TAG):  # every run is in one group, and the total is their sum
            total = Tally()
            for tally in self._groups.values():
                total.merge(tally)
        groups = [(key, tally.totals()) for key, tally in self._groups.items()]
        groups.sort(key=self._rank)
        return Statistics(total.totals(), tuple(groups), self._first, self._last, self._duplicates, self._clock_set)

    def _rank(self, group: tuple[str | None, Totals]) -> tuple[float, ...] | tuple[str, ...]:
        key, totals = group
        if self._by is By.DAY:
            return (key or "~",)  # what has no end comes last
        if self._by is By.STATE:
            return (list(State).index(State(key or "invalid")),)
        return -totals.gpu_hours, -totals.cpu_hours, -totals.runs

    def _waited(self, run: Account) -> int | None:
        """Return how long the run waited for its start; a later one of a submission, since the end of the one before.

        None if it never started, if the run before is not known, or if the clock was set meanwhile.
        """
        since = run.submitted_at_ns
        if run.job in self._open:
            since = self._open.pop(run.job)
        elif run.attempt > 1 or run.requeues:
            since = None
        if run.again is not None:
            self._open[run.job] = run.ended_at_ns
        if run.started_at_ns is None or since is None or run.started_at_ns < since:
            return None
        return run.started_at_ns - since

    def _count(self, run: Account, waited_ns: int | None, ran_ns: int | None) -> None:
        for tally in self._tallies(run):
            tally.count(run, waited_ns, ran_ns)

    def _use(self, run: Account, start: int, end: int) -> None:
        """Count what a run was given, of each day within that day."""
        gpus = self._gpus.setdefault(run.gpus, run.gpus) if run.gpus else ()
        if self._by is By.DAY:
            for day, since, until in self._days.parts(start, end):
                self._tally(day).given.add(since, until, run.cpus, gpus)
        else:
            for tally in self._tallies(run):
                tally.given.add(start, end, run.cpus, gpus)

    def _tallies(self, run: Account) -> Sequence[Tally]:
        """Return all that a run is counted in."""
        if self._by is None:
            return self._only_total
        key = self._key
        if key is not None:
            return (self._tally(key(run)),)
        if self._by is By.DAY:
            return (self._tally(None if run.ended_at_ns is None else self._days.of(run.ended_at_ns)),)
        return (self._total, *map(self._tally, dict.fromkeys(run.tags) or (None,)))

    def _tally(self, key: str | None) -> Tally:
        tally = self._groups.get(key)
        if tally is None:
            tally = self._groups[key] = Tally()
        return tally


_KEY: dict[By, Callable[[Account], str | None]] = {
    By.USER: lambda run: run.user,
    By.PROJECT: lambda run: run.project,
    By.STATE: lambda run: run.outcome,
    By.GROUP: lambda run: run.group,
    By.EXECUTOR: lambda run: run.executor,
}
