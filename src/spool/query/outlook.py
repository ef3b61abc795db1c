"""What is expected of jobs in a list: the time that remains of those that run, and when those that wait start.

A run's own progress and its limit are known from its line. Everything else is asked of the planner, once for all lines,
and only if a dispatcher is there to start jobs and the queue is short enough to answer at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from spool.core.errors import SpoolError
from spool.core.layout import QUEUED
from spool.core.model import State
from spool.core.timeleft import ExpectedStart, TimeLeft, time_left
from spool.query.jobs import JobList
from spool.query.rows import JobRow
from spool.query.tasks import ArrayTasks
from spool.store.spool import Spool

_MOST = 500  # files that wait; with more, a list does not ask the planner
_ENOUGH = 50_000  # the bound on the work of a forecast, about a quarter of a second


def foreseen(spool: Spool, found: JobList, arrays: Mapping[str, ArrayTasks]) -> tuple[JobList, dict[str, ArrayTasks]]:
    """Return a list of jobs, and the tasks of *arrays*, with the `left` or the `start` of each, as far as known."""
    served = found.dispatcher and found.stale_ns is None and not found.paused
    lists = [found.rows, *(one.rows for one in arrays.values())]
    rows = iter(with_outlook(spool, [row for each in lists for row in each], found.at_ns, served=served))
    jobs, *tasks = [tuple(next(rows) for _ in each) for each in lists]
    return replace(found, rows=jobs), dict(zip(arrays, map(ArrayTasks, tasks), strict=True))


def with_outlook(spool: Spool, rows: Iterable[JobRow], now_ns: int, *, served: bool) -> tuple[JobRow, ...]:
    """Return *rows* with their `left` or their `start`, as far as known; *served*: a dispatcher starts jobs."""
    listed = [replace(row, left=left_of(row, now_ns)) for row in rows]
    asked = [row for row in listed if _waits(row) or (row.left is None and _goes_on(row))]
    found = _Foreseen({}, {})
    if asked and served and len(spool.names(QUEUED)) <= _MOST:
        with suppress(OSError, SpoolError):  # both are reported where the rows come from
            found = _foresee(spool, [row.name for row in asked if _waits(row)], now_ns)
    return tuple(
        replace(row, start=found.starts.get(row.name), left=row.left or left_of(row, now_ns, found.ends.get(row.name)))
        if row.state in (State.QUEUED, State.RUNNING)
        else row
        for row in listed
    )


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


class _Foreseen(Struct, frozen=True):
    starts: dict[str, ExpectedStart]
    ends: dict[str, int]


def _foresee(spool: Spool, waiting: Sequence[str], now_ns: int) -> _Foreseen:
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
    return _Foreseen(starts, ends)
