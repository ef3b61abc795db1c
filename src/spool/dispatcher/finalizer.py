"""Finalize a run that is over: decide whether the job goes on, write result and history, move the job file.

If interrupted anywhere, it is done again by the next dispatcher. The end of the run is known before (`conclude`), and
its resources are free before anything is written: no start waits for paperwork.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from spool.core import layout
from spool.core.arrays import Tasks
from spool.core.errors import shown
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.lifecycle import Ended, Filed, Recorded, Void, continued
from spool.core.model import Jid, Result, Spec, State, StopKind
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Component, Context
from spool.dispatcher.scanner import Scanner
from spool.dispatcher.supervisor import COULD_NOT_START
from spool.formats import jobfile, journal, run_records
from spool.formats.run_records import render_history, render_result
from spool.formats.wire import metrics_in, one_line
from spool.machine import identity
from spool.state.load import OutcomeIndex
from spool.state.run import ActiveRun, Attempts, JobEntry, JobFileVersion, QueueTime, attempts_after
from spool.store.disk import status_of
from spool.store.ownership import cancelled_by_mover, name_of
from spool.store.reading import end_of_file, is_too_long
from spool.store.spool import spec_of

log = logging.getLogger(__name__)

_FILE = "file"


class Submission(Struct, frozen=True):
    """A submission that ends without a run, or an array."""

    name: str
    spec: Spec | None  # None: its file is not valid
    user: str
    wait: QueueTime | None
    attempts: Attempts


class Finalizer(Component):
    """Does the paperwork of runs, and of jobs that end without one.

    Always in the order "result, history, events, move": after a crash something may be done again, but is never left
    out.
    """

    def __init__(self, context: Context, scanner: Scanner, outcomes: OutcomeIndex) -> None:
        super().__init__(context)
        self._scanner = scanner
        self.outcomes = outcomes

    def file(self, ended: list[ActiveRun], now_ns: int) -> list[ActiveRun]:
        """Do the paperwork of runs that are over: every result, then the history, then every move.

        After an error (the disk is full) it is called again with the same runs and continues. Returns the finished
        runs: a failure for one run is tried again by a later call.
        """
        over = [live for live in ended if live.key in self._state.live]
        filed = [live for live in ended if live.key not in self._state.live]
        over = [live for live in over if not self._confinement.pauses(Thing.of_run(live.key), _FILE)]
        accounts = self._accounts(over)
        lines: dict[ActiveRun, bytes] = {}
        ready = [live for live in over if self._try(live, self._settle, lines, accounts, now_ns, partly=True)]
        told = [live for live in ready if live in lines]
        self._journal.logs.account(b"".join(lines[live] for live in told))
        for live in told:
            if isinstance(live.phase, Recorded):
                live.see(replace(live.phase, accounted=True))
        for live in ready:
            if live.result is not None:
                self._tell(self._state.job(live.name), live.result, live.spec)
        self._events.flush()
        return filed + [live for live in ready if self._try(live, self._file_away, now_ns)]

    def _try(self, live: ActiveRun, step: Callable[..., None], *about: object, partly: bool = False) -> bool:
        return self._confinement.attempt(Thing.of_run(live.key), _FILE, step, live, *about, partly=partly)

    def _accounts(self, over: list[ActiveRun]) -> dict[tuple[str, int], Result]:
        """Return the results in the history of runs that an earlier dispatcher may have recorded, in one reading."""
        asked = {live.key: live.started_at_ns for live in over if live.may_be_recorded}
        found: dict[tuple[str, int], Result] = {}
        for known in self._spool.accounts_since(min(asked.values())) if asked else ():  # newest first
            key = known.job, known.run
            if key in asked:
                found.setdefault(key, known)
        return found

    def _settle(
        self,
        live: ActiveRun,
        lines: dict[ActiveRun, bytes],
        accounts: Mapping[tuple[str, int], Result],
        now_ns: int,
    ) -> None:
        """Record the end of a run, and add its line of the history to *lines* if *accounts* does not have it."""
        if isinstance(live.phase, Ended):
            # If its wrapper has been alive since, a result is not by an earlier dispatcher.
            recorded = self._spool.result(live.name, live.run) if live.may_be_recorded else None
            # A power cut may have emptied the result and spared the line of the history, which is synced.
            result = recorded or accounts.get(live.key) or self._result(live, live.phase)
            if recorded is None:
                unwritten = result.outcome not in (State.FINISHED, State.FAILED) or live.phase.unstarted
                if unwritten:  # else the wrapper has. It comes first: a result says that all is written
                    self._spool.put_record(*live.key, layout.STATUS, run_records.render_status(result.outcome))
                if live.phase.unstarted:  # no wrapper has written it
                    self._spool.put_record(*live.key, layout.JOB_LOG, _said(result.reason))
                self._spool.put_record(*live.key, layout.RESULT, render_result(result))
            live.see(Recorded(live.phase, result, accounted=live.key in accounts))
        if isinstance(live.phase, Recorded) and not live.phase.accounted:
            lines[live] = render_history(live.phase.result, now_ns)

    def _file_away(self, live: ActiveRun, now_ns: int) -> None:
        job, phase = self._state.job(live.name), live.phase
        if isinstance(phase, Recorded | Filed):
            self._move(job, live, phase.ended, phase.result)
        else:
            assert isinstance(phase, Void), f"run {live.run} of job {live.name} is not over: {phase}"
            self._void(job, live, phase, now_ns)

    def _move(self, job: JobEntry, live: ActiveRun, ended: Ended, result: Result) -> None:
        """Move the job's file to its place after *result*, and set the state of the job."""
        spool, name = self._spool, live.name
        final = result.again is None
        tried_again = result.again in ("retry", "requeue") and live.stop_kind not in (StopKind.REQUEUE, StopKind.HOLD)
        if tried_again:
            final = not (spool.requeue_file(name, QUEUED) or spool.holds(live.inode, name, QUEUED))
        elif live.copied and result.again == "hold":
            final = not spool.hold_because(name, f"{live.copied}; `spool release {name}` runs it here", RUNNING)
        # A second name of the same file (`ln running/x.toml queued/x.toml`) is a submission of its own.
        if final and not spool.archive_file(name, RUNNING):
            moved_by_user = self._waits_again(live) or spool.holds(live.inode, name, DONE)
            if not moved_by_user:
                spool.archive(name, RUNNING, spool.record(name, live.run, layout.SPEC_COPY))
        over = journal.Over(name, live.run, final, result.outcome)
        live.see(Filed(ended, result, final))
        if final:
            self._journal.note(over)
            self._state.end_series(job, live)
            self._ended(name, result)
        self._state.end_run(live)
        if not final:
            # Another file of its name that is held has a place of its own, and gives way to the one that is queued.
            anew = job.wait is None or (tried_again and job.wait.arrived_at_ns != live.wait.arrived_at_ns)
            attempts = attempts_after(result, live.stop)
            self._state.go_on(job, attempts, QueueTime(live.wait.arrived_at_ns, 0, None) if anew else None)
        if not final:
            self._waits_on(job, over)
        elif job.queued is None and job.held is None:
            self._state.settle(job)  # later files of its name are reported by events
        else:
            self.revisit(job)

    def _waits_on(self, job: JobEntry, over: journal.Over) -> None:
        """Look at the files of a job that goes on after a run, and note both, even if its file cannot be seen."""
        try:
            self.revisit(job)
        finally:  # its place comes first: a job without a place, whose run is over, begins anew
            self._journal.note_place(job)
            self._journal.note(over)

    def revisit(self, job: JobEntry) -> None:
        """Look again at the files of a job whose run is over."""
        self._scanner.examine(QUEUED, job.name, anew=True)
        self._scanner.examine(HELD, job.name, anew=True)
        self._state.settle(job)

    def _ended(self, name: str, result: Result) -> None:
        """Report the end of *name* to the jobs that depend on it."""
        self.outcomes.record(name, result.outcome)
        self._state.ended(name, result.outcome, result.ended_at_ns)

    def _waits_again(self, live: ActiveRun) -> bool:
        """Whether a user has moved the file of a run to where it waits."""
        return self._spool.holds(live.inode, live.name, QUEUED, HELD, mtime_ns=live.mtime_ns)

    def _void(self, job: JobEntry, live: ActiveRun, void: Void, now_ns: int) -> None:
        """Requeue the job of a run whose command has not begun and never will; nothing is counted."""
        if isinstance(self._spool.jid(live.name, live.run), Jid):
            # Its wrapper is gone, and has reported that the machine refused it a process: its number is not used again.
            self._spool.put_record(live.name, live.run, layout.JID, run_records.VOID_JID)
        self._state.refused(job, live, void.refusal, now_ns)
        if void.held_because and self._spool.hold_because(live.name, void.held_because, RUNNING):
            log.warning("job %s is held: %s", live.name, void.held_because)
            self._state.go_on(job, live.attempts, live.waits_on(now_ns))
        elif self._spool.requeue_file(live.name, QUEUED):
            self._state.go_on(job, live.attempts, live.waits_on(now_ns))
        elif self._spool.holds(live.inode, live.name, RUNNING) or not self._waits_again(live):
            self._end_taken_back(job, live, now_ns)
        self._state.end_run(live)
        self._waits_on(job, journal.Over(live.name, live.run, False))

    def _end_taken_back(self, job: JobEntry, live: ActiveRun, now_ns: int) -> None:
        """End a job whose start was taken back and which cannot wait: deleted, or a newer one of its name waits."""
        spool, name = self._spool, live.name
        text, filed = spool.record(name, live.run, layout.SPEC_COPY), spool.holds(live.inode, name, DONE)
        end = State.CANCELLED, self._why_taken_back(live, filed=filed), now_ns
        result = self._put_unstarted(job, live, end, text)
        if not filed:
            spool.archive(name, RUNNING, text)
        self._ended(name, result)

    def _why_taken_back(self, live: ActiveRun, *, filed: bool) -> str:
        """Return why a job does not keep waiting after its start was taken back."""
        if live.stop_kind is StopKind.CANCEL and live.stop is not None:
            why = f": {live.stop.reason}" if live.stop.reason else ""
            return f"cancelled by {live.stop.by} before it started{why}"
        if filed:
            return cancelled_by_mover(self._spool.root, RUNNING)
        newer = self._spool.holds(live.inode, live.name, RUNNING)
        return "a newer file replaced it before it started" if newer else "deleted before it started"

    def _tell(self, job: JobEntry, result: Result, spec: Spec | None) -> None:
        """Report the end of a run, or of a job that never ran: once, however often its paperwork is tried."""
        if self._state.told(job, result.run):
            self._events.end(result, spec)

    def _put_unstarted(
        self, job: JobEntry, ended: Submission | ActiveRun, end: tuple[State, str, int], text: bytes | None
    ) -> Result:
        """Record the end of a job that never started, as far as an earlier dispatcher has not, report and return it.

        *end* is its outcome, the reason and the time.
        """
        spool, wait, result = self._spool, ended.wait, self._spool.newest_result(ended.name)
        done = result is not None and wait is not None and (result.started_at_ns, result.again) == (None, None)
        if result is None or wait is None or not done or result.submitted_at_ns != wait.arrived_at_ns:
            result = result_of(ended, spool.next_run(ended.name), *end)
        if spool.result(result.job, result.run) is None:
            said = "" if result.reason.startswith(result.outcome) else f"{result.outcome} before it started: "
            files = {
                layout.RESULT: render_result(result),
                layout.STATUS: run_records.render_status(result.outcome),
                layout.JOB_LOG: _said(said + result.reason),
            }
            if text is not None and not is_too_long(text):
                files[layout.SPEC_COPY] = text
            spool.publish_metadir(result.job, result.run, files)
            self._journal.logs.account(render_history(result, self._clock()))
        elif not spool.accounted(result):
            self._journal.logs.account(render_history(result, self._clock()))
        self._tell(job, result, ended.spec)
        self._events.flush()
        return result

    def _result(self, live: ActiveRun, ended: Ended) -> Result:
        outcome, reason, end = ended.outcome, ended.reason, ended.end
        result = replace(
            result_of(live, live.run, outcome, reason, end.at_ns),
            started_at_ns=live.ran_from_ns,
            end_is_bound=end.is_bound,
            exit_code=ended.exit_code,
            peak_memory_bytes=live.usage.peak_memory_bytes,
            cpu_time_ns=live.usage.cpu_time_ns,
            grant=live.grant,
            executor=live.executor,
            node=live.node,
            suspended_ns=live.suspension.total_ns(end.at_ns),
            gpu_use=live.gpu_watch.known if live.gpu_watch is not None else (),
            parameters=self._parameters(live.spec),
            metrics=self._metrics(live),
        )
        kind = live.stop_kind
        if kind in (StopKind.REQUEUE, StopKind.HOLD):
            if set(self._spool.places(live.name)) <= {DONE}:  # the user has changed the order to a cancellation
                return replace(result, reason=f"{reason}, and cancelled")
        elif live.file_missing_ns is not None or (
            (newer := self._state.job(live.name).queued) is not None
            and (newer.inode != live.inode or live.mtime_ns not in (None, newer.mtime_ns))
        ):
            return result  # this submission does not go on: its file was taken away, or a newer one of its name waits
        unstarted, most = reason.startswith(COULD_NOT_START), self._settings.config.max_requeues
        spec = self._state.may_grow(live, result)
        result = continued(spec, result, kind, could_not_start=unstarted, max_requeues=most)
        if live.copied and (outcome is State.LOST or result.again is not None):
            return replace(result, reason=live.copied, again="hold", again_at_ns=None)
        return result

    def _parameters(self, spec: Spec) -> tuple[tuple[str, str], ...]:
        """Return what a task has of its array's matrix or rows; () for another job."""
        if spec.task is None:
            return ()
        name, array = spec.task.array, self._state.arrays.get(spec.task.array)
        if array is None:  # it is over, and this task of it ran again
            record = self._spool.newest_array(name)
            of_array = self._spool.spec(name, record.run) if record is not None else None
            tasks = Tasks(name, of_array) if of_array is not None else None
        else:
            tasks = array.tasks
        if tasks is None or len(tasks.keys) == 1:  # the index alone, which is no parameter
            return ()
        position = tasks.position_of(spec.task.index)
        return tuple(tasks.parameters(position).items()) if position is not None else ()

    def _metrics(self, live: ActiveRun) -> tuple[tuple[str, str], ...]:
        """Return the metrics that a run has written; () if there are none, or the job has made them unreadable.

        Nothing looks for a link that stands for the metadir: the writing of the result, which comes next, does.
        """
        path = self._spool.layout.record(live.name, live.run, layout.METRICS)
        try:
            return metrics_in(end_of_file(path)) if status_of(path) is not None else ()
        except OSError:
            return ()

    def end_unstarted(self, job: JobEntry, place: str, outcome: State, reason: str, now_ns: int) -> None:
        """End a job that never started (given up, or cancelled while it waited): records, history, `done/`.

        A file that was moved to `done/` ended the job at the time of the move, which is its last change. Nothing ends
        if the file in *place* is not the one that was seen: it was held, withdrawn or edited meanwhile.
        """
        spool, name = self._spool, job.name
        found = self.file_in(place, name)
        seen = job.file(place) if place != DONE else None
        moved = place == DONE and found is not None and job.last_inode not in (None, found[0].inode)
        if found is None or moved or (seen is not None and seen.content != found[0].content):
            self.revisit(job)
            return
        file, text = found
        at_ns = _moved_at_ns(job, file, now_ns) if place == DONE else now_ns
        result = self._put_unstarted(job, _submission(job, file), (outcome, reason, at_ns), text)
        if place != DONE:
            spool.archive(name, place, text)
        self._ended(name, result)
        self._journal.note(journal.Left(name))
        another = place == QUEUED and job.held is not None  # a submission of its own
        self._state.ended_unstarted(job)
        if another:
            self.revisit(self._state.job(name))

    def end_called_off(self, gone: JobEntry, text: bytes, now_ns: int) -> None:
        """End a submission that was cancelled while an earlier run of its name was alive, which is over by now.

        *gone* is the submission as it was; its file, which reads *text*, becomes the newest record of the name.
        """
        name, reason = gone.name, cancelled_by_mover(self._spool.root, QUEUED)
        file = gone.queued
        assert file is not None
        end = State.CANCELLED, reason, _moved_at_ns(gone, file, now_ns)
        result = self._put_unstarted(gone, _submission(gone, file), end, text)
        if not is_too_long(text):
            self._spool.disk.put(self._spool.layout.job_file(DONE, name), text)
        self._ended(name, result)
        goes_on = self._state.jobs.get(name)
        if goes_on is None or goes_on.wait is None:
            self._journal.note(journal.Left(name))
        else:  # the earlier submission waits again, and keeps its place
            self._journal.note_place(goes_on)

    def file_in(self, place: str, name: str) -> tuple[JobFileVersion, bytes] | None:
        """Return the file of a job that lies in *place* now, with its spec, and its text; None if there is none."""
        status = status_of(self._spool.layout.job_file(place, name))
        text = self._spool.job_text(place, name)
        if status is None or text is None or not stat.S_ISREG(status.st_mode):
            return None
        seen = status.st_ino, status.st_mtime_ns, status.st_size, status.st_ctime_ns, status.st_uid
        reviewed = self._state.review_of(name, (status.st_ino, status.st_mtime_ns, status.st_size))
        defaults = self._settings.config.defaults
        if reviewed is not None and reviewed.keys:
            defaults = jobfile.with_set(defaults, reviewed.keys)
        return JobFileVersion(*seen, spec_of(text, name, defaults)), text


def _submission(job: JobEntry, file: JobFileVersion) -> Submission:
    return Submission(job.name, file.spec, name_of(file.uid), job.wait, job.attempts)


def result_of(ended: Submission | ActiveRun, run: int, outcome: State, reason: str, at_ns: int) -> Result:
    """Return what is recorded of each end, of a run and of a submission that never ran."""
    result = Result(
        job=ended.name,
        run=run,
        attempt=ended.attempts.attempt,
        outcome=outcome,
        reason=one_line(reason),
        submitted_at_ns=ended.wait.arrived_at_ns if ended.wait is not None else None,
        ended_at_ns=at_ns,
        requeues=ended.attempts.requeues,
        user=ended.user,
        host=identity.host(),
    )
    spec = ended.spec
    if spec is None:
        return result
    return replace(result, project=spec.project, group=spec.group, tags=spec.tags, request=spec.request)


def _moved_at_ns(job: JobEntry, file: JobFileVersion, now_ns: int) -> int:
    """Return when the file of a job was moved to its directory, at the latest now: a rename sets its ctime."""
    arrived_at_ns = job.wait.arrived_at_ns if job.wait is not None else 0
    return min(max(file.changed_at_ns, arrived_at_ns), now_ns)


def _said(text: str) -> bytes:
    """Return spool's own message for the log of a run that has written none itself."""
    return f"spool: {shown(text)}\n".encode(errors="replace")
