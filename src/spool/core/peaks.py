"""How much was in use at once: a sweep over the intervals in which runs had what they were given."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul, sub


@dataclass(frozen=True, slots=True)
class Peak:
    """The most at one moment, and the first moment of it; 0 and None where there was nothing."""

    count: int = 0
    at_ns: int | None = None


class Intervals:
    """From when to when runs had CPUs and GPUs. An end is no part of its interval; one of no length is no interval.

    A GPU that several runs share counts once while any of them has it. It is told from others by its UUID, so GPUs of
    several hosts add up.
    """

    __slots__ = ("_cpus", "_ends", "_gpus", "_starts")

    def __init__(self) -> None:
        self._starts = array("q")
        self._ends = array("q")
        self._cpus = array("q")
        self._gpus: list[tuple[str, ...]] | None = None  # made by the first run that has any

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start_at_ns: int, end_at_ns: int, cpus: int, gpus: tuple[str, ...] = ()) -> None:
        """Take note of a run. Equal *gpus* had best be one object, for there may be a million of them."""
        if start_at_ns < end_at_ns and (cpus or gpus):
            if gpus and self._gpus is None:
                self._gpus = [()] * len(self._starts)
            self._starts.append(start_at_ns)
            self._ends.append(end_at_ns)
            self._cpus.append(cpus)
            if self._gpus is not None:
                self._gpus.append(gpus)

    def merge(self, other: Intervals) -> None:
        """Take note of all that *other* has."""
        if other._gpus is not None and self._gpus is None:
            self._gpus = [()] * len(self._starts)
        if self._gpus is not None:
            self._gpus.extend(other._gpus if other._gpus is not None else [()] * len(other._starts))
        self._starts.extend(other._starts)
        self._ends.extend(other._ends)
        self._cpus.extend(other._cpus)

    def sums(self) -> tuple[int, int]:
        """Return CPUs times ns, and GPUs times ns; a shared GPU counts for each run that has it."""
        lengths = list(map(sub, self._ends, self._starts))
        gpu_ns = sum(map(mul, map(len, self._gpus), lengths)) if self._gpus is not None else 0
        return sum(map(mul, self._cpus, lengths)), gpu_ns

    def peaks(self) -> tuple[Peak, Peak]:
        """Return the peak of the CPUs and that of the GPUs."""
        starts, ends = self._starts.tolist(), self._ends.tolist()
        by_start = _order(starts)
        by_end = _order(ends)
        cpu_peak = _peak_of(starts, ends, by_start, by_end, self._cpus.tolist())
        return cpu_peak, Peak() if self._gpus is None else _gpu_peak(starts, ends, by_start, by_end, self._gpus)


def _order(keys: Sequence[int]) -> Sequence[int]:
    """Return the positions in ascending order of their key; lines of a history are nearly in order already."""
    return sorted(range(len(keys)), key=keys.__getitem__)


def _peak_of(
    starts: Sequence[int], ends: Sequence[int], by_start: Sequence[int], by_end: Sequence[int], amounts: Sequence[int]
) -> Peak:
    level = highest = over = 0
    when = None
    next_end = ends[by_end[0]] if by_end else 0
    for each in by_start:
        start = starts[each]
        # Never past the last: this run itself ends later than it starts.
        while next_end <= start:
            level -= amounts[by_end[over]]
            over += 1
            next_end = ends[by_end[over]]
        level += amounts[each]
        if level > highest:
            highest, when = level, start
    return Peak(highest, when)


def _gpu_peak(
    starts: Sequence[int],
    ends: Sequence[int],
    by_start: Sequence[int],
    by_end: Sequence[int],
    gpus: Sequence[tuple[str, ...]],
) -> Peak:
    users: dict[str, int] = {}
    there_are = len(set().union(*set(gpus)))  # more are never in use
    highest = over = 0
    when = None
    for each in by_start:
        start = starts[each]
        while ends[by_end[over]] <= start:
            for gpu in gpus[by_end[over]]:
                if users[gpu] > 1:
                    users[gpu] -= 1
                else:
                    del users[gpu]
            over += 1
        for gpu in gpus[each]:
            users[gpu] = users.get(gpu, 0) + 1
        if len(users) > highest:
            highest, when = len(users), start
            if highest == there_are:
                break
    return Peak(highest, when)
