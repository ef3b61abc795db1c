"""The metrics in the text format of Prometheus; the one place that imports prometheus_client, an extra of the package.

Names and labels follow the conventions: base units, `_total` for counters. docs/METRICS.md lists them all.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from spool.core.model import OUTCOMES, SECOND_NS, State
from spool.extras.metrics.sums import Histogram, RunUsage, Sums
from spool.formats.state import GpuView, MachineView, PassesView, StateView
from spool.version import __version__

_WAITING = (
    *(State.QUEUED, State.HELD, State.SUBMITTED),
    *(State.STARTING, State.RUNNING, State.STOPPING, State.INVALID),
)
_AGAIN = ("retry", "requeue", "hold")
_MESSAGES = ("delivered", "failed", "given_up")

Values = Sequence[tuple[Mapping[str, str], float]]
"""Numbers, each with its labels; all have the same label names."""

_NO_LABELS: Mapping[str, str] = {}


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
    """Return *numbers* in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(numbers))
    return bytes(generate_latest(registry))


class _Families:
    """The collector for the library. Each metric has the label `spool`, since several spools may share a machine."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Any]:
        numbers, sums, view = self._numbers, self._numbers.sums, self._numbers.view
        info = {"version": __version__, "python": platform.python_version()}
        yield self._gauge("build_info", "The version of spool; always 1.", [(info, 1)])
        yield self._gauge("dispatcher_up", "Whether a dispatcher is running.", numbers.up)
        if numbers.heartbeat_s is not None:
            text = "The last report of a dispatcher."
            yield self._gauge("dispatcher_heartbeat_timestamp_seconds", text, numbers.heartbeat_s)
        if view is not None:
            yield from self._view(view)
        yield from self._sums(sums)
        delivered = [({"result": word}, numbers.messages.get(word, 0)) for word in _MESSAGES]
        yield self._counter("notifications", "Messages by result; a failed one may be retried.", delivered)

    def _view(self, view: StateView) -> Iterator[Any]:
        if view.started_at_ns is not None:
            started = view.started_at_ns / SECOND_NS
            yield self._gauge("dispatcher_start_time_seconds", "When this dispatcher started.", started)
        yield self._gauge("paused", "Whether nothing starts because the spool is paused.", view.paused)
        problems = len(view.problems)
        yield self._gauge("problems", "Current problems, such as with the configuration.", problems)
        jobs = [job for job in view.jobs.values() if not job.array]
        states = {**dict.fromkeys((state.value for state in _WAITING), 0), **view.counts()}
        counted = [({"state": state}, count) for state, count in states.items()]
        yield self._gauge(
            "jobs", "Waiting, held and running jobs, by state. Array tasks count; arrays do not.", counted
        )
        since = [job.since_ns for job in jobs if job.state == State.QUEUED and job.since_ns is not None]
        if since:
            oldest = min(since) / SECOND_NS
            yield self._gauge("oldest_queued_timestamp_seconds", "Since when the oldest queued job has waited.", oldest)
        yield self._counter("file_event_losses", "How often the kernel dropped file events.", view.events_lost)
        yield self._counter("errors", "Errors that this dispatcher has logged.", view.errors)
        if view.passes is not None:
            yield from self._passes(view.passes)
        if view.machine is not None:
            yield from self._machine(view.machine)

    def _passes(self, passes: PassesView) -> Iterator[Any]:
        told = Histogram(passes.bounds_ns)
        told.counts, told.sum_ns = list(passes.counts), passes.sum_ns
        yield self._histogram(
            "pass_duration_seconds", "How long the passes of this dispatcher took.", [(_NO_LABELS, told)]
        )
        last = passes.last_ns / SECOND_NS
        yield self._gauge("last_pass_duration_seconds", "How long the last pass took.", last)

    def _machine(self, machine: MachineView) -> Iterator[Any]:
        use = self._numbers.use
        granted_bytes = machine.memory_bytes - machine.memory_free_bytes
        for name, text, value in (
            ("cpus", "CPUs that jobs may use.", machine.cpus),
            ("cpus_granted", "CPUs assigned to runs.", machine.cpus - machine.cpus_free),
            ("cpus_used", "CPUs that the runs' processes have kept busy since the last update.", use.cpus),
            ("memory_bytes", "Memory that jobs may use.", machine.memory_bytes),
            ("memory_granted_bytes", "Memory assigned to runs.", granted_bytes),
            (
                "memory_used_bytes",
                "Memory of the runs' processes; a shared page counts for each process.",
                use.memory_bytes,
            ),
        ):
            yield self._gauge(name, text, value)
        if machine.resources:
            pools = [({"resource": name}, pool) for name, pool in machine.resources.items()]
            totals = [(of, pool.total) for of, pool in pools]
            granted = [(of, pool.granted) for of, pool in pools]
            yield self._gauge("resources", "Total amount of a named resource.", totals)
            yield self._gauge("resources_granted", "Amount of a named resource assigned to runs.", granted)
        if machine.shared is not None:
            text = "Whether the arbiter of the shared machine grants leases to this dispatcher."
            yield self._gauge("arbiter_up", text, not machine.shared.problem)
        if machine.gpus:
            yield from self._gpus(machine.gpus)

    def _gpus(self, gpus: tuple[GpuView, ...]) -> Iterator[Any]:
        info = [({"uuid": gpu.uuid, "index": str(gpu.index), "name": gpu.name}, 1) for gpu in gpus]
        yield self._gauge("gpu_info", "The GPUs; always 1.", info)
        for name, text, values in (
            ("gpu_usable", "Whether jobs can use the GPU.", [gpu.problem is None for gpu in gpus]),
            ("gpu_jobs", "Jobs to which the GPU is assigned.", [len(gpu.jobs) for gpu in gpus]),
            (
                "gpu_foreign_processes",
                "Processes on the GPU that belong to no job.",
                [len(gpu.foreign_processes) for gpu in gpus],
            ),
            ("gpu_memory_bytes", "Memory of the GPU.", [gpu.memory_total_bytes for gpu in gpus]),
            ("gpu_memory_used_bytes", "Memory of the GPU in use.", [_used(gpu) for gpu in gpus]),
            (
                "gpu_utilisation_ratio",
                "Fraction of time in which the GPU computed.",
                [_ratio(gpu.utilisation_percent) for gpu in gpus],
            ),
            (
                "gpu_memory_utilisation_ratio",
                "Fraction of time in which the GPU read or wrote its memory.",
                [_ratio(gpu.memory_utilisation_percent) for gpu in gpus],
            ),
        ):
            known = [({"uuid": gpu.uuid}, value) for gpu, value in zip(gpus, values, strict=True) if value is not None]
            yield self._gauge(name, text, known)

    def _sums(self, sums: Sums) -> Iterator[Any]:
        outcomes = sorted(OUTCOMES)
        yield self._counter("submissions", "Jobs that entered the queue.", sums.submissions)
        ended = [({"outcome": word}, sums.outcomes[word]) for word in outcomes]
        yield self._counter("job_outcomes", "Jobs that finally ended, by outcome.", ended)
        again = [({"kind": word}, sums.again[word]) for word in _AGAIN]
        yield self._counter("retries", "Runs after which the job starts again, by reason.", again)
        yield self._histogram("job_wait_seconds", "Wait of jobs until their first start.", [(_NO_LABELS, sums.waits)])
        runs = [({"outcome": word}, sums.runs.get(word) or Histogram()) for word in outcomes]
        yield self._histogram("run_duration_seconds", "How long runs took, by outcome.", runs)
        yield self._counter("run_cpu_seconds", "CPU time of runs that ended.", sums.cpu_ns / SECOND_NS)
        text = "GPU time of runs that ended: each assigned GPU counts."
        yield self._counter("run_gpu_seconds", text, sums.gpu_ns / SECOND_NS)
        text = "GPU time of runs that ended in which the GPUs computed, where it is known."
        yield self._counter("run_gpu_busy_seconds", text, sums.gpu_busy_ns / SECOND_NS)

    def _gauge(self, name: str, text: str, values: Values | float) -> Any:
        return self._filled(GaugeMetricFamily, name, text, values)

    def _counter(self, name: str, text: str, values: Values | float) -> Any:
        return self._filled(CounterMetricFamily, name, text, values)

    def _filled(self, kind: Any, name: str, text: str, values: Values | float) -> Any:
        if isinstance(values, int | float):
            values = [(_NO_LABELS, values)]
        labels = list(values[0][0]) if values else []
        family = kind(f"spool_{name}", text, labels=["spool", *labels])
        for of, value in values:
            family.add_metric([self._numbers.spool_dir, *of.values()], float(value))
        return family

    def _histogram(self, name: str, text: str, values: Sequence[tuple[Mapping[str, str], Histogram]]) -> Any:
        family = HistogramMetricFamily(f"spool_{name}", text, labels=["spool", *values[0][0]])
        for of, histogram in values:
            buckets, total = [], 0
            for bound_ns, count in zip(histogram.bounds_ns, histogram.counts, strict=False):
                total += count
                buckets.append((str(bound_ns / SECOND_NS), total))
            buckets.append(("+Inf", sum(histogram.counts)))
            family.add_metric([self._numbers.spool_dir, *of.values()], buckets, histogram.sum_ns / SECOND_NS)
        return family


def _ratio(percent: int | None) -> float | None:
    return None if percent is None else percent / 100


def _used(gpu: GpuView) -> int | None:
    if gpu.memory_total_bytes is None or gpu.memory_free_bytes is None:
        return None
    return gpu.memory_total_bytes - gpu.memory_free_bytes
