"""Changes of job files by users, for jobs that run or waited: delete, move, put into `running/` by hand."""

from __future__ import annotations

import logging
import os
import time

from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import State, Stop, StopKind
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Component, Context
from spool.dispatcher.finalizer import Finalizer
from spool.dispatcher.limits import LimitEnforcer
from spool.dispatcher.scanner import Scanner
from spool.dispatcher.terminator import StopOrders
from spool.formats import journal
from spool.state.run import ActiveRun
from spool.state.submission import QueueTime
from spool.state.table import JobEntry
from spool.store.disk import status_of
from spool.store.ownership import cancelled_by_mover, mover
from spool.store.spool import MISSED_NS

log = logging.getLogger(__name__)

# A file is missing for a moment while an editor saves it. A deletion by `spool cancel` has left a record and counts at
# once.
MISSING_NS = 300_000_000


class FileMoves(Component):
    """Applies the meaning of each change of a file."""

    def __init__(
        self, context: Context, scanner: Scanner, finalizer: Finalizer, stops: StopOrders, limits: LimitEnforcer
    ) -> None:
        super().__init__(context)
        self._timer = context.timers.timer("files")  # due when a missing file counts as deleted
        self._scanner = scanner
        self._finalizer = finalizer
        self._stops = stops
        self._limits = limits
        self._missing: dict[tuple[str, int], ActiveRun] = {}  # runs whose file is not in running/
        self.called_off: dict[str, list[tuple[JobEntry, bytes]]] = {}  # cancelled while an earlier run was alive

    def see(self) -> None:
        """Process all changes that the look has found since the last call; failures are tried again by a later call."""
        self._see_moves()
        attempt = self._confinement.attempt
        for name in list(self._changes.strays.names):
            if attempt(Thing.of_job(name), "take in", self._see_stray, name):
                self._changes.strays.done(name)
        for name in list(self._changes.vanished.names):
            if attempt(Thing.of_job(name), "end", self._see_vanished, name):
                self._changes.vanished.done(name)
        for name in list(self.called_off):
            job = self._state.jobs.get(name)
            is_over = job is None or job.live is None
            if is_over and attempt(Thing.of_job(name), "end", self._end_called_off, name):
                del self.called_off[name]

    def _see_moves(self) -> None:
        """Process moves of the files of live runs: deleted, moved to another directory, replaced."""
        for name in self._changes.runs.take():
            job = self._state.jobs.get(name)
            live = job.live if job is not None else None
            if live is None or live.is_over:
                continue
            if not self._confinement.attempt(Thing.of_run(live.key), "read the file of", self._see_file, live):
                self._changes.runs.add(name)
        if not self._missing:
            return
        self._timer.set(None)
        for key, live in list(self._missing.items()):
            if live.file_missing_ns is None or live.is_over or self._state.live.get(key) is not live:
                del self._missing[key]
            elif live.order is None:
                self._confinement.attempt(Thing.of_run(key), "handle the missing file of", self._see_missing, live)

    def _see_file(self, live: ActiveRun) -> None:
        status = status_of(self._spool.layout.job_file(RUNNING, live.name))
        if status is not None:
            if live.is_new_text(status.st_ino, status.st_mtime_ns):
                self._see_edited(live)
            live.file_seen(status.st_ino, status.st_mtime_ns)
        elif live.file_missing_ns is None:
            live.file_missing(time.monotonic_ns())
            self._missing[live.key] = live

    def _see_edited(self, live: ActiveRun) -> None:
        """Apply the new content of a run's file; an invalid file changes nothing."""
        defaults = self._spool.defaults(live.name, live.run, self._settings.config.kill_grace_ns)
        spec = self._spool.job_spec(RUNNING, live.name, defaults)
        if spec is None or spec.is_array:
            why = self._spool.why_no_order(RUNNING, live.name)
            what = f", but {why}" if why else " and is not valid"
            log.warning("job %s: its file in running/ was changed%s; the previous text stays in force", live.name, what)
        elif live.edited(spec):
            log.info("job %s run %d: its time limit or priority was changed", live.name, live.run)
            self._limits.add(live)
            self._state.recount(live)

    def _is_over(self, live: ActiveRun) -> bool:
        """Whether the run had ended by itself when its file was taken away: then that does not stop it.

        The file was moved by a user, or by the paperwork of another dispatcher, which was interrupted after that: of
        the run's end, or of a start that was taken back.
        """
        spool, name, run = self._spool, live.name, live.run
        if spool.exit(name, run) is not None:
            return True
        if not live.adopted:
            return False
        recorded = live.may_be_recorded and spool.result(name, run) is not None  # else the run itself has written it
        return recorded or spool.is_void(name, run)

    def _see_missing(self, live: ActiveRun) -> None:
        stop: Stop | None = None
        try:
            if self._is_over(live):
                if self._spool.holds(live.inode, live.name, QUEUED, mtime_ns=live.mtime_ns):
                    live.file_found()
                return
            stop = self._spool.stop(live.name, live.run)
        except OSError:
            if not live.holds_room:  # only its records can say how it ended
                raise
        if stop is None:
            for place, kind in ((QUEUED, StopKind.REQUEUE), (HELD, StopKind.HOLD), (DONE, StopKind.CANCEL)):
                if self._spool.holds(live.inode, live.name, place, mtime_ns=live.mtime_ns):
                    stop = Stop(kind, mover(self._spool.root, RUNNING), time.time_ns())
                    break
            else:
                deleted_ns = (live.file_missing_ns or 0) + MISSING_NS
                if time.monotonic_ns() < deleted_ns:
                    self._timer.advance(deleted_ns)
                    return
                by, why = mover(self._spool.root, RUNNING), "its file was deleted from running/"
                stop = Stop(StopKind.CANCEL, by, time.time_ns(), why)
        self._stops.order(live, stop)

    def _see_stray(self, name: str) -> None:
        """Queue a file in `running/` that belongs to no run: it was put there by hand."""
        job = self._state.jobs.get(name)
        if (job is not None and job.live is not None) or name in self._state.arrays or name in self._state.unsettled:
            return
        if self._spool.requeue_file(name, QUEUED):
            log.warning("job %s was in running/ without a run; moved back to queued/", name)
            self._scanner.examine(QUEUED, name)
            return
        self._state.doubt(name)
        if job is not None:
            self._state.unblock(job)  # the file that blocked the one in queued/ may be gone

    def _see_vanished(self, name: str) -> None:
        self._see_unseen(name)
        job = self._state.jobs.get(name)
        if job is None or job.wait is None or name in self._state.arrays:
            return
        if job.queued is not None or job.held is not None:
            return
        if job.live is not None:
            if job.last_inode is not None and self._spool.holds(job.last_inode, name, DONE):
                self._call_off(job, job.live)
            return
        if job.last_inode is not None and self._spool.holds(job.last_inode, name, DONE):
            self._finalizer.end_unstarted(
                job,
                DONE,
                State.CANCELLED,
                self._why_moved(job.wait),
                time.time_ns(),
            )

    def _why_moved(self, wait: QueueTime | None) -> str:
        return cancelled_by_mover(self._spool.root, QUEUED if wait is not None and wait.clock_at_ns else HELD)

    def _see_unseen(self, name: str, since_ns: int = 0) -> None:
        """Restore the place of a job that was cancelled after *since_ns* and before any look: its end is recorded then.

        A name that has run, or whose newest end is in the history, has a record in `done/` and no submission.
        """
        job = self._state.jobs.get(name)
        if job is not None and (job.live is not None or job.wait is not None):
            return
        status = status_of(self._spool.layout.job_file(DONE, name))
        if status is None or status.st_ctime_ns < since_ns:
            return
        if self._spool.next_run(name) > 1 or self._spool.account_of(name, 1, None) is not None:
            return
        arrived_ns = min(status.st_mtime_ns, status.st_ctime_ns - 1)  # the move came after it
        self._state.recall_place(name, journal.Waits(name, arrived_ns, 0, arrived_ns))
        job = self._state.job(name)
        self._state.recall_file(job, status.st_ino)
        self._journal.note_place(job)
        self._journal.commit()  # the rest is finished by the next dispatcher, like any end

    def _call_off(self, job: JobEntry, live: ActiveRun) -> None:
        """Record that the second submission of a name was cancelled. Its number comes after that of *live*.

        So its end is recorded when that run is over: the newest metadir of a name is that of the live run.
        """
        name, wait = job.name, job.wait
        if wait is None or wait.arrived_at_ns == live.wait.arrived_at_ns:
            return  # it is the submission that runs: its file was moved there and back
        found = self._finalizer.file_in(DONE, name)
        if found is None:
            return
        file, text = found
        gone = JobEntry(name, queued=file, wait=wait, attempts=job.attempts)
        self.called_off.setdefault(name, []).append((gone, text))
        self._state.forget_place(job)

    def _end_called_off(self, name: str) -> None:
        those = self.called_off[name]
        while those:
            self._finalizer.end_called_off(*those[0], time.time_ns())
            del those[0]
        job = self._state.jobs.get(name)
        if job is not None:
            self._journal.note_place(job)  # a third submission of the name; the journal has just dropped it
            self._state.settle(job)

    def settle_places(self) -> None:
        """After the first look: settle jobs that waited when the last dispatcher left, and do not wait any more.

        Also jobs that were submitted and cancelled without a dispatcher. A file that was in `done/` before that is a
        record.
        """
        served_ns = (self._spool.served_until_ns() or 0) - MISSED_NS
        for name in set(self._spool.names(DONE)).difference(self._spool.jobs_with_runs()):
            if name not in self._state.unsettled:
                with self._confinement.of(Thing.of_job(name), "end"):
                    self._see_unseen(name, since_ns=served_ns)
        for job in list(self._state.jobs.values()):
            if job.wait is None or job.queued is not None or job.held is not None:
                continue
            waiting = (self._spool.layout.job_file(place, job.name) for place in (QUEUED, HELD))
            if job.name not in self._state.unsettled and not any(map(os.path.lexists, waiting)):  # else it is unread
                with self._confinement.of(Thing.of_job(job.name), "end"):
                    self._settle_place(job)

    def _was_filed_away(self, job: JobEntry) -> bool:
        """Whether the file in `done/` is that of the job that waited, and not the record of an earlier one."""
        status = status_of(self._spool.layout.job_file(DONE, job.name))
        if status is None or job.wait is None or status.st_ctime_ns <= job.wait.arrived_at_ns:
            return False
        result = self._spool.newest_result(job.name)
        if result is None or result.again is not None:
            return True
        granted = self._spool.grant(job.name, result.run)
        return granted is None or granted.inode != status.st_ino

    def _settle_place(self, job: JobEntry) -> None:
        if job.live is not None:
            self._call_off(job, job.live)
        elif job.name not in self._state.arrays and self._was_filed_away(job):
            self._finalizer.end_unstarted(job, DONE, State.CANCELLED, self._why_moved(job.wait), time.time_ns())
        else:
            self._scanner.forget_place(job.name)
