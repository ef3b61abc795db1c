"""The metrics in the text format of Prometheus; the one place that imports prometheus_client, an extra of the package.

Names and labels follow the conventions: base units, `_total` for counters. docs/EVENTS.md lists them all.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from msgspec import Struct, field
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily as Histograms

from spool.core.model import OUTCOMES, SECOND_NS, State
from spool.extras.metrics.sums import Histogram, RunUsage, Sums
from spool.formats.state import GpuView, MachineView, StateView
from spool.version import __version__

Values = Sequence[tuple[Mapping[str, str], Any]] | float
"""Numbers, each with its labels, or one without; all have the same label names. A histogram stands for a number."""
Row = tuple[Any, str, str, Values]
"""A metric: its kind, its name, its help text, its values."""

_JOBS = [
    *(State.QUEUED, State.HELD, State.SUBMITTED),
    *(State.STARTING, State.RUNNING, State.STOPPING, State.INVALID),
]


class Numbers(Struct, frozen=True):
    """The data of the metrics."""

    spool_dir: str
    sums: Sums
    up: bool
    heartbeat_s: float | None = None  # time of the file of `view`
    view: StateView | None = None
    use: RunUsage = field(default_factory=RunUsage)
    messages: dict[str, int] = field(default_factory=dict)


def render(numbers: Numbers) -> bytes:
    """Return *numbers* in the text format of Prometheus.

    Each metric has the label `spool`, since several spools may share a machine.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(numbers))
    return bytes(generate_latest(registry))


class _Families:
    """The collector for the library."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Any]:
        for kind, name, text, values in _rows(self._numbers):
            listed = values if isinstance(values, Sequence) else [({}, values)]
            family = kind(f"spool_{name}", text, labels=["spool", *(listed[0][0] if listed else ())])
            for labels, value in listed:
                words = [self._numbers.spool_dir, *labels.values()]
                if isinstance(value, Histogram):
                    bounds = [*(str(bound_ns / SECOND_NS) for bound_ns in value.bounds_ns), "+Inf"]
                    buckets = list(zip(bounds, accumulate(value.counts), strict=True))
                    family.add_metric(words, buckets, value.sum_ns / SECOND_NS)
                else:
                    family.add_metric(words, float(value))
            yield family


def _rows(numbers: Numbers) -> Iterator[Row]:
    sums, view = numbers.sums, numbers.view
    info = {"version": __version__, "python": platform.python_version()}
    yield Gauge, "build_info", "The version of spool; always 1.", [(info, 1)]
    yield Gauge, "dispatcher_up", "Whether a dispatcher is running.", numbers.up
    if numbers.heartbeat_s is not None:
        yield Gauge, "dispatcher_heartbeat_timestamp_seconds", "The last report of a dispatcher.", numbers.heartbeat_s
    if view is not None:
        yield from _of_view(view)
        if view.machine is not None:
            yield from _of_machine(view.machine, numbers.use)
    outcomes = sorted(OUTCOMES)
    ended = [({"outcome": word}, sums.outcomes[word]) for word in outcomes]
    again = [({"kind": word}, sums.again[word]) for word in ("retry", "requeue", "hold")]
    runs = [({"outcome": word}, sums.runs.get(word) or Histogram()) for word in outcomes]
    busy = "GPU time of runs that ended in which the GPUs computed, where it is known."
    messages = [({"result": word}, numbers.messages.get(word, 0)) for word in ("delivered", "failed", "given_up")]
    yield Counter, "submissions", "Jobs that entered the queue.", sums.submissions
    yield Counter, "job_outcomes", "Jobs that finally ended, by outcome.", ended
    yield Counter, "retries", "Runs after which the job starts again, by reason.", again
    yield Histograms, "job_wait_seconds", "Wait of jobs until their first start.", [({}, sums.waits)]
    yield Histograms, "run_duration_seconds", "How long runs took, by outcome.", runs
    yield Counter, "run_cpu_seconds", "CPU time of runs that ended.", sums.cpu_ns / SECOND_NS
    yield (
        Counter,
        "run_gpu_seconds",
        "GPU time of runs that ended: each assigned GPU counts.",
        sums.gpu_ns / SECOND_NS,
    )
    yield Counter, "run_gpu_busy_seconds", busy, sums.gpu_busy_ns / SECOND_NS
    yield Counter, "notifications", "Messages by result; a failed one may be retried.", messages


def _of_view(view: StateView) -> Iterator[Row]:
    if view.started_at_ns is not None:
        started = view.started_at_ns / SECOND_NS
        yield Gauge, "dispatcher_start_time_seconds", "When this dispatcher started.", started
    yield Gauge, "paused", "Whether nothing starts because the spool is paused.", view.paused
    yield Gauge, "problems", "Current problems, such as with the configuration.", len(view.problems)
    states = {**dict.fromkeys((state.value for state in _JOBS), 0), **view.counts()}
    text = "Waiting, held and running jobs, by state. Array tasks count; arrays do not."
    yield Gauge, "jobs", text, [({"state": state}, count) for state, count in states.items()]
    queued = [job.since_ns for job in view.jobs.values() if job.state == State.QUEUED and not job.array]
    if since := [since_ns for since_ns in queued if since_ns is not None]:
        text = "Since when the oldest queued job has waited."
        yield Gauge, "oldest_queued_timestamp_seconds", text, min(since) / SECOND_NS
    yield Counter, "file_event_losses", "How often the kernel dropped file events.", view.events_lost
    yield Counter, "errors", "Errors that this dispatcher has logged.", view.errors
    if (passes := view.passes) is not None:
        told = Histogram(passes.bounds_ns)
        told.counts, told.sum_ns = list(passes.counts), passes.sum_ns
        yield Histograms, "pass_duration_seconds", "How long the passes of this dispatcher took.", [({}, told)]
        yield Gauge, "last_pass_duration_seconds", "How long the last pass took.", passes.last_ns / SECOND_NS


def _of_machine(machine: MachineView, use: RunUsage) -> Iterator[Row]:
    granted_bytes = machine.memory_bytes - machine.memory_free_bytes
    busy = "CPUs that the runs' processes have kept busy since the last update."
    yield Gauge, "cpus", "CPUs that jobs may use.", machine.cpus
    yield Gauge, "cpus_granted", "CPUs assigned to runs.", machine.cpus - machine.cpus_free
    yield Gauge, "cpus_used", busy, use.cpus
    yield Gauge, "memory_bytes", "Memory that jobs may use.", machine.memory_bytes
    yield Gauge, "memory_granted_bytes", "Memory assigned to runs.", granted_bytes
    shared = "Memory of the runs' processes; a shared page counts for each process."
    yield Gauge, "memory_used_bytes", shared, use.memory_bytes
    if machine.resources:
        pools = [({"resource": name}, pool) for name, pool in machine.resources.items()]
        granted = [(of, pool.granted) for of, pool in pools]
        yield Gauge, "resources", "Total amount of a named resource.", [(of, pool.total) for of, pool in pools]
        yield Gauge, "resources_granted", "Amount of a named resource assigned to runs.", granted
    if machine.shared is not None:
        text = "Whether the arbiter of the shared machine grants leases to this dispatcher."
        yield Gauge, "arbiter_up", text, not machine.shared.problem
    if machine.gpus:
        info = [({"uuid": gpu.uuid, "index": str(gpu.index), "name": gpu.name}, 1) for gpu in machine.gpus]
        yield Gauge, "gpu_info", "The GPUs; always 1.", info
        for name, (text, of_gpu) in _OF_A_GPU.items():
            known = [({"uuid": gpu.uuid}, value) for gpu in machine.gpus if (value := of_gpu(gpu)) is not None]
            yield Gauge, f"gpu_{name}", text, known


def _ratio(percent: int | None) -> float | None:
    return None if percent is None else percent / 100


def _used(gpu: GpuView) -> int | None:
    if gpu.memory_total_bytes is None or gpu.memory_free_bytes is None:
        return None
    return gpu.memory_total_bytes - gpu.memory_free_bytes


_OF_A_GPU: dict[str, tuple[str, Callable[[GpuView], float | None]]] = {
    "usable": ("Whether jobs can use the GPU.", lambda gpu: gpu.problem is None),
    "jobs": ("Jobs to which the GPU is assigned.", lambda gpu: len(gpu.jobs)),
    "foreign_processes": ("Processes on the GPU that belong to no job.", lambda gpu: len(gpu.foreign_processes)),
    "memory_bytes": ("Memory of the GPU.", lambda gpu: gpu.memory_total_bytes),
    "memory_used_bytes": ("Memory of the GPU in use.", _used),
    "utilisation_ratio": (
        "Fraction of time in which the GPU computed.",
        lambda gpu: _ratio(gpu.utilisation_percent),
    ),
    "memory_utilisation_ratio": (
        "Fraction of time in which the GPU read or wrote its memory.",
        lambda gpu: _ratio(gpu.memory_utilisation_percent),
    ),
}
"""The metrics of each GPU; a number that is not known is left out."""
