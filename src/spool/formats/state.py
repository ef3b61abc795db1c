"""`state.json`, the dispatcher's last view: text to values and back. No decision may depend on it.

A reader ignores unknown keys, so that the file can grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeVar

from msgspec import Struct, convert, field, json
from msgspec.structs import asdict, replace

from spool.core.gpuuse import GpuWatch, RecentUse
from spool.core.model import NVIDIA, ForeignProcess, Gpu, GpuUse, Grant, Holding, Pool, Request, Result, Spec, State
from spool.formats.capabilities import used_by
from spool.formats.wire import as_json, decoded


class GpuUseView(GpuUse, frozen=True, kw_only=True):
    """A run's use of one of its GPUs: since its start, and in the last moments."""

    percent: int | None = None
    memory_bytes: int | None = None

    def use(self) -> GpuUse:
        """Return the use since the start of the run."""
        return convert(self, GpuUse, from_attributes=True)

    @staticmethod
    def of(watch: GpuWatch) -> tuple[GpuUseView, ...]:
        """Return the views of the GPUs of a run."""
        now = watch.now or (None,) * len(watch.gpus)
        return tuple(
            GpuUseView(
                percent=done.percent if done is not None else None,
                memory_bytes=done.memory_bytes if done is not None else None,
                **asdict(replace(use, mean_percent=use.mean_percent and round(use.mean_percent, 2))),
            )
            for use, done in zip(watch.gpus, now, strict=True)
        )


class JobView(Struct, kw_only=True, rename={"submitted_at_ns": "since_ns"}):
    """One job that waits, is held or runs: in `state.json`, and the part of a row in a list that is written there."""

    state: str
    reason: str = ""
    problem: str = ""  # a problem, and what to do; spool retries by itself
    run: int | None = None
    attempt: int = 1
    priority: int | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    gpus: int | None = None
    gpu_uuids: tuple[str, ...] = ()
    cpu_list: str = ""  # the CPUs that its run is pinned to
    gpu_use: tuple[GpuUseView, ...] = ()  # one for each GPU of a running job; () is unknown
    gpu_idle_ns: int = 0  # how long all of them have been idle
    resources: dict[str, int] = field(default_factory=dict)
    user: str | None = None
    project: str | None = None
    tags: tuple[str, ...] = ()
    submitted_at_ns: int | None = None
    started_at_ns: int | None = None
    time_limit_ns: int | None = None
    suspended_ns: int = 0  # total of the past suspensions
    suspended_at_ns: int | None = None  # start of the present suspension; None: not suspended
    engine: str | None = None  # the engine of its run, on another machine
    node: str | None = None  # the node where it runs there
    array: bool = False  # an array, whose tasks are jobs themselves
    beside: str = ""  # the states of the other jobs of this name, with a space between two; they wait for this one

    def gpu_watch(self, at_ns: int) -> GpuWatch | None:
        """Return the GPU use of its run as of *at_ns*, the time of the view; None if unknown."""
        uses = tuple(each.use() for each in self.gpu_use)
        return GpuWatch(at_ns, uses, self.gpu_idle_ns) if uses else None


def of_spec(spec: Spec, request: Request | None = None, grant: Grant | None = None) -> dict[str, Any]:
    """Return what each view takes from a job file whose next run gets *request*, or whose present run has *grant*."""
    request = spec.request if request is None else request
    return {
        "priority": spec.priority,
        "cpus": request.cpus if grant is None else grant.cpus,
        "memory_bytes": request.memory_bytes,
        "gpus": request.gpus,
        "gpu_uuids": () if grant is None else grant.gpu_uuids,
        "cpu_list": "" if grant is None else grant.cpu_list,
        "resources": dict(request.resources),
        "project": spec.project,
        "tags": spec.tags,
        "time_limit_ns": spec.time_limit_ns,
    }


def of_result(result: Result) -> dict[str, Any]:
    """Return what each view takes from the end of a run, or of an array."""
    return {
        "state": result.outcome,
        "reason": result.reason,
        "run": result.run,
        "attempt": result.attempt,
        "cpus": result.request.cpus,
        "memory_bytes": result.grant.memory_bytes if result.request.memory_auto else result.request.memory_bytes,
        "gpus": result.request.gpus,
        "cpu_list": result.grant.cpu_list,
        "resources": dict(result.request.resources),
        "user": result.user,
        "project": result.project,
        "tags": result.tags,
        "submitted_at_ns": result.submitted_at_ns,
        "started_at_ns": result.started_at_ns,
        "suspended_ns": result.suspended_ns,
        "node": result.node,
    }


def running_words(spec: Spec, watch: GpuWatch | None, state: State | None) -> str:
    """Return what every view says of a run in *state* if there is nothing else to say."""
    idle = watch.words(spec) if watch is not None else ""
    told = (each.running for each in used_by(spec) if each.running and state is State.RUNNING)
    return idle or next(told, "")


class GpuView(Struct, frozen=True, kw_only=True):
    """The dispatcher's view of one GPU."""

    uuid: str
    index: int
    name: str = ""
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    mig: bool = False
    utilisation_percent: int | None = None
    memory_utilisation_percent: int | None = None
    temperature_c: int | None = None
    power_w: int | None = None
    problem: str | None = None
    jobs: tuple[str, ...] = ()  # jobs that it is granted to
    taken_bytes: dict[str, int] = field(default_factory=dict)  # its memory used by jobs, where known
    foreign_processes: tuple[ForeignProcess, ...] = ()
    node: int | None = None
    links: tuple[tuple[str, int], ...] = ()
    vendor: str = NVIDIA

    @staticmethod
    def of(gpu: Gpu, jobs: Iterable[str]) -> GpuView:
        """Return the view of *gpu*, which is granted to *jobs*."""
        known = asdict(gpu)
        taken, foreign, _ = (known.pop(key) for key in ("taken_bytes", "foreign", "work"))
        return GpuView(jobs=tuple(jobs), taken_bytes=dict(taken), foreign_processes=foreign, **known)

    def gpu(self) -> Gpu:
        """Return the GPU of this view."""
        known = asdict(self)
        taken, foreign, _ = (known.pop(key) for key in ("taken_bytes", "foreign_processes", "jobs"))
        return Gpu(taken_bytes=tuple(sorted(taken.items())), foreign=foreign, **known)


class GpuLook(Struct, frozen=True):
    """The GPUs at one moment, in PCI bus order, as NVML showed them to this process or to a dispatcher.

    A GPU whose own `problem` is None can be granted; `problem` here says why the state of all GPUs is unknown.
    """

    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None
    seen_at_ns: int | None = None  # time of the NVML query; None: no answer yet
    unused: tuple[str, ...] = ()  # which others there are, without a UUID, and why


class RefusalView(Struct, frozen=True, kw_only=True):
    """A start that the machine refused, and when it is tried again."""

    why: str
    until_ns: int


class PoolView(Struct, frozen=True):
    """A named resource: its total, and the part of it that is granted."""

    total: int
    granted: int = 0  # may exceed the total after a change of the configuration

    @property
    def free(self) -> int:
        """The part that is not granted."""
        return max(self.total - self.granted, 0)


class SharedView(Struct, frozen=True, kw_only=True):
    """The dispatcher's view of the arbiter of a shared machine, and of the totals by which it plans."""

    directory: str
    problem: str = ""  # why it grants nothing, "" if it does
    problem_since_ns: int | None = None
    remedy: str = ""
    cpus: int | None = None  # None: it has never answered this dispatcher
    memory_bytes: int | None = None
    resources: tuple[Pool, ...] = ()


class MachineView(Struct, frozen=True, kw_only=True):
    """The dispatcher's view of the machine."""

    cpus: int
    cpus_free: int
    memory_bytes: int
    memory_free_bytes: int
    gpu_problem: str | None = None
    gpus_at_ns: int | None = None  # time of the NVML query; None: nothing is known of the GPUs
    gpus: tuple[GpuView, ...] = ()
    gpus_unused: tuple[str, ...] = ()  # which others there are, and why they are not used
    refusal: str = ""  # why it starts nothing now
    resources: dict[str, PoolView] = field(default_factory=dict)
    shared: SharedView | None = None  # None: the machine is this spool's alone

    def told(self) -> GpuLook | None:
        """Return the GPUs of this view, None if there is nothing about them."""
        if self.gpus_at_ns is None:
            return None
        gpus = tuple(each.gpu() for each in self.gpus)
        return GpuLook(gpus, self.gpu_problem, self.gpus_at_ns, self.gpus_unused)


class StateView(Struct, frozen=True, kw_only=True):
    """The whole view. It is as old as `at_ns`; the time of the file itself is the dispatcher's last heartbeat."""

    version: int
    at_ns: int
    pid: int  # of the dispatcher
    heartbeat_ns: int = 0
    host: str = ""
    boot_id: str = ""
    started_at_ns: int | None = None
    paused: bool = False
    problems: tuple[str, ...] = ()
    machine: MachineView | None = None
    errors: int = 0  # logged by this dispatcher
    jobs: dict[str, JobView] = field(default_factory=dict)
    held_back: Holding | None = None  # because of a guess
    refused: dict[str, RefusalView] = field(default_factory=dict)  # jobs whose start the machine refused
    executors: dict[str, str] = field(default_factory=dict)  # executors that cannot start anything now, and why
    recent: RecentUse = RecentUse()

    def counts(self) -> Counter[str]:
        """Return how many jobs are in each state: tasks count, not their arrays; each job of a name counts."""
        found = Counter(job.state for job in self.jobs.values() if not job.array)
        for job in self.jobs.values():
            found.update(job.beside.split())
        return found


V = TypeVar("V", bound=StateView)

render_state = as_json
"""`state.json`, the text of a `StateView`."""


class StateParts(Struct, frozen=True):
    """Parts of the view, for readers that do not need the jobs, which may be many."""

    machine: MachineView | None = None
    recent: RecentUse = RecentUse()


_parts_decoder = json.Decoder(StateParts)


def parse_parts(data: bytes) -> StateParts:
    """Return the parts of the view in `state.json`; those that are missing or cannot be parsed are empty."""
    return decoded(_parts_decoder, data) or StateParts()


def parse_state(data: bytes) -> StateView | None:
    """Return the view in `state.json`, None if it cannot be parsed; it may be rewritten at any moment."""
    return parse_state_as(StateView, data)


def parse_state_as(kind: type[V], data: bytes) -> V | None:
    """Return the view in `state.json` as a *kind* of it whose jobs have more to be filled in."""
    return decoded(json.Decoder(kind), data)
