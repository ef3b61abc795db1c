"""What is known of each job: the files it saw, the place in the queue, the run that is alive.

All of it can be lost: a new dispatcher finds it again in the spool, and so does a command that explains or foresees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace

from spool.core.arrays import array_of
from spool.core.backfill import Holding
from spool.core.layout import QUEUED, RUNNING
from spool.core.lifecycle import Liveness, Proof, Verdict
from spool.core.model import (
    SECOND_NS,
    Grant,
    Jid,
    Machine,
    Policy,
    Reservation,
    Result,
    Running,
    Spec,
    State,
    Stop,
    StopKind,
    Waiting,
)
from spool.core.names import LOCAL_EXECUTORS
from spool.core.order import Past
from spool.core.queue import WaitingQueue
from spool.core.runs import Runs
from spool.core.scheduler import View
from spool.executors import Executors, RunHandle, Usage
from spool.formats import journal
from spool.formats.journal import Started
from spool.formats.run_records import GrantRecord
from spool.machine.host import local_zone, this_user, user_name
from spool.state.array import Array
from spool.store.spool import Spool

INVALID = "invalid"  # the problem of a file beside which an `.error` file says more


@dataclass(slots=True)
class JobFile:
    """One version of a job file in `queued/` or `held/`, as it was last seen."""

    inode: int
    mtime_ns: int
    size: int
    changed_at_ns: int
    uid: int
    spec: Spec | None  # None: it is not to be started, and `problem` says why
    problem: str | None = None
    unread: bool = False  # it could not be read, so a look opens it again


@dataclass(frozen=True, slots=True)
class Wait:
    """A job's place in the queue and its waiting clock; on disk in the journal."""

    arrived_at_ns: int
    waited_ns_before: int = 0
    clock_at_ns: int | None = None

    def lying(self, file: JobFile, now_ns: int, *, queued: bool) -> Wait:
        """Return it for a job whose file lies in `queued/`, or else in `held/`, since its last change at the latest."""
        since_ns = min(file.changed_at_ns, now_ns)
        if queued and self.clock_at_ns is None:
            return replace(self, clock_at_ns=since_ns)
        if not queued and self.clock_at_ns is not None:
            waited_ns = self.waited_ns_before + max(0, since_ns - self.clock_at_ns)
            return Wait(self.arrived_at_ns, waited_ns, None)
        return self

    def line(self, name: str) -> journal.Waits:
        """Return what the journal says of it, of the job *name*."""
        return journal.Waits(name, self.arrived_at_ns, self.waited_ns_before, self.clock_at_ns)

    @classmethod
    def of_line(cls, line: journal.Waits) -> Wait:
        """Return what a line of the journal says."""
        return cls(line.arrived_at_ns, line.waited_ns_before, line.clock_at_ns)

    def without(self, since_ns: int, now_ns: int) -> Wait:
        """Return it when the time since then, as far as the clock ran, does not count: the job could not start."""
        if self.clock_at_ns is None:
            return self
        return replace(self, clock_at_ns=self.clock_at_ns + max(0, now_ns - max(since_ns, self.clock_at_ns)))


@dataclass(frozen=True, slots=True)
class Series:
    """How far a submission has come: retries and requeues so far, and when the next run may start."""

    attempt: int = 1
    requeues: int = 0
    not_before_ns: int | None = None


FRESH = Series()

LONGEST_PAUSE_NS = 60 * SECOND_NS


@dataclass(frozen=True, slots=True)
class Refusal:
    """How often in succession the machine has refused something, why, and until when it is not asked again."""

    times: int = 0
    why: str = ""
    until_ns: int = 0

    def again(self, why: str, now_ns: int) -> Refusal:
        """Return what follows from one refusal more: the pauses grow from a second to a minute."""
        pause_ns = min(SECOND_NS << min(self.times, 10), LONGEST_PAUSE_NS)
        return Refusal(self.times + 1, why, now_ns + pause_ns)


WELCOME = Refusal()


@dataclass(slots=True, eq=False)
class Live:
    """A run that is not over: from its start until its paperwork is done."""

    name: str
    run: int
    spec: Spec
    grant: Grant
    user: str
    wait: Wait
    series: Series
    inode: int  # of the job file in running/
    started_at_ns: int
    started_boot_ns: int  # on the clock that no one sets: since boot
    executor: str
    handle: RunHandle | None = None  # its executor's; None: nothing was started yet, or only its records are known
    spoken: bool = False  # its jid was seen, whether anybody had to know whose it is or not
    boot_id: str | None = None  # of the boot in which it was started, if that may not be this one
    silent_until_ns: int = 0  # monotonic: a missing jid proves nothing until then
    stop: Stop | None = None
    stop_recorded: bool = False  # the record `stop` says it
    unread: bool = False  # adopted, and its records could not be read yet: nothing is concluded of it
    file_missing_ns: int | None = None  # monotonic: since when its file is not in running/
    ended_at_ns: int | None = None  # when its end was seen
    mtime_ns: int | None = None  # of the job file in running/, where it was seen
    exit_code: int | None = None  # as the wrapper wrote it down
    failure: str | None = None  # why it could not be started
    refusal: str | None = None  # why the machine did not let it begin, so that its job waits on
    refused: Refusal = WELCOME  # how often it has refused this job just before
    cpu_time_ns: int | None = None
    peak_memory_bytes: int | None = None
    proof: Proof | None = None  # set once it has ended
    result: Result | None = None  # set once that is written down
    accounted: bool = False  # the history has its line
    remains: bool = False  # the wrapper is gone, processes of the run may not be
    oom_killed: bool = False
    adopted: bool = False  # started by an earlier dispatcher
    cleared: bool = False  # it was made sure that nothing outlived the wrapper
    gone: bool = False  # no process of it is left: its room is free, whether its end can be read and filed or not
    final: bool = False  # its job has ended with it
    asking: bool = False  # somebody is asked whether it may be cancelled
    kept: str = ""  # why it was not cancelled
    key: tuple[str, int] = field(init=False)  # what names this run

    def __post_init__(self) -> None:
        """Name it."""
        self.key = self.name, self.run

    @property
    def holds_room(self) -> bool:
        """Whether what it was granted is not free."""
        return not self.gone and self.proof is None

    @property
    def stop_kind(self) -> StopKind | None:
        """Return why it is being stopped, None if it is not."""
        return self.stop.kind if self.stop is not None else None

    @property
    def elsewhere(self) -> str | None:
        """Return on which other machine it runs, None if on this one."""
        return None if self.executor in LOCAL_EXECUTORS else self.executor

    @property
    def jid(self) -> Jid | None:
        """Return who its wrapper is, None as long as nobody has found out."""
        return self.handle.jid if self.handle is not None else None

    @property
    def exit_status(self) -> int | None:
        """Return what its wrapper, our own child, has ended with, as wait() reports it."""
        return self.handle.exit_status if self.handle is not None else None

    # Transitions: what becomes of it.

    def become(self, read: Live) -> None:
        """Learn that its records can be read now: it is *read*, and a stop that was ordered meanwhile stays ordered."""
        stop, recorded, handle = self.stop, self.stop_recorded, self.handle
        for each in fields(Live):
            setattr(self, each.name, getattr(read, each.name))
        if handle is not None:  # which knows what was done about it
            self.handle = handle
            if read.jid is not None:
                handle.identified(read.jid)
        if stop is not None and self.stop is None:
            self.stop, self.stop_recorded = stop, recorded

    def began(self, boot_ns: int) -> None:
        """Learn when it began, on the clock since boot."""
        self.started_boot_ns = boot_ns

    def may_be_silent(self, until_ns: int) -> None:
        """Let a missing jid prove nothing until then, monotonic."""
        self.silent_until_ns = until_ns

    def file_seen(self, inode: int, mtime_ns: int) -> None:
        """Learn that its job file lies in `running/`."""
        self.inode, self.mtime_ns, self.file_missing_ns = inode, mtime_ns, None

    def file_missing(self, at_ns: int) -> None:
        """Learn that its job file is not in `running/`, seen first at *at_ns*, monotonic."""
        self.file_missing_ns = at_ns

    def file_found(self) -> None:
        """Learn that its job file is where a retry would put it."""
        self.file_missing_ns = None

    def launched(self, handle: RunHandle) -> None:
        """Learn that its wrapper is on its way, or was started by an earlier dispatcher."""
        self.handle = handle

    def failed_to_launch(self, why: str) -> None:
        """Learn that it was not started, and never will be."""
        self.failure = why

    def taken_back(self, refusal: str | None = None) -> None:
        """Learn that it was not started: its missing jid proves that at once. *refusal* is what the machine says."""
        self.refusal = refusal or self.refusal
        self.silent_until_ns, self.cleared = 0, True

    def stop_ordered(self, stop: Stop) -> None:
        """Stop it from now on."""
        self.stop, self.asking = stop, False

    def stop_on_record(self, stop: Stop | None) -> None:
        """Learn that the record `stop` says so; *stop* is what stands there if somebody else was first."""
        self.stop = stop or self.stop
        self.stop_recorded = True

    def stop_asked(self) -> None:
        """Let it go on while somebody is asked whether it may be cancelled."""
        self.stop, self.asking = None, True

    def stop_answered(self, kept: str = "") -> None:
        """Learn that they have answered. *kept* says why it is not cancelled."""
        self.asking = False
        self.kept = kept or self.kept

    def has_spoken(self, *, spoken: bool) -> None:
        """Learn whether its jid is there, whether anybody has to know whose it is or not."""
        self.spoken = spoken

    def seen_ended(self, at_ns: int) -> None:
        """Learn that its end was seen at *at_ns*."""
        self.ended_at_ns = at_ns

    def has_result(self, result: Result) -> None:
        """Learn that its result is written down."""
        self.result = result

    def is_accounted(self, *, accounted: bool) -> None:
        """Learn whether the history has its line."""
        self.accounted = accounted

    def filed(self, *, final: bool) -> None:
        """Learn that its paperwork is done. *final*: its job has ended with it."""
        self.final = final

    # Transitions: what the supervisor learns.

    def used_memory(self, memory_bytes: int) -> None:
        """Learn that it had so much in memory at once."""
        self.peak_memory_bytes = max(self.peak_memory_bytes or 0, memory_bytes)

    def outlived(self) -> bool:
        """Learn that processes of it have outlived its wrapper; return whether that is news."""
        news, self.remains = not self.remains, True
        return news

    def nothing_left(self) -> None:
        """Learn that nothing of it is left, so that its room is free."""
        self.remains, self.cleared, self.gone = False, True, True

    def measured(self, usage: Usage) -> None:
        """Learn what it has used in all."""
        self.oom_killed = usage.oom_killed
        self.cpu_time_ns = usage.cpu_time_ns if usage.cpu_time_ns is not None else self.cpu_time_ns
        if usage.peak_memory_bytes is not None:
            self.peak_memory_bytes = usage.peak_memory_bytes

    def exited(self, code: int | None) -> None:
        """Learn which exit code its wrapper has written down; None: none yet."""
        self.exit_code = code

    def resolved(self, proof: Proof) -> None:
        """Learn that it is over, and how."""
        self.proof, self.gone = proof, True

    def refused_by_machine(self, why: str | None) -> None:
        """Learn that it is over and has not begun; *why*: the machine did not let it, where that is known."""
        self.refusal = self.refusal or why
        self.resolved(Proof(Verdict.VOID))

    @property
    def running(self) -> Running:
        """Return the run as the planner sees it; what outlived its command is being stopped as well."""
        stopping = self.stop is not None or self.remains
        return Running(
            self.name,
            self.run,
            self.user,
            self.spec,
            self.grant,
            self.started_at_ns,
            self.series.attempt,
            stopping,
            elsewhere=self.elsewhere,
        )

    @classmethod
    def of_records(
        cls,
        record: GrantRecord,
        spec: Spec,
        *,
        granted_at_ns: int,
        boot_ns: int,
        stop: Stop | None,
        inode: int,
    ) -> Live:
        """Return a run that another dispatcher has started, as its records show it."""
        return cls(
            name=record.job,
            run=record.run,
            spec=spec,
            grant=record.grant,
            user=record.user or this_user(),
            wait=Wait(record.submitted_at_ns or granted_at_ns),
            series=Series(record.attempt, record.requeues),
            inode=inode,
            started_at_ns=granted_at_ns,
            started_boot_ns=boot_ns,
            executor=record.executor,
            boot_id=record.boot_id,
            stop=stop,
            adopted=True,
        )

    @classmethod
    def of_journal(
        cls,
        spool: Spool,
        name: str,
        known: Mapping[tuple[str, int], Started],
        stopping: Mapping[tuple[str, int], Stop],
        kill_grace_ns: int,
    ) -> Live | None:
        """Return the newest run of that name that the journal knows, without its records; None if it knows none."""
        run = max((run for job, run in known if job == name), default=None)
        if run is None:
            return None
        started, spec = known[name, run], None
        with suppress(OSError):
            spec = spool.job_spec(RUNNING, name, kill_grace_ns=kill_grace_ns)
        spec = spec or Spec(command="true")
        record = GrantRecord(
            name,
            run,
            grant=Grant(spec.request.cpus, spec.request.memory_bytes, resources=spec.request.resources),
            executor=spec.executor or "process",
            boot_id=started.boot_id,
            submitted_at_ns=started.arrived_at_ns,
        )
        live = cls.of_records(
            record,
            spec,
            granted_at_ns=started.at_ns,
            boot_ns=0,
            stop=stopping.get((name, run)),
            inode=started.inode,
        )
        live.unread = True
        return live


@dataclass(slots=True, eq=False)
class Job:
    """All that is known of one name."""

    name: str
    queued: JobFile | None = None
    held: JobFile | None = None
    live: Live | None = None
    wait: Wait | None = None
    series: Series = FRESH
    refused: Refusal = WELCOME  # by the machine, since the last run that began
    last_inode: int | None = None  # of the file that waited last
    blocked: str | None = None  # why it could not be started when that was tried
    asked: str = ""  # what its start waits for, while somebody is asked about it
    parked: bool = False  # it was held when it was last seen
    why_held: str = ""  # why spool itself has held it
    told_run: int | None = None  # the run of which it was told how it ended, until the paperwork is done

    def file(self, place: str) -> JobFile | None:
        """Return its file in `queued/` or `held/`."""
        return self.queued if place == QUEUED else self.held


@dataclass(slots=True)
class Table:
    """The jobs, and the same facts as the planner wants them."""

    jobs: dict[str, Job] = field(default_factory=dict)
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    held: dict[str, Waiting] = field(default_factory=dict)
    live: dict[tuple[str, int], Live] = field(default_factory=dict)
    executors: Executors = field(default_factory=lambda: Executors(lambda: "process"))
    arrays: dict[str, Array] = field(default_factory=dict)  # in progress
    array_files: set[str] = field(default_factory=set)  # waiting files that are to be expanded
    left: list[str] = field(default_factory=list)  # names of which nothing is left since somebody asked
    unsettled: dict[str, str] = field(default_factory=dict)  # names whose records could not be read yet, and why
    told_blocked: dict[str, str] = field(default_factory=dict)  # the last reasons of jobs that could not be started
    version: int = 0  # moves with every change that may alter a decision
    runs: Runs = field(default_factory=Runs)  # those that hold what they were granted
    past: Past = field(default_factory=lambda: Past(Policy()))

    def job(self, name: str) -> Job:
        """Return the entry of *name*, made if need be."""
        job = self.jobs.get(name)
        if job is None:
            job = self.jobs[name] = Job(name)
        return job

    def add_run(self, job: Job, live: Live) -> None:
        """Take in a run of *job* that is alive."""
        job.live = live
        self.live[live.key] = live
        self.recount(live)

    def recount(self, live: Live) -> None:
        """Bring the planner's view of a run up to date, of which something has changed that decisions rest on."""
        self.version += 1
        counted = self.runs.get(live.name)
        if counted is not None and counted.run != live.run:
            counted = None
        if live.holds_room and live.key in self.live:
            run = live.running
            if counted is None:
                self.past.begin(run.user, run.spec.project, run.grant, run.started_at_ns)
            self.runs.put(run)
        elif counted is not None:
            self.runs.remove(live.name)
            at_ns = max(live.ended_at_ns or time.time_ns(), counted.started_at_ns)
            self.past.end(counted.user, counted.spec.project, counted.grant, at_ns)

    def remember(self, past: Past) -> None:
        """Plan by another past from now on."""
        self.past = past
        self.runs.learn_from(past.run_times)
        for run in self.runs.values():
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
        """Return what `decide` is asked about: by the dispatcher, and by every command that explains or foresees."""
        return View(
            machine=machine,
            elsewhere=self.executors.machines(),
            queue=self.queue,
            held=self.held,
            running=self.runs,
            ended=ended,
            arrays=arrays,
            held_arrays=self.held_arrays,
            reservations=reservations,
            past=self.past,
            paused=paused,
            holding=holding,
            zone=local_zone(),
        )

    def place(self, job: Job, now_ns: int) -> bool:
        """Give a job whose file was seen its place in the queue, and its clock; return whether it is a new submission.

        One that a person has moved out of `running/` goes on where its run stands.
        """
        file, queued = job.queued or job.held, job.queued is not None
        assert file is not None
        new = False
        if job.wait is None:
            live = job.live
            if live is not None and live.inode == file.inode and live.mtime_ns in (None, file.mtime_ns):
                job.wait, job.series = Wait(live.wait.arrived_at_ns), live.series
            else:
                job.wait, job.series, new = Wait(min(file.changed_at_ns, now_ns)), FRESH, True
        job.wait = job.wait.lying(file, now_ns, queued=queued)
        return new

    def changed(self) -> None:
        """Have the next plan made anew: something that decisions rest on has changed."""
        self.version += 1

    # A job's file.

    def see_file(self, job: Job, place: str, file: JobFile | None) -> None:
        """Take in the file of a job in `queued/` or `held/` as it was seen; None: it is not there. Settles nothing."""
        if place == QUEUED:
            job.queued = file
        else:
            job.held = file
        job.blocked = None  # what was in its way may have been this
        if (seen := job.queued or job.held) is not None:
            job.last_inode = seen.inode

    def refuse_file(self, job: Job, place: str, problem: str) -> None:
        """Take a file for one that cannot be used after all."""
        file = job.file(place)
        if file is not None:
            file.spec, file.problem = None, problem
            self.settle(job)

    def see_why_held(self, job: Job, why: str) -> None:
        """Take in why spool itself holds a job; "": it does not."""
        job.why_held = why

    # A job's place in the queue, and its clock.

    def recall_place(self, name: str, line: journal.Waits) -> None:
        """Give a job the place back that the journal remembers."""
        job = self.job(name)
        job.wait, job.parked = Wait.of_line(line), line.clock_at_ns is None

    def recall_series(self, job: Job, series: Series) -> None:
        """Let a job go on where its earlier runs have brought it."""
        job.series = series

    def park(self, job: Job, *, parked: bool) -> bool:
        """Take in whether a job is held; return whether it was."""
        was_parked, job.parked = job.parked, parked
        return was_parked

    def issue(self, task: str, array: Array, position: int, now_ns: int) -> Job:
        """Give a task of an array, which is issued now, its place: that of the array, and by its position."""
        job = self.job(task)
        job.wait = Wait(array.arrived_at_ns + position, 0, now_ns)
        array.open.add(task)
        return job

    def discount(self, job: Job, since_ns: int, now_ns: int) -> bool:
        """Do not count the time since then as waiting, where somebody looks at that; return whether it is so."""
        spec = job.queued.spec if job.queued is not None else None
        if spec is None or spec.scheduling_timeout_ns is None or job.wait is None or job.wait.clock_at_ns is None:
            return False
        job.wait = job.wait.without(since_ns, now_ns)
        self.settle(job)
        return True

    def forget_place(self, job: Job) -> None:
        """Forget the place of a job: it will not come back as the same submission."""
        job.wait, job.series, job.parked = None, FRESH, False

    # What keeps a job from starting.

    def block(self, job: Job, why: str) -> bool:
        """Keep a job that could not be started from keeping others waiting; return whether it is another reason."""
        new = self.told_blocked.get(job.name) != why
        job.blocked = self.told_blocked[job.name] = why
        self.settle(job)
        return new

    def unblock(self, job: Job) -> None:
        """Have the start of a job tried again."""
        job.blocked = None
        self.settle(job)

    def unblock_all(self) -> None:
        """Have the start of every job tried again that could not be started."""
        for job in list(self.jobs.values()):
            if job.blocked is not None:
                self.unblock(job)

    def await_answer(self, job: Job, what: str) -> None:
        """Take note of what the start of a job waits for; "": nothing any more."""
        job.asked = what

    # Runs.

    def claimed(self, job: Job, live: Live, now_ns: int) -> None:
        """Take in that the file of a job was claimed for a run."""
        job.queued, job.wait, job.series, job.refused = None, None, FRESH, WELCOME
        self.add_run(job, live)
        if job.held is not None:  # another file of its name is held
            self.place(job, now_ns)
        self.settle(job)

    def began(self, name: str) -> None:
        """Take in that a job was launched."""
        self.told_blocked.pop(name, None)

    def end_run(self, live: Live) -> None:
        """Take out a run whose paperwork is done."""
        if self.live.pop(live.key, None) is not None:
            self.recount(live)
        job = self.job(live.name)
        job.live, job.told_run = None, None

    def told(self, job: Job, run: int) -> bool:
        """Take note that it is told how a run ended; return whether that is news."""
        news, job.told_run = job.told_run != run, run
        return news

    def end_series(self, job: Job, live: Live) -> None:
        """Take in that a submission has ended with *live*; another file of its name is another submission."""
        if job.queued is None or job.queued.inode == live.inode:
            job.series = FRESH

    def go_on(self, job: Job, series: Series, wait: Wait | None) -> None:
        """Let a submission go on: *series* says how far it has come, *wait* is its place if it has a new one."""
        job.series, job.wait = series, wait or job.wait

    def refused(self, job: Job, live: Live, now_ns: int) -> None:
        """Take in that the machine refused what *live* was to be; without words it did not."""
        job.refused = live.refused.again(live.refusal, now_ns) if live.refusal else live.refused

    def ended_unstarted(self, job: Job) -> None:
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

    def expanded(self, job: Job, array: Array) -> None:
        """Take in that the file of an array was claimed, and its tasks are there to be issued."""
        self.arrays[array.name] = array
        job.queued, job.held, job.wait, job.series = None, None, None, FRESH
        self.settle(job)
        self.queue.changed(array.name)

    def ended(self, name: str, outcome: State) -> None:
        """Let those that depend on *name* know that it has ended for good, and the array whose task it is."""
        array = self.arrays.get(array_of(name))
        if array is not None and (name in array.open or name in array.ended):
            array.ended[name] = outcome
        self.queue.changed(name)

    def take_left(self) -> list[str]:
        """Return the names of which nothing is left since the last call."""
        left, self.left = self.left, []
        return left

    def unsettle(self, name: str, why: str) -> None:
        """Start nothing of *name* until what its records say is known; *why* it is not."""
        self.unsettled[name] = why

    def settle(self, job: Job) -> None:
        """Bring the planner's view of *job* up to date with its files."""
        self.version += 1
        waiting = self._waiting(job, job.queued)
        self.array_files.discard(job.name)
        if waiting is not None and (waiting.spec.is_array or job.name in self.arrays):
            if job.name not in self.arrays:
                self.array_files.add(job.name)
            waiting = None
        if waiting is not None:
            self.queue.put(waiting)
        elif job.name in self.queue:
            self.queue.remove(job.name)
        parked = self._waiting(job, job.held) if job.queued is None else None
        if parked is not None:
            self.held[job.name] = parked
        else:
            self.held.pop(job.name, None)
        self.queue.changed(job.name)  # it may be an array, or none any more
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
        """The arrays of which nothing is to start."""
        return frozenset(array.name for array in self.arrays.values() if array.held)

    def user_of(self, job: Job) -> str:
        """Return whose job it is: the owner of its file."""
        file = job.queued or job.held
        return user_name(file.uid) if file is not None else this_user()

    def _waiting(self, job: Job, file: JobFile | None) -> Waiting | None:
        if file is None or file.spec is None or job.wait is None:
            return None
        retry_ns = job.series.not_before_ns or 0
        return Waiting(
            name=job.name,
            spec=file.spec,
            user=user_name(file.uid),
            arrived_at_ns=job.wait.arrived_at_ns,
            waited_ns_before=job.wait.waited_ns_before,
            clock_at_ns=job.wait.clock_at_ns,
            attempt=job.series.attempt,
            not_before_ns=max(retry_ns, job.refused.until_ns) or None,
            refused=job.refused.why if job.refused.until_ns > retry_ns else "",
            executor_problem=self.unsettled.get(job.name) or job.blocked or self.executors.problem(file.spec.executor),
            elsewhere=self.executors.elsewhere(file.spec.executor),
        )


def presumed_grant(spec: Spec) -> Grant:
    """Return what a run is taken to have where no record says any more what it was given."""
    return Grant(cpus=spec.request.cpus, resources=spec.request.resources)


def series_after(result: Result, stopped_by: StopKind | None) -> Series:
    """Return how far a submission has come after a run that is not its last."""
    requeued = result.again == "requeue" and stopped_by is None
    return Series(result.attempt + (result.again == "retry"), result.requeues + requeued, result.again_at_ns)


def series_so_far(
    spool: Spool,
    name: str,
    arrived_at_ns: int,
    *,
    before: int | None = None,
    settle: Callable[[str, int], bool] | None = None,
) -> Series:
    """Return how far the submission that came then has come, of its runs only those *before* one.

    Its newest result says so, if it is of the same submission. A run that was prepared and never claimed is passed
    over; *settle* takes it back, or returns that it has begun after all.
    """
    for run in reversed([run for run in spool.runs(name) if before is None or run < before]):
        result = spool.result(name, run)
        if result is not None:
            if result.again is None or result.submitted_at_ns != arrived_at_ns:
                return FRESH
            stop = spool.stop(name, run)
            return series_after(result, stop.kind if stop is not None else None)
        if spool.array(name, run) is not None:
            return FRESH
        found = spool.jid(name, run)
        if found is Liveness.VOID:
            continue
        if found is not Liveness.ABSENT or (settle is not None and not settle(name, run)):
            return FRESH
    return FRESH
