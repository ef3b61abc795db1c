"""Arrays in progress: expand their files, issue, hold back, cancel and count their tasks, a little in every pass.

The place of an array's own file is an order, as for a run: in `running/` it goes on, in `held/` none of its tasks is
issued or started, in `done/` or deleted it is cancelled. Moved back to `queued/` it goes on. It holds no resources.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections import deque
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from spool.core import layout
from spool.core.arrays import array_of
from spool.core.errors import InvalidFile, InvalidJob
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import SECOND_NS, EventName, Problem, Result, Spec, State, Stop, StopKind
from spool.core.units import show_size
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Component, Context
from spool.dispatcher.finalizer import Finalizer, Submission, result_of
from spool.dispatcher.observer import MISSING_NS
from spool.dispatcher.scanner import TOGETHER_NS, Scanner
from spool.dispatcher.terminator import StopOrders
from spool.formats import jobfile, journal, run_records
from spool.formats.jobfile import TaskFiles
from spool.formats.run_records import ArrayRecord, render_array, render_result
from spool.machine import identity
from spool.machine.host import why_not_expanded
from spool.state.run import FIRST_ATTEMPT, JobEntry, JobFileVersion, QueueTime
from spool.state.table import Array, new_array
from spool.store.arrays import ArrayStore, Issue
from spool.store.disk import status_of
from spool.store.ownership import mover, name_of
from spool.store.reading import is_too_long, read_record

log = logging.getLogger(__name__)

_GO_ON = "continue"
_SETTLE = "settle"
_RECORD = "record the cancel of"
BUDGET_NS = 20_000_000  # time for arrays in one pass
_SEE = "check the file of"
_EXPAND = "expand"
MOST_BYTES = 1 << 30
"""The largest total size of an array's task files: one array must not fill the disk."""

_TRY_AGAIN_NS = 5 * SECOND_NS


class Arrays(Component):
    """The arrays of a dispatcher.

    *why_no_room* says why the disk is too short for new tasks, "" if it is not.
    """

    def __init__(
        self,
        context: Context,
        scanner: Scanner,
        finalizer: Finalizer,
        stops: StopOrders,
        why_no_room: Callable[[], str],
    ) -> None:
        super().__init__(context)
        self._scanner = scanner
        self._finalizer = finalizer
        self._stops = stops
        self.store = ArrayStore(context.spool)
        self.expander = Expander(context, self.store, scanner, why_no_room)
        self._timer = context.timers.timer("arrays")  # when a missing file counts as deleted
        self.has_left = True  # whether something may be left of former arrays

    # One pass.

    def work(self, now_ns: int, *, paused: bool) -> bool:
        """Work for a limited time; return whether there is more to do at once."""
        until_ns = time.monotonic_ns() + BUDGET_NS
        self._see_files(now_ns)
        self._see_left()
        more = not paused and self.expander.work(until_ns, now_ns)
        for array in list(self._state.arrays.values()):
            if not self._confinement.pauses(Thing("array", array.name), _GO_ON):
                with self._confinement.of(Thing("array", array.name), _GO_ON):
                    more = self._go_on(array, until_ns, now_ns) or more
        if self.store.has_rubbish:
            with self._confinement.service("clean up", "the staging directory"):
                more = self.store.clean(until_ns) or more
        self.has_left = self.expander.is_busy or self.store.has_rubbish
        return more

    @property
    def idle(self) -> bool:
        """Whether no array waits to be expanded, and no other one needs work until a user acts."""
        return not self._state.array_files and all(
            array.missing_ns is None and (array.held or not (array.to_issue or array.over))
            for array in self._state.arrays.values()
        )

    def _go_on(self, array: Array, until_ns: int, now_ns: int) -> bool:
        """Advance one array; return whether it has more to do at once."""
        if array.cancelled is not None:
            more = self._cancel_some(array, until_ns, now_ns)
        elif array.held:
            more = False
        else:
            more = self._issue_some(array, until_ns, now_ns)
        if self._each(array.unknown, until_ns, lambda name: self._recount(array, name)):
            return True
        if array.name in self._changes.arrays.names:
            return more  # the place of its file, and its meaning, are not known yet
        if array.over and not more and (array.result is not None or not self._reopened(array)):
            self._conclude(array, now_ns)
            return True
        return more

    # Issuing.

    def _issue_some(self, array: Array, until_ns: int, now_ns: int) -> bool:
        for task in list(array.taken):
            if task not in self._state.jobs and task not in self._state.arrays:
                array.to_issue.appendleft(array.taken.pop(task))
        while array.to_issue:
            if time.monotonic_ns() >= until_ns:
                return True
            position = array.to_issue[0]  # it stays there if the disk is full
            task = array.tasks.task_name(position)
            known = task in self._state.jobs or task in self._state.arrays
            issue = Issue.TAKEN if known else self.store.issue(array.name, array.run, task)
            array.to_issue.popleft()
            if issue is Issue.TAKEN:
                if not self.expander.waits_already(array, position, now_ns):
                    array.taken_by_another(task, position)
                continue
            array.unissued.discard(task)
            if issue is Issue.GONE:
                log.warning("array %s: someone removed its task %s", array.name, task)
                self._withdrawn(array, task, self._clock())
                continue
            # Its place is that of the array plus its position, independent of the clock.
            job = self._state.issue(task, array, position, now_ns)
            self._finalizer.outcomes.forget(task)
            self._journal.note_place(job)
            self._scanner.examine(QUEUED, task)
            if job.queued is not None:
                self._events.file(EventName.QUEUED, job, job.queued, now_ns)
        return False

    # The ends of tasks.

    def _see_left(self) -> None:
        """Process the names that are gone: open tasks among them have ended, or were removed by hand."""
        for name in self._state.take_left():
            array = self._state.arrays.get(array_of(name))
            if array is None:
                continue
            if name in array.open and name not in self._state.jobs:
                array.open.discard(name)
                if name not in array.ended:  # it was removed from queued/ by hand, and ends without an event
                    self._withdrawn(array, name, self._clock())
                else:
                    self._state.queue.changed(name)

    def _withdrawn(self, array: Array, task: str, at_ns: int | None) -> None:
        """End a task whose file was taken away before it began: it has no record, and others may depend on it."""
        array.task_ended(task, State.CANCELLED, at_ns)
        self._finalizer.outcomes.record(task, State.CANCELLED)
        self._state.queue.changed(task)

    def _reopened(self, array: Array) -> bool:
        """Return whether ended tasks were queued again, so that the array is not over."""
        again = [name for name in array.names if name in self._state.jobs and self._is_task(array, name)]
        for name in again:
            array.ended.pop(name, None)
            array.open.add(name)
        return bool(again)

    def _is_task(self, array: Array, name: str) -> bool:
        job = self._state.jobs[name]
        file = job.queued or job.held
        spec = job.live.spec if job.live is not None else file.spec if file is not None else None
        return spec is None or (spec.task is not None and spec.task.array == array.name)

    def _recount(self, array: Array, name: str) -> None:
        """Read the outcome of a task that ended while no dispatcher knew of its array."""
        result = self._spool.newest_result(name)
        if result is None or (result.submitted_at_ns or 0) < array.arrived_at_ns:
            self._withdrawn(array, name, None)  # that is from an earlier submission: this one never ran
        else:
            array.task_ended(name, result.outcome, result.ended_at_ns)

    # Cancelling.

    def cancel(self, array: Array, stop: Stop) -> None:
        """Cancel an array: issue no more tasks, and cancel the issued ones one after the other."""
        words = array.cancel(stop)
        log.info("array %s run %d: %s", array.name, array.run, words)
        self._state.changed()
        self._state.queue.changed()  # the state of the array, and of every unissued task
        self._record_cancel(array)

    def _record_cancel(self, array: Array) -> None:
        """Record that an array is cancelled, and discard its unissued tasks; failures are retried."""
        thing, stop = Thing("array", array.name), array.unrecorded
        if stop is not None and not self._confinement.pauses(thing, _RECORD):
            with self._confinement.of(thing, _RECORD):
                self._spool.order_stop(array.name, array.run, stop)
                self.store.drop(array.name, array.run)
                array.cancel_recorded()

    def _cancel_some(self, array: Array, until_ns: int, now_ns: int) -> bool:
        reason = f"array {array.name} was {array.cancelled}"
        self._record_cancel(array)
        if self._each(array.to_cancel, until_ns, lambda name: self._cancel_task(array, name, reason, now_ns)):
            return True
        if array.to_cancel:  # these are retried after a pause
            return False
        # A task whose run had just ended may have been queued again since.
        jobs = [self._state.jobs[name] for name in array.open if name in self._state.jobs]
        array.to_cancel.extend(job.name for job in jobs if job.live is None and (job.queued or job.held) is not None)
        return bool(array.to_cancel)

    def _each(self, names: deque[str], until_ns: int, action: Callable[[str], None]) -> bool:
        """Call *action* for each task of *names* and remove it; return whether time was up. Failed ones stay."""
        for _ in range(len(names)):
            if time.monotonic_ns() >= until_ns:
                return True
            name = names[0]
            if self._confinement.attempt(Thing.of_job(name), _SETTLE, action, name):  # else it comes again
                names.popleft()
            else:
                names.rotate(-1)
        return False

    def _cancel_task(self, array: Array, name: str, reason: str, now_ns: int) -> None:
        job = self._state.jobs.get(name)
        if job is None:
            return
        if not self._is_task(array, name):
            array.open.discard(name)  # another job has the name now
        elif job.live is not None:
            if job.live.stop is None and not job.live.is_over:
                self._stops.order(job.live, Stop(StopKind.CANCEL, array.cancelled_by, now_ns, reason))
        elif job.queued is not None or job.held is not None:
            place = QUEUED if job.queued is not None else HELD
            self._finalizer.end_unstarted(job, place, State.CANCELLED, reason, now_ns)

    # The end.

    def _conclude(self, array: Array, now_ns: int) -> None:
        """File an array that is over; steps that fail are completed by the next call."""
        spool, name, run = self._spool, array.name, array.run
        result = array.result or _result(array, now_ns)
        outcome = result.outcome
        if array.result is None:
            self._events.end(result, array.spec)
            array.conclude(result)
        self._events.flush()
        spool.put_record(name, run, layout.RESULT, render_result(result))
        spool.put_record(name, run, layout.STATUS, run_records.render_status(outcome))
        self.store.archive(array.inode, name, spool.record(name, run, layout.SPEC_COPY))
        self._journal.write([journal.Over(name, run, True, outcome)])
        self._state.arrays.pop(name)
        self._finalizer.outcomes.record(name, outcome)
        log.info("array %s run %d: %s (%s)", name, run, outcome, result.reason)
        # A second file of its name may have waited for this.
        self._scanner.examine(QUEUED, name, anew=True)
        self._scanner.examine(HELD, name, anew=True)
        self._state.settle(self._state.job(name))
        self._state.queue.changed(name)

    # After a restart.

    def count(self, now_ns: int) -> None:
        """After the first look: find the states of the tasks of every resumed array."""
        self._state.left.clear()
        for array in self._state.arrays.values():
            self.count_one(array, now_ns)

    def count_one(self, array: Array, now_ns: int) -> None:
        """Find the states of the tasks of one resumed array."""
        for name in array.names:
            if name in array.unissued:
                continue
            if name in self._state.jobs and self._is_task(array, name):
                array.open.add(name)
            else:
                array.unknown.append(name)
        # A stop without a move of the file is none: only the move counts.
        self._see_file(array, now_ns)

    # Changes of its file.

    def _see_files(self, now_ns: int) -> None:
        """Process every array in progress of whose name a file may have changed."""
        moved = set(self._changes.arrays.take())
        self._timer.set(None)
        for array in list(self._state.arrays.values()):
            if array.name in moved or array.missing_ns is not None:
                self._see_file(array, now_ns)

    def _see_file(self, array: Array, now_ns: int) -> None:
        """Find the file of *array*, carry out what its place means, and find others of its name; retried on failure."""
        if not self._confinement.attempt(Thing("array", array.name), _SEE, self._see_all, array, now_ns):
            self._changes.arrays.add(array.name)

    def _see_all(self, array: Array, now_ns: int) -> None:
        if array.cancelled is None and array.result is None:
            self._see_one(array, now_ns)
        self._see_others(array)

    def _see_one(self, array: Array, now_ns: int) -> None:
        spool, name = self._spool, array.name
        if (inode := self._regular(RUNNING, name)) is not None:
            self._see_text(array, RUNNING)
            array.file_seen(inode)
            self._release(array, now_ns)
            return
        in_held = self._regular(HELD, name)
        if in_held is not None and (array.held_since_ns is not None or in_held == array.inode):
            self._see_text(array, HELD)
            array.file_seen(in_held)
            if array.hold(now_ns):
                self._changed(array, "held")
            return
        stop = spool.stop(name, array.run)
        if stop is None and spool.holds(array.inode, name, QUEUED):
            spool.claim_again(name, QUEUED)
            array.file_seen(array.inode)
            self._release(array, now_ns)
            return
        missing_ns = array.file_missing(time.monotonic_ns())
        if stop is None and not spool.holds(array.inode, name, DONE):
            deleted_ns = missing_ns + MISSING_NS
            if time.monotonic_ns() < deleted_ns:
                self._timer.advance(deleted_ns)
                return
            by = mover(spool.root, self._place(array))
            stop = Stop(StopKind.CANCEL, by, now_ns, f"its file was deleted from {self._place(array)}/")
        self.cancel(array, stop or Stop(StopKind.CANCEL, mover(spool.root, self._place(array)), now_ns))

    def _see_others(self, array: Array) -> None:
        """Tell what other files of its name wait for its end; they are looked at for a start after it."""
        spool, name = self._spool, array.name
        found: dict[int, tuple[str, os.stat_result]] = {}
        for place in (QUEUED, HELD):
            status = status_of(spool.layout.job_file(place, name))
            if status is not None and stat.S_ISREG(status.st_mode) and status.st_ino != array.inode:
                found.setdefault(status.st_ino, (place, status))
        seen = tuple((place, inode, status.st_mtime_ns, status.st_ctime_ns) for inode, (place, status) in found.items())
        if seen == array.others_seen:  # they may be long: none is read twice
            return
        states = []
        for place, status in found.values():
            valid = not spool.why_not(status, place, name) and spool.job_spec(place, name) is not None
            states.append(State.INVALID if not valid else State.QUEUED if place == QUEUED else State.HELD)
        array.see_others(tuple(states), seen)
        self._state.changed()

    def _see_text(self, array: Array, place: str) -> None:
        """Apply the limit of running tasks from its file in *place*."""
        status = status_of(self._spool.layout.job_file(place, array.name))
        if status is None or array.seen == (seen := (status.st_ino, status.st_mtime_ns)):
            return
        if array.edited(self._spool.job_spec(place, array.name), seen):
            self._changed(array, f"at most {array.max_running or 'all'} of its tasks run at once")
            self._state.queue.changed()

    @staticmethod
    def _place(array: Array) -> str:
        return RUNNING if array.held_since_ns is None else HELD

    def _regular(self, place: str, name: str) -> int | None:
        status = status_of(self._spool.layout.job_file(place, name))
        return status.st_ino if status is not None and stat.S_ISREG(status.st_mode) else None

    def _release(self, array: Array, now_ns: int) -> None:
        since = array.release()
        if since is None:
            return
        for name in array.open:
            job = self._state.jobs.get(name)
            if job is not None and self._state.discount(job, since, now_ns):
                self._journal.note_place(job)
        self._changed(array, "released")

    def _changed(self, array: Array, what: str) -> None:
        log.info("array %s run %d: %s", array.name, array.run, what)
        self._state.changed()


def _result(array: Array, now_ns: int) -> Result:
    """Return the result of an array: it ends with the last of its tasks, whenever that is noticed."""
    counts = array.counts()
    reason = f"{array.cancelled}: {counts}" if array.cancelled is not None else counts
    ended_at_ns = min(array.ended_at_ns, now_ns) if array.ended_at_ns is not None else now_ns
    submission = Submission(array.name, array.spec, array.user, QueueTime(array.arrived_at_ns), FIRST_ATTEMPT)
    result = result_of(submission, array.run, array.outcome, reason, max(ended_at_ns, array.expanded_at_ns))
    return replace(result, started_at_ns=array.expanded_at_ns)


class _Staged(Struct):
    file: JobFileVersion
    data: bytes
    texts: TaskFiles
    path: str
    position: int = 0


class Expander(Component):
    """Expands waiting array files into arrays in progress.

    *why_no_room* says why the disk has too little room for new tasks, "" if it has enough.
    """

    def __init__(self, context: Context, store: ArrayStore, scanner: Scanner, why_no_room: Callable[[], str]) -> None:
        super().__init__(context)
        self._timer = context.timers.timer("arrays")  # when to retry files that found no room on the disk
        self._store = store
        self._scanner = scanner
        self._why_no_room = why_no_room
        self._staged: dict[str, _Staged] = {}
        self._no_room: dict[str, tuple[str, int]] = {}  # why there is no room for its tasks, and when to check again

    @property
    def is_busy(self) -> bool:
        """Whether a file is partly expanded, or one needs another try."""
        return bool(self._staged or self._no_room)

    def reason(self, name: str, *, paused: bool) -> str:
        """Return why an array's file still waits."""
        staged = self._staged.get(name)
        if name in self._no_room:
            return self._no_room[name][0]
        if trouble := self._confinement.why(name):
            return trouble
        if paused:
            return "spool paused"
        if staged is not None:
            return f"being expanded: {staged.position} of {staged.texts.tasks.count} tasks written"
        return "another run of this name is running" if self._blocked(name) else ""

    def work(self, until_ns: int, now_ns: int) -> bool:
        """Work until *until_ns*, monotonic; return whether there is more to do at once."""
        for name in [name for name in self._staged if name not in self._state.array_files]:
            self._abandon(name)
        for name in [name for name, (_, at_ns) in self._no_room.items() if at_ns <= time.monotonic_ns()]:
            del self._no_room[name]
        self._timer.set(min((at_ns for _, at_ns in self._no_room.values()), default=None))
        waiting = [name for name in self._state.array_files if name not in self._no_room and not self._blocked(name)]
        waits = ((name, self._state.jobs[name].wait) for name in waiting)
        arrived = {name: wait.arrived_at_ns if wait is not None else 0 for name, wait in waits}
        waiting.sort(key=lambda name: (name not in self._staged, arrived[name], name))
        for name in waiting:
            if time.monotonic_ns() >= until_ns:
                return True
            if name not in self._staged and (why := self._why_no_room()):
                self._no_room[name] = (why, time.monotonic_ns() + _TRY_AGAIN_NS)
                self._timer.advance(self._no_room[name][1])
                continue
            thing, done = Thing("array", name), True
            if self._confinement.pauses(thing, _EXPAND):
                continue
            with self._confinement.of(thing, _EXPAND) as piece:
                done = self._step(self._state.job(name), until_ns, now_ns)
            if piece.failed:
                self._abandon(name)
            elif not done:
                return True
        return False

    def _blocked(self, name: str) -> bool:
        job = self._state.jobs.get(name)
        if job is None or job.live is not None:
            return True
        return os.path.lexists(self._spool.layout.job_file(RUNNING, name))  # if that is unknown, the claim fails

    def _step(self, job: JobEntry, until_ns: int, now_ns: int) -> bool:
        """Write some more tasks of an array; return False if time is up and not all are written."""
        file = job.queued
        assert file is not None
        assert file.spec is not None
        staged = self._staged.get(job.name)
        if staged is not None and staged.file is not file:
            self._abandon(job.name)
            staged = None
        if staged is None:
            staged = self._begin(job.name, file, file.spec)
            if staged is None:
                return True
        tasks = staged.texts.tasks
        while staged.position < tasks.count:
            if time.monotonic_ns() >= until_ns:
                return False
            task, text = tasks.task_name(staged.position), staged.texts.text(staged.position)
            if staged.position == 0 and len(text) * tasks.count > MOST_BYTES:
                size, taken, most = map(show_size, (len(text), len(text) * tasks.count, MOST_BYTES))
                too_much = f"a file of {size}: {taken} in total, and the maximum is {most}"
                advice = "put long texts into a script and run that"
                words = f"each of its {tasks.count:,} tasks is {too_much}; {advice}"
                self._refuse(job, [Problem(None, None, words)])
                return True
            try:
                jobfile.parse(text, name=task, defaults=self._settings.config.defaults, why_no_path=why_not_expanded)
            except InvalidJob as error:
                why = [Problem(each.key, None, f"task {task}: {each.message}") for each in error.problems[:5]]
                self._refuse(job, why)
                return True
            self._store.add(staged.path, task, text)
            staged.position += 1
        del self._staged[job.name]
        self._publish(job, file, file.spec, staged, now_ns)
        return True

    def _begin(self, name: str, file: JobFileVersion, spec: Spec) -> _Staged | None:
        data = self._spool.waiting_text(name, file.version)
        if data is None:
            return None  # the next look sees that it is gone
        try:
            texts = TaskFiles(name, data, spec)
        except InvalidFile:
            return None  # it is being changed
        staged = self._staged[name] = _Staged(file, data, texts, self._store.begin())
        return staged

    def _refuse(self, job: JobEntry, problems: list[Problem]) -> None:
        """Refuse the whole file, as for any other mistake: it makes an impossible task, or too many."""
        self._abandon(job.name)
        self._scanner.refuse(QUEUED, job, jobfile.render_errors(job.name, problems))

    def _publish(self, job: JobEntry, file: JobFileVersion, spec: Spec, staged: _Staged, now_ns: int) -> None:
        assert job.wait is not None
        spool, name = self._spool, job.name
        arrived = job.wait.arrived_at_ns
        run = spool.next_run(name)
        record = ArrayRecord(
            job=name,
            run=run,
            tasks=staged.texts.tasks.count,
            inode=file.inode,
            user=name_of(file.uid),
            host=identity.host(),
            boot_id=identity.boot_id(),
            submitted_at_ns=arrived,
            expanded_at_ns=now_ns,
        )
        files = {layout.SPEC_COPY: staged.data, layout.ARRAY: render_array(record)}
        if spec.defaults_text:
            files[layout.DEFAULTS] = spec.defaults_text.encode()
        try:
            self._store.publish(staged.path, name, run, files)
        except OSError:
            self._store.abandon(staged.path)
            raise
        try:
            claimed = spool.claim(name, *file.version)
            if claimed:
                self._journal.commit()
                self._journal.write([journal.Started(name, run, identity.boot_id(), file.inode, arrived, now_ns)])
        except OSError:  # a claimed file is found in running/, and queued again
            self._store.withdraw(name, run)
            raise
        if not claimed:
            self._store.withdraw(name, run)
            return
        array = new_array(spec, record)
        for position, task in enumerate(array.names):
            if task in self._state.jobs:
                self.waits_already(array, position, now_ns)
        array.resume({task for task in array.names if task not in array.open})
        if job.held is not None:  # another file of its name, which waits for its end from now on
            self._changes.arrays.add(name)
        self._state.expanded(job, array)
        log.info("array %s run %d: expanded into %d tasks", name, run, len(array.names))

    def awaits(self, name: str) -> bool:
        """Whether a job is a task of an array that is about to be expanded anew: it starts as a task of that."""
        job = self._state.jobs.get(name)
        spec = job.queued.spec if job is not None and job.queued is not None else None
        task = spec.task if spec is not None else None
        return task is not None and task.array in self._state.array_files and not self._blocked(task.array)

    def waits_already(self, array: Array, position: int, now_ns: int) -> bool:
        """Whether a task waits already, since a user has queued it again as well: that is its issue, and it runs once.

        It may even have begun. A job of its name with another text is another job.
        """
        task = array.tasks.task_name(position)
        job, path = self._state.jobs.get(task), self._spool.layout.task_file(array.name, array.run, task)
        if job is None or (text := read_record(path)) is None or is_too_long(text):
            return False
        texts = [self._spool.job_text(place, task) for place in (QUEUED, HELD)]
        if (live := job.live) is not None:
            has_come_with_it = live.stop is None and live.wait.arrived_at_ns > array.arrived_at_ns - TOGETHER_NS
            texts = [self._spool.record(task, live.run, layout.SPEC_COPY)] if has_come_with_it else []
        if text not in texts:
            return False
        self._spool.disk.discard(path)
        array.unissued.discard(task)
        if live is None:
            self._journal.note_place(self._state.issue(task, array, position, now_ns))
        array.open.add(task)
        self._state.settle(job)
        return True

    def _abandon(self, name: str) -> None:
        staged = self._staged.pop(name, None)
        if staged is not None:
            self._store.abandon(staged.path)
