"""The tasks of an array as rows: each of them, and many that wait or have finished as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spool.client.waiting import task_names
from spool.core.arrays import array_of
from spool.core.layout import HELD, QUEUED, RUNNING
from spool.core.model import State
from spool.query.jobs import JobLister, JobRow
from spool.store.spool import Spool

_FOLDED = frozenset({State.QUEUED, State.HELD, State.FINISHED})
_BAD = frozenset(state for state in State if state.ended and state is not State.FINISHED)
_FEW = 2  # rows that are alike are shown as they are


@dataclass(frozen=True, slots=True)
class ListedJob:
    """A line of a list: a job, or the *count* tasks of an array that are alike, of which *row* is the first."""

    row: JobRow
    name: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class ArrayTasks:
    """The tasks of an array in their order: those that have begun or wait, and those that are still to be issued."""

    rows: tuple[JobRow, ...]

    def counts(self) -> dict[str, int]:
        """Return how many tasks are in each state, those that have ended first."""
        found = Counter(row.state for row in self.rows)
        return {state.value: found[state] for state in sorted(found, key=lambda state: (not state.ended, state))}

    def failed(self) -> tuple[str, ...]:
        """Return the tasks that have ended and did not finish."""
        return tuple(row.name for row in self.rows if row.state in _BAD)


def tasks_of(spool: Spool, name: str) -> ArrayTasks | None:
    """Return the tasks of the array *name*; None where that is no array, or has not been expanded."""
    run = spool.latest_run(name)
    record = spool.array(name, run) if run is not None else None
    if run is None or record is None:
        return None
    names = task_names(spool, name, run, record)
    wanted = frozenset(names)
    known = {row.name: row for row in JobLister(spool).listing(only=wanted.__contains__).rows}
    goes_on = any(place in (QUEUED, HELD, RUNNING) for place in spool.places(name))
    since_ns = record.submitted_at_ns or 0

    def row_of(task: str) -> JobRow:
        row = known.get(task)
        if row is not None and not (row.state.ended and (row.submitted_at_ns or since_ns) < since_ns):
            return row
        if goes_on:
            return JobRow(
                task, State.QUEUED, user=record.user, submitted_at_ns=since_ns or None, reason="not issued yet"
            )
        return JobRow(task, State.CANCELLED, user=record.user, reason="never issued")

    return ArrayTasks(tuple(map(row_of, names)))


def folded(spool: Spool, rows: Iterable[JobRow]) -> list[ListedJob]:
    """Return the lines of a list in which one stands for the tasks of an array that wait or have finished alike."""
    alike: dict[tuple[object, ...], list[JobRow]] = {}
    order: list[tuple[object, ...]] = []
    for at, row in enumerate(rows):
        array = array_of(row.name) if row.state in _FOLDED else ""
        key: tuple[object, ...] = (at,)
        if array and _index(row):
            key = (array, row.state, row.priority, row.user, row.cpus, row.gpus)
        if key not in alike:
            order.append(key)
        alike.setdefault(key, []).append(row)
    arrays = {key[0]: _is_array(spool, str(key[0])) for key in order if len(alike[key]) > _FEW}
    found: list[ListedJob] = []
    for key in order:
        group = alike[key]
        if len(group) > _FEW and arrays[key[0]]:
            found.append(ListedJob(group[0], f"{key[0]}_[{_ranges(group)}]", len(group)))
        else:
            found += [ListedJob(row, row.name) for row in group]
    return found


def _is_array(spool: Spool, name: str) -> bool:
    run = spool.latest_run(name)
    return run is not None and spool.array(name, run) is not None


def _index(row: JobRow) -> str:
    """Return the number at the end of a task's name, "" for a name without one."""
    text = row.name.rpartition("_")[2]
    return text if text.isascii() and text.isdigit() else ""


def _ranges(rows: Sequence[JobRow]) -> str:
    """Return the indices of tasks as an array writes them: 3-7,9."""
    indices = sorted({int(_index(row)) for row in rows})
    cuts = [at + 1 for at, (one, other) in enumerate(pairwise(indices)) if other != one + 1]
    parts = [indices[start:end] for start, end in pairwise([0, *cuts, len(indices)])]
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
