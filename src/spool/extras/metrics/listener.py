"""Metrics for Prometheus, in a file that node_exporter's textfile collector reads (docs/EVENTS.md).

Names and labels follow the conventions: base units, `_total` for counters. Counters start at zero with this process.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

from spool import __version__
from spool.core import layout
from spool.core.layout import Layout
from spool.core.model import ENDS, OUTCOMES, SECOND_NS, Event, EventName, Result, State
from spool.formats.config import Config
from spool.formats.state import GpuView, MachineView, StateView, parse_state
from spool.listeners import Listener
from spool.store.disk import Disk
from spool.store.reading import read_bytes

log = logging.getLogger(__name__)

EVERY_S = 15.0
_MODE = 0o644  # readable by the user of node_exporter
_MOST_BYTES = 1 << 30
_ALIVE_NS = 60 * SECOND_NS  # without a sign of life for this long, the dispatcher counts as gone
_REMEMBERED = 60_000  # events, so that what is told twice counts once
_HOUR_NS = 3600 * SECOND_NS
BOUNDS_NS = (
    *(seconds * SECOND_NS for seconds in (1, 10, 60, 300, 900)),
    *(hours * _HOUR_NS for hours in (1, 4, 12, 24, 72, 168)),
)
"""Bounds for waits and run times: from a second to a week."""


class Metrics(Listener):
    """Rewrites the file, at most every 15 seconds. *config* returns the configuration in force."""

    name = "metrics"
    wants = ENDS | {EventName.QUEUED, EventName.STARTED, EventName.RETRYING}

    def __init__(self, root: str, config: Callable[[], Config]) -> None:
        self._root = root
        self._config = config
        self._sums = Sums()
        self._disk = Disk(os.path.join(root, layout.STAGING))
        self._next = time.monotonic()
        self._complaint = ""

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Count the event."""
        self._sums.take(event)
        done()

    def tick(self) -> float | None:
        """Write the file if it is due."""
        left = self._next - time.monotonic()
        if left > 0:
            return left
        self._write()
        self._next = time.monotonic() + EVERY_S
        return EVERY_S

    def close(self) -> None:
        """Write the file a last time: as far as this process knows, no dispatcher is running any more."""
        self._write(up=False)

    def _write(self, *, up: bool = True) -> None:
        stated = self._config().part("metrics")
        if stated is None:
            return
        path = os.path.expanduser(stated)
        state = Layout(self._root).at(layout.STATE)
        heartbeat_ns: int | None = None
        with suppress(OSError):  # it is gone
            heartbeat_ns = os.stat(state).st_mtime_ns
        view = parse_state(read_bytes(state, _MOST_BYTES) or b"")
        alive = up and heartbeat_ns is not None and time.time_ns() - heartbeat_ns < _ALIVE_NS
        families = [*_of_dispatcher(view, heartbeat_ns, up=alive), *_of_sums(self._sums)]
        text = "".join(f"{line}\n" for family in families for line in _lines(self._root, *family))
        try:
            self._disk.put_beside(path, text.encode(errors="replace"), _MODE)
            complaint = ""
        except OSError as error:
            complaint = f"cannot write the metrics: {path}: {error.strerror or error}"
            if complaint != self._complaint:
                log.error("%s", complaint)
        self._complaint = complaint


class Histogram:
    """How many durations were within each bound, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_NS) + 1)  # each counted once; the last: longer than all bounds
        self.sum_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count a duration; a negative one, from a clock that was set, is ignored."""
        duration_ns = max(0, duration_ns)
        self.counts[bisect_left(BOUNDS_NS, duration_ns)] += 1
        self.sum_ns += duration_ns


class Sums:
    """The sums of all events since counting began."""

    def __init__(self) -> None:
        self.submissions = 0
        self.outcomes: Counter[str] = Counter()  # of jobs that ended for good
        self.again: Counter[str] = Counter()  # of runs after which the job goes on: "retry", "requeue", "hold"
        self.waits = Histogram()  # until the first start
        self.runs: dict[str, Histogram] = {}  # by the outcome of the run
        self.cpu_ns = 0  # of runs that ended
        self.gpu_ns = 0  # summed over the granted GPUs
        self._seen: OrderedDict[object, None] = OrderedDict()

    def take(self, event: Event) -> None:
        """Count an event, unless it was counted before. For an array its tasks count, not the array."""
        if event.is_array or not self._is_new(event.id):
            return
        if event.name is EventName.QUEUED:
            self.submissions += 1
        elif event.name is EventName.STARTED:
            self._start(event, event.started_at_ns, event.submitted_at_ns)
        elif event.name in ENDS:
            self.outcomes[event.name.value] += 1
        elif event.name is EventName.RETRYING:
            self.again[event.result.again if event.result is not None and event.result.again else "retry"] += 1
        if event.result is not None and (event.name in ENDS or event.name is EventName.RETRYING):
            self._end(event, event.result)

    def _is_new(self, *key: object) -> bool:
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return True

    def _start(self, event: Event, started_at_ns: int | None, submitted_at_ns: int | None) -> None:
        if event.attempt not in (None, 1) or started_at_ns is None or submitted_at_ns is None:
            return
        if self._is_new("start", event.job, event.run):
            self.waits.add(started_at_ns - submitted_at_ns)

    def _end(self, event: Event, result: Result) -> None:
        if result.started_at_ns is None or not self._is_new("end", result.job, result.run):
            return
        if not result.requeues:  # a run too short for a "started" event
            self._start(event, result.started_at_ns, result.submitted_at_ns)
        self.cpu_ns += result.cpu_time_ns or 0
        if result.ended_at_ns is not None:
            took_ns = max(0, result.ended_at_ns - result.started_at_ns)
            self.runs.setdefault(result.outcome.value, Histogram()).add(took_ns)
            self.gpu_ns += took_ns * result.grant.gpu_count


# The text.

Values = Sequence[tuple[Mapping[str, str], "float | Histogram"]] | float
"""Numbers, each with its labels, or one without; all have the same label names."""
Family = tuple[str, str, str, Values]
"""A metric: its kind, its name, its help text, its values."""


def _lines(root: str, kind: str, name: str, text: str, values: Values) -> Iterator[str]:
    """Yield the lines of a metric. Each has the label `spool`, since several spools may share a machine."""
    name = f"spool_{name}{'_total' if kind == 'counter' else ''}"
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values if isinstance(values, Sequence) else [({}, values)]:
        of = {"spool": root, **labels}
        if isinstance(value, Histogram):
            bounds = (*(str(bound_ns / SECOND_NS) for bound_ns in BOUNDS_NS), "+Inf")
            for bound, count in zip(bounds, accumulate(value.counts), strict=True):
                yield _sample(f"{name}_bucket", {**of, "le": bound}, count)
            yield _sample(f"{name}_count", of, sum(value.counts))
            yield _sample(f"{name}_sum", of, value.sum_ns / SECOND_NS)
        else:
            yield _sample(name, of, value)


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    shown = ",".join(f'{key}="{text.translate(escapes)}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {float(value)}"


def _of_sums(sums: Sums) -> Iterator[Family]:
    outcomes = sorted(OUTCOMES)
    ended = [({"outcome": word}, sums.outcomes[word]) for word in outcomes]
    again = [({"kind": word}, sums.again[word]) for word in ("retry", "requeue", "hold")]
    runs = [({"outcome": word}, sums.runs.get(word) or Histogram()) for word in outcomes]
    gpu_time = "GPU time of runs that ended: each assigned GPU counts."
    yield "counter", "submissions", "Jobs that entered the queue.", sums.submissions
    yield "counter", "job_outcomes", "Jobs that finally ended, by outcome.", ended
    yield "counter", "retries", "Runs after which the job starts again, by reason.", again
    yield "histogram", "job_wait_seconds", "Wait of jobs until their first start.", [({}, sums.waits)]
    yield "histogram", "run_duration_seconds", "How long runs took, by outcome.", runs
    yield "counter", "run_cpu_seconds", "CPU time of runs that ended.", sums.cpu_ns / SECOND_NS
    yield "counter", "run_gpu_seconds", gpu_time, sums.gpu_ns / SECOND_NS


def _of_dispatcher(view: StateView | None, heartbeat_ns: int | None, *, up: bool) -> Iterator[Family]:
    info = {"version": __version__, "python": platform.python_version()}
    yield "gauge", "build_info", "The version of spool; always 1.", [(info, 1)]
    yield "gauge", "dispatcher_up", "Whether a dispatcher is running.", up
    if heartbeat_ns is not None:
        text = "The last report of a dispatcher."
        yield "gauge", "dispatcher_heartbeat_timestamp_seconds", text, heartbeat_ns / SECOND_NS
    if view is None:
        return
    yield "gauge", "paused", "Whether nothing starts because the spool is paused.", view.paused
    yield "gauge", "problems", "Current problems, such as with the configuration.", len(view.problems)
    yield "counter", "errors", "Errors that this dispatcher has logged.", view.errors
    states = {**dict.fromkeys((state.value for state in State if not state.ended), 0), **view.counts()}
    text = "Waiting, held and running jobs, by state. Array tasks count; arrays do not."
    yield "gauge", "jobs", text, [({"state": state}, count) for state, count in states.items()]
    queued = [job.submitted_at_ns for job in view.jobs.values() if job.state == State.QUEUED and not job.array]
    if since := [since_ns for since_ns in queued if since_ns is not None]:
        text = "Since when the oldest queued job has waited."
        yield "gauge", "oldest_queued_timestamp_seconds", text, min(since) / SECOND_NS
    if view.machine is not None:
        yield from _of_machine(view.machine)


def _of_machine(machine: MachineView) -> Iterator[Family]:
    granted_bytes = machine.memory_bytes - machine.memory_free_bytes
    yield "gauge", "cpus", "CPUs that jobs may use.", machine.cpus
    yield "gauge", "cpus_granted", "CPUs assigned to runs.", machine.cpus - machine.cpus_free
    yield "gauge", "memory_bytes", "Memory that jobs may use.", machine.memory_bytes
    yield "gauge", "memory_granted_bytes", "Memory assigned to runs.", granted_bytes
    if machine.resources:
        pools = [({"resource": name}, pool) for name, pool in machine.resources.items()]
        granted = [(of, pool.granted) for of, pool in pools]
        yield "gauge", "resources", "Total amount of a named resource.", [(of, pool.total) for of, pool in pools]
        yield "gauge", "resources_granted", "Amount of a named resource assigned to runs.", granted
    if machine.shared is not None:
        text = "Whether the arbiter of the shared machine grants leases to this dispatcher."
        yield "gauge", "arbiter_up", text, not machine.shared.problem
    if machine.gpus:
        info = [({"uuid": gpu.uuid, "index": str(gpu.index), "name": gpu.name}, 1) for gpu in machine.gpus]
        yield "gauge", "gpu_info", "The GPUs; always 1.", info
        for name, (text, of_gpu) in _OF_A_GPU.items():
            known = [({"uuid": gpu.uuid}, value) for gpu in machine.gpus if (value := of_gpu(gpu)) is not None]
            yield "gauge", f"gpu_{name}", text, known


_OF_A_GPU: dict[str, tuple[str, Callable[[GpuView], float | None]]] = {
    "usable": ("Whether jobs can use the GPU.", lambda gpu: gpu.problem is None),
    "jobs": ("Jobs to which the GPU is assigned.", lambda gpu: len(gpu.jobs)),
    "foreign_processes": ("Processes on the GPU that belong to no job.", lambda gpu: len(gpu.foreign_processes)),
    "memory_bytes": ("Memory of the GPU.", lambda gpu: gpu.memory_total_bytes),
    "memory_used_bytes": ("Memory of the GPU in use.", lambda gpu: gpu.gpu().memory_used_bytes),
    "utilisation_ratio": (
        "Fraction of time in which the GPU computed.",
        lambda gpu: None if gpu.utilisation_percent is None else gpu.utilisation_percent / 100,
    ),
}
"""The metrics of each GPU; a number that is not known is left out."""
