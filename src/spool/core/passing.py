"""Who has been passed by so much work of later arrivals that it goes first.

Work counts when its run ends, for the pool that it took: processors, memory, GPUs. A job goes to the front of its
priority once later arrivals have used the whole pool that it lacks for longer than 8 hours, and for longer than 15 % of
the time that it has waited. A mere age would do worse: under load everything becomes old, and the order that of
arrival.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from operator import add, itemgetter
from typing import NamedTuple

from spool.core.model import SECOND_NS, Grant, Machine

LEAST_NS = 8 * 3600 * SECOND_NS
PART = 0.15
LONG_NS = int(LEAST_NS / PART)  # who has waited for longer has to be passed by the more work the longer it waits

_RECENT = 128  # entries that are not in order yet
_MOST = 20_000  # entries at least that are kept apart, those that arrived last
_NEAR = 100
_KNOWN = 4096  # answers that are kept


class Work(NamedTuple):
    """Pools times nanoseconds: what runs have used, or what a machine has."""

    cpus: int
    memory: int
    gpus: int

    @classmethod
    def of(cls, grant: Grant, ran_ns: int) -> Work:
        """Return what a run of that grant has used in that time."""
        return cls(grant.cpus * ran_ns, (grant.memory_bytes or 0) * ran_ns, len(grant.gpu_uuids) * ran_ns)

    @classmethod
    def whole(cls, machine: Machine) -> Work:
        """Return what the whole machine does in a nanosecond."""
        return cls(machine.cpus, machine.memory_bytes, len(machine.gpus))


class PassedWork:
    """The work of ended runs, by when their jobs arrived."""

    __slots__ = ("_arrivals", "_known", "_recent", "_sums", "_total", "_works")

    def __init__(self) -> None:
        self._arrivals: list[int] = []  # in order
        self._works: list[Work] = []
        self._sums: tuple[list[int], ...] = ([0], [0], [0])  # by pool, of all before each
        self._recent: list[tuple[int, Work]] = []
        self._total = Work(0, 0, 0)  # of all that ever ended
        self._known: dict[int, tuple[Work, Work]] = {}  # by arrival: what was later, and the total at that time

    def add(self, arrived_at_ns: int, work: Work) -> None:
        """Count the work of a run whose job arrived then."""
        self._recent.append((arrived_at_ns, work))
        total = self._total
        self._total = Work(total.cpus + work.cpus, total.memory + work.memory, total.gpus + work.gpus)
        if len(self._recent) > _RECENT:
            self._merge()

    def is_passed(self, arrived_at_ns: int, now_ns: int, whole: Work, pools: Iterable[int]) -> bool:
        """Tell whether a job that arrived then goes first: *pools*, places in `Work`, are those that it lacks."""
        waited_ns = now_ns - arrived_at_ns
        if waited_ns <= LEAST_NS:
            return False  # nobody can have done that much work since
        enough_ns = max(LEAST_NS, int(PART * waited_ns))
        known = self._known.get(arrived_at_ns)
        total = self._total
        undecided = False
        for pool in pools:
            enough = enough_ns * whole[pool]
            if known is None:
                undecided = True
            elif known[0][pool] > enough:
                return True
            elif known[0][pool] + total[pool] - known[1][pool] > enough:
                undecided = True  # no answer is asked for twice until enough has ended to alter it
        if not undecided:
            return False
        if len(self._known) > _KNOWN:
            self._known.clear()
        later = self.later(arrived_at_ns)
        self._known[arrived_at_ns] = later, total
        return any(later[pool] > enough_ns * whole[pool] for pool in pools)

    def later(self, arrived_at_ns: int) -> Work:
        """Return the work of all that arrived after that instant."""
        at = bisect_right(self._arrivals, arrived_at_ns)
        cpus, memory, gpus = (sums[-1] - sums[at] for sums in self._sums)
        for arrival, work in self._recent:
            if arrival > arrived_at_ns:
                cpus += work.cpus
                memory += work.memory
                gpus += work.gpus
        return Work(cpus, memory, gpus)

    def _merge(self) -> None:
        """Put what is recent into order; nearly all of it has arrived lately, so little has to be moved."""
        arrivals, works = self._arrivals, self._works
        first = bisect_right(arrivals, min(arrival for arrival, _ in self._recent))
        entries = [*zip(arrivals[first:], works[first:], strict=True), *self._recent]
        entries.sort(key=itemgetter(0))
        self._recent = []
        arrivals[first:] = [arrival for arrival, _ in entries]
        works[first:] = [work for _, work in entries]
        if len(arrivals) > 2 * _MOST:
            first = 0
            self._coarsen()
        for pool, sums in enumerate(self._sums):
            del sums[first + 1 :]
            sums[first:] = accumulate((work[pool] for work in works[first:]), initial=sums[first])

    def _coarsen(self) -> None:
        """Add up those that arrived long ago and within a hundredth of their age of each other.

        So memory does not grow with the number of jobs, and no work is forgotten: it takes a million jobs of a second
        to pass one by 8 hours of a large machine. A sum counts as having arrived with the first of its jobs, so that
        nobody seems to be passed by more than there was.
        """
        arrivals, works = self._arrivals, self._works
        newest = arrivals[-1]
        firsts: list[int] = []
        sums: list[Work] = []
        for arrived_at_ns, work in zip(arrivals[:-_MOST], works[:-_MOST], strict=True):
            if firsts and (arrived_at_ns - firsts[-1]) * _NEAR <= newest - arrived_at_ns:
                sums[-1] = Work(*map(add, sums[-1], work))
            else:
                firsts.append(arrived_at_ns)
                sums.append(work)
        arrivals[:-_MOST], works[:-_MOST] = firsts, sums
