"""The values used throughout the program.

Instants are integers of nanoseconds since the Unix epoch (`…_at_ns`), durations integers of
nanoseconds (`…_ns`), sizes integers of bytes (`…_bytes`). What is unknown is None, never 0 or -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from spool.core.layout import UMASK

SECOND_NS = 1_000_000_000

Parts = tuple[tuple[str, Any], ...]
"""The values of the keys that capabilities contribute to a file, each with the name of its capability."""


class State(StrEnum):
    """The state of a job. The same words in files, `--json` and history."""

    QUEUED = "queued"
    HELD = "held"
    SUBMITTED = "submitted"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    UNSCHEDULABLE = "unschedulable"
    PREEMPTED = "preempted"
    LOST = "lost"
    INVALID = "invalid"

    @property
    def ended(self) -> bool:
        """Whether the state is also an outcome of a run."""
        return self in OUTCOMES


class OutcomeView(Struct, frozen=True):
    """What every view says of jobs that have ended in one way."""

    exit_code: int  # of a command that waits for such a job; a failed job has its own
    tone: Literal["good", "bad", "warn"]  # "warn": a user or another job ended it
    colour: str  # in charts
    words: str  # of the event


OUTCOMES = {
    State.FINISHED: OutcomeView(0, "good", "#009e73", "has finished"),
    State.FAILED: OutcomeView(1, "bad", "#d55e00", "has failed"),
    State.CANCELLED: OutcomeView(130, "warn", "#888888", "was cancelled"),  # as after Ctrl-C
    State.TIMEOUT: OutcomeView(124, "bad", "#e69f00", "was stopped at its time limit"),  # as in coreutils' timeout
    State.OUT_OF_MEMORY: OutcomeView(137, "bad", "#cc79a7", "ran out of memory"),
    State.UNSCHEDULABLE: OutcomeView(75, "bad", "#999933", "could not be scheduled"),
    State.PREEMPTED: OutcomeView(143, "warn", "#56b4e9", "was preempted"),
    State.LOST: OutcomeView(125, "bad", "#f0e442", "was lost"),
}
"""The states that are outcomes of a run."""

BAD = frozenset(OUTCOMES) - {State.FINISHED}
"""The outcomes of a job that did not finish."""

ALIVE = frozenset({State.STARTING, State.RUNNING, State.STOPPING})
"""The states of a job whose run is alive on this machine."""


class StopKind(StrEnum):
    """The reasons for stopping a run: the first word of the metadir's `stop` file."""

    CANCEL = "cancel"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    REQUEUE = "requeue"
    HOLD = "hold"
    UNSCHEDULABLE = "unschedulable"  # it waited too long on its engine
    PREEMPT = "preempt"  # a short job gets its room; the reason is the name of that job


FIRST_BYTES = 4 << 30
"""The first guess of `memory = "auto"`, until a run of that name has ended."""


class Request(Struct, frozen=True):
    """The resources that a job requests."""

    cpus: int = 1
    memory_bytes: int | None = None
    gpus: int = 0
    gpu_memory_bytes: int | None = None  # per GPU; if set, the job shares its GPUs
    gpu_types: tuple[str, ...] = ()  # names or parts of names: any of them will do; () is any
    resources: tuple[tuple[str, int], ...] = ()  # named resources and their counts, ordered by name
    memory_auto: bool = False  # spool sizes it by earlier runs (see `sizes`); `memory_bytes` is the first guess
    gpu_memory_auto: bool = False  # the same; the first guess None is whole GPUs
    gpu_min_memory_bytes: int | None = None  # the least that each GPU has in total


class Grant(Struct, frozen=True):
    """The resources granted to a run."""

    cpus: int = 0
    memory_bytes: int | None = None
    gpu_uuids: tuple[str, ...] = ()
    gpu_indices: tuple[int, ...] = ()
    gpu_memory_bytes: int | None = None  # per GPU; None with GPUs means that they are not shared
    resources: tuple[tuple[str, int], ...] = ()
    resource_indices: tuple[tuple[str, tuple[int, ...]], ...] = ()  # of the resources that have indices
    gpus_elsewhere: int = 0  # number of GPUs of a run whose engine alone knows which ones
    cpu_list: str = ""  # the CPUs that it is pinned to and that no other pinned run has, "0-3,8"; "": it is not pinned

    @property
    def gpu_count(self) -> int:
        """The number of its GPUs, here or elsewhere."""
        return len(self.gpu_uuids) or self.gpus_elsewhere


class Retry(Struct, frozen=True):
    """When to retry a run that failed. Delay before retry n: min(delay * backoff**(n-1), max_delay)."""

    max: int = 0
    delay_ns: int = 0
    backoff: float = 2.0
    max_delay_ns: int = 3600 * SECOND_NS
    on: frozenset[str | int] = frozenset({"failed"})  # outcomes and exit codes
    memory_factor: float | None = None  # after `out_of_memory` the next run requests that many times the memory


class WarningSignal(Struct, frozen=True):
    """`signal = "USR1@60s"`: sent that long before the time limit."""

    name: str  # without "SIG"
    before_ns: int


SignalTo = Literal["main", "all", "shell"] | None
"""Which processes of a run get a signal (docs/KEYS.md, `signal_to`); None: main, and a shell that has a trap for it."""


class Dependencies(Struct, frozen=True):
    """Job names that a job depends on. An array's name means all of its tasks."""

    all: tuple[str, ...] = ()  # every one finished
    any: tuple[str, ...] = ()  # one finished
    ended: tuple[str, ...] = ()  # every one ended, whatever the outcome
    failed: tuple[str, ...] = ()  # every one ended badly
    each: str | None = None  # the task of that array with this task's index

    def names(self) -> tuple[str, ...]:
        """Every name that appears in a clause."""
        return self.all + self.any + self.ended + self.failed + ((self.each,) if self.each else ())


class ArraySpec(Struct, frozen=True):
    """`array = "0-99:2%4"`: the indices, and how many tasks at most run at once."""

    indices: tuple[int, ...]
    max_running: int | None = None


class ArrayTask(Struct, frozen=True):
    """The array and index of an expanded task."""

    array: str  # the name of the expanded file
    index: int
    max_running: int | None = None


DEFAULT_KILL_GRACE_NS = 10 * SECOND_NS
DEFAULT_PRIORITY = 10
MAX_REQUEUES = 3  # how many times a submission is repeated after a lost run, apart from its retries


class Spec(Struct, frozen=True):
    """The content of a job file, parsed: every key of the format page, typed, sizes and durations as integers."""

    command: str | tuple[str, ...]
    script: str | None = None  # a script that replaces the first word of `command`
    shell: str = "/bin/sh"
    setup: str | None = None
    workdir: str | None = None  # as written; None is the home directory
    env: tuple[tuple[str, str], ...] = ()
    umask: int = UMASK
    limits: tuple[tuple[str, int | None], ...] = ()  # soft ones; None: unlimited
    nice: int | None = None  # None: as the dispatcher
    request: Request = Request()
    time_limit_ns: int | None = None
    signal: WarningSignal | None = None
    signal_to: SignalTo = None
    gpu_idle_ns: int | None = None  # how long it may leave its GPUs idle; None: without limit
    gpu_idle_action: str = "warn"  # or "stop"
    kill_grace_ns: int = DEFAULT_KILL_GRACE_NS
    priority: int = DEFAULT_PRIORITY
    depends_on: Dependencies | None = None
    cancel_on_dependency_failure: bool = True
    start_after_ns: int | None = None  # the earliest start
    start_delay_ns: int | None = None  # the least delay between queueing and start
    scheduling_timeout_ns: int | None = None
    group: str | None = None
    group_limit: int | None = None
    array: ArraySpec | None = None
    matrix: tuple[tuple[str, tuple[str, ...]], ...] = ()
    rows: tuple[tuple[tuple[str, str], ...], ...] = ()
    max_running: int | None = None
    task: ArrayTask | None = None
    retry: Retry = Retry()
    requeue: bool = True
    preemptible: bool = False  # it may be stopped for a short job, and runs again later
    stdout: str | None = None
    stderr: str | None = None
    prolog: str | None = None
    epilog: str | None = None
    executor: str | None = None  # None is the configured default
    keep_session: bool = False
    project: str | None = None
    tags: tuple[str, ...] = ()
    comment: str | None = None
    parts: Parts = ()
    defaults_text: str = ""  # text of the configured defaults in force when it was read

    def part(self, capability: str) -> Any:
        """Return the value of the keys of a capability; None if the file has none of them."""
        return next((value for name, value in self.parts if name == capability), None)

    @property
    def is_sized(self) -> bool:
        """Whether its runs may request other memory than it states (see `sizes`)."""
        request = self.request
        return request.memory_auto or request.gpu_memory_auto or self.retry.memory_factor is not None

    @property
    def is_array(self) -> bool:
        """Whether the file is an array: it is expanded, never started itself."""
        return self.array is not None or bool(self.matrix) or bool(self.rows)


class JobDefaults(Struct, frozen=True):
    """Defaults for keys that a job file does not set, as values and as text.

    `winning` are keys that hooks have set: these count whatever the file sets.
    """

    kill_grace_ns: int = DEFAULT_KILL_GRACE_NS
    keys: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    winning: Mapping[str, Any] = field(default_factory=dict)


_NO_NODE = frozenset({"-", "unknown"})  # what a wrapper writes that its engine has not told the node


class Jid(Struct, frozen=True):
    """The identity of a wrapper: a pid alone proves nothing."""

    pid: int
    start_ticks: int  # since boot: field 22 of /proc/PID/stat
    boot_id: str
    pid_namespace: str  # "pid:[4026531836]"
    host: str
    engine: str | None = None  # of a run on a cluster: "cluster:4711", the engine and its id there

    @property
    def node(self) -> str | None:
        """The node of a run on a cluster; None: unknown, or it runs here."""
        return self.host if self.engine is not None and self.host not in _NO_NODE else None


SOMEONE_WHO = "someone who can write to "
"""Begins the words for a possible mover of a file in a directory that others can write to; the place follows."""


class Stop(Struct, frozen=True):
    """An order to stop a run: the reason, the user and the time."""

    kind: StopKind
    by: str  # a user, or SOMEONE_WHO and a place
    at_ns: int
    reason: str = ""

    @property
    def by_whom(self) -> str:
        """Who has given it, and the reason: "by alice: enough"."""
        return f"by {self.by}" + (f": {self.reason}" if self.reason else "")


def in_force(spec: Spec, edited: Spec) -> Spec:
    """Return the values in force for a run that began with *spec* and whose job file was *edited* since."""
    return replace(
        spec,
        time_limit_ns=edited.time_limit_ns,
        priority=edited.priority,
        gpu_idle_ns=edited.gpu_idle_ns,
        gpu_idle_action=edited.gpu_idle_action,
    )


_MOST_GPUS = 1024  # of one run on a cluster: an edited line may claim any number


class Result(Struct, frozen=True):
    """The end of a run; `result.toml` and one line of `history.jsonl`."""

    job: str
    run: int
    attempt: int
    outcome: State
    reason: str
    submitted_at_ns: int | None = None
    started_at_ns: int | None = None  # None: it never started
    ended_at_ns: int | None = None
    exit_code: int | None = None
    peak_memory_bytes: int | None = None
    cpu_time_ns: int | None = None
    requeues: int = 0  # how often this submission was run again because a run was lost
    again: str | None = None  # "retry", "requeue" or "hold": this submission goes on
    again_at_ns: int | None = None  # earliest start of the next run
    user: str | None = None
    project: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    request: Request = Request()
    grant: Grant = Grant()
    executor: str | None = None
    host: str | None = None  # of the dispatcher
    node: str | None = None  # where it ran on a cluster
    suspended_ns: int = 0  # total time suspended between start and end
    gpu_use: tuple[GpuUse, ...] = ()  # of each GPU of the grant; () is unknown
    recorded_at_ns: int | None = None  # when the history line was written, if that was long after the end
    end_is_bound: bool = False  # it was last known alive at `ended_at_ns`: it ended then or later
    parameters: tuple[tuple[str, str], ...] = ()  # of a task: its values of the array's matrix or rows
    metrics: tuple[tuple[str, str], ...] = ()  # that it has written

    @property
    def told_at_ns(self) -> int | None:
        """When its history line was written: the lines are ordered by this, not by the ends of the runs."""
        return self.recorded_at_ns if self.recorded_at_ns is not None else self.ended_at_ns

    @property
    def gpus(self) -> tuple[str, ...]:
        """The UUIDs of its GPUs; made-up ones if only its engine knows which: each counts as one that no other had."""
        elsewhere = range(min(self.grant.gpus_elsewhere, _MOST_GPUS))
        return tuple([f"{self.job}:{self.run}:{at}" for at in elsewhere]) if elsewhere else self.grant.gpu_uuids


class GpuUse(Struct, frozen=True):
    """A run's use of one of its GPUs while that was watched. None is unknown, never 0."""

    watched_ns: int = 0  # how long its utilisation was known
    mean_percent: float | None = None  # share of that time in which it computed
    peak_percent: int | None = None
    memory_watched_ns: int = 0
    mean_memory_bytes: int | None = None
    peak_memory_bytes: int | None = None
    energy_watched_ns: int = 0
    energy_mj: int | None = None  # of the GPU, divided equally among the runs that share it


class GpuWork(Struct, frozen=True):
    """The current activity of a run on one GPU. None is what NVML does not report."""

    job: str
    percent: int | None  # share of the last moments in which it computed
    memory_bytes: int | None
    counter_mj: int | None = None  # what the GPU has consumed since its driver was loaded
    sharers: int = 1  # our runs on it


NVIDIA = "NVIDIA"
"""The vendor of the GPUs that NVML lists."""


class Gpu(Struct, frozen=True):
    """One GPU or MIG instance as the machine shows it. None is unknown, and unknown is not free."""

    uuid: str
    index: int
    name: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    foreign: tuple[ForeignProcess, ...] = ()  # processes outside spool, or of a run without this GPU
    problem: str | None = None  # why no new run may start on it
    taken_bytes: tuple[tuple[str, int], ...] = ()  # (job, bytes) that our runs hold on it now, where known
    mig: bool = False  # a MIG instance: CUDA can use one of them at a time
    utilisation_percent: int | None = None  # computing time before the look; for display only
    memory_utilisation_percent: int | None = None  # the same for access to its memory
    temperature_c: int | None = None  # this and the next for display only
    power_w: int | None = None
    work: tuple[GpuWork, ...] = ()  # the activity of each of our runs that was there all the time
    node: int | None = None  # its NUMA node, on a spool with `cpu_pinning`
    links: tuple[tuple[str, int], ...] = ()  # likewise: (UUID of another GPU, NVLinks to it)
    vendor: str = NVIDIA  # who made it

    @property
    def memory_used_bytes(self) -> int | None:
        """How much of its memory is in use; None if that is unknown."""
        total, free = self.memory_total_bytes, self.memory_free_bytes
        return total - free if total is not None and free is not None else None


class ForeignProcess(Struct, frozen=True):
    """A process on a GPU that was not granted to the run of that process.

    Pid 0 is memory in use whose process cannot be seen. `job`: the process belongs to a run of that job, which was not
    granted the GPU.
    """

    pid: int
    name: str
    memory_bytes: int | None
    user: str | None = None
    job: str | None = None


class Core(Struct, frozen=True):
    """A core that runs may be pinned to: those of its CPUs (hardware threads) that may be used, and its NUMA node."""

    cpus: tuple[int, ...]
    node: int = 0


def cpus_of(cores: tuple[Core, ...]) -> int:
    """Return how many CPUs these cores have."""
    return sum(len(core.cpus) for core in cores)


class Pool(Struct, frozen=True):
    """A named resource of the whole spool, such as licences: the total, and the indices if it has any."""

    name: str
    total: int
    indices: tuple[int, ...] = ()  # each is granted to one run at a time; (): the resource is only counted


class NoLeases(Struct, frozen=True):
    """Why the arbiter of a shared machine grants nothing, if known since when, and what to do."""

    problem: str
    since_ns: int | None = None
    remedy: str = ""


class Machine(Struct, frozen=True):
    """The resources of the machine. The totals are those that may be granted, after reserves."""

    cpus: int
    memory_bytes: int
    memory_available_bytes: int | None = None  # memory that the kernel could really give now
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str | None = None  # NVML fails or hangs; None with no GPUs: the machine has none
    gpus_unused: tuple[str, ...] = ()  # which others there are, and why they are not used
    disk_free_bytes: int | None = None
    refusal: str = ""  # why it refuses to start anything now; "" if it does not
    resources: tuple[Pool, ...] = ()
    most_runs: int | None = None  # for an engine that finds the room itself: the maximum number of runs there
    title: str = ""  # the usual name of that engine
    most_pending: int | None = None  # of these, the jobs that wait there for room
    no_leases: NoLeases | None = None  # why no run may start on a shared machine now
    cores: tuple[Core, ...] = ()  # that runs are pinned to; (): runs are not pinned

    @classmethod
    def of_an_engine(cls, most_runs: int, most_pending: int | None = None) -> Machine:
        """Return the machine of an engine that plans its runs itself: it accepts every request."""
        return cls(cpus=0, memory_bytes=0, most_runs=most_runs, most_pending=most_pending)


def granted_request(spec: Spec, grant: Grant) -> Request:
    """Return the request of a run with that *grant*: that of its file, with the sizes that it got."""
    request = spec.request
    gpu_memory = grant.gpu_memory_bytes if request.gpu_memory_auto else request.gpu_memory_bytes
    return replace(request, memory_bytes=grant.memory_bytes, gpu_memory_bytes=gpu_memory)


class Holding(Struct, frozen=True, rename={"name": "job"}):
    """Resources held back for jobs whose start rests on a guess, in seconds of the whole pool.

    For the job `name` the amount keeps growing by `rate` per second from `since_ns` on.
    """

    amounts: Mapping[str, float] = field(default_factory=dict)
    name: str | None = None
    rate: float = 0.0
    since_ns: int = 0

    def at(self, now_ns: int) -> Mapping[str, float]:
        """Return the amount held back for each job until then."""
        if self.name is None or not self.rate:
            return self.amounts
        more = self.rate * max(now_ns - self.since_ns, 0) / SECOND_NS
        return {**self.amounts, self.name: self.amounts.get(self.name, 0.0) + more}


class Sized(Struct, frozen=True):
    """The request of a job's next run where that is not what its file states, and the reason in words."""

    request: Request
    why: str
    learnt: bool = False  # by the memory that similar runs used


class Waiting(Struct, frozen=True):
    """A job that waits in `queued/`, or is parked in `held/`."""

    name: str
    spec: Spec
    user: str
    arrived_at_ns: int  # place in the queue: survives edits, holds, retries and restarts
    waited_ns_before: int = 0  # waiting time already on the clock at `clock_at_ns` (holds and pauses do not count)
    clock_at_ns: int | None = None  # the waiting clock runs since then; None: it is stopped (held)
    attempt: int = 1  # of the next run
    not_before_ns: int | None = None  # a retry's delay, or the pause after a start that the machine refused
    refused: str = ""  # why the machine refused that start; "": it did not
    executor_problem: str | None = None  # why its executor cannot start it
    elsewhere: str | None = None  # name of the other machine that it is for; None: this one
    yields_to: str | None = None  # the job that its last run was preempted for, and which goes first
    preempted_at_ns: int | None = None  # when that was
    sized: Sized | None = None  # None: it requests what its file states

    @property
    def request(self) -> Request:
        """The resources that its next run requests."""
        return self.spec.request if self.sized is None else self.sized.request

    @property
    def begins_at_ns(self) -> int | None:
        """The earliest start as set in its file; None: not set."""
        begins = self.spec.start_after_ns
        delay = self.spec.start_delay_ns
        if delay is None:
            return begins
        delayed = self.arrived_at_ns + delay
        return delayed if begins is None or delayed > begins else begins

    @property
    def opens_at_ns(self) -> int | None:
        """The earliest start: from its file, or after a retry's delay. None: not limited."""
        begins = self.begins_at_ns
        retry = self.not_before_ns
        if retry is None or begins is None:
            return begins if retry is None else retry
        return max(begins, retry)

    @property
    def deadline_ns(self) -> int | None:
        """The last instant at which it has not yet waited longer than its scheduling timeout, or None.

        None without a timeout (0 means none), and while its clock is stopped.
        """
        timeout = self.spec.scheduling_timeout_ns
        if not timeout or self.clock_at_ns is None:
            return None
        return self.clock_at_ns + timeout - self.waited_ns_before

    def waited_ns(self, now_ns: int) -> int:
        """Return how long it has waited since it was (re)queued; held and paused time does not count."""
        if self.clock_at_ns is None:
            return self.waited_ns_before
        return self.waited_ns_before + max(now_ns - self.clock_at_ns, 0)


class Suspension(Struct, frozen=True):
    """The suspensions of a run. The clock of its time limit is stopped while it is suspended."""

    before_ns: int = 0  # total of the past suspensions
    since_ns: int | None = None  # start of the present suspension; None: not suspended
    since_boot_ns: int | None = None  # the same instant on the clock since boot, which cannot be set

    def total_ns(self, now_ns: int) -> int:
        """Return the total time suspended until *now_ns*."""
        return self.before_ns + (0 if self.since_ns is None else max(0, now_ns - self.since_ns))


NOT_SUSPENDED = Suspension()


class Running(Struct, frozen=True):
    """A run that is alive or not known to be gone, and so holds its grant."""

    name: str
    run: int
    user: str
    spec: Spec
    grant: Grant
    started_at_ns: int
    attempt: int = 1
    stopping: bool = False
    elsewhere: str | None = None  # the other machine that it runs on, where it holds its grant; None: this one
    submitted: bool = False  # it waits on its engine, and has not begun
    blocked: bool = False  # there, for something other than room: its node, a limit, a licence, a user
    suspension: Suspension = NOT_SUSPENDED
    stop_at_ns: int | None = None  # start of its grace: its stop was ordered, or its command ended before the others
    arrived_at_ns: int | None = None  # when its job arrived, if known
    preempted_at_ns: int | None = None  # when the run before it was preempted
    preempted_for: str | None = None  # the job that it is being stopped for

    @property
    def suspended(self) -> bool:
        """Whether it is suspended, so that its end is unknown."""
        return self.suspension.since_ns is not None

    @property
    def sized(self) -> Sized | None:
        """The request that its grant was for, if its file states another."""
        return Sized(granted_request(self.spec, self.grant), "as its last run") if self.spec.is_sized else None

    @property
    def counts_from_ns(self) -> int:
        """The start time shifted by the completed suspensions: where it would be if it had never been suspended."""
        return self.started_at_ns + self.suspension.before_ns


class Reservation(Struct, frozen=True):
    """GPUs reserved from `start` until `end`."""

    name: str
    user: str | None  # "nobody" keeps them free for interactive use
    project: str | None
    start_at_ns: int
    end_at_ns: int
    gpu_count: int | None = None
    gpu_indices: tuple[int, ...] = ()
    comment: str | None = None
    created_at_ns: int = 0

    @property
    def holder(self) -> str:
        """The user or the project that has them, in words."""
        return self.user if self.user is not None else f"project {self.project}"


class Limits(Struct, frozen=True):
    """A quota: None is unlimited."""

    max_running_jobs: int | None = None
    max_running_gpus: int | None = None
    max_running_cpus: int | None = None
    max_running_memory_bytes: int | None = None
    max_queued_jobs: int | None = None


class Policy(Struct, frozen=True):
    """The part of the configuration that decides."""

    order: str = "slowdown"  # or "arrival"; see `order`
    promotes: bool = True  # whether jobs passed by too much work go first; False in the simulator only
    protects: bool = True  # whether room is kept for the first that does not fit; False in the simulator only
    guess_budget: float = 0.1  # part of a job's wait for which guesses may hold all of a pool for it
    fair_share: bool = True
    fair_share_by: str = "user"  # or "project"
    disk_floor_bytes: int = 1 << 30
    gpu_strategy: str | None = None  # "sequential", "random", "packed", "spread"; None: the smallest memory
    gpu_use: tuple[str, ...] | None = None  # indices or UUIDs; None is all
    default_user_limits: Limits = Limits()
    default_project_limits: Limits = Limits()
    user_limits: dict[str, Limits] = field(default_factory=dict)
    project_limits: dict[str, Limits] = field(default_factory=dict)
    max_running: int | None = None  # runs of the whole spool at once; None is unlimited
    on_failure: str = "continue"  # or "pause", "halt"
    preemption: bool = True  # whether long runs of jobs that allow it are stopped for short jobs
    strict_order: bool = False  # no job overtakes one that does not fit; for comparison in the simulator


class Problem(Struct, frozen=True):
    """One mistake in a file."""

    key: str | None  # dotted: "retry.max"; None if no key is at fault
    line: int | None  # counted from 1; None if no line is at fault (a missing key)
    message: str  # a complete sentence: names the key and the line, suggests what was probably meant
    stands_for: int = 1  # more than one in the last problem of a file, if not all are listed


class EventName(StrEnum):
    """Every kind of event (docs/FORMAT.md, "Events"); the word is also the name of its hook."""

    QUEUEING = "queueing"  # new in queued/; a hook may veto it or set keys
    QUEUED = "queued"  # a new submission was found in queued/
    SUBMITTING = "submitting"  # about to start; a hook may veto it
    SUBMITTED = "submitted"  # its start is committed and the wrapper is launched
    HANDED_OVER = "handed_over"  # its engine has accepted it; it may wait there
    STARTED = "started"  # the wrapper has reported
    POLLING = "polling"  # its progress was checked while it runs
    GPU_IDLE = "gpu_idle"  # it has left its GPUs idle for too long
    FINISHED = "finished"
    FAILED = "failed"
    RETRYING = "retrying"  # a run was over, and the submission goes on with another
    CANCELLING = "cancelling"  # about to be cancelled; a hook may veto it
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    LOST = "lost"
    UNSCHEDULABLE = "unschedulable"
    HELD = "held"
    RELEASED = "released"
    RESERVATION_CREATED = "reservation_created"  # its file has appeared, and it conflicts with no other
    RESERVATION_CANCELLED = "reservation_cancelled"  # its file was removed or changed before its end
    RESERVATION_STARTED = "reservation_started"
    RESERVATION_ENDED = "reservation_ended"
    GPU_TAKEN = "gpu_taken"  # a usable GPU was granted, or is used outside spool
    GPU_FREE = "gpu_free"  # a GPU that was taken can be given again
    DISPATCHER_STARTED = "dispatcher_started"
    DISPATCHER_STOPPED = "dispatcher_stopped"


ENDS = frozenset(EventName(outcome) for outcome in OUTCOMES)
"""The events that end a job."""

OF_NO_JOB = frozenset(
    {
        EventName.RESERVATION_CREATED,
        EventName.RESERVATION_CANCELLED,
        EventName.RESERVATION_STARTED,
        EventName.RESERVATION_ENDED,
        EventName.GPU_TAKEN,
        EventName.GPU_FREE,
        EventName.DISPATCHER_STARTED,
        EventName.DISPATCHER_STOPPED,
    }
)

_GROUPS = {"ended": ENDS, "retried": frozenset({EventName.RETRYING})}

# A message at every check would be noise, and a question to the hooks about a new file is no event.
EVENT_WORDS = (*_GROUPS, *(name.value for name in EventName if name not in (EventName.POLLING, EventName.QUEUEING)))
"""The allowed words in `on` of the configuration."""

JOB_WORDS = tuple(word for word in EVENT_WORDS if word not in OF_NO_JOB)
"""The allowed words in `on` of a job file."""


def concerns(on: Iterable[str], name: EventName) -> bool:
    """Whether one of the words of *on* selects this event."""
    return any(word == name or name in _GROUPS.get(word, ()) for word in on)


class Event(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event. After a crash it may be delivered twice, with the same `id`."""

    id: str  # derived from the event, not from the time of delivery
    name: EventName
    at_ns: int
    host: str
    version: str  # of spool
    spool_dir: str
    reason: str = ""
    job: str | None = None
    is_array: bool = False  # the event concerns an array as a whole, which has no runs of its own
    run: int | None = None
    attempt: int | None = None
    user: str | None = None
    project: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    executor: str | None = None
    engine_id: str | None = None  # of the run in its engine
    request: Request | None = None
    grant: Grant | None = None
    submitted_at_ns: int | None = None
    started_at_ns: int | None = None
    result: Result | None = None  # of a run that is over
    metadir: str | None = None
    wishes: dict[str, Any] = {}  # of the job file, by the capability whose listener it asks for; shown to no hook
    reservation: str | None = None
    reserved: Reservation | None = None  # what that reservation is, or was
    gpu: str | None = None  # UUID
    keys: dict[str, Any] | None = None  # of the job file, for a hook that may set some


class Answer(Struct, frozen=True):
    """The hooks' answer to a new job, or to a proposed start or cancellation."""

    no: str | None = None  # the reason for a veto, in a hook's words
    env: tuple[tuple[str, str], ...] = ()  # variables for the run
    keys: tuple[tuple[str, dict[str, Any]], ...] = ()  # for a new job: the hooks, and the keys that each sets
