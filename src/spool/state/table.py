"""What is known of each job: the files it saw, the place in the queue, the run that is alive.

All of it can be lost: a new dispatcher finds it again in the spool, and so does a command that explains or foresees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from spool.core.arrays import array_of
from spool.core.backfill import Holding
from spool.core.layout import RUNNING
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
from spool.core.order import Past
from spool.core.queue import WaitingQueue
from spool.core.runs import Runs
from spool.core.scheduler import View
from spool.formats.journal import Started
from spool.formats.run_records import GrantRecord
from spool.machine.host import local_zone, this_user, user_name
from spool.state.array import Array
from spool.store.spool import Spool

if TYPE_CHECKING:
    from spool.executors import RunHandle, Usage

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

    @property
    def key(self) -> tuple[str, int]:
        """Return what names this run."""
        return self.name, self.run

    @property
    def holds_room(self) -> bool:
        """Whether what it was granted is not free."""
        return not self.gone and self.proof is None

    @property
    def stop_kind(self) -> StopKind | None:
        """Return why it is being stopped, None if it is not."""
        return self.stop.kind if self.stop is not None else None

    @property
    def jid(self) -> Jid | None:
        """Who its wrapper is, None as long as nobody has found out."""
        return self.handle.jid if self.handle is not None else None

    @property
    def exit_status(self) -> int | None:
        """What its wrapper, our own child, has ended with, as wait() reports it."""
        return self.handle.exit_status if self.handle is not None else None

    # Transitions: what the launcher does with it.

    def launched(self, handle: RunHandle) -> None:
        """Know that its wrapper is on its way."""
        self.handle = handle

    def failed_to_launch(self, why: str) -> None:
        """Know that it was not started, and never will be."""
        self.failure = why

    def taken_back(self, refusal: str | None = None) -> None:
        """Know that nothing was started: its missing jid proves it at once, and its job goes back. *refusal*: why."""
        self.refusal = refusal or self.refusal
        self.silent_until_ns, self.cleared = 0, True

    # Transitions: what the supervisor learns.

    def used_memory(self, memory_bytes: int) -> None:
        """Know that it had so much in memory at once."""
        self.peak_memory_bytes = max(self.peak_memory_bytes or 0, memory_bytes)

    def outlived(self) -> bool:
        """Know that processes of it have outlived its wrapper; return whether that is news."""
        news, self.remains = not self.remains, True
        return news

    def nothing_left(self) -> None:
        """Know that nothing of it is left: its room is free."""
        self.remains, self.cleared, self.gone = False, True, True

    def measured(self, usage: Usage) -> None:
        """Know what it has used in all."""
        self.oom_killed = usage.oom_killed
        self.cpu_time_ns = usage.cpu_time_ns if usage.cpu_time_ns is not None else self.cpu_time_ns
        if usage.peak_memory_bytes is not None:
            self.peak_memory_bytes = usage.peak_memory_bytes

    def exited(self, code: int | None) -> None:
        """Know which exit code its wrapper has written down, None: none yet."""
        self.exit_code = code

    def resolved(self, proof: Proof) -> None:
        """Know that it is over, and how."""
        self.proof, self.gone = proof, True

    def refused_by_machine(self, why: str | None) -> None:
        """Know that it is over and has not begun, and what the machine did not let it have, where that is known."""
        self.refusal = self.refusal or why
        self.resolved(Proof(Verdict.VOID))

    @property
    def running(self) -> Running:
        """Return the run as the planner sees it; what outlived its command is being stopped as well."""
        stopping = self.stop is not None or self.remains
        attempt, at_ns = self.series.attempt, self.started_at_ns
        return Running(self.name, self.run, self.user, self.spec, self.grant, at_ns, attempt, stopping)

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


@dataclass(slots=True)
class Table:
    """The jobs, and the same facts as the planner wants them."""

    jobs: dict[str, Job] = field(default_factory=dict)
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    held: dict[str, Waiting] = field(default_factory=dict)
    live: dict[tuple[str, int], Live] = field(default_factory=dict)
    executor_problem: Callable[[str | None], str | None] = lambda name: None
    arrays: dict[str, Array] = field(default_factory=dict)  # in progress
    array_files: set[str] = field(default_factory=set)  # waiting files that are to be expanded
    left: list[str] = field(default_factory=list)  # names of which nothing is left since somebody asked
    unsettled: dict[str, str] = field(default_factory=dict)  # names whose records could not be read yet, and why
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

    def unblock(self) -> None:
        """Have the start of every job tried again that could not be started."""
        for job in list(self.jobs.values()):
            if job.blocked is not None:
                job.blocked = None
                self.settle(job)

    def end_run(self, live: Live) -> None:
        """Take out a run whose paperwork is done."""
        if self.live.pop(live.key, None) is not None:
            self.recount(live)

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
            executor_problem=self.unsettled.get(job.name) or job.blocked or self.executor_problem(file.spec.executor),
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
