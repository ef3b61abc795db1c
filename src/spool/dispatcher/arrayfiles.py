"""What people do to the files of arrays in progress: hold, release, cancel, by moving or deleting them."""

from __future__ import annotations

import logging
import stat
import time
from collections.abc import Callable

from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import Stop, StopKind
from spool.dispatcher.confinement import Confinement, Thing
from spool.dispatcher.filemoves import MISSING_NS
from spool.dispatcher.look import Look
from spool.state.array import Array
from spool.state.table import Table
from spool.store.disk import status_of
from spool.store.locked_spool import LockedSpool

log = logging.getLogger(__name__)


_SEE = "see to the file of"


class ArrayFiles:
    """Makes of each change of an array's file what it means. *cancel* cancels an array."""

    def __init__(
        self,
        spool: LockedSpool,
        table: Table,
        look: Look,
        cancel: Callable[[Array, Stop], None],
        confinement: Confinement,
    ) -> None:
        self._confinement = confinement
        self._due_ns: int | None = None  # when a missing file counts as deleted, monotonic
        self._spool = spool
        self._table = table
        self._look = look
        self._cancel = cancel

    def next_due_ns(self) -> int | None:
        """Return when a missing file counts as deleted, on the monotonic clock."""
        return self._due_ns

    def see(self, now_ns: int) -> None:
        """See to every array in progress whose file may have changed."""
        moved, self._look.arrays_moved = self._look.arrays_moved, set()
        self._due_ns = None
        for array in list(self._table.arrays.values()):
            goes_on = array.cancelled is None and array.result is None
            if goes_on and (array.name in moved or array.missing_ns is not None):
                self.see_one(array, now_ns)

    def see_one(self, array: Array, now_ns: int) -> None:
        """See where the file of *array* is and what that means; where that cannot be done it is tried again."""
        thing = Thing("array", array.name)
        if not self._confinement.pauses(thing, _SEE):
            with self._confinement.of(thing, _SEE) as piece:
                self._see_one(array, now_ns)
            if not piece.failed:
                return
        self._look.arrays_moved.add(array.name)

    def _see_one(self, array: Array, now_ns: int) -> None:
        spool, name = self._spool, array.name
        if (inode := self._regular(RUNNING, name)) is not None:
            array.inode, array.missing_ns = inode, None
            self._release(array, now_ns)
            return
        in_held = self._regular(HELD, name)
        if in_held is not None and (array.held_since_ns is not None or in_held == array.inode):
            array.inode, array.missing_ns = in_held, None
            if array.held_since_ns is None:
                array.held_since_ns = now_ns
                self._changed(array, "held")
            return
        stop = spool.stop(name, array.run)
        if stop is None and spool.holds(array.inode, name, QUEUED):
            spool.put_forward(name, QUEUED)
            array.missing_ns = None
            self._release(array, now_ns)
            return
        if array.missing_ns is None:
            array.missing_ns = time.monotonic_ns()
        if stop is None and not spool.holds(array.inode, name, DONE):
            deleted_ns = array.missing_ns + MISSING_NS
            if time.monotonic_ns() < deleted_ns:
                self._due_ns = min(deleted_ns, self._due_ns or deleted_ns)
                return
            stop = Stop(StopKind.CANCEL, array.user, now_ns, f"its file was deleted from {self._place(array)}/")
        self._cancel(array, stop or Stop(StopKind.CANCEL, array.user, now_ns))

    @staticmethod
    def _place(array: Array) -> str:
        return RUNNING if array.held_since_ns is None else HELD

    def _regular(self, place: str, name: str) -> int | None:
        """Return the inode of a job file, None if there is none."""
        status = status_of(self._spool.layout.job_file(place, name))
        return status.st_ino if status is not None and stat.S_ISREG(status.st_mode) else None

    def _release(self, array: Array, now_ns: int) -> None:
        since = array.held_since_ns
        if since is None:
            return
        array.held_since_ns = None
        for name in array.open:
            job = self._table.jobs.get(name)
            spec = job.queued.spec if job is not None and job.queued is not None else None
            if job is None or job.wait is None or spec is None or spec.scheduling_timeout_ns is None:
                continue
            if job.wait.clock_at_ns is not None:  # a time held does not count as waiting
                job.wait = job.wait.without(since, now_ns)
                self._look.clocks.remember(job)
                self._table.settle(job)
        self._changed(array, "released")

    def _changed(self, array: Array, what: str) -> None:
        log.info("array %s run %d: %s", array.name, array.run, what)
        self._table.version += 1
