"""The arrays that an earlier dispatcher left in progress, found again by their metadirs."""

from __future__ import annotations

import logging

from spool.core import layout
from spool.core.errors import InvalidFile
from spool.core.layout import HELD, QUEUED, RUNNING
from spool.formats.journal import Memory
from spool.formats.tasks import ArrayRecord, TaskFiles
from spool.machine import identity
from spool.machine.host import this_user
from spool.state.array import Array, new_array
from spool.store.arrays import ArrayStore
from spool.store.disk import status_of
from spool.store.locked_spool import LockedSpool

log = logging.getLogger(__name__)


def unfinished(
    spool: LockedSpool, store: ArrayStore, name: str, run: int, memory: Memory
) -> tuple[Array, set[str]] | None:
    """Return the array *name* (*run* is its newest) if it is not over, and its tasks that were not issued yet.

    Of one that is over the paperwork is finished.
    """
    record = spool.array(name, run)
    if record is None:
        return None
    if spool.result(name, run) is not None:
        _finish(spool, store, record, remembered=(name, run) in memory.open)
        return None
    array = _array(spool, record)
    if array is None:
        return None
    if record.boot_id != identity.boot_id():
        _mend(spool, store, array)
    return array, store.unissued(name, run)


def _finish(spool: LockedSpool, store: ArrayStore, record: ArrayRecord, *, remembered: bool) -> None:
    """Move the file of an array that is over: to `done/`, or back to `queued/` if somebody put it into `running/`."""
    name = record.job
    if remembered:
        store.file_away(record.inode or 0, name, spool.record(name, record.run, layout.SPEC_COPY))
    if spool.put_back(name, QUEUED):
        log.warning("job %s lay in running/ without a run; it is queued", name)


def _array(spool: LockedSpool, record: ArrayRecord) -> Array | None:
    name, run = record.job, record.run
    spec = spool.spec(name, run)
    if spec is None or not spec.is_array:
        spec = spool.job_spec(RUNNING, name)
    if spec is None or not spec.is_array:
        log.error("cannot go on with array %s: what its run %d was made of is lost", name, run)
        return None
    array = new_array(spec, record, record.inode or 0, record.user or this_user())
    for place in (RUNNING, HELD):
        # Edited or saved by an editor since, it is the array's file all the same.
        status = status_of(spool.layout.job_file(place, name))
        if status is not None:
            array.inode = status.st_ino
            break
    return array


def _mend(spool: LockedSpool, store: ArrayStore, array: Array) -> None:
    """Write the tasks again that a power cut left empty; the array's file has all that they are made of."""
    name, run = array.name, array.run
    texts: TaskFiles | None = None
    for position, task in enumerate(array.names):
        paths = [spool.layout.task_file(name, run, task)]
        paths += [spool.layout.job_file(place, task) for place in (QUEUED, HELD)]
        for path in paths:
            if not _is_empty(path):
                continue
            if texts is None:
                data = spool.record(name, run, layout.SPEC_COPY) or spool.job_text(RUNNING, name) or b""
                try:
                    texts = TaskFiles(name, data, array.spec)
                except InvalidFile:
                    return
            log.warning("array %s: its task %s was lost to a power cut and is written again", name, task)
            store.rewrite(path, texts.text(position))


def _is_empty(path: str) -> bool:
    status = status_of(path)
    return status is not None and status.st_size == 0
