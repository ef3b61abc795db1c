"""The values of a matrix or of rows that a task of an array has.

No file of a task has them: its array's file and its index determine them. So a list, `show` and a Python program have
them from here, and each array's file is read once.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from spool.core import layout
from spool.core.arrays import Tasks
from spool.core.errors import InvalidJob
from spool.core.layout import HELD, QUEUED, RUNNING, natural
from spool.core.model import State
from spool.query.rows import JobRow
from spool.store.spool import Spool

_NOT_EXPANDED = 0  # stands for the run of an array that waits


class Parameters:
    """The parameters of tasks in one spool, at one moment."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._runs: dict[str, list[int]] = {}  # by array: its runs from the newest on
        self._tasks: dict[tuple[str, int], tuple[int, Tasks | None]] = {}  # by array and run: when it was submitted

    def of(self, name: str, submitted_at_ns: int | None = None) -> tuple[tuple[str, str], ...]:
        """Return the values of task *name* by their keys; () for another job.

        *submitted_at_ns*: when the task was; its array may have been submitted again since, with other values.
        """
        array, _, index = name.rpartition("_")
        if not array or not (index.isascii() and index.isdigit()) or str(int(index)) != index:
            return ()
        for run in self._runs_of(array):
            since_ns, tasks = self._expanded(array, run)
            if tasks is not None and (submitted_at_ns is None or submitted_at_ns >= since_ns):
                if len(tasks.keys) == 1:  # the index: to look for one of many would take long, and it is no parameter
                    return ()
                position = tasks.position_of(int(index))
                return tuple(tasks.parameters(position).items()) if position is not None else ()
        return ()

    def _runs_of(self, array: str) -> list[int]:
        if array not in self._runs:
            try:
                self._runs[array] = self._spool.runs(array)[::-1] or [_NOT_EXPANDED]
            except OSError:  # reported where its rows come from
                self._runs[array] = []
        return self._runs[array]

    def _expanded(self, array: str, run: int) -> tuple[int, Tasks | None]:
        key = array, run
        if key not in self._tasks:
            record = tasks = None
            try:
                if run == _NOT_EXPANDED:
                    tasks = tasks_in(self._spool, array)
                elif (record := self._spool.array(array, run)) is not None:
                    tasks = _tasks_of_run(self._spool, array, run)
            except OSError:  # reported where its rows come from
                pass
            self._tasks[key] = (record.submitted_at_ns if record is not None else None) or 0, tasks
        return self._tasks[key]


def tasks_in(spool: Spool, name: str) -> Tasks | None:
    """Return the tasks of the array *name*, as its file has them now or as they were made last; None if it is none."""
    places = spool.places(name)
    record = spool.newest_array(name)
    if record is not None and (spool.result(name, record.run) is None or not {QUEUED, HELD} & set(places)):
        return _tasks_of_run(spool, name, record.run)
    specs = (spool.job_spec(place, name) for place in (QUEUED, HELD, RUNNING) if place in places)
    return next((Tasks(name, spec) for spec in specs if spec is not None and spec.is_array), None)


def _tasks_of_run(spool: Spool, name: str, run: int) -> Tasks | None:
    """Return the tasks that a run of an array has made; None if a power cut has emptied the copy of its file."""
    from spool.formats import jobfile  # imported here, because a list without arrays does not need it

    try:
        return Tasks(name, jobfile.parse(spool.record(name, run, layout.SPEC_COPY) or b"", name=name))
    except InvalidJob:
        return None


class ValueOutcomes(Struct, frozen=True):
    """How the tasks with one value of a parameter ended."""

    value: str
    total: int
    failed: tuple[str, ...]


def by_value(rows: Iterable[JobRow], key: str) -> list[JobRow]:
    """Return the *rows* that have the parameter *key*, in the order of its values, of numbers as numbers."""
    found = [(dict(row.parameters)[key], row) for row in rows if key in dict(row.parameters)]
    return [row for _, row in sorted(found, key=lambda each: (*_rank(each[0]), natural(each[1].name)))]


def outcomes_by_value(rows: Iterable[JobRow], key: str) -> list[ValueOutcomes]:
    """Return how the tasks with each value of *key* ended; *rows* are in the order of `by_value`."""
    groups: dict[str, list[JobRow]] = {}
    for row in rows:
        groups.setdefault(dict(row.parameters)[key], []).append(row)
    return [
        ValueOutcomes(
            value, len(group), tuple(row.name for row in group if row.state.ended and row.state is not State.FINISHED)
        )
        for value, group in groups.items()
    ]


def with_metrics(spool: Spool, rows: Iterable[JobRow]) -> tuple[JobRow, ...]:
    """Return *rows* with the metrics that their runs have written."""
    from spool.query.progress import metrics_of  # imported here, because a list without runs does not need it

    def of(row: JobRow) -> tuple[tuple[str, str], ...]:
        try:
            return metrics_of(spool, row.name, row.run) if row.run is not None and not row.array else ()
        except OSError:  # they are an extra
            return ()

    return tuple(replace(row, metrics=found) if (found := of(row)) else row for row in rows)


def _rank(value: str) -> tuple[bool, float, object]:
    """Return the sort key of a value: numbers first."""
    try:
        number = float(value)
    except ValueError:
        return True, 0.0, natural(value)
    return False, number if number == number else 0.0, natural(value)
