"""Groups of jobs: the tasks of an array, similar ones folded into one line, a tree of dependencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set

from msgspec import Struct

from spool.client.waiting import task_names
from spool.core.arrays import array_of
from spool.core.layout import HELD, QUEUED, RUNNING
from spool.core.model import State
from spool.core.reasons import ranges_of
from spool.query.jobs import JobLister, with_parameters
from spool.query.rows import JobRow
from spool.store.spool import Spool

_FOLDED = frozenset({State.QUEUED, State.HELD, State.FINISHED})
BAD = frozenset(state for state in State if state.ended and state is not State.FINISHED)
"""The outcomes of a job that did not finish."""

_DEEP = 12  # levels of a tree; deeper ones are not indented further
_FEW = 2  # this many similar rows are not folded


class ListedJob(Struct, frozen=True):
    """A line of a list: a job, or *count* similar tasks of an array, with the first of them in *row*."""

    row: JobRow
    name: str
    count: int = 1


class ArrayTasks(Struct, frozen=True):
    """The tasks of an array in order: those that have begun or wait, and those not issued yet."""

    rows: tuple[JobRow, ...]

    def counts(self) -> dict[str, int]:
        """Return how many tasks are in each state, ended states first."""
        found = Counter(row.state for row in self.rows)
        return {state.value: found[state] for state in sorted(found, key=lambda state: (not state.ended, state))}

    def failed(self) -> tuple[str, ...]:
        """Return the tasks that have ended without finishing."""
        return tuple(row.name for row in self.rows if row.state in BAD)


def tasks_of(spool: Spool, name: str) -> ArrayTasks | None:
    """Return the tasks of the array *name*; None if it is not an array, or not expanded."""
    record = spool.newest_array(name)
    if record is None:
        return None
    names = task_names(spool, name, record.run, record)
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

    return ArrayTasks(with_parameters(spool, map(row_of, names)))


def folded(spool: Spool, rows: Iterable[JobRow], states: Set[State] = _FOLDED) -> list[ListedJob]:
    """Return the lines of a list in which similar tasks of an array in one of *states* share one line."""
    alike: dict[tuple[object, ...], list[JobRow]] = {}
    order: list[tuple[object, ...]] = []
    for at, row in enumerate(rows):
        array = array_of(row.name) if row.state in states else ""
        key: tuple[object, ...] = (at,)
        if array and _index(row):
            again = row.attempt is not None and row.attempt > 1 and not row.state.ended
            key = (array, row.state, row.priority, row.user, row.cpus, row.gpus, again)
        if key not in alike:
            order.append(key)
        alike.setdefault(key, []).append(row)
    arrays = {key[0]: spool.newest_array(str(key[0])) is not None for key in order if len(alike[key]) > _FEW}
    found: list[ListedJob] = []
    for key in order:
        group = alike[key]
        if len(group) > _FEW and arrays[key[0]]:
            found.append(ListedJob(group[0], f"{key[0]}_[{ranges_of(int(_index(row)) for row in group)}]", len(group)))
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
            found.append(ListedJob(one.row, f"{head}{one.name}{also}", one.count))
            children = [row for row in below.get(one.row.name, ()) if row.name not in placed and one.count == 1]
            placed.update(row.name for row in children)
            leaves = {row.name for row in children if row.name not in below and len(parents[row.name]) == 1}
            lines = folded(spool, (row for row in children if row.name in leaves))
            lines += [ListedJob(row, row.name) for row in children if row.name not in leaves]
            if depth >= _DEEP:
                todo += [(line, f"{rest}… ", rest, depth + 1) for line in reversed(lines)]
            else:
                last = len(lines) - 1
                drawn = [
                    (f"{rest}└─ ", f"{rest}   ") if at == last else (f"{rest}├─ ", f"{rest}│  ")
                    for at in range(last + 1)
                ]
                todo += [(line, *signs, depth + 1) for line, signs in reversed(list(zip(lines, drawn, strict=True)))]
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
