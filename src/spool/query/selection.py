"""The jobs of a request: those selected by a filter, the last one submitted, and those that failed with others."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from msgspec.structs import replace

from spool.core.arrays import array_of
from spool.core.dependencies import CANCELLED_BY
from spool.core.errors import NoSuchJob, SpoolError, cannot
from spool.core.layout import DONE, QUEUED, RUNNING, natural
from spool.core.model import OUTCOMES, State
from spool.core.queue import HIGHEST_PRIORITY
from spool.query.jobs import JobLister, list_jobs
from spool.query.rows import JobFilter, JobRow
from spool.store.arrays import task_names
from spool.store.spool import Spool

UNSUCCESSFUL = frozenset(OUTCOMES) - {State.FINISHED, State.CANCELLED}
"""Outcomes of jobs that were not cancelled and did not finish."""

_MANY = 1000  # ended jobs to search for the last one submitted


def last_job(spool: Spool, user: str) -> str:
    """Return the job that *user* submitted last: one that waits or runs, or has ended within a day.

    For an array this is the array, not its last task. A requeue counts as a submission. Raises NoSuchJob.
    """
    rows = JobLister(spool).listing(recent=_MANY).rows
    own = [row for row in rows if row.user == user and row.submitted_at_ns is not None]
    if not own:
        why = f"{user} has no active job and none that ended within a day"
        raise NoSuchJob(cannot("find", "the last job", why, remedy="specify a job name"))
    last = max(own, key=lambda row: (row.submitted_at_ns or 0, row.name)).name
    return _array(spool, last) or last


def picked(spool: Spool, wanted: JobFilter, places: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the selected jobs in *places*, in natural order, and the names without a job.

    Jobs that are being stopped are left out unless that state is selected. An ended array is represented by its tasks,
    also where only the array is named, and an array in progress represents its tasks.
    """
    by_task = DONE in places
    among = (*wanted.names, *(f"{name}_*" for name in wanted.names)) if by_task else wanted.names
    found = list_jobs(spool, replace(wanted, names=among), everything=by_task)
    rows = [row for row in found.rows if row.place in places]
    if by_task and wanted.names:
        rows = _named(spool, rows, wanted)
    rows = [row for row in rows if row.state is not State.STOPPING or State.STOPPING in wanted.states]
    unknown = (*found.unknown, *(row.name for row in found.rows if row.place is None))  # or not issued yet
    return sorted({row.name for row in _once(spool, rows, by_task=by_task)}, key=natural), unknown


def unknown_ends(spool: Spool) -> list[JobRow]:
    """Return the ended jobs whose record cannot be parsed."""
    found = list_jobs(spool, JobFilter(states=frozenset({State.INVALID})), everything=True)
    return [row for row in found.rows if row.place == DONE]


def _named(spool: Spool, rows: Sequence[JobRow], wanted: JobFilter) -> list[JobRow]:
    """Return the *rows* that *wanted* names, and the tasks of named arrays that have ended.

    If only ended jobs are wanted, the tasks of an array in progress are there too.
    """
    only_ended = bool(wanted.states) and all(state.ended for state in wanted.states)

    def is_named(name: str) -> bool:
        return any(fnmatchcase(name, each) for each in wanted.names)

    def tasks(array: str) -> frozenset[str]:
        record = spool.newest_array(array) if is_named(array) else None
        if record is None or not (only_ended or DONE in spool.places(array)):
            return frozenset()
        return frozenset(task_names(spool, array, record.run, record))

    tasks_of = {array: tasks(array) for array in {array_of(row.name) for row in rows}}
    return [row for row in rows if is_named(row.name) or row.name in tasks_of[array_of(row.name)]]


def _once(spool: Spool, rows: Iterable[JobRow], *, by_task: bool) -> list[JobRow]:
    """Return *rows* without those represented by others; *by_task*: tasks represent their array."""
    rows = list(rows)
    names = {row.name for row in rows}
    arrays = {name for name in {array_of(name) for name in names} & names if spool.newest_array(name) is not None}
    if by_task:
        return [row for row in rows if row.name not in arrays]
    going_on = {row.name for row in rows if row.name in arrays and row.place == RUNNING}
    return [row for row in rows if array_of(row.name) not in going_on]


def once(spool: Spool, names: Sequence[str], again: Collection[str]) -> Iterator[str]:
    """Yield *names*, last the tasks of arrays among them; one whose array is *again* queued by then runs with it."""
    arrays = {name: spool.newest_array(name) for name in {array_of(name) for name in names}.intersection(names)}
    tasks = {task for name, record in arrays.items() if record for task in task_names(spool, name, record.run, record)}
    yield from (name for name in names if name not in tasks)
    yield from (name for name in names if name in tasks and array_of(name) not in again)


def priority_for(spool: Spool, place: str, name: str, *, first: bool = False, before: str | None = None) -> int:
    """Return the priority that puts the job in *place* ahead of job *before*, or of all waiting jobs of its user.

    Or behind those, unless *first*. A job that stands there keeps its own. Raises SpoolError if *before* does not wait.
    """

    def owner(place: str, name: str) -> int | None:
        with suppress(FileNotFoundError):
            return os.lstat(spool.layout.job_file(place, name)).st_uid
        return None

    what = ("put", f"job {name} before {before}")
    if before == name:
        raise SpoolError(cannot(*what, "a job cannot be placed before itself"))
    user, first = owner(place, name), first or before is not None
    rivals = [before] if before is not None else [each for each in spool.names(QUEUED) if owner(QUEUED, each) == user]
    # From the files, since the dispatcher's view may be older than the last change.
    specs = ((rival, spool.job_spec(QUEUED, rival)) for rival in rivals if rival != name)
    known = ((spec.priority, rival) for rival, spec in specs if spec is not None)
    bound, other = (max if first else min)(known, default=(None, ""))
    if bound is None and before is not None:
        remedy = "`spool ls -s queued` lists the jobs that wait"
        raise SpoolError(cannot(*what, "that job does not wait", remedy=remedy))
    own = spool.job_spec(place, name)
    if own is not None and (bound is None or (own.priority > bound if first else own.priority < bound)):
        return own.priority
    wanted = (bound or 0) + (1 if first else -1)
    if 0 <= wanted <= HIGHEST_PRIORITY:
        return wanted
    where = f"before {before}" if before is not None else "first" if first else "last"
    why = f"{other} has priority {bound}, the {'highest' if first else 'lowest'}"
    raise SpoolError(cannot("put", f"job {name} {where}", why, remedy=f"`spool edit {other} --priority N` changes it"))


def running_tasks(spool: Spool, names: Iterable[str]) -> list[str]:
    """Return *names*, with each array that has running tasks replaced by these."""
    running: dict[str, list[str]] = {}
    for name in spool.names(RUNNING):
        running.setdefault(array_of(name), []).append(name)
    found = {
        task: None
        for name in names
        for task in (sorted(running.get(name, ()), key=natural) if spool.newest_array(name) else ()) or [name]
    }
    return list(found)


def cancelled_with(spool: Spool, names: Collection[str]) -> list[str]:
    """Return the jobs that were cancelled because a dependency among *names* had failed.

    This includes jobs that depend on these, and so on, each after its dependency.
    """
    ended = list_jobs(spool, JobFilter(states=frozenset({State.CANCELLED})), everything=True).rows
    needs: dict[str, tuple[str, ...]] = {}
    for row in ended:
        if row.place == DONE and row.started_at_ns is None and row.reason.startswith(CANCELLED_BY):
            spec = spool.job_spec(DONE, row.name)
            if spec is not None and spec.depends_on is not None:
                needs[row.name] = spec.depends_on.names()
    found: dict[str, None] = {}
    new = set(names)
    while new:
        changed = new | {_array(spool, name) for name in new}
        back = [
            name
            for name, listed in needs.items()
            if name not in found and any(each in changed or _array(spool, each) in new for each in listed)
        ]
        found.update(dict.fromkeys(sorted(back, key=natural)))
        new = set(back)
    return [name for name in found if name not in names]


def _array(spool: Spool, name: str) -> str:
    """Return the array that *name* is a task of, "" if it is not a task."""
    array = array_of(name)
    return array if array and spool.newest_array(array) is not None else ""
