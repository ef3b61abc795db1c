"""What a list of jobs shows beyond their rows: arrays, similar jobs folded, dependencies as a tree, expected ends.

A run's own progress and its limit are known from its row. Everything else that is expected, when those that wait
start and awaited ones end, is asked of the planner, once for all lines, and only if a dispatcher is there to start jobs
and the queue is short enough to answer at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set
from contextlib import suppress

from msgspec import Struct, field
from msgspec.structs import replace

from spool.core.arrays import array_of
from spool.core.errors import SpoolError
from spool.core.layout import QUEUED
from spool.core.model import BAD, SECOND_NS, State
from spool.core.reasons import ranges_of
from spool.core.runtimes import ExpectedStart, Progress, Source, time_left
from spool.query.jobs import JobLister, list_jobs, to_come
from spool.query.rows import JobFilter, JobList, JobRow, with_parameters
from spool.store.arrays import task_names
from spool.store.spool import Spool

_FOLDED = frozenset({State.QUEUED, State.HELD, State.FINISHED})

_DEEP = 12  # levels of a tree; deeper ones are not indented further
_FEW = 2  # this many similar rows are not folded


class ListedJob(Struct, frozen=True):
    """A line of a list: a job, or similar *tasks* of an array, with the first of them in *row*."""

    row: JobRow
    name: str
    tasks: tuple[JobRow, ...] = ()

    @property
    def count(self) -> int:
        """How many jobs it stands for."""
        return len(self.tasks) or 1


class ArrayTasks(Struct, frozen=True):
    """The tasks of an array in order: those that have begun or wait, and those not issued yet."""

    rows: tuple[JobRow, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many tasks are in each state, ended states first."""
        found = Counter(row.state for row in self.rows)
        return {state.value: found[state] for state in sorted(found, key=lambda state: (not state.ended, state))}

    @property
    def failed(self) -> tuple[str, ...]:
        """The tasks that have ended without finishing."""
        return tuple(row.name for row in self.rows if row.state in BAD)


def tasks_of(spool: Spool, name: str) -> ArrayTasks | None:
    """Return the tasks of the array *name*; None if it is not an array, or not expanded."""
    record = spool.newest_array(name)
    if record is None:
        return None
    names = task_names(spool, name, record.run, record)
    wanted = frozenset((name, *names))
    known = {row.name: row for row in JobLister(spool).listing(only=wanted.__contains__).rows}
    array, since_ns = known.get(name), record.submitted_at_ns or 0

    def row_of(task: str) -> JobRow:
        row = known.get(task)
        if row is not None and not (row.state.ended and (row.submitted_at_ns or since_ns) < since_ns):
            return row
        if array is not None and not array.state.ended and array.state is not State.STOPPING:
            return to_come(array, task)
        return JobRow(name=task, state=State.CANCELLED, user=record.user, reason="never issued")

    return ArrayTasks(with_parameters(spool, map(row_of, names)))


def folded(spool: Spool, rows: Iterable[JobRow], states: Container[State] = _FOLDED) -> list[ListedJob]:
    """Return the lines of a list in which similar tasks of an array in one of *states* share one line."""
    alike: dict[tuple[object, ...], list[JobRow]] = {}
    for at, row in enumerate(rows):
        array = array_of(row.name) if row.state in states else ""
        key: tuple[object, ...] = (at,)
        if array and _index(row):
            again = row.attempt is not None and row.attempt > 1 and not row.state.ended
            key = (array, row.state, row.priority, row.user, row.cpus, row.gpus, again)
        alike.setdefault(key, []).append(row)
    arrays = {key[0]: spool.newest_array(str(key[0])) is not None for key in alike if len(alike[key]) > _FEW}
    found: list[ListedJob] = []
    for key, group in alike.items():
        if len(group) > _FEW and arrays[key[0]]:
            name = f"{key[0]}_[{ranges_of(int(_index(row)) for row in group)}]"
            found.append(ListedJob(group[0], name, tuple(group)))
        else:
            found += [ListedJob(row, row.name) for row in group]
    return found


def tree(spool: Spool, rows: Sequence[JobRow]) -> list[ListedJob]:
    """Return the jobs below their dependencies, and tasks below their array, as the lines of a tree.

    A job with several dependencies is below the first of them, and its line names the others. Jobs in a dependency
    cycle are below none.
    """
    rows = list({row.name: row for row in reversed(rows)}.values())[::-1]
    names = {row.name for row in rows}
    parents = {row.name: _parents(spool, row, names) for row in rows}
    below: dict[str, list[JobRow]] = {}
    for row in rows:
        if parents[row.name]:
            below.setdefault(parents[row.name][0], []).append(row)
    found: list[ListedJob] = []
    placed: set[str] = set()
    for root in [*(row for row in rows if not parents[row.name]), *rows]:
        todo = [(ListedJob(root, root.name), "", "", 0)] if root.name not in placed else []
        while todo:
            one, head, rest, depth = todo.pop()
            placed.add(one.row.name)
            others = parents[one.row.name][1:]
            also = f" (also after {', '.join(others)})" if others else ""
            found.append(ListedJob(one.row, f"{head}{one.name}{also}", one.tasks))
            children = [row for row in below.get(one.row.name, ()) if row.name not in placed and one.count == 1]
            placed.update(row.name for row in children)
            leaves = {row.name for row in children if row.name not in below and len(parents[row.name]) == 1}
            lines = folded(spool, (row for row in children if row.name in leaves))
            lines += [ListedJob(row, row.name) for row in children if row.name not in leaves]
            for line in reversed(lines):
                sign, more = ("└─ ", "   ") if line is lines[-1] else ("├─ ", "│  ")
                sign, more = ("… ", "") if depth >= _DEEP else (sign, more)
                todo.append((line, f"{rest}{sign}", f"{rest}{more}", depth + 1))
    return found


def _parents(spool: Spool, row: JobRow, names: Set[str]) -> list[str]:
    """Return the listed jobs that a job depends on; for a task its array comes first."""
    array = array_of(row.name)
    found = [array] if array in names and _index(row) and spool.newest_array(array) is not None else []
    spec = spool.job_spec(row.place, row.name) if row.place is not None else None
    depends_on = spec.depends_on if spec is not None else None
    found += [name for name in (depends_on.names() if depends_on is not None else ()) if name in names]
    return list(dict.fromkeys(found))


def _index(row: JobRow) -> str:
    text = row.name.rpartition("_")[2]
    return text if text.isascii() and text.isdigit() else ""


_MOST = 500  # jobs; with more that wait, the planner is not asked
_ENOUGH = 50_000  # the bound on the work of a forecast, about a quarter of a second
_SHARE = 50  # a view that stays open uses one part in N of a processor to ask
_AT_MOST_EVERY_NS = 3 * SECOND_NS
_LATEST_NS = 60 * SECOND_NS


class Outlook(Struct, frozen=True):
    """What is expected, by the names of jobs: the starts of those that wait, and the ends."""

    starts: Mapping[str, ExpectedStart] = field(default_factory=dict)
    ends: Mapping[str, int] = field(default_factory=dict)

    def of(self, row: JobRow, now_ns: int) -> JobRow:
        """Return *row* with its `left` or its `start`, as far as known."""
        if row.state is State.QUEUED:
            return replace(row, start=self.starts.get(row.name))
        if not _goes_on(row):
            return row
        began_ns, end_ns = now_ns - (row.time_ns(now_ns) or 0), self.ends.get(row.name)
        planned_ns = None if end_ns is None else end_ns - began_ns
        progress = Progress(row.progress, row.progress_at_ns)
        return replace(row, left=time_left(progress, began_ns, now_ns, row.time_limit_ns, planned_ns))


UNKNOWN = Outlook()
"""An outlook without the planner."""


class OutlookReader:
    """Asks for a view that stays open: no more often than it may cost. Not for several threads at once."""

    def __init__(self) -> None:
        self._last = UNKNOWN
        self._due_ns = 0

    def look(self, spool: Spool, rows: Collection[JobRow], now_ns: int, *, served: bool) -> Outlook:
        """Return what is expected of *rows*, from a moment ago; *served*: a dispatcher starts jobs."""
        if not served:
            self._last, self._due_ns = UNKNOWN, 0
        elif not 0 <= self._due_ns - now_ns <= _LATEST_NS:
            begun_ns = time.thread_time_ns()
            self._last = outlook(spool, rows, now_ns)
            pause_ns = max(_AT_MOST_EVERY_NS, _SHARE * (time.thread_time_ns() - begun_ns))
            self._due_ns = now_ns + min(pause_ns, _LATEST_NS)
        return self._last


def foreseen(spool: Spool, found: JobList, *, ask: bool) -> JobList:
    """Return a list of jobs with their `left` or their `start`; *ask*: also what only the planner knows."""
    return replace(found, rows=with_outlook(spool, found.rows, found.at_ns, served=ask and found.serves))


def with_outlook(spool: Spool, rows: Iterable[JobRow], now_ns: int, *, served: bool) -> tuple[JobRow, ...]:
    """Return *rows* with their `left` or their `start`, as far as known; *served*: a dispatcher starts jobs."""
    listed = tuple(rows)
    found = outlook(spool, listed, now_ns) if served else UNKNOWN
    return tuple(found.of(row, now_ns) for row in listed)


def outlook(spool: Spool, rows: Iterable[JobRow], now_ns: int) -> Outlook:
    """Return what the planner expects of those of *rows* that say nothing themselves, of none if too many wait."""
    asked = [row for row in rows if _waits(row) or (_goes_on(row) and UNKNOWN.of(row, now_ns).left_by != "progress")]
    if asked:
        with suppress(OSError, SpoolError):  # both are reported where the rows come from
            if len(spool.names(QUEUED)) <= _MOST:
                return _foresee(spool, [row.name for row in asked if _waits(row)], now_ns)
    return UNKNOWN


def _goes_on(row: JobRow) -> bool:
    return (
        row.state is State.RUNNING and row.started_at_ns is not None and row.suspended_at_ns is None and not row.array
    )


def _waits(row: JobRow) -> bool:
    return row.state is State.QUEUED and not row.array


def _foresee(spool: Spool, names: Sequence[str], now_ns: int, *, limits: bool = False) -> Outlook:
    """Ask the planner when those of *names* that wait start and end, and each run; *limits*: also at its limit."""
    from spool.core.forecast import forecast
    from spool.query.snapshot import snapshot  # imported on demand: a list rarely needs this half of the program

    seen = snapshot(spool, now_ns, with_tasks=bool(names))
    starts = dict[str, ExpectedStart]()
    told = {name: left for name, left in seen.left.items() if left is not None and (limits or left.basis != "limit")}
    ends = {name: now_ns + left.ns for name, left in told.items()}
    for name, start in forecast(seen.plan, names, seen.left, enough=_ENOUGH).items() if names else ():
        job = seen.view.queue.get(name)
        if start.at_ns is None or job is None:
            continue
        starts[name] = ExpectedStart(start.at_ns, is_guess=start.guessed or seen.shared is not None)
        expected = seen.view.past.run_times.likely(job)
        if seen.shared is None and expected.source is not Source.NONE:  # else only the earliest start is known
            ends[name] = start.at_ns + expected.ns
    return Outlook(starts, ends)


def awaited(spool: Spool, names: Sequence[str]) -> list[JobRow]:
    """Return the rows of awaited jobs; of an array, those of its tasks."""
    found = {row.name: row for row in list_jobs(spool, JobFilter(tuple(names))).rows}
    rows: list[JobRow] = []
    for name in names:
        tasks = tasks_of(spool, name)
        if tasks is not None:
            rows += tasks.rows
        elif name in found:
            rows.append(found[name])
    return rows


def expected_end(spool: Spool, names: Sequence[str], now_ns: int) -> int | None:
    """Return when the last of *names* is expected to have ended; None: unknown, or they are too many to ask for."""
    ends = _foresee(spool, names, now_ns, limits=True).ends if len(names) <= _MOST else {}
    return max((ends[name] for name in names), default=0) if ends.keys() >= set(names) else None
