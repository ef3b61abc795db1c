"""Looks at files, those named by events or due by the clock, and at all of them once in a while; and what users moved.

A user deletes or moves the file of a job that runs or waited, or puts one into `running/` by hand.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext, suppress

from spool.core import layout
from spool.core.layout import DONE, HELD, QUEUED, RESERVATIONS, RUNNING
from spool.core.lifecycle import Liveness
from spool.core.model import SECOND_NS, State, Stop, StopKind
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Component, Context
from spool.dispatcher.finalizer import Finalizer
from spool.dispatcher.monitor import LimitEnforcer
from spool.dispatcher.scanner import Reservations, Scanner
from spool.dispatcher.terminator import StopOrders
from spool.dispatcher.wakeup import DirectoryWatcher, Hint, Pace
from spool.formats import journal
from spool.state.run import ActiveRun, JobEntry
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
            is_over = self._state.live_of(name) is None
            if is_over and attempt(Thing.of_job(name), "end", self._end_called_off, name):
                del self.called_off[name]

    def _see_moves(self) -> None:
        """Process moves of the files of live runs: deleted, moved to another directory, replaced."""
        for name in self._changes.runs.take():
            live = self._state.live_of(name)
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
        return recorded or spool.jid(name, run) is Liveness.VOID

    def _see_missing(self, live: ActiveRun) -> None:
        stop: Stop | None = None
        try:
            if self._is_over(live):
                if self._spool.holds(live.inode, live.name, QUEUED, mtime_ns=live.mtime_ns):
                    live.file_missing(None)
                return
            stop = self._spool.stop(live.name, live.run, late=True)
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
        self._state.doubted.add(name)
        if job is not None:
            self._state.unblock(job)  # the file that blocked the one in queued/ may be gone

    def _see_vanished(self, name: str) -> None:
        self._see_unseen(name)
        job = self._state.jobs.get(name)
        if job is None or job.wait is None or name in self._state.arrays:
            return
        if job.queued is not None or job.held is not None:
            return
        if job.last_inode is not None and self._spool.holds(job.last_inode, name, DONE):
            if job.live is not None:
                self._call_off(job, job.live)
            else:
                self._end_moved(job)

    def _end_moved(self, job: JobEntry) -> None:
        """End a job whose file was moved from where it waited to `done/`."""
        place = QUEUED if job.wait is not None and job.wait.clock_at_ns else HELD
        why = cancelled_by_mover(self._spool.root, place)
        self._finalizer.end_unstarted(job, DONE, State.CANCELLED, why, time.time_ns())

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
        self._state.job(name).recall_place(journal.Waits(name, arrived_ns, 0, arrived_ns), status.st_ino)
        self._journal.note_place(self._state.job(name))
        self._journal.commit()  # the rest is finished by the next dispatcher, like any end

    def _call_off(self, job: JobEntry, live: ActiveRun) -> None:
        """Record that the second submission of a name was cancelled. Its number comes after that of *live*.

        So its end is recorded when that run is over: the newest metadir of a name is that of the live run.
        """
        name, wait = job.name, job.wait
        if wait is None or wait.arrived_at_ns == live.wait.arrived_at_ns:
            return  # it is the submission that runs: its file was moved there and back
        if (found := self._finalizer.file_in(DONE, name)) is not None:
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
            self.settle_place(job)

    def settle_place(self, job: JobEntry) -> None:
        """Settle a job that waited when the last dispatcher left, unless it waits still."""
        if job.wait is None or job.queued is not None or job.held is not None or job.name in self._state.unsettled:
            return
        with self._confinement.of(Thing.of_job(job.name), "end"):
            waiting = (self._spool.layout.job_file(place, job.name) for place in (QUEUED, HELD))
            if all(status_of(path) is None for path in waiting):  # else it is unread
                self._no_longer_waits(job)

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

    def _no_longer_waits(self, job: JobEntry) -> None:
        if job.live is not None:
            self._call_off(job, job.live)
        elif job.name not in self._state.arrays and self._was_filed_away(job):
            self._end_moved(job)
        else:
            self._scanner.forget_place(job.name)


LOOK_NS = 5 * SECOND_NS  # between looks at everything, beside the events that report changes of files
POLL_NS = SECOND_NS  # the same if no event does
# A look at everything may use one part in N of a processor: a safety net beside the events, or the only source.
_SHARE_BESIDE_EVENTS = 1000
_SHARE_WITHOUT_EVENTS = 20
BUDGET_NS = 20_000_000  # how long a look may delay the starts of a pass before it gives way
_LEAST_SPARES, _MOST_SPARES = 2, 256


class Observer(Component):
    """Turns file events into looks of the scanner, and paces the looks at everything."""

    def __init__(
        self,
        context: Context,
        watcher: DirectoryWatcher,
        scanner: Scanner,
        filemoves: FileMoves,
        reservations: Reservations,
    ) -> None:
        super().__init__(context)
        self._watcher = watcher
        self._scanner = scanner
        self._filemoves = filemoves
        self._reservations = reservations
        self._timer = context.timers.timer("files")  # when the next look at everything is due
        self._pace = Pace(_SHARE_BESIDE_EVENTS)
        self._pause_ns = 0  # the least pause after the present look at everything
        self._hints: list[Hint] = []
        self._rescans = True  # whether the next look is at everything
        self._reservations_changed = False
        self._directories_changed = False  # whether one of the spool's directories has appeared or gone

    @property
    def unfinished(self) -> bool:
        """Whether a look has given way to starts, and must be continued."""
        return self._scanner.unfinished or bool(self._hints or self._watcher.hints)

    @property
    def has_work(self) -> bool:
        """Whether a file may have changed, or the last look has left something to do."""
        watcher, changes, called_off = self._watcher, self._changes, self._filemoves.called_off
        if self._hints or watcher.hints or watcher.lost or changes.runs.names or changes.strays.names:
            return True
        return bool(changes.vanished.names or called_off) or self._scanner.unfinished

    def open(self) -> None:
        """Begin to watch the directories."""
        at = self._spool.layout.at
        directories = {place: at(place) for place in (QUEUED, HELD, RUNNING, RESERVATIONS)} | {"": self._spool.root}
        self._watcher.start(directories, modes_of=(QUEUED, HELD))  # a file there may be made readable
        self._watcher.also(layout.HOOKS, at(layout.HOOKS))
        self._watch_notes()
        if self._watcher.problem is not None:
            log.warning("%s; checking about every %d s instead", self._watcher.problem, POLL_NS // SECOND_NS)

    def listen(self) -> bool:
        """Read the file events; return whether the configuration, the pause or the listeners may have changed."""
        now = time.monotonic_ns()
        reload = False
        for hint in self._watcher.take_hints():
            place, filename, _ = hint
            if place == RESERVATIONS:
                self._reservations_changed = True
            elif place == layout.NOTES:
                name, _, record = filename.rpartition(".")
                if record == layout.LEFTOVERS:
                    self._changes.leftovers.add(name.rpartition(".")[0])
                    with suppress(OSError):
                        self._spool.disk.discard(f"{self._spool.layout.at(layout.NOTES)}/{filename}")
            elif layout.HOOKS in (place, filename):
                reload = True
            elif place:
                self._hints.append(hint)
            elif filename in (layout.CONFIG, layout.PAUSED):
                reload = True
            elif filename in layout.DIRECTORIES:
                self._directories_changed = True
        due = self._timer.at_ns is None or now >= self._timer.at_ns
        lost = self._watcher.take_lost() or self._directories_changed
        self._rescans = lost or (due and not self._scanner.unfinished)
        return reload or self._rescans

    def look(self) -> bool:
        """Look at everything that may have changed; return whether that was a look at everything."""
        now = time.monotonic_ns()
        until = now + BUDGET_NS
        if self._rescans:
            self._keep_directories()
            self._state.unblock_all()
            self._state.queue.watch.look_again()
            share = _SHARE_BESIDE_EVENTS if self._watcher.problem is None else _SHARE_WITHOUT_EVENTS
            self._pace, self._pause_ns = Pace(share), 0
        hints, self._hints = self._hints, []
        for at, hint in enumerate(hints, 1):
            self._scanner.hint(hint)
            if time.monotonic_ns() >= until:
                self._hints = hints[at:]
                break
        if self._reservations_changed or self._reservations.due or self._rescans:
            self._reservations_changed = False
            self._reservations.look()
        is_part = self._rescans or self._scanner.unfinished  # of a look at everything, and so of its cost
        with self._pace if is_part else nullcontext():
            if self._rescans:
                self.look_at_everything(until)
            else:
                self._scanner.go_on(until, busy=bool(self._hints))
            self._scanner.due(now)
            self._filemoves.see()  # of a look at everything: the file of every run
        if is_part:  # the next one is due when this one has been paid for
            self._pause_ns += self._pace.pause_ns
            every_ns = LOOK_NS if self._watcher.problem is None else POLL_NS
            self._timer.set(now + max(every_ns, self._pause_ns))
        return self._rescans

    def _keep_directories(self) -> None:
        """Recreate removed directories of the spool, and watch the present ones."""
        self._directories_changed = False
        with self._confinement.spool("keep", "the directories of the spool"):
            if self._spool.keep_directories():
                log.warning("directories of the spool were removed; created them again")
                self._watch_notes()
        self._watcher.renew()

    def _watch_notes(self) -> None:
        """Clear the notes of wrappers, and watch for more: who looks at everything needs none of before."""
        with suppress(OSError):  # without notes, looks at everything find what they tell
            self._spool.notes()
        self._watcher.also(layout.NOTES, self._spool.layout.at(layout.NOTES))

    def look_at_everything(self, until_ns: int | None = None) -> None:
        """Look as if no event had ever been raised; give way at *until_ns*, monotonic. None: all in one go."""
        with self._confinement.service("keep room for", "stops on a full disk"):
            self._spool.keep_spares(min(max(_LEAST_SPARES, len(self._state.live)), _MOST_SPARES))
        self._scanner.everything(until_ns)
        self._timer.set(time.monotonic_ns() + POLL_NS)


class Pause(Component):
    """The pause of starts, by a user or after a failed job. The file `paused` orders it."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._since_ns = 0
        self.paused = False

    def see(self) -> bool:
        """Check whether the spool is paused; return whether that has changed. Paused time does not count as waiting."""
        context, paused = self._context, self._spool.paused
        if paused == self.paused:
            return False
        self.paused = paused
        context.state.changed()
        now_ns = context.clock()
        if paused:
            self._since_ns = min(context.spool.paused_at_ns or now_ns, now_ns)  # there may have been no dispatcher
            return True
        for job in list(context.state.jobs.values()):
            if context.state.discount(job, self._since_ns, now_ns):
                context.journal.note_place(job)
        return True

    def failed(self, name: str, why: str) -> None:
        """Pause the spool, if so configured, because a job has failed for good."""
        if self._settings.config.policy.on_failure == "pause" and not self.paused:
            log.warning("job %s has finally failed: the spool is paused", name)
            self._spool.pause(f"job {name}: {why}")
            self.see()
