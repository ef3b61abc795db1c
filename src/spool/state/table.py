"""The jobs, runs and arrays of a spool, and the same facts in the form for the planner.

All of it can be rebuilt: a new dispatcher reads it from the spool again, and so does a command that explains or
predicts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from spool.core.arrays import Tasks, array_of, cancelled_by, in_words, outcome_of, progress
from spool.core.gpuuse import RecentRecorder
from spool.core.model import Holding, Machine, Policy, Reservation, Result, Spec, State, Stop, Waiting
from spool.core.priority import Past
from spool.core.queue import WaitingQueue
from spool.core.resources import Runs
from spool.core.scheduler import View
from spool.executors import Executors
from spool.formats import journal
from spool.formats.run_records import ArrayRecord
from spool.formats.state import of_spec
from spool.state.past import Sizing
from spool.state.run import (
    FIRST_ATTEMPT,
    NO_BACKOFF,
    UNREVIEWED,
    ActiveRun,
    Attempts,
    JobEntry,
    JobFileVersion,
    QueueTime,
    StartBackoff,
)
from spool.store.ownership import name_of, this_user


class Array(Struct, eq=False):
    """One expanded array, from its claim until its own file lies in `done/`."""

    name: str
    run: int
    spec: Spec
    tasks: Tasks
    user: str
    inode: int  # of its job file
    arrived_at_ns: int  # where its tasks' places in the queue begin
    expanded_at_ns: int
    names: tuple[str, ...] = ()
    unissued: set[str] = field(default_factory=set)
    to_issue: deque[int] = field(default_factory=deque)  # positions
    taken: dict[str, int] = field(default_factory=dict)  # tasks whose names are in use, and their positions
    open: set[str] = field(default_factory=set)  # issued, and a job of that name is active
    ended: dict[str, State] = field(default_factory=dict)
    unknown: deque[str] = field(default_factory=deque)  # ended before this dispatcher started: outcome not read yet
    to_cancel: deque[str] = field(default_factory=deque)
    beside: tuple[State, ...] = ()  # the states of other jobs of its name, which wait for its end
    others_seen: tuple[tuple[str, int, int, int], ...] = ()  # place, inode, mtime and ctime of their files
    held_since_ns: int | None = None  # its file is in held/: no task is issued or started
    seen: tuple[int, int] | None = None  # inode and mtime of its job file when its text was last read
    max_running: int | None = None  # the limit of running tasks in its file now
    missing_ns: int | None = None  # monotonic: since when its file is missing
    cancelled: str | None = None  # the user and the reason
    cancelled_by: str = ""  # the user
    unrecorded: Stop | None = None  # the same, until a record has it
    ended_at_ns: int | None = None  # the last end of a task, or the cancellation; None: unknown
    result: Result | None = None  # set once it is over and reported; only the filing is left

    @property
    def held(self) -> bool:
        """Whether none of its tasks may be issued or started."""
        return self.held_since_ns is not None and self.cancelled is None

    @property
    def over(self) -> bool:
        """Whether every task has ended, with a known outcome."""
        return not (self.unissued or self.open or self.unknown or self.to_issue)

    @property
    def outcome(self) -> State:
        """The outcome of the array, once it is over."""
        if self.cancelled is not None:
            return State.CANCELLED
        return outcome_of(self.ended.values(), len(self.names))

    # Transitions.

    def resume(self, unissued: set[str]) -> None:
        """Record which tasks have not been issued yet."""
        self.unissued = set(unissued)
        self.to_issue = deque(at for at, name in enumerate(self.names) if name in unissued)

    def file_seen(self, inode: int) -> None:
        """Record its file's inode: the file is in its place."""
        self.inode, self.missing_ns = inode, None

    def see_others(self, beside: tuple[State, ...], seen: tuple[tuple[str, int, int, int], ...]) -> None:
        """Record the states of the other jobs of its name, and which versions of their files have them."""
        self.beside, self.others_seen = beside, seen

    def edited(self, spec: Spec | None, seen: tuple[int, int]) -> bool:
        """Apply its job file as edited; return whether its limit changed. *seen* identifies that version of the file.

        A file that is invalid or not an array changes nothing.
        """
        before, self.seen = self.max_running, seen
        if spec is not None and spec.is_array:
            self.max_running = Tasks(self.name, spec).max_running
        return self.max_running != before

    def file_missing(self, at_ns: int) -> int:
        """Record that its job file is missing at *at_ns*, monotonic; return since when."""
        if self.missing_ns is None:
            self.missing_ns = at_ns
        return self.missing_ns

    def hold(self, now_ns: int) -> bool:
        """Stop issuing and starting its tasks; return whether that is new."""
        if self.held_since_ns is not None:
            return False
        self.held_since_ns = now_ns
        return True

    def release(self) -> int | None:
        """Resume; return since when it was held, None if it was not."""
        since_ns, self.held_since_ns = self.held_since_ns, None
        return since_ns

    def taken_by_another(self, task: str, position: int) -> None:
        """Record that another job has the name of a task, which must wait."""
        self.taken[task] = position

    def task_ended(self, task: str, outcome: State, at_ns: int | None) -> None:
        """Record the outcome of a task, and its time, if known."""
        self.ended[task] = outcome
        self._went_on_until(at_ns)

    def _went_on_until(self, at_ns: int | None) -> None:
        if at_ns is not None:
            self.ended_at_ns = max(at_ns, self.ended_at_ns or 0)

    def cancel(self, stop: Stop) -> str:
        """Stop issuing, and end every active task; return the user and the reason."""
        self.unrecorded, self.cancelled_by = stop, stop.by
        self.cancelled = cancelled_by(stop)
        self.missing_ns = None
        self._went_on_until(stop.at_ns)
        self.unissued.clear()
        self.to_issue.clear()
        self.taken.clear()
        self.to_cancel.extend(name for name in self.names if name in self.open)
        return self.cancelled

    def withdrawn(self) -> None:
        """Mark it as cancelled because its job file does not wait anywhere; the file does not tell the user."""
        self.cancelled = "cancelled"

    def cancel_recorded(self) -> None:
        """Record that the cancellation is on record."""
        self.unrecorded = None

    def conclude(self, result: Result) -> None:
        """Record its result, which has been reported."""
        self.result = result

    # In words.

    def counts(self) -> str:
        """Return the outcomes of its tasks, in words."""
        return in_words(self.ended.values(), len(self.names))

    def row(self, state: State, reason: str) -> dict[str, Any]:
        """Return its row in every view while it is in progress, in that *state*."""
        return {
            "state": state,
            "reason": reason,
            "run": self.run,
            "attempt": 1,
            "user": self.user,
            "submitted_at_ns": self.arrived_at_ns,
            "started_at_ns": self.expanded_at_ns,
            "array": True,
            **of_spec(self.spec),
        }

    def progress(self, running: int) -> str:
        """Return its progress in words; *running* is the number of tasks that run now."""
        return progress(len(self.ended) + len(self.unknown), len(self.names), running, list(self.taken))


def new_array(spec: Spec, record: ArrayRecord) -> Array:
    """Return the array of a record, without the states of its tasks."""
    tasks = Tasks(record.job, spec)
    at_ns = record.expanded_at_ns or 0
    return Array(
        name=record.job,
        run=record.run,
        spec=spec,
        tasks=tasks,
        user=record.user or this_user(),
        inode=record.inode or 0,
        arrived_at_ns=record.submitted_at_ns or at_ns,
        expanded_at_ns=at_ns,
        names=tasks.names(),
        max_running=tasks.max_running,
    )


class SchedulerState(Struct):
    """The jobs, and the same facts in the form for the planner."""

    jobs: dict[str, JobEntry] = field(default_factory=dict)
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    held: dict[str, Waiting] = field(default_factory=dict)
    live: dict[tuple[str, int], ActiveRun] = field(default_factory=dict)
    executors: Executors = field(default_factory=Executors)
    arrays: dict[str, Array] = field(default_factory=dict)  # in progress
    array_files: set[str] = field(default_factory=set)  # waiting files to expand
    left: list[str] = field(default_factory=list)  # names without anything left, since the last call of `take_left`
    unsettled: dict[str, str] = field(default_factory=dict)  # names whose records could not be read yet, and why
    reviewed: dict[str, journal.Reviewed] = field(default_factory=dict)  # what hooks set in files, by job
    to_review: dict[str, None] = field(default_factory=dict)  # jobs about which no hook was asked yet
    told_blocked: dict[str, str] = field(default_factory=dict)  # the last reasons of failed starts, as reported
    doubted: set[str] = field(default_factory=set)  # names whose next start checks for conflicting files first
    version: int = 0  # changes with every fact
    decisive: int = 0  # changes with every fact that may alter a decision
    departure: tuple[int, str] = (0, "")  # the last time a run left its room: `decisive` after it, and its job
    over: list[int] = field(default_factory=list)  # the leases of runs that left their room, until they are taken
    runs: Runs = field(default_factory=Runs)  # those that hold grants
    past: Past = field(default_factory=lambda: Past(Policy()))
    recent: RecentRecorder = field(default_factory=RecentRecorder)
    fits: tuple[Machine, Policy] | None = None  # the resources for jobs that are sized, as last seen
    newest_result: Callable[[str], Result | None] = lambda name: None  # the recorded one of a job's newest run
    sizing: Sizing | None = None  # None: no job was sized yet

    def job(self, name: str) -> JobEntry:
        """Return the entry of *name*, created if needed."""
        job = self.jobs.get(name)
        if job is None:
            job = self.jobs[name] = JobEntry(name)
        return job

    def live_of(self, name: str) -> ActiveRun | None:
        """Return the live run of *name*, None if there is none."""
        job = self.jobs.get(name)
        return job.live if job is not None else None

    def add_run(self, job: JobEntry, live: ActiveRun) -> None:
        """Add a live run of *job*."""
        job.live = live
        self.live[live.key] = live
        self.recount(live)

    def recount(self, live: ActiveRun) -> None:
        """Update the planner's view of a run after a change that decisions depend on."""
        self.version += 1
        counted = self.runs.get(live.name)
        if counted is not None and counted.run != live.run:
            counted = None
        run = live.running if live.holds_room and live.key in self.live else None
        if run is None and counted is None:
            return  # it has left its room before
        self.decisive += 1
        used, uses = (each is not None and not each.submitted for each in (counted, run))
        if run is not None:
            if uses and not used:
                self.past.begin(run.user, run.spec.project, run.grant, run.started_at_ns)
            self.runs.put(run)
        elif counted is not None:
            self.runs.remove(live.name)
            self.departure = self.decisive, live.name
            if live.lease is not None:
                self.over.append(live.lease)
        if used and not uses and counted is not None:
            at_ns = max(live.end.at_ns if live.end is not None else time.time_ns(), counted.started_at_ns)
            self.past.end(counted.user, counted.spec.project, counted.grant, at_ns)

    def take_over(self) -> list[int]:
        """Return the leases of the runs that left their room since the last call."""
        over, self.over = self.over, []
        return over

    def remember(self, past: Past) -> None:
        """Plan with that past from now on."""
        self.past = past
        self._size_again(self.sizing.names if self.sizing is not None else ())
        self.runs.learn_from(past.run_times)
        for run in self.runs.values():
            if not run.submitted:
                past.begin(run.user, run.spec.project, run.grant, run.started_at_ns)

    def learn(self, live: ActiveRun, result: Result) -> None:
        """Use the result of a run that is over, for the jobs like it that wait."""
        if self.past.learn(live.user, result) and self.sizing is not None:
            self._size_again(self.sizing.like(live.name))

    def _size_again(self, names: Iterable[str]) -> None:
        for name in list(names):
            if name in self.jobs:
                self.settle(self.jobs[name])

    def may_grow(self, live: ActiveRun, result: Result) -> Spec:
        """Return the spec of a run that has ended, with the retry that it deserves if spool sized it too small."""
        if not live.spec.is_sized:
            return live.spec
        return self._sizing().retried(live.spec, result, live.elsewhere)

    def fit(self, machine: Machine, policy: Policy) -> None:
        """Let no job that is sized request more than *machine* and the quotas of *policy* have."""
        self.fits = machine, policy
        if self.sizing is not None and self.sizing.fit(machine, policy):
            self._size_again(self.sizing.names)

    def _sizing(self) -> Sizing:
        if self.sizing is None:
            self.sizing = Sizing(self.newest_result)
            if self.fits is not None:
                self.sizing.fit(*self.fits)
        return self.sizing

    def view(
        self,
        machine: Machine,
        *,
        ended: Mapping[str, State],
        arrays: Mapping[str, tuple[str, ...]],
        reservations: tuple[Reservation, ...],
        paused: bool,
        holding: Holding,
    ) -> View:
        """Return the input of `decide`: for the dispatcher, and for every command that explains or predicts."""
        return View(
            machine=machine,
            elsewhere=self.executors.machines(),
            queue=self.queue,
            held=self.held,
            running=self.runs,
            ended=ended,
            arrays=arrays,
            held_arrays=self.held_arrays,
            array_limits={
                array.name: array.max_running
                for array in self.arrays.values()
                if array.max_running != array.tasks.max_running  # it was edited
            },
            reservations=reservations,
            past=self.past,
            paused=paused,
            holding=holding,
        )

    def changed(self) -> None:
        """Invalidate the plan: a fact that decisions depend on has changed."""
        self.version += 1
        self.decisive += 1

    # The file of a job.

    def see_file(self, job: JobEntry, place: str, file: JobFileVersion | None) -> None:
        """Set the file of a job in `queued/` or `held/` as seen; None: it is not there. Settles nothing."""
        job.see_file(place, file)
        job.blocked = None  # the file may have been the reason
        if file is not None and file.problem == UNREVIEWED:
            self.to_review[job.name] = None

    def refuse_file(self, job: JobEntry, place: str, problem: str, *, invalid: bool = False) -> None:
        """Mark a file as unusable after all; *invalid*: because of a mistake in it."""
        file = job.file(place)
        if file is not None:
            file.spec, file.problem, file.invalid = None, problem, invalid
            self.settle(job)

    def review_of(self, name: str, content: tuple[int, int, int]) -> journal.Reviewed | None:
        """Return what hooks set in that content of a job file; None if they were not asked."""
        reviewed = self.reviewed.get(name)
        return reviewed if reviewed is not None and reviewed.is_for(content) else None

    def keys_set(self, line: journal.Reviewed) -> None:
        """Record what hooks set in a job file."""
        self.reviewed[line.job] = line

    def needs_no_review(self, job: JobEntry) -> None:
        """Let a file be used as it is, in which hooks set nothing."""
        file = job.queued
        if file is not None and file.problem == UNREVIEWED:
            file.spec, file.unreviewed, file.problem = file.unreviewed, None, None
            self.settle(job)

    def recall_refusal(self, job: JobEntry, refused: StartBackoff) -> None:
        """Let a job wait that the machine has refused, as the dispatcher says."""
        job.refused = refused
        self.settle(job)

    def park(self, job: JobEntry, *, parked: bool) -> bool:
        """Set whether a job is held; return whether it was."""
        was_parked, job.parked = job.parked, parked
        return was_parked

    def issue(self, task: str, array: Array, position: int, now_ns: int) -> JobEntry:
        """Give a task its place as it is issued: that of the array plus its position."""
        job = self.job(task)
        job.wait = QueueTime(array.arrived_at_ns + position, 0, None if job.parked else now_ns)
        array.open.add(task)
        return job

    def discount(self, job: JobEntry, since_ns: int, now_ns: int) -> bool:
        """Exclude the time since then from the job's wait, if it has a scheduling timeout; return whether it has."""
        spec = job.queued.spec if job.queued is not None else None
        if spec is None or spec.scheduling_timeout_ns is None or job.wait is None or job.wait.clock_at_ns is None:
            return False
        job.wait = job.wait.without(since_ns, now_ns)
        self.settle(job)
        return True

    def forget_place(self, job: JobEntry) -> None:
        """Forget the place of a job, which will not come back as the same submission."""
        job.wait, job.attempts, job.parked = None, FIRST_ATTEMPT, False

    # Obstacles to a start.

    def block(self, job: JobEntry, why: str) -> None:
        """Take a job that could not be started out of the order."""
        job.blocked = self.told_blocked[job.name] = why
        self.doubted.add(job.name)
        self.settle(job)

    def unblock(self, job: JobEntry) -> None:
        """Let the start of a job be tried again."""
        job.blocked = None
        self.settle(job)

    def unblock_all(self) -> None:
        """Let the start of every blocked job be tried again."""
        for name in list(self.told_blocked):
            job = self.jobs.get(name)
            if job is not None and job.blocked is not None:
                self.unblock(job)

    def await_answer(self, job: JobEntry, what: str) -> None:
        """Set what the start of a job waits for; "": nothing any more."""
        job.asked = what

    # Runs.

    def claimed(self, job: JobEntry, live: ActiveRun, now_ns: int) -> None:
        """Record that the file of a job was claimed for a run."""
        job.queued, job.wait, job.attempts, job.refused = None, None, FIRST_ATTEMPT, NO_BACKOFF
        self.add_run(job, live)
        if job.held is not None:  # another file of its name is held
            job.takes_place(now_ns)
        self.settle(job)

    def began(self, name: str) -> None:
        """Record that a job was launched."""
        self.told_blocked.pop(name, None)
        self.doubted.discard(name)

    def end_run(self, live: ActiveRun) -> None:
        """Remove a run that is completely filed. Settles nothing."""
        if self.live.pop(live.key, None) is not None:
            self.recount(live)
        job = self.job(live.name)
        job.live, job.told_run = None, None
        if self.sizing is not None and live.spec.is_sized:
            self.sizing.forget(live.name)

    def told(self, job: JobEntry, run: int) -> bool:
        """Record that the end of a run was reported; return whether that is new."""
        news, job.told_run = job.told_run != run, run
        return news

    def end_series(self, job: JobEntry, live: ActiveRun) -> None:
        """Record that a submission has ended with *live*; another file of its name is another submission."""
        if job.queued is None or job.queued.inode == live.inode:
            job.attempts = FIRST_ATTEMPT

    def go_on(self, job: JobEntry, attempts: Attempts, wait: QueueTime | None) -> None:
        """Let a submission continue: *attempts* has its attempts, *wait* its new place, if any."""
        job.attempts, job.wait = attempts, wait or job.wait

    def refused(self, job: JobEntry, live: ActiveRun, why: str | None, now_ns: int) -> None:
        """Record why the machine refused the start of *live*; without words (*why*) it did not."""
        job.refused = live.refused.again(why, now_ns) if why else live.refused

    def ended_unstarted(self, job: JobEntry) -> None:
        """Record that a job has ended without a start."""
        job.queued = job.held = job.told_run = None
        self.forget_place(job)
        self.settle(job)

    def add_array(self, array: Array) -> None:
        """Add an array in progress."""
        self.arrays[array.name] = array

    def expanded(self, job: JobEntry, array: Array) -> None:
        """Record that the file of an array was claimed, and its tasks can be issued."""
        self.arrays[array.name] = array
        job.queued, job.held, job.wait, job.attempts = None, None, None, FIRST_ATTEMPT
        self.settle(job)
        self.queue.changed(array.name)

    def ended(self, name: str, outcome: State, at_ns: int | None) -> None:
        """Report the final end of *name* to the jobs that depend on it, and to the array of a task."""
        array = self.arrays.get(array_of(name))
        if array is not None and (name in array.open or name in array.ended):
            array.task_ended(name, outcome, at_ns)
        self.decisive += self.queue.changed(name)

    def take_left(self) -> list[str]:
        """Return the names without anything left, since the last call."""
        left, self.left = self.left, []
        return left

    def unsettle(self, name: str, why: str) -> None:
        """Start nothing of *name* until its records could be read; *why* they could not."""
        self.unsettled[name] = why

    def settle(self, job: JobEntry) -> None:
        """Update the planner's view of *job* from its files."""
        self.version += 1
        waiting = self._waiting(job, job.queued)
        news = waiting is not None or job.name in self.array_files
        self.array_files.discard(job.name)
        if waiting is not None and (waiting.spec.is_array or job.name in self.arrays):
            if job.name not in self.arrays:
                self.array_files.add(job.name)
            waiting = None
        if waiting is not None:
            self.queue.put(waiting)
        elif job.name in self.queue:
            self.queue.remove(job.name)
            news = True
        parked = self._waiting(job, job.held) if job.queued is None else None
        if parked is not None:
            self.held[job.name] = parked
            news = True
        elif self.held.pop(job.name, None) is not None:
            news = True
        if self.sizing is not None and waiting is None and parked is None:
            self.sizing.forget(job.name)
        news = self.queue.changed(job.name) or news  # it may have become an array, or stopped being one
        self.decisive += news or job.name in self.arrays
        if job.queued is None and job.held is None and job.live is None and job.wait is None:
            self.jobs.pop(job.name, None)
            self.reviewed.pop(job.name, None)
            if self.arrays:
                self.left.append(job.name)

    def array_state(self, name: str) -> State | None:
        """Return the state of *name* if it is an array that is not over, or an unissued task."""
        if name in self.array_files:
            return State.QUEUED
        if name in self.arrays:
            return State.RUNNING
        array = self.arrays.get(array_of(name))
        return State.QUEUED if array is not None and name in array.unissued else None

    def tasks_to_come(self, now_ns: int) -> Iterator[Waiting]:
        """Yield the tasks that arrays have not issued yet, as each would wait if it were issued now.

        A held array issues none. A task whose name another job has is left out.
        """
        for name in self.array_files:
            job = self.jobs[name]
            waiting = self._waiting(job, job.queued)
            if waiting is not None:
                tasks = Tasks(name, waiting.spec)
                yield from self._issued(waiting, tasks, range(tasks.count), now_ns)
        for array in self.arrays.values():
            if array.held_since_ns is None and array.cancelled is None:
                waiting = Waiting(
                    array.name,
                    array.spec,
                    array.user,
                    array.arrived_at_ns,
                    executor_problem=self.executors.problem_of(array.spec),
                    elsewhere=self.executors.elsewhere(array.spec.executor),
                )
                yield from self._issued(waiting, array.tasks, array.to_issue, now_ns)

    def _issued(self, array: Waiting, tasks: Tasks, positions: Iterable[int], now_ns: int) -> Iterator[Waiting]:
        spec = replace(array.spec, array=None, matrix=(), rows=(), max_running=None)
        size = None
        if spec.is_sized:
            size = self._sizing().of_task(replace(array, name=tasks.task_name(0), spec=spec), self.past)
        for position in positions:
            task = tasks.task_name(position)
            if task not in self.jobs and task not in self.arrays:
                yield replace(
                    array,
                    name=task,
                    spec=replace(spec, task=tasks.task(position)),
                    arrived_at_ns=array.arrived_at_ns + position,
                    waited_ns_before=0,
                    clock_at_ns=now_ns,
                    sized=size,
                )

    @property
    def held_arrays(self) -> dict[str, State]:
        """The state of each array whose tasks must not start.

        A task of a cancelled array may have its end on record already, and wait only for the move of its file.
        """
        found = {name: State.HELD for name, array in self.arrays.items() if array.held}
        return found | {name: State.CANCELLED for name, array in self.arrays.items() if array.cancelled is not None}

    def _waiting(self, job: JobEntry, file: JobFileVersion | None) -> Waiting | None:
        if file is None or file.spec is None or job.wait is None:
            return None
        retry_ns, preempted = job.attempts.not_before_ns or 0, job.attempts.preempted
        waiting = Waiting(
            name=job.name,
            spec=file.spec,
            user=name_of(file.uid),
            arrived_at_ns=job.wait.arrived_at_ns,
            waited_ns_before=job.wait.waited_ns_before,
            clock_at_ns=job.wait.clock_at_ns,
            attempt=job.attempts.attempt,
            not_before_ns=max(retry_ns, job.refused.until_ns) or None,
            refused=job.refused.why if job.refused.until_ns > retry_ns else "",
            executor_problem=self.unsettled.get(job.name) or job.blocked or self.executors.problem_of(file.spec),
            elsewhere=self.executors.elsewhere(file.spec.executor),
            yields_to=preempted.reason if preempted is not None else None,
            preempted_at_ns=preempted.at_ns if preempted is not None else None,
        )
        if not file.spec.is_sized or file.spec.is_array:
            return waiting
        return replace(waiting, sized=self._sizing().of(waiting, self.past))
