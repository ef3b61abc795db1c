"""What the dispatcher knows of each job: the files it saw, the place in the queue, the run that is alive.

All of it can be lost: a new dispatcher finds it again in the spool.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from spool.core.lifecycle import Proof
from spool.core.model import Grant, Jid, Result, Running, Spec, State, Stop, StopKind, Waiting
from spool.core.queue import WaitingQueue
from spool.dispatcher.array import Array, array_of
from spool.machine.run_groups import RunGroup

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


@dataclass(slots=True)
class Wait:
    """A job's place in the queue and its waiting clock; on disk in the journal."""

    arrived_at_ns: int
    waited_ns_before: int = 0
    clock_at_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """How far a submission has come: retries and requeues so far, and when the next run may start."""

    attempt: int = 1
    requeues: int = 0
    not_before_ns: int | None = None


FRESH = Series()


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
    view: Running
    pid: int | None = None  # our own child
    pidfd: int | None = None  # of a wrapper that is not our child
    jid: Jid | None = None
    boot_id: str | None = None  # of the boot in which it was started, if that may not be this one
    silent_until_ns: int = 0  # monotonic: a missing jid proves nothing until then
    stop: Stop | None = None
    file_missing_ns: int | None = None  # monotonic: since when its file is not in running/
    ended_at_ns: int | None = None  # when its end was seen
    mtime_ns: int | None = None  # of the job file in running/, where it was seen
    exit_status: int | None = None  # of our own child, as wait() reports it
    exit_code: int | None = None  # as the wrapper wrote it down
    failure: str | None = None  # why it could not be started
    cpu_time_ns: int | None = None
    peak_memory_bytes: int | None = None
    proof: Proof | None = None  # set once it has ended
    result: Result | None = None  # set once that is written down
    remains: bool = False  # the wrapper is gone, processes of the run may not be
    oom_killed: bool = False
    group: RunGroup | None = None  # the control group that holds it to its memory, where there is one
    adopted: bool = False  # started by an earlier dispatcher
    cleared: bool = False  # it was made sure that nothing outlived the wrapper
    final: bool = False  # its job has ended with it
    asking: bool = False  # somebody is asked whether it may be cancelled
    kept: str = ""  # why it was not cancelled

    @property
    def key(self) -> tuple[str, int]:
        """Return what names this run."""
        return self.name, self.run

    @property
    def stop_kind(self) -> StopKind | None:
        """Return why it is being stopped, None if it is not."""
        return self.stop.kind if self.stop is not None else None


@dataclass(slots=True, eq=False)
class Job:
    """All that is known of one name."""

    name: str
    queued: JobFile | None = None
    held: JobFile | None = None
    live: Live | None = None
    wait: Wait | None = None
    series: Series = FRESH
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
    version: int = 0  # moves with every change that may alter a decision

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
        self.version += 1

    def free(self, live: Live) -> None:
        """Nothing of the run is left: what it was granted can be given to the next."""
        self.version += 1

    def unblock(self) -> None:
        """Have the start of every job tried again that could not be started."""
        for job in list(self.jobs.values()):
            if job.blocked is not None:
                job.blocked = None
                self.settle(job)

    def end_run(self, live: Live) -> None:
        """Take out a run whose paperwork is done."""
        if self.live.pop(live.key, None) is not None:
            self.version += 1

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
        return Waiting(
            name=job.name,
            spec=file.spec,
            user=user_name(file.uid),
            arrived_at_ns=job.wait.arrived_at_ns,
            waited_ns_before=job.wait.waited_ns_before,
            clock_at_ns=job.wait.clock_at_ns,
            attempt=job.series.attempt,
            not_before_ns=job.series.not_before_ns,
            executor_problem=job.blocked or self.executor_problem(file.spec.executor),
        )


@lru_cache(maxsize=256)
def user_name(uid: int) -> str:
    """Return the login name of *uid*, its number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def this_user() -> str:
    """Return the login name of whoever runs this process."""
    return user_name(os.getuid())
