"""Reviews by hooks of new jobs, starts and cancellations, without waiting for the answer (FORMAT 15.3).

A new job in which hooks may set keys is not planned before their answer. A job whose start is under review keeps its
place in the plan, with its room, and starts in the pass after the answer. A run whose cancellation is under review goes
on.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from msgspec import Struct

from spool.core import layout
from spool.core.errors import InvalidValue
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import SECOND_NS, Answer, EventName, Stop, StopKind
from spool.core.scheduler import Start
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Component, Context
from spool.dispatcher.monitor import Monitor
from spool.dispatcher.scanner import Scanner
from spool.formats import jobfile, journal, toml
from spool.formats.events import Reply
from spool.machine.host import why_not_expanded
from spool.state.run import UNREVIEWED, ActiveRun, JobEntry, JobFileVersion
from spool.store.disk import status_of

log = logging.getLogger(__name__)

_ASK = "ask the hooks about"
_ANSWER = "apply the answer of a hook to"
ASKED = "hook submitting: asked"
_MOST_FILES = 64  # open questions about new files; those about starts need not wait for all others
_GOOD_FOR_NS = 60 * SECOND_NS  # for a yes: its reasons may no longer hold after that


class _FileReview(Struct):
    number: int
    content: tuple[int, int, int]  # of the file


class _StartReview(Struct):
    number: int
    version: tuple[object, ...]  # of the job under review
    answer: Answer | None = None
    at_ns: int = 0  # when the answer came, monotonic


class _CancelReview(Struct):
    number: int
    live: ActiveRun
    stop: Stop


class Admission(Component):
    """The open reviews, and the answers not used yet."""

    def __init__(self, context: Context, scanner: Scanner, monitor: Monitor) -> None:
        super().__init__(context)
        self._scanner = scanner
        self._monitor = monitor
        self._files: dict[str, _FileReview] = {}
        self._starts: dict[str, _StartReview] = {}
        self._cancels: dict[tuple[str, int], _CancelReview] = {}
        self.allowed: set[tuple[str, int]] = set()  # runs whose cancellation was approved
        self.asked: frozenset[EventName] = frozenset()  # the events that needed a review in the last pass

    @property
    def waiting(self) -> bool:
        """Whether an answer is still missing."""
        if self._cancels or self.awaits_keys:
            return True
        return any(start.answer is None for start in self._starts.values())

    @property
    def awaits_keys(self) -> bool:
        """Whether hooks may still set keys in a new job."""
        return bool(self._files or self._state.to_review)

    @property
    def reviews_starts(self) -> bool:
        """Whether hooks review starts."""
        return EventName.SUBMITTING in self._events.asked

    def take_answers(self) -> list[tuple[ActiveRun, Stop]]:
        """Apply the answers that came since the last pass; return the runs that may be stopped now."""
        if self._events.asked != self.asked:
            self.asked = self._events.asked
            self._review_no_more()
        if self._state.to_review:
            self._ask_about_files()
        if self._events.replies:
            now = time.monotonic_ns()
            for name, start in list(self._starts.items()):  # about jobs that have gone meanwhile
                if start.answer is not None and now - start.at_ns > _GOOD_FOR_NS and name not in self._state.jobs:
                    del self._starts[name]
            self._events.apply_replies(self._take)
        return [(cancel.live, cancel.stop) for key, cancel in self._cancels.items() if key in self.allowed]

    def review(self, starts: Sequence[Start], now_ns: int) -> list[tuple[Start, Answer | None]]:
        """Return the starts that need no review or were approved; begin a review of the others.

        Each comes with the hooks' variables for its run.
        """
        if not self.reviews_starts:
            return [(start, None) for start in starts]
        allowed: list[tuple[Start, Answer | None]] = []
        for start in starts:
            job = self._state.jobs.get(start.name)
            if job is None or job.queued is None or job.queued.spec is None or job.live is not None:
                allowed.append((start, None))  # the launcher reports why it cannot be started
            elif (answer := self._answer_to(start, job, now_ns)) is not None:
                allowed.append((start, answer))
        return allowed

    def may_stop(self, live: ActiveRun, stop: Stop) -> bool:
        """Whether the run may be stopped now; if that needs a review, begin it: the run goes on until then."""
        if stop.kind is not StopKind.CANCEL:
            self.forget([live])  # it ends whatever the answer is
            return True
        told = self._monitor.has_told(EventName.CANCELLING, live)
        if told or live.key in self.allowed or EventName.CANCELLING not in self._events.asked:
            self._cancels.pop(live.key, None)
            return True
        live.stop_asked()
        if live.key not in self._cancels:
            number = self._events.review_cancel(live, stop, self._clock())
            self._cancels[live.key] = _CancelReview(number, live, stop)
        return False

    def forget(self, lives: Iterable[ActiveRun]) -> None:
        """Drop the reviews of runs that are over, or about to end; an unanswered cancellation has not happened."""
        for live in lives:
            self.allowed.discard(live.key)
            cancel = self._cancels.get(live.key)
            if cancel is not None:
                with self._confinement.of(Thing.of_run(live.key), "take back the cancel of"):
                    self._spool.disk.discard(self._spool.own_record(*live.key, layout.STOP))
                self._events.client.forget(cancel.number)
                self._answered_cancel(cancel)

    # Answers.

    def _take(self, reply: Reply) -> bool:
        """Apply one answer; return whether that succeeded, else it is applied again later."""
        number, answer = reply.number, reply.answer
        for name, file in list(self._files.items()):
            if file.number == number and not self._try(Thing.of_job(name), self._take_review, name, file, answer):
                return False
        for name, start in list(self._starts.items()):
            if start.number == number and not self._try(Thing.of_job(name), self._answer_start, name, start, answer):
                return False
        return all(
            cancel.number != number or self._try(Thing.of_run(key), self._stop_or_keep, cancel, answer)
            for key, cancel in list(self._cancels.items())
        )

    def _try(self, thing: Thing, action: Callable[..., None], *about: object) -> bool:
        """Apply the consequence of an answer, unless that failed a moment ago; return whether it succeeded."""
        if self._confinement.pauses(thing, _ANSWER):
            return False
        done = self._confinement.attempt(thing, _ANSWER, action, *about)
        if not done and (job := self._state.jobs.get(thing.name)) is not None and job.live is None:
            self._state.block(job, self._confinement.why(thing.name))  # so that it does not keep others waiting
        return done

    def _review_no_more(self) -> None:
        """After a change of the reviewed events: drop reviews that are no longer needed."""
        if EventName.QUEUEING not in self.asked:
            for name in {**self._state.to_review, **self._files}:
                self._state.to_review.pop(name, None)
                if (job := self._state.jobs.get(name)) is not None:
                    self._state.needs_no_review(job)
            self._files.clear()
        if EventName.SUBMITTING not in self.asked:
            for name in self._starts:
                if (job := self._state.jobs.get(name)) is not None:
                    self._state.await_answer(job, "")
            self._starts.clear()
        if EventName.CANCELLING not in self.asked:
            for key, cancel in list(self._cancels.items()):
                self._try(Thing.of_run(key), self._stop_or_keep, cancel, Answer())
        self._state.changed()

    # New files.

    def _ask_about_files(self) -> None:
        """Ask hooks which keys to set in the files that came or changed since the last pass."""
        ready = (name for name in self._state.to_review if not self._confinement.pauses(Thing.of_job(name), _ASK))
        for name in list(islice(ready, max(0, _MOST_FILES - len(self._files)))):
            with self._confinement.of(Thing.of_job(name), _ASK) as piece:
                self._ask_about_file(name)
            if not piece.failed:
                self._state.to_review.pop(name, None)

    def _ask_about_file(self, name: str) -> None:
        job, known = self._state.jobs.get(name), self._files.get(name)
        file = _unreviewed(job)
        if job is None or file is None or (known is not None and known.content == file.content):
            return
        text = self._spool.waiting_text(name, file.version)
        if text is None:
            return  # the next look sees the change
        if known is not None:
            self._events.client.forget(known.number)
        keys = toml.read(text, f"job {name}")
        number = self._events.review_file(EventName.QUEUEING, job, file, self._clock(), keys=keys)
        self._files[name] = _FileReview(number, file.content)

    def _take_review(self, name: str, review: _FileReview, answer: Answer) -> None:
        """Record the keys that hooks set in a file, and use it with them; hold a job that would be invalid."""
        job = self._state.jobs.get(name)
        file = _unreviewed(job)
        if job is not None and file is not None and file.content == review.content:
            text = self._spool.waiting_text(name, file.version)
            if text is None:
                self._scanner.examine(QUEUED, name, anew=True)
            elif answer.no is not None:
                self._refuse(job, answer.no)
            else:
                self._set(job, file, text, answer)
        self._files.pop(name, None)

    def _set(self, job: JobEntry, file: JobFileVersion, text: bytes, answer: Answer) -> None:
        defaults = self._settings.config.defaults
        try:
            jobfile.check_set(job.name, text, answer.keys, defaults, why_not_expanded)
        except InvalidValue as error:
            self._refuse(job, str(error))
            return
        line = journal.Reviewed(job.name, *file.content, answer.keys)
        self._state.keys_set(line)
        self._journal.note(line)
        if answer.keys:
            said = jobfile.comments(answer.keys)
            log.info("job %s: %s", job.name, said.replace("# ", "").rstrip().replace("\n", "; "))
            self._scanner.examine(QUEUED, job.name, anew=True)
        else:
            self._state.needs_no_review(job)

    # Starts.

    def _answer_to(self, start: Start, job: JobEntry, now_ns: int) -> Answer | None:
        """Return the approval of a start, which is used up by that; None: there is none, and it was requested."""
        assert job.queued is not None
        review = self._starts.get(job.name)
        if review is not None and review.version == _version(job):
            if review.answer is None:
                return None
            if review.answer.no is not None:
                self._try(Thing.of_job(job.name), self._refuse, job, review.answer.no)
                return None
            if time.monotonic_ns() - review.at_ns < _GOOD_FOR_NS:
                return self._starts.pop(job.name).answer
        if review is not None:
            self._events.client.forget(review.number)
        number = self._events.review_file(EventName.SUBMITTING, job, job.queued, now_ns, grant=start.grant)
        self._starts[job.name] = _StartReview(number, _version(job))
        self._state.await_answer(job, ASKED)
        return None

    def _answer_start(self, name: str, review: _StartReview, answer: Answer) -> None:
        review.answer, review.at_ns = answer, time.monotonic_ns()
        job = self._state.jobs.get(name)
        self._state.changed()  # a new plan is made, and approved jobs start
        if job is not None:
            self._state.await_answer(job, "")
        if job is None or job.queued is None or job.live is not None or review.version != _version(job):
            del self._starts[name]
        elif answer.no is not None:
            self._refuse(job, answer.no)

    def _refuse(self, job: JobEntry, why: str) -> None:
        """Hold a job that must not start; if it cannot be held, because of its name, it stays where it is."""
        if not self._spool.hold_because(job.name, why):
            self._state.block(job, why)
            if _unreviewed(job) is not None:
                self._state.refuse_file(job, QUEUED, why)
            return
        log.info("job %s is held: %s", job.name, why)
        self._starts.pop(job.name, None)
        self._scanner.examine(QUEUED, job.name)
        self._scanner.examine(HELD, job.name)

    # Cancellations.

    def _stop_or_keep(self, cancel: _CancelReview, answer: Answer) -> None:
        live = cancel.live
        if not live.holds_room or live.key not in self._state.live:
            self._answered_cancel(cancel)
        elif answer.no is None:
            self.allowed.add(live.key)
        else:
            self._keep(live, answer.no)
            self._answered_cancel(cancel, answer.no)

    def _answered_cancel(self, cancel: _CancelReview, kept: str = "") -> None:
        cancel.live.stop_answered(kept)
        self._cancels.pop(cancel.live.key, None)

    def _keep(self, live: ActiveRun, why: str) -> None:
        """Drop a cancellation: the run goes on, its file returns to `running/`, and a record says why."""
        spool, name = self._spool, live.name
        log.info("job %s run %d is not cancelled: %s", name, live.run, why)
        # If interrupted before its last step, this is still a cancellation, and is reviewed again.
        spool.put_record(name, live.run, layout.KEPT, f"{why}\n".encode())
        spool.disk.discard(spool.own_record(name, live.run, layout.STOP))
        running = spool.layout.job_file(RUNNING, name)
        if status_of(running) is None:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                if spool.holds(live.inode, name, DONE, mtime_ns=live.mtime_ns):
                    spool.disk.move(spool.layout.job_file(DONE, name), running)
                else:
                    spool.disk.publish(running, spool.record(name, live.run, layout.SPEC_COPY) or b"")
        self._changes.runs.add(name)
        self._state.changed()


def _unreviewed(job: JobEntry | None) -> JobFileVersion | None:
    """Return the file of a job in which hooks may still set keys."""
    file = job.queued if job is not None else None
    return file if file is not None and file.problem == UNREVIEWED else None


def _version(job: JobEntry) -> tuple[object, ...]:
    file, wait = job.queued, job.wait
    assert file is not None
    return file.inode, file.mtime_ns, file.size, job.attempts, wait.arrived_at_ns if wait is not None else 0
