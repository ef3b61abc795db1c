"""What is expected of jobs in a list: the time that remains of those that run, and when those that wait start.

A run's own progress and its limit are known from its line. Everything else is asked of the planner, once for all lines,
and only if a dispatcher is there to start jobs and the queue is short enough to answer at once.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct, field
from msgspec.structs import replace

from spool.core.errors import SpoolError
from spool.core.layout import QUEUED
from spool.core.model import SECOND_NS, State
from spool.core.runtimes import ExpectedStart, TimeLeft, time_left
from spool.query.jobs import JobList
from spool.query.rows import JobRow
from spool.query.tasks import ArrayTasks
from spool.store.spool import Spool

_MOST = 500  # files that wait; with more, a list does not ask the planner
_ENOUGH = 50_000  # the bound on the work of a forecast, about a quarter of a second
_SHARE = 50  # a view that stays open uses one part in N of a processor to ask
_AT_MOST_EVERY_NS = 3 * SECOND_NS
_LATEST_NS = 60 * SECOND_NS


class Outlook(Struct, frozen=True):
    """What the planner expects, by the names of jobs: the starts of those that wait, the ends of those that run."""

    starts: Mapping[str, ExpectedStart] = field(default_factory=dict)
    ends: Mapping[str, int] = field(default_factory=dict)

    def of(self, row: JobRow, now_ns: int) -> JobRow:
        """Return *row* with its `left` or its `start`, as far as known."""
        if row.state is State.QUEUED:
            return replace(row, start=self.starts.get(row.name))
        left = left_of(row, now_ns, self.ends.get(row.name))
        return row if left is None else replace(row, left=left)


UNKNOWN = Outlook()
"""An outlook without the planner."""


class OutlookReader:
    """Asks for a view that stays open: no more often than it may cost. Not for several threads at once."""

    def __init__(self) -> None:
        self._last = UNKNOWN
        self._due_ns = 0
        self.took_ns = 0  # processor time of the last call

    def look(self, spool: Spool, rows: Collection[JobRow], now_ns: int, *, served: bool) -> Outlook:
        """Return what is expected of *rows*, from a moment ago; *served*: a dispatcher starts jobs."""
        self.took_ns = 0
        if not served:
            self._last, self._due_ns = UNKNOWN, 0
        elif not 0 <= self._due_ns - now_ns <= _LATEST_NS:
            begun_ns = time.thread_time_ns()
            self._last = outlook(spool, rows, now_ns)
            self.took_ns = time.thread_time_ns() - begun_ns
            self._due_ns = now_ns + min(max(_AT_MOST_EVERY_NS, _SHARE * self.took_ns), _LATEST_NS)
        return self._last


def foreseen(
    spool: Spool, found: JobList, arrays: Mapping[str, ArrayTasks], *, ask: bool = True
) -> tuple[JobList, dict[str, ArrayTasks]]:
    """Return a list of jobs, and the tasks of *arrays*, with the `left` or the `start` of each, as far as known.

    *ask*: also what only the planner knows.
    """
    lists = [found.rows, *(one.rows for one in arrays.values())]
    rows = iter(with_outlook(spool, [row for each in lists for row in each], found.at_ns, served=ask and found.serves))
    jobs, *tasks = [tuple(next(rows) for _ in each) for each in lists]
    return replace(found, rows=jobs), dict(zip(arrays, map(ArrayTasks, tasks), strict=True))


def with_outlook(spool: Spool, rows: Iterable[JobRow], now_ns: int, *, served: bool) -> tuple[JobRow, ...]:
    """Return *rows* with their `left` or their `start`, as far as known; *served*: a dispatcher starts jobs."""
    listed = tuple(rows)
    found = outlook(spool, listed, now_ns) if served else UNKNOWN
    return tuple(found.of(row, now_ns) for row in listed)


def outlook(spool: Spool, rows: Iterable[JobRow], now_ns: int) -> Outlook:
    """Return what the planner expects of those of *rows* that say nothing themselves, of none if too many wait."""
    asked = [row for row in rows if _waits(row) or (_goes_on(row) and left_of(row, now_ns) is None)]
    if asked:
        with suppress(OSError, SpoolError):  # both are reported where the rows come from
            if len(spool.names(QUEUED)) <= _MOST:
                return _foresee(spool, [row.name for row in asked if _waits(row)], now_ns)
    return UNKNOWN


def left_of(row: JobRow, now_ns: int, guess_ns: int | None = None) -> TimeLeft | None:
    """Return the time that remains of the run of *row*; None if it has none, or nothing tells.

    *guess_ns* is when it ends if it lasts as long as similar runs.
    """
    ran_ns = row.time_ns(now_ns)
    if not _goes_on(row) or ran_ns is None:
        return None
    return time_left(row.progress, ran_ns, row.time_limit_ns, None if guess_ns is None else guess_ns - now_ns)


def _goes_on(row: JobRow) -> bool:
    return (
        row.state is State.RUNNING and row.started_at_ns is not None and row.suspended_at_ns is None and not row.array
    )


def _waits(row: JobRow) -> bool:
    return row.state is State.QUEUED and not row.array


def _foresee(spool: Spool, waiting: Sequence[str], now_ns: int) -> Outlook:
    """Ask the planner when the jobs *waiting* start, and when each run ends."""
    from spool.core.forecast import forecast
    from spool.core.runtimes import Source
    from spool.query.snapshot import snapshot  # imported on demand: a list rarely needs this half of the program

    seen = snapshot(spool, now_ns, with_tasks=bool(waiting))
    run_times, here = seen.view.past.run_times, seen.view.running
    ends = {name: at_ns for at_ns, name in here.ends(now_ns) if run_times.of_run(here[name]).source is not Source.NONE}
    found = forecast(seen.plan, waiting, enough=_ENOUGH) if waiting else {}
    starts = {
        name: ExpectedStart(start.at_ns, is_guess=start.guessed or seen.shared is not None)
        for name, start in found.items()
        if start.at_ns is not None
    }
    return Outlook(starts, ends)
