"""The values of the metrics: counters and histograms of events, which start at zero, and the current use by runs."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict

from msgspec import Struct

from spool.core.events import ENDS, Event, EventName
from spool.core.gpuuse import mean_part
from spool.core.model import SECOND_NS, Result

_HOUR_NS = 3600 * SECOND_NS
BOUNDS_NS = (
    *(seconds * SECOND_NS for seconds in (1, 10, 60, 300, 900)),
    *(hours * _HOUR_NS for hours in (1, 4, 12, 24, 72, 168)),
)
"""Bounds for waits and run times: from a second to a week."""

COUNTED = ENDS | {EventName.QUEUED, EventName.STARTED, EventName.RETRYING}
"""The events that are counted."""

_REMEMBERED = 60_000


class RunUsage(Struct, frozen=True):
    """The current resource use of all runs of a spool together."""

    memory_bytes: int = 0
    cpus: float = 0.0  # CPUs kept busy, on average since the last look


class Histogram:
    """How many durations were within each bound, and their sum."""

    def __init__(self, bounds_ns: tuple[int, ...] = BOUNDS_NS) -> None:
        self.bounds_ns = bounds_ns
        self.counts = [0] * (len(bounds_ns) + 1)  # each counted once; the last: longer than all bounds
        self.sum_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count a duration; a negative one, from a clock that was set, is ignored."""
        duration_ns = max(0, duration_ns)
        self.counts[bisect_left(self.bounds_ns, duration_ns)] += 1
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
        self.gpu_busy_ns = 0  # time in which they computed, where known
        self._seen: OrderedDict[object, None] = OrderedDict()  # the newest, so that what is told twice counts once

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
            gpu_ns = took_ns * result.grant.gpu_count
            self.gpu_ns += gpu_ns
            ran_ns = max(0, took_ns - result.suspended_ns)  # GPUs are not looked at during a suspension
            self.gpu_busy_ns += round((mean_part(result.gpu_use) or 0.0) * ran_ns * len(result.grant.gpu_uuids))
