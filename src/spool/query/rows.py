"""The dispatcher's last view, `state.json`, and the row of a job in a list: from that view, its file or its result."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from spool.core import layout, reasons
from spool.core.arrays import Tasks
from spool.core.errors import SpoolError, cannot
from spool.core.layout import DONE, HELD, QUEUED, RUNNING, NaturalOrder, natural
from spool.core.model import SECOND_NS, Result, State
from spool.core.reasons import INSTANT
from spool.core.runtimes import ExpectedStart, TimeLeft
from spool.core.units import show_duration, show_size
from spool.formats.state import JobView, MachineView, StateView, of_result, parse_parts, parse_state_as
from spool.store.disk import status_of
from spool.store.spool import MISSED_NS, Spool

STALE_NS = 35 * SECOND_NS  # three heartbeats and a little
_MAX_STATE = 1 << 30
_MOST = 200  # rows that a notebook shows
_HEADS = ("name", "state", "parameters", "CPUs", "memory", "GPUs", "time", "reason")


def last_view(spool: Spool, now_ns: int) -> tuple[ListedState | None, int | None]:
    """Return the last view of a dispatcher, with its last heartbeat, and how long it has been silent, if too long."""
    data, beat_ns = _last_words(spool)
    view = parse_state_as(ListedState, data) if data else None
    silent_ns = now_ns - beat_ns if beat_ns is not None and now_ns - beat_ns > STALE_NS else None
    return (view if view is None or beat_ns is None else replace(view, heartbeat_ns=beat_ns)), silent_ns


def machine_told(spool: Spool, now_ns: int) -> MachineView | None:
    """Return the machine in the running dispatcher's view; None without a dispatcher, or if it is silent.

    It has watched the GPUs, and may know what one look cannot show: that one has fallen off, or its earlier users.
    """
    data, beat_ns = _last_words(spool) if spool.dispatcher_lives() else (None, None)
    return parse_parts(data).machine if data and beat_ns is not None and now_ns - beat_ns <= STALE_NS else None


def _last_words(spool: Spool) -> tuple[bytes | None, int | None]:
    try:
        beat_ns = os.stat(spool.layout.at(layout.STATE)).st_mtime_ns
    except OSError:
        return None, None
    return spool.file(layout.STATE, _MAX_STATE), beat_ns


def cancelled_unseen(spool: Spool, names: Iterable[str]) -> set[str]:
    """Return those of *names* that were cancelled while no dispatcher ran: the next one records that."""
    since_ns, found = (spool.served_until_ns() or 0) - MISSED_NS, set[str]()
    for name in names:
        with suppress(OSError):
            status = status_of(spool.layout.job_file(DONE, name))
            if status is not None and status.st_ctime_ns >= since_ns and not spool.runs(name):
                found.add(name)
    return found.difference(known.job for known in spool.accounts_since(None)) if found else found


class JobRow(JobView, kw_only=True, repr_omit_defaults=True):
    """One job. Unknown values are None."""

    name: str = ""
    state: State
    attempt: int | None = None  # type: ignore[assignment]
    ended_at_ns: int | None = None
    exit_code: int | None = None
    place: str | None = None  # the state directory of its file; a name may have files in several
    progress: str = ""  # its reported progress
    progress_at_ns: int = 0  # when it was reported
    gpu_percent: int | None = None  # time in which its GPUs computed, of the last moments; once ended, of its run time
    parameters: tuple[tuple[str, str], ...] = ()  # of a task: its values of the array's matrix or rows
    metrics: tuple[tuple[str, str], ...] = ()  # that its run has written
    left: TimeLeft | None = None  # of its run
    start: ExpectedStart | None = None  # while it waits

    @property
    def left_ns(self) -> int | None:
        """The time that remains of its run."""
        return self.left.ns if self.left is not None else None

    @property
    def left_by(self) -> str | None:
        """What that rests on: "progress", "limit" or "guess"."""
        return self.left.basis.value if self.left is not None else None

    @property
    def start_at_ns(self) -> int | None:
        """When it is expected to start."""
        return self.start.at_ns if self.start is not None else None

    @property
    def start_is_guess(self) -> bool:
        """Whether that rests on guesses."""
        return self.start is not None and self.start.is_guess

    def outlook(self, now_ns: int) -> str:
        """Return the time that remains, or until its start, in words: "-" if that is unknown, "" for an ended job."""
        if self.left is not None:
            return self.left.words()
        if self.start is not None:
            return self.start.words(now_ns)
        return "" if self.state.ended else "-"

    def time_ns(self, now_ns: int) -> int | None:
        """Return how long the job has waited, has run, or ran, without suspensions; None if unknown."""
        if self.started_at_ns is not None:
            until_ns = self.ended_at_ns or self.suspended_at_ns or now_ns
            return max(0, until_ns - self.started_at_ns - self.suspended_ns)
        if self.ended_at_ns is not None:
            return None
        return now_ns - self.submitted_at_ns if self.submitted_at_ns is not None else None


class ListedState(StateView, frozen=True, kw_only=True):
    """The dispatcher's view, each of its jobs as a row that lacks its name."""

    jobs: dict[str, JobRow] = field(default_factory=dict)  # type: ignore[assignment]


_RANKS = {
    State.RUNNING: 0, State.STARTING: 0, State.STOPPING: 0, State.SUBMITTED: 1, State.QUEUED: 2, State.HELD: 3,
    State.INVALID: 4,
}  # fmt: skip
_BIG = 1 << 62
ORDERS: dict[str, Callable[[JobRow], Any]] = {
    "name": lambda row: natural(row.name),
    "state": lambda row: (_RANKS.get(row.state, 5), row.state, natural(row.name)),
    "priority": lambda row: (-(row.priority or 0), row.submitted_at_ns or _BIG),
    "submitted": lambda row: row.submitted_at_ns or _BIG,
    "started": lambda row: row.started_at_ns or _BIG,
    "ended": lambda row: row.ended_at_ns or _BIG,
    "user": lambda row: (row.user or "", natural(row.name)),
    "cpus": lambda row: -(row.cpus or 0),
    "memory": lambda row: -(row.memory_bytes or 0),
    "gpus": lambda row: -(row.gpus or 0),
}


def usual_order(row: JobRow) -> tuple[int, int, int, object]:
    """Return the default sort key: ended jobs with the newest last, running ones, waiting ones with the next first."""
    rank = _RANKS.get(row.state, -1)
    if rank == 0:
        return rank, row.started_at_ns or _BIG, 0, NaturalOrder(row.name)
    if rank > 0:
        return rank, -(row.priority or 0), row.submitted_at_ns or _BIG, NaturalOrder(row.name)
    return rank, row.ended_at_ns or 0, 0, NaturalOrder(row.name)


def row_of_result(result: Result, *, array: bool = False) -> JobRow:
    """Return an ended run as a row, or an ended *array*, which has a reason also if it has finished."""
    row = JobRow(
        name=result.job,
        ended_at_ns=result.ended_at_ns,
        exit_code=result.exit_code,
        gpu_percent=_average(each.mean_percent for each in result.gpu_use),
        array=array,
        **of_result(result),
    )
    if result.outcome is State.FINISHED and not array:
        row.reason = result.reason.partition("; ")[2]  # what came after the exit code
    return row


def _average(percents: Iterable[float | None]) -> int | None:
    known = [percent for percent in percents if percent is not None]
    return round(sum(known) / len(known)) if known else None


def in_words(reason: str, now_ns: int) -> str:
    """Return a reason as it reads now and here: its instants become local times, or the times until then."""
    if "Z" not in reason or INSTANT.search(reason) is None:  # the first is quick, and true of most
        return reason
    from spool.machine.host import LOCAL_ZONE  # few reasons need it

    return reasons.in_words(reason, now_ns, LOCAL_ZONE)


def row_of_view(name: str, view: JobRow, now_ns: int, place: str | None = None) -> JobRow:
    """Return a job as the dispatcher's last view has it, with its file in *place*."""
    row: JobRow = view.__copy__()  # type: ignore[attr-defined]
    reason = in_words(view.reason, now_ns)
    row.name, row.place = name, place
    row.reason = f"{view.problem}; {reason}" if view.problem and reason else view.problem or reason
    row.gpu_percent = _average(each.percent for each in view.gpu_use) if view.gpu_use else None
    return row


def html(rows: Sequence[JobRow], now_ns: int) -> str:
    """Return a table in HTML, with everything escaped, of at most the last rows."""
    from html import escape  # only a notebook asks for it

    shown = rows[-_MOST:]
    cells = [_cells(row, now_ns) for row in shown]
    kept = [at for at in range(len(_HEADS)) if at < 2 or any(line[at] for line in cells)]
    head = "".join(f"<th>{_HEADS[at]}</th>" for at in kept)
    body = "".join("<tr>" + "".join(f"<td>{escape(line[at])}</td>" for at in kept) + "</tr>" for line in cells)
    more = f"<p>… and {len(rows) - len(shown)} before them</p>" if len(rows) > len(shown) else ""
    return f"{more}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(row: JobRow, now_ns: int) -> tuple[str, ...]:
    time_ns = row.time_ns(now_ns)
    return (
        row.name,
        row.state.value.replace("_", " "),
        ", ".join(f"{key}={value}" for key, value in row.parameters),
        str(row.cpus or ""),
        show_size(row.memory_bytes) if row.memory_bytes is not None else "",
        str(row.gpus or ""),
        show_duration(time_ns) if time_ns is not None else "",
        row.reason,
    )


def dataframe(rows: Sequence[JobRow]) -> Any:
    """Return a table of pandas, one row for each job. Raises SpoolError if there is no pandas."""
    try:
        import pandas
    except ImportError:
        why, remedy = "pandas is not installed", "`pip install pandas`, or use the rows"
        raise SpoolError(cannot("make", "a table", why, remedy=remedy)) from None
    keys = list(dict.fromkeys(key for row in rows for key in _tables(row)))
    columns: dict[str, list[Any]] = {}
    for row in rows:
        values, tables = asdict(row), _tables(row)
        for name in ("parameters", "metrics", "left", "start", "problem", "gpu_uuids", "gpu_use", "engine", "beside"):
            del values[name]
        del values["progress_at_ns"]
        values |= {name: getattr(row, name) for name in ("left_ns", "left_by", "start_at_ns", "start_is_guess")}
        values |= {"state": row.state.value, "tags": list(row.tags)}
        for key, value in (values | {key: tables.get(key) for key in keys}).items():
            columns.setdefault(key, []).append(value)
    found = pandas.DataFrame(columns)
    for name in [name for name in columns if name.endswith("_at_ns")]:
        instants = pandas.to_datetime(pandas.array(columns[name], dtype="Int64"), unit="ns", utc=True)
        found[name] = instants
    return found.rename(columns={name: name.removesuffix("_ns") for name in columns if name.endswith("_at_ns")})


def _tables(row: JobRow) -> dict[str, str]:
    found = {f"parameters.{key}": value for key, value in row.parameters}
    return found | {f"metrics.{key}": value for key, value in row.metrics}


class JobList(Struct, frozen=True):
    """The jobs, and how reliable the list is."""

    rows: tuple[JobRow, ...]
    dispatcher: bool  # one is running
    starting: bool  # one was started a moment ago
    stale_ns: int | None  # how long its view has been out of date, if too long
    paused: bool
    problems: tuple[str, ...]
    at_ns: int
    unserved: bool  # jobs wait or run, and no dispatcher is running or starting
    unknown: tuple[str, ...] = ()  # requested names without a job

    @property
    def serves(self) -> bool:
        """Whether a dispatcher that is not silent starts jobs."""
        return self.dispatcher and self.stale_ns is None and not self.paused

    def __repr__(self) -> str:
        states = Counter(row.state.value for row in self.rows)
        return f"<spool.JobList: {', '.join(f'{count} {state}' for state, count in states.items()) or 'no jobs'}>"

    def _repr_html_(self) -> str:
        """Return the list as a table for a notebook."""
        return html(self.rows, self.at_ns)

    def to_dataframe(self) -> Any:
        """Return the list as a table of pandas, one row for each job. Raises SpoolError if there is no pandas.

        Instants are times of UTC; each parameter of tasks has a column `parameters.KEY`.
        """
        return dataframe(self.rows)


class JobFilter(Struct, frozen=True):
    """A filter for lists of jobs; empty or None selects everything. `names` may be globs.

    Among ended jobs it selects the last `recent`, and those that ended since `since_at_ns`.
    """

    names: tuple[str, ...] = ()
    states: frozenset[State] = frozenset()
    user: str | None = None
    project: str | None = None
    tag: str | None = None
    recent: int | None = None
    since_at_ns: int | None = None

    def wants(self, row: JobRow) -> bool:
        """Whether a job is selected, whatever its name."""
        return (
            (not self.states or row.state in self.states)
            and self.user in (None, row.user)
            and self.project in (None, row.project)
            and (self.tag is None or self.tag in row.tags)
            and (self.since_at_ns is None or row.ended_at_ns is None or row.ended_at_ns >= self.since_at_ns)
        )


ALL_JOBS = JobFilter()


_NOT_EXPANDED = 0  # stands for the run of an array that waits


class Parameters:
    """The parameters of tasks in one spool, at one moment."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._runs_of = cache(self._runs)
        self._expanded = cache(self._tasks)

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

    def _runs(self, array: str) -> list[int]:
        """Return the runs of an array from the newest on."""
        with suppress(OSError):  # reported where its rows come from
            return self._spool.runs(array)[::-1] or [_NOT_EXPANDED]
        return []

    def _tasks(self, array: str, run: int) -> tuple[int, Tasks | None]:
        """Return when that run of an array was submitted, and its tasks."""
        with suppress(OSError):  # reported where its rows come from
            if run == _NOT_EXPANDED:
                return 0, tasks_in(self._spool, array)
            if (record := self._spool.array(array, run)) is not None:
                return record.submitted_at_ns or 0, _tasks_of_run(self._spool, array, run)
        return 0, None


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
    spec = spool.spec(name, run)
    return Tasks(name, spec) if spec is not None else None


def with_progress(spool: Spool, row: JobRow) -> JobRow:
    """Return *row* with the progress that its run reports now."""
    if row.state is not State.RUNNING or row.run is None:
        return row
    from spool.client.output import progress_of  # imported here, because a list without runs does not need it

    found = progress_of(spool, row.name, row.run)
    return replace(row, progress=found.text, progress_at_ns=found.at_ns)


def with_parameters(spool: Spool, rows: Iterable[JobRow]) -> tuple[JobRow, ...]:
    """Return *rows* with the parameters of those that are tasks of an array."""
    known = Parameters(spool)
    return tuple(
        replace(row, parameters=found) if (found := known.of(row.name, row.submitted_at_ns)) else row for row in rows
    )


def with_what_it_tells(spool: Spool, rows: Iterable[JobRow]) -> list[JobRow]:
    """Return *rows* with the parameters of tasks, and the progress that runs report now."""
    return [with_progress(spool, row) for row in with_parameters(spool, rows)]


def by_value(rows: Iterable[JobRow], key: str) -> list[JobRow]:
    """Return the *rows* that have the parameter *key*, in the order of its values, of numbers as numbers."""
    found = [(dict(row.parameters)[key], row) for row in rows if key in dict(row.parameters)]
    return [row for _, row in sorted(found, key=lambda each: (*_rank(each[0]), natural(each[1].name)))]


def with_metrics(spool: Spool, rows: Iterable[JobRow]) -> tuple[JobRow, ...]:
    """Return *rows* with the metrics that their runs have written."""
    from spool.client.output import metrics_of  # imported here, because a list without runs does not need it

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
