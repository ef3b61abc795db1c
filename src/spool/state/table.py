"""What is known of all jobs, runs and arrays of a spool, and the same facts as the planner wants them.

All of it can be rebuilt: a new dispatcher reads it from the spool again, and so does a command that explains or
predicts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from spool.core.arrays import array_of
from spool.core.backfill import Holding
from spool.core.layout import HELD, QUEUED
from spool.core.model import (
    Machine,
    Policy,
    Reservation,
    State,
    Waiting,
)
from spool.core.priority import Past
from spool.core.queue import WaitingQueue
from spool.core.runs import Runs
from spool.core.scheduler import View
from spool.executors import Executors
from spool.formats import journal
from spool.machine.host import local_zone, this_user, user_name
from spool.state.array import Array
from spool.state.run import ActiveRun
from spool.state.submission import FIRST_ATTEMPT, NO_BACKOFF, Attempts, JobFileVersion, QueueTime, StartBackoff


class JobEntry(Struct, eq=False):
    """Everything known of one name."""

    name: str
    queued: JobFileVersion | None = None
    held: JobFileVersion | None = None
    live: ActiveRun | None = None
    wait: QueueTime | None = None
    attempts: Attempts = FIRST_ATTEMPT
    refused: StartBackoff = NO_BACKOFF  # by the machine, since the last run that began
    last_inode: int | None = None  # of the file that waited last
    blocked: str | None = None  # why it could not be started when that was tried
    asked: str = ""  # what its start waits for, while somebody is asked about it
    parked: bool = False  # it was held when it was last seen
    hold_reason: str = ""  # why spool itself has held it
    told_run: int | None = None  # the run whose end was reported, until the paperwork is done

    def file(self, place: str) -> JobFileVersion | None:
        """Return its file in `queued/` or `held/`."""
        return self.queued if place == QUEUED else self.held


class SchedulerState(Struct):
    """The jobs, and the same facts as the planner wants them."""

    jobs: dict[str, JobEntry] = field(default_factory=dict)
    with_file: dict[str, set[str]] = field(default_factory=lambda: {QUEUED: set(), HELD: set()})  # those that lie there
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    held: dict[str, Waiting] = field(default_factory=dict)
    live: dict[tuple[str, int], ActiveRun] = field(default_factory=dict)
    executors: Executors = field(default_factory=lambda: Executors(lambda: "process"))
    arrays: dict[str, Array] = field(default_factory=dict)  # in progress
    array_files: set[str] = field(default_factory=set)  # waiting files to expand
    left: list[str] = field(default_factory=list)  # names that have nothing left, since the last call that asked
    unsettled: dict[str, str] = field(default_factory=dict)  # names whose records could not be read yet, and why
    told_blocked: dict[str, str] = field(default_factory=dict)  # the last reasons of jobs that could not be started
    doubted: set[str] = field(default_factory=set)  # names whose start looks first for what is in its way
    version: int = 0  # changes with whatever is known
    decisive: int = 0  # changes whenever a decision might
    departure: tuple[int, str] = (0, "")  # the last time that a run left its room: `decisive` from then on, and its job
    runs: Runs = field(default_factory=Runs)  # those that hold what they were granted
    past: Past = field(default_factory=lambda: Past(Policy()))

    def job(self, name: str) -> JobEntry:
        """Return the entry of *name*, created if needed."""
        job = self.jobs.get(name)
        if job is None:
            job = self.jobs[name] = JobEntry(name)
        return job

    def add_run(self, job: JobEntry, live: ActiveRun) -> None:
        """Take in a run of *job* that is alive."""
        job.live = live
        self.live[live.key] = live
        self.recount(live)

    def arrivals(self) -> Iterator[int]:
        """Yield when the jobs that there are have arrived."""
        for job in self.jobs.values():
            if job.wait is not None:
                yield job.wait.arrived_at_ns
            if job.live is not None:
                yield job.live.wait.arrived_at_ns

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
        if used and not uses and counted is not None:
            at_ns = max(live.end.at_ns if live.end is not None else time.time_ns(), counted.started_at_ns)
            self.past.end(counted.user, counted.spec.project, counted.grant, at_ns)

    def remember(self, past: Past) -> None:
        """Plan by another past from now on."""
        self.past = past
        self.runs.learn_from(past.run_times)
        for run in self.runs.values():
            if not run.submitted:
                past.begin(run.user, run.spec.project, run.grant, run.started_at_ns)

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
            array_limits={array.name: array.max_running for array in self.arrays.values() if array.limit_edited},
            reservations=reservations,
            past=self.past,
            paused=paused,
            holding=holding,
            zone=local_zone(),
        )

    def place(self, job: JobEntry, now_ns: int) -> bool:
        """Give a job whose file was seen its place in the queue, and its clock; return whether it is a new submission.

        One that a person has moved out of `running/` goes on where its run stands.
        """
        file, queued = job.queued or job.held, job.queued is not None
        assert file is not None
        new = False
        if job.wait is None:
            live = job.live
            if live is not None and live.inode == file.inode and live.mtime_ns in (None, file.mtime_ns):
                job.wait, job.attempts = QueueTime(live.wait.arrived_at_ns), live.attempts
            else:
                job.wait, job.attempts, new = QueueTime(min(file.changed_at_ns, now_ns)), FIRST_ATTEMPT, True
        job.wait = job.wait.lying(file, now_ns, queued=queued)
        return new

    def changed(self) -> None:
        """Have the next plan made anew: something that decisions depend on has changed."""
        self.version += 1
        self.decisive += 1

    # A job's file.

    def see_file(self, job: JobEntry, place: str, file: JobFileVersion | None) -> None:
        """Take in the file of a job in `queued/` or `held/` as it was seen; None: it is not there. Settles nothing."""
        if place == QUEUED:
            job.queued = file
        else:
            job.held = file
        self._note_files(job)
        job.blocked = None  # what was in its way may have been this
        if (seen := job.queued or job.held) is not None:
            job.last_inode = seen.inode

    def _note_files(self, job: JobEntry) -> None:
        for place, file in ((QUEUED, job.queued), (HELD, job.held)):
            if file is not None:
                self.with_file[place].add(job.name)
            else:
                self.with_file[place].discard(job.name)

    def refuse_file(self, job: JobEntry, place: str, problem: str) -> None:
        """Mark a file as unusable after all."""
        file = job.file(place)
        if file is not None:
            file.spec, file.problem = None, problem
            self.settle(job)

    def see_why_held(self, job: JobEntry, why: str) -> None:
        """Take in why spool itself holds a job; "": it does not."""
        job.hold_reason = why

    # A job's place in the queue, and its clock.

    def recall_place(self, name: str, line: journal.Waits) -> None:
        """Give a job the place back that the journal remembers."""
        job = self.job(name)
        job.wait, job.parked = QueueTime.of_line(line), line.clock_at_ns is None

    def recall_file(self, job: JobEntry, inode: int) -> None:
        """Take in which file waited, though it is elsewhere by now."""
        job.last_inode = inode

    def recall_series(self, job: JobEntry, attempts: Attempts) -> None:
        """Let a job go on from where its earlier runs left it."""
        job.attempts = attempts

    def park(self, job: JobEntry, *, parked: bool) -> bool:
        """Take in whether a job is held; return whether it was."""
        was_parked, job.parked = job.parked, parked
        return was_parked

    def issue(self, task: str, array: Array, position: int, now_ns: int) -> JobEntry:
        """Give a task of an array, which is issued now, its place: that of the array, and by its position."""
        job = self.job(task)
        job.wait = QueueTime(array.arrived_at_ns + position, 0, now_ns)
        array.open.add(task)
        return job

    def discount(self, job: JobEntry, since_ns: int, now_ns: int) -> bool:
        """Do not count the time since then as waiting, where somebody looks at that; return whether it is so."""
        spec = job.queued.spec if job.queued is not None else None
        if spec is None or spec.scheduling_timeout_ns is None or job.wait is None or job.wait.clock_at_ns is None:
            return False
        job.wait = job.wait.without(since_ns, now_ns)
        self.settle(job)
        return True

    def forget_place(self, job: JobEntry) -> None:
        """Forget the place of a job: it will not come back as the same submission."""
        job.wait, job.attempts, job.parked = None, FIRST_ATTEMPT, False

    # What keeps a job from starting.

    def block(self, job: JobEntry, why: str) -> bool:
        """Keep a job that could not be started from keeping others waiting; return whether it is another reason."""
        new = self.told_blocked.get(job.name) != why
        job.blocked = self.told_blocked[job.name] = why
        self.doubt(job.name)
        self.settle(job)
        return new

    def doubt(self, name: str) -> None:
        """Have the next start of *name* look first for what is in its way, before it gives a number away."""
        self.doubted.add(name)

    def unblock(self, job: JobEntry) -> None:
        """Have the start of a job tried again."""
        job.blocked = None
        self.settle(job)

    def unblock_all(self) -> None:
        """Have the start of every job tried again that could not be started."""
        for name in list(self.told_blocked):
            job = self.jobs.get(name)
            if job is not None and job.blocked is not None:
                self.unblock(job)

    def await_answer(self, job: JobEntry, what: str) -> None:
        """Take note of what the start of a job waits for; "": nothing any more."""
        job.asked = what

    # Runs.

    def claimed(self, job: JobEntry, live: ActiveRun, now_ns: int) -> None:
        """Take in that the file of a job was claimed for a run."""
        job.queued, job.wait, job.attempts, job.refused = None, None, FIRST_ATTEMPT, NO_BACKOFF
        self.add_run(job, live)
        if job.held is not None:  # another file of its name is held
            self.place(job, now_ns)
        self.settle(job)

    def began(self, name: str) -> None:
        """Take in that a job was launched."""
        self.told_blocked.pop(name, None)
        self.doubted.discard(name)

    def end_run(self, live: ActiveRun) -> None:
        """Take out a run whose paperwork is done."""
        if self.live.pop(live.key, None) is not None:
            self.recount(live)
        job = self.job(live.name)
        job.live, job.told_run = None, None

    def told(self, job: JobEntry, run: int) -> bool:
        """Take note that it is told how a run ended; return whether that is news."""
        news, job.told_run = job.told_run != run, run
        return news

    def end_series(self, job: JobEntry, live: ActiveRun) -> None:
        """Take in that a submission has ended with *live*; another file of its name is another submission."""
        if job.queued is None or job.queued.inode == live.inode:
            job.attempts = FIRST_ATTEMPT

    def go_on(self, job: JobEntry, attempts: Attempts, wait: QueueTime | None) -> None:
        """Let a submission go on: *attempts* says how far it has come, *wait* is its place if it has a new one."""
        job.attempts, job.wait = attempts, wait or job.wait

    def refused(self, job: JobEntry, live: ActiveRun, now_ns: int) -> None:
        """Take in that the machine refused what *live* was to be; without words it did not."""
        job.refused = live.refused.again(live.refusal, now_ns) if live.refusal else live.refused

    def ended_unstarted(self, job: JobEntry) -> None:
        """Take in that a job has ended and never started."""
        job.queued = job.held = job.told_run = None
        self.forget_place(job)
        self.settle(job)

    def add_array(self, array: Array) -> None:
        """Take in an array that is in progress."""
        self.arrays[array.name] = array

    def end_array(self, array: Array) -> None:
        """Take out an array whose paperwork is done."""
        del self.arrays[array.name]

    def expanded(self, job: JobEntry, array: Array) -> None:
        """Take in that the file of an array was claimed, and its tasks are there to be issued."""
        self.arrays[array.name] = array
        job.queued, job.held, job.wait, job.attempts = None, None, None, FIRST_ATTEMPT
        self.settle(job)
        self.queue.changed(array.name)

    def ended(self, name: str, outcome: State, at_ns: int | None) -> None:
        """Let those that depend on *name* know that it has ended for good, and the array whose task it is."""
        array = self.arrays.get(array_of(name))
        if array is not None and (name in array.open or name in array.ended):
            array.task_ended(name, outcome, at_ns)
        self.decisive += self.queue.changed(name)

    def take_left(self) -> list[str]:
        """Return the names that have lost everything since the last call."""
        left, self.left = self.left, []
        return left

    def unsettle(self, name: str, why: str) -> None:
        """Start nothing of *name* until what its records say is known; *why* it is not."""
        self.unsettled[name] = why

    def settle(self, job: JobEntry) -> None:
        """Bring the planner's view of *job* up to date with its files."""
        self.version += 1
        self._note_files(job)
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
        news = self.queue.changed(job.name) or news  # it may have become an array, or stopped being one
        self.decisive += news or job.name in self.arrays
        if job.queued is None and job.held is None and job.live is None and job.wait is None:
            self.jobs.pop(job.name, None)
            if self.arrays:
                self.left.append(job.name)

    def array_state(self, name: str) -> State | None:
        """Return what *name* does if it is an array that is not over, or a task that was not issued yet."""
        if name in self.array_files:
            return State.QUEUED
        if name in self.arrays:
            return State.RUNNING
        array = self.arrays.get(array_of(name))
        return State.QUEUED if array is not None and name in array.unissued else None

    @property
    def held_arrays(self) -> frozenset[str]:
        """The arrays whose tasks must not start."""
        return frozenset(array.name for array in self.arrays.values() if array.held)

    def user_of(self, job: JobEntry) -> str:
        """Return whose job it is: the owner of its file."""
        file = job.queued or job.held
        return user_name(file.uid) if file is not None else this_user()

    def _waiting(self, job: JobEntry, file: JobFileVersion | None) -> Waiting | None:
        if file is None or file.spec is None or job.wait is None:
            return None
        retry_ns = job.attempts.not_before_ns or 0
        return Waiting(
            name=job.name,
            spec=file.spec,
            user=user_name(file.uid),
            arrived_at_ns=job.wait.arrived_at_ns,
            waited_ns_before=job.wait.waited_ns_before,
            clock_at_ns=job.wait.clock_at_ns,
            attempt=job.attempts.attempt,
            not_before_ns=max(retry_ns, job.refused.until_ns) or None,
            refused=job.refused.why if job.refused.until_ns > retry_ns else "",
            executor_problem=self.unsettled.get(job.name) or job.blocked or self.executors.problem_of(file.spec),
            elsewhere=self.executors.elsewhere(file.spec.executor),
        )
