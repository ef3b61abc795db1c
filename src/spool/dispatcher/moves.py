"""What people do to the files of jobs that run or waited: delete, move, put into `running/` by hand."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import State, Stop, StopKind
from spool.dispatcher.finish import Finisher
from spool.dispatcher.look import Look
from spool.dispatcher.table import Live, Table, this_user
from spool.store.locked import LockedSpool
from spool.store.logs import Logs

log = logging.getLogger(__name__)

# A file that an editor saves is gone for a moment. A deletion by `spool cancel` has left its record and counts at once.
MISSING_NS = 300_000_000


class Moves:
    """Makes of each change of a file what it means. *order_stop* orders a run to be stopped."""

    def __init__(
        self,
        spool: LockedSpool,
        table: Table,
        look: Look,
        finisher: Finisher,
        logs: Logs,
        order_stop: Callable[[Live, Stop], None],
    ) -> None:
        self.spool = spool
        self.table = table
        self.look = look
        self.finisher = finisher
        self.logs = logs
        self.order_stop = order_stop

    def see(self) -> None:
        """See to all that the look has found since the last call."""
        self._see_moves()
        for name in list(self.look.strays):
            self._see_stray(name)
        self.look.strays.clear()
        self._see_cancelled()

    def _see_moves(self) -> None:
        """See what was done to the files of live runs: deleted, moved to another directory, replaced."""
        names, self.look.moved = self.look.moved, set()
        for name in names:
            job = self.table.jobs.get(name)
            live = job.live if job is not None else None
            if live is None or live.proof is not None:
                continue
            try:
                status = os.lstat(self.spool.layout.job_file(RUNNING, name))
                live.inode, live.mtime_ns, live.file_missing_ns = status.st_ino, status.st_mtime_ns, None
            except FileNotFoundError:
                if live.file_missing_ns is None:
                    live.file_missing_ns = time.monotonic_ns()
            except OSError:  # nobody can tell
                continue
        for live in self.table.live.values():
            if live.file_missing_ns is not None and live.stop is None and live.proof is None and not live.asking:
                self._see_missing(live)

    def _is_over(self, live: Live) -> bool:
        """Whether the run had ended by itself when its file was taken away: that stops nothing any more.

        It was a person, or it was the paperwork of another dispatcher, which was cut off after that.
        """
        spool, name, run = self.spool, live.name, live.run
        return spool.exit_code(name, run) is not None or (live.adopted and spool.result(name, run) is not None)

    def _see_missing(self, live: Live) -> None:
        if self._is_over(live):
            if self.spool.holds(live.inode, live.name, QUEUED, mtime_ns=live.mtime_ns):
                live.file_missing_ns = None  # it lies where a retry would put it
            return
        stop = self.spool.stop(live.name, live.run)
        if stop is None:
            for place, kind in ((QUEUED, StopKind.REQUEUE), (HELD, StopKind.HOLD), (DONE, StopKind.CANCEL)):
                if self.spool.holds(live.inode, live.name, place, mtime_ns=live.mtime_ns):
                    stop = Stop(kind, live.user, time.time_ns())
                    break
            else:
                if time.monotonic_ns() < (live.file_missing_ns or 0) + MISSING_NS:
                    return
                stop = Stop(StopKind.CANCEL, live.user, time.time_ns(), "its file was deleted from running/")
        self.order_stop(live, stop)

    def next_due_ns(self) -> int | None:
        """Return when a missing file counts as deleted, on the monotonic clock."""
        return min(
            (
                live.file_missing_ns + MISSING_NS
                for live in self.table.live.values()
                if live.file_missing_ns is not None and live.stop is None and not live.asking
                if not self._is_over(live)
            ),
            default=None,
        )

    def _see_stray(self, name: str) -> None:
        """Queue a file in `running/` that belongs to no run: it was put there by hand."""
        job = self.table.jobs.get(name)
        if (job is not None and job.live is not None) or name in self.table.arrays:
            return
        if self.spool.put_back(name, QUEUED):
            log.warning("job %s lay in running/ without a run; it is queued", name)
            self.look.examine(QUEUED, name)
        elif job is not None:
            job.blocked = None  # it may have been in the way of the one in queued/, and be gone
            self.table.settle(job)

    def _see_cancelled(self) -> None:
        """Cancel the waiting jobs whose files were moved to `done/`."""
        for name in list(self.look.gone):
            self._see_gone(name)
            del self.look.gone[name]  # not before: the disk may be full

    def _see_gone(self, name: str) -> None:
        job = self.table.jobs.get(name)
        if job is None or job.live is not None or job.wait is None or name in self.table.arrays:
            return
        if job.queued is not None or job.held is not None:
            return
        if job.last_inode is not None and self.spool.holds(job.last_inode, name, DONE):
            self.finisher.end_unstarted(
                job,
                DONE,
                State.CANCELLED,
                f"cancelled by {this_user()} before it started",
                self.logs.account,
                time.time_ns(),
            )

    def settle_places(self) -> None:
        """After the first look: what waited when the last dispatcher left, and is in no directory any more."""
        for job in list(self.table.jobs.values()):
            if job.wait is None or job.queued is not None or job.held is not None or job.live is not None:
                continue
            if job.name in self.table.arrays:
                self.look.clocks.forget(job.name)
                continue
            if os.path.lexists(self.spool.layout.job_file(DONE, job.name)):
                self.finisher.end_unstarted(
                    job, DONE, State.CANCELLED, "moved to done/ before it started", self.logs.account, time.time_ns()
                )
            else:
                self.look.clocks.forget(job.name)
