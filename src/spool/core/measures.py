"""What a schedule was worth: how long jobs waited, how much of the machine was used, how long the queue was.

Feitelson 2001, "Metrics for Parallel Job Scheduling and Their Convergence".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spool.core.model import SECOND_NS
from spool.core.simulation import Outcome

TAU_NS = 10 * SECOND_NS
"""Jobs shorter than this count as this long in the bounded slowdown: nobody minds 3 s of waiting for 0.1 s of work."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One schedule in numbers. None where there is nothing to take a mean of.

    Utilisation is of the time from the first submission to the last end (`makespan_ns`), as is the mean queue, and
    between 0 and 1; that of GPUs is None for a machine without. `left` counts the jobs that never started.
    """

    jobs: int
    left: int
    mean_wait_ns: int | None
    median_wait_ns: int | None
    wait_95_ns: int | None  # 95 of 100 jobs waited no longer
    mean_bounded_slowdown: float | None
    utilisation: float | None
    gpu_utilisation: float | None
    max_queue: int
    mean_queue: float | None
    makespan_ns: int


@dataclass(frozen=True, slots=True)
class Curve:
    """What was in use and how many jobs waited over time: means over stretches of equal length."""

    start_at_ns: int
    step_ns: int
    utilisation: tuple[float, ...]
    queue: tuple[float, ...]


def figures(outcomes: Sequence[Outcome], cpus: int, gpus: int = 0) -> Figures:
    """Return the figures of a schedule on a machine of that size."""
    began = [each for each in outcomes if each.started_at_ns is not None]
    waits = sorted(each.waited_ns or 0 for each in began)
    start, end = span(outcomes)
    makespan = end - start
    queue = _Steps((at, change) for each in outcomes for at, change in _waiting(each, end))
    used = sum(each.grant.cpus * _ran_ns(each) for each in began)
    gpu_used = sum(len(each.grant.gpu_uuids) * _ran_ns(each) for each in began)
    return Figures(
        jobs=len(outcomes),
        left=len(outcomes) - len(began),
        mean_wait_ns=sum(waits) // len(waits) if waits else None,
        median_wait_ns=nearest_rank(waits, 50),
        wait_95_ns=nearest_rank(waits, 95),
        mean_bounded_slowdown=sum(map(_slowdown, began)) / len(began) if began else None,
        utilisation=used / (cpus * makespan) if cpus and makespan else None,
        gpu_utilisation=gpu_used / (gpus * makespan) if gpus and makespan else None,
        max_queue=queue.highest,
        mean_queue=queue.area(start, end) / makespan if makespan else None,
        makespan_ns=makespan,
    )


def curve(outcomes: Sequence[Outcome], cpus: int, points: int, end_at_ns: int | None = None) -> Curve:
    """Return *points* means over the time from the first submission to the last end, or to *end_at_ns*.

    With *end_at_ns*, the last of several schedules' ends, their curves are on one scale of time.
    """
    start, last = span(outcomes)
    end = last if end_at_ns is None else max(end_at_ns, start)
    step = max(-(-(end - start) // points), 1)
    busy = _Steps((at, change) for each in outcomes for at, change in _using(each))
    queue = _Steps((at, change) for each in outcomes for at, change in _waiting(each, last))
    edges = [start + step * at for at in range(points + 1)]
    return Curve(
        start_at_ns=start,
        step_ns=step,
        utilisation=tuple(area / (step * max(cpus, 1)) for area in busy.areas(edges)),
        queue=tuple(area / step for area in queue.areas(edges)),
    )


def span(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Return the first submission and the last end."""
    start = min((each.submit_at_ns for each in outcomes), default=0)
    return start, max((each.ended_at_ns for each in outcomes if each.ended_at_ns is not None), default=start)


def nearest_rank(ordered: Sequence[int], percent: int) -> int | None:
    """Return the smallest of *ordered* that so many in a hundred do not exceed (the nearest rank)."""
    return ordered[max(-(-len(ordered) * percent // 100), 1) - 1] if ordered else None


def _ran_ns(each: Outcome) -> int:
    return 0 if each.started_at_ns is None or each.ended_at_ns is None else each.ended_at_ns - each.started_at_ns


def _slowdown(each: Outcome) -> float:
    ran = _ran_ns(each)
    return max(((each.waited_ns or 0) + ran) / max(ran, TAU_NS), 1.0)


def _using(each: Outcome) -> Iterable[tuple[int, int]]:
    if each.started_at_ns is None or each.ended_at_ns is None:
        return ()
    return (each.started_at_ns, each.grant.cpus), (each.ended_at_ns, -each.grant.cpus)


def _waiting(each: Outcome, last_at_ns: int) -> Iterable[tuple[int, int]]:
    until = each.started_at_ns if each.started_at_ns is not None else each.ended_at_ns
    return (each.submit_at_ns, 1), (last_at_ns if until is None else until, -1)


class _Steps:
    """A sum that changes at instants; what comes and goes at the same instant was never there."""

    def __init__(self, changes: Iterable[tuple[int, int]]) -> None:
        at_once: dict[int, int] = {}
        for at, change in changes:
            at_once[at] = at_once.get(at, 0) + change
        self._levels: list[tuple[int, int]] = []
        level = 0
        for at in sorted(at_once):
            level += at_once[at]
            self._levels.append((at, level))
        self.highest = max((level for _, level in self._levels), default=0)

    def area(self, start: int, end: int) -> int:
        return self.areas([start, end])[0]

    def areas(self, edges: Sequence[int]) -> list[int]:
        """Return the sum times ns of each stretch between neighbouring *edges*, which ascend."""
        found = [0] * (len(edges) - 1)
        levels = [*self._levels, (edges[-1], 0)]
        stretch = 0
        for (at, level), (until, _) in pairwise(levels):
            since = max(at, edges[0])
            until = min(until, edges[-1])
            while level and since < until:
                while edges[stretch + 1] <= since:
                    stretch += 1
                upto = min(until, edges[stretch + 1])
                found[stretch] += level * (upto - since)
                since = upto
        return found
