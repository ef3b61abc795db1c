"""Fairness among waiting jobs: what each user has used recently, and which work has overtaken a waiting job.

Fair share: jobs of users with more usage than others wait somewhat longer. The score of a waiting job (see `order`) is
multiplied by `2^(0.5 * (1 - level))`, but by at least 1/1.5; `level` is 1 for average usage, 2 for twice the average, 0
for none. Usage halves with every half-life. An absolute rank by usage would starve heavy users, so the factor is
bounded.

Passed work: a job that has been overtaken by a certain amount of later work goes first. Work counts when its run ends,
for the pool that it took: processors, memory, GPUs. A job goes to the front of its priority once later arrivals have
used the whole pool that it lacks for longer than 8 hours, and for longer than 15% of the time that it has waited. Age
alone would do worse: under load everything becomes old, and the order becomes that of arrival.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable
from heapq import heappop, heappush
from itertools import accumulate
from operator import add, itemgetter
from typing import NamedTuple

from spool.core.model import SECOND_NS, Grant, Machine, Policy

LEAST = 1 / 1.5
"""The factor of the heaviest user."""

_STEEP = 0.5
_NEGLIGIBLE = 1000  # who has used less than so small a part of all does not count as somebody to be fair to
_NOISE = 1e-12  # of the sums: where nothing has run yet, they differ by as little
_TOO_LARGE = 256.0  # doublings since the reference: numbers are taken back to a nearer one
LEAST_NS = 8 * 3600 * SECOND_NS
PART = 0.15
LONG_NS = int(LEAST_NS / PART)  # who has waited for longer has to be passed by the more work the longer it waits

_RECENT = 128  # entries that are not in order yet
_MOST = 20_000  # entries at least that are kept apart, those that arrived last
_NEAR = 100
_FOLD = 4096  # entries that are worth a fold
_KNOWN = 4096  # answers that are kept


def share_key(user: str, project: str | None, policy: Policy) -> str:
    """Return under which key usage is counted: the user, or the project ("" for none) where so configured."""
    return (project or "") if policy.fair_share_by == "project" else user


def weigh(grant: Grant, policy: Policy) -> float:
    """Return what a run of that grant uses in a second: its GPUs, and its CPUs times `cpu_weight`."""
    return grant.gpu_count + grant.cpus * policy.cpu_weight


class Shares:
    """The decayed usage of each user or project, from intervals of constant usage per second.

    Nothing is decayed step by step: what is used counts the more the later, and all that is asked for are ratios. So
    each start and each end changes two numbers, and the cost of asking does not grow with the number of runs.
    """

    __slots__ = (
        "_base",
        "_half_life_s",
        "_heap",
        "_rate",
        "_reference_ns",
        "_sum_base",
        "_sum_rate",
        "_used",
        "_watched",
    )

    def __init__(self, half_life_ns: int) -> None:
        self._half_life_s = max(half_life_ns, SECOND_NS) / SECOND_NS
        self._reference_ns: int | None = None
        self._base: dict[str, float] = {}
        self._rate: dict[str, float] = {}
        self._sum_base = self._sum_rate = 0.0
        self._used: set[str] = set()  # of those of whom nothing runs, who have used more than is negligible
        self._heap: list[tuple[float, str]] = []  # … and how much at least, the least first
        self._watched: set[str] = set()  # who is in it

    def copy(self) -> Shares:
        """Return the same usage, to be changed apart from this."""
        other = Shares.__new__(Shares)
        for each in self.__slots__:
            value = getattr(self, each)
            setattr(other, each, value.copy() if isinstance(value, (dict, set, list)) else value)
        return other

    def begin(self, key: str, rate: float, at_ns: int) -> None:
        """Count what *key* uses in a second from then on."""
        if not rate:
            return
        before = rate * self._grown(at_ns)
        self._base[key] = self._base.get(key, 0.0) - before
        self._rate[key] = self._rate.get(key, 0.0) + rate
        self._sum_base -= before
        self._sum_rate += rate
        self._used.discard(key)

    def end(self, key: str, rate: float, at_ns: int) -> None:
        """Count it no more."""
        if not rate:
            return
        until = rate * self._grown(at_ns)
        self._base[key] = self._base.get(key, 0.0) + until
        self._rate[key] = self._rate.get(key, 0.0) - rate
        self._sum_base += until
        self._sum_rate -= rate
        if self._rate[key] < rate * 1e-6:  # nothing of it runs: the noise of the sums is no usage
            self._sum_rate -= self._rate.pop(key)
            if not self._rate:
                self._sum_rate = 0.0
            self._used.add(key)
            if key not in self._watched:
                self._watched.add(key)
                heappush(self._heap, (self._base[key], key))

    def factors(self, now_ns: int, active: Collection[str]) -> dict[str, float]:
        """Return the factor of each of *active*, the keys that have jobs which wait or run."""
        grown = self._grown(now_ns)
        total = self._sum_base + self._sum_rate * grown
        if total <= self._sum_rate * grown * _NOISE:
            return dict.fromkeys(active, 1.0)
        self._forget(total / _NEGLIGIBLE)
        others = len(self._used) - sum(key in self._used for key in active)
        keys = len(active) + others
        found = {}
        for key in active:
            used = self._base.get(key, 0.0) + self._rate.get(key, 0.0) * grown
            level = max(used, 0.0) / total * keys
            found[key] = max(math.pow(2.0, _STEEP * (1 - level)), LEAST)
        return found

    def _forget(self, least: float) -> None:
        """Pass over those who have used next to nothing since, and use nothing."""
        heap = self._heap
        while heap and heap[0][0] <= least:
            _, key = heappop(heap)
            self._watched.discard(key)
            if key in self._rate:
                continue  # it is watched again when nothing of it runs any more
            if self._base[key] <= least:
                self._used.discard(key)
            else:  # it has used more since
                self._watched.add(key)
                heappush(heap, (self._base[key], key))

    def _grown(self, at_ns: int) -> float:
        """Return how much somebody who uses 1 in a second has used until then, in today's weight of the reference."""
        if self._reference_ns is None:
            self._reference_ns = at_ns
        doublings = (at_ns - self._reference_ns) / SECOND_NS / self._half_life_s
        if doublings > _TOO_LARGE:
            self._move(at_ns, doublings)
            doublings = 0.0
        return math.pow(2.0, max(doublings, -_TOO_LARGE)) * self._half_life_s / math.log(2)

    def _move(self, at_ns: int, doublings: float) -> None:
        """Take another instant as the reference."""
        smaller = math.pow(2.0, -min(doublings, 1000.0))
        self._reference_ns = at_ns
        for key in self._base:
            self._base[key] *= smaller
        self._sum_base = sum(self._base.values())
        self._heap = [(self._base[key], key) for key in sorted(self._used, key=self._base.__getitem__)]
        self._watched = set(self._used)


class Work(NamedTuple):
    """Pools times nanoseconds: what runs have used, or what a machine has."""

    cpus: int
    memory: int
    gpus: int

    @classmethod
    def of(cls, grant: Grant, ran_ns: int) -> Work:
        """Return what a run of that grant has used in that time."""
        return cls(grant.cpus * ran_ns, (grant.memory_bytes or 0) * ran_ns, grant.gpu_count * ran_ns)

    @classmethod
    def whole(cls, machine: Machine) -> Work:
        """Return what the whole machine does in a nanosecond."""
        return cls(machine.cpus, machine.memory_bytes, len(machine.gpus))


class PassedWork:
    """The work of ended runs, by when their jobs arrived."""

    __slots__ = ("_arrivals", "_folded", "_known", "_recent", "_sums", "_total", "_works")

    def __init__(self) -> None:
        self._arrivals: list[int] = []  # in order
        self._works: list[Work] = []
        self._sums: tuple[list[int], ...] = ([0], [0], [0])  # by pool, of all before each
        self._recent: list[tuple[int, Work]] = []
        self._total = Work(0, 0, 0)  # of all that ever ended
        self._known: dict[int, tuple[Work, Work]] = {}  # by arrival: what was later, and the total at that time
        self._folded = 0  # how many entries the last fold has left

    def __len__(self) -> int:
        """Return how many entries are kept apart."""
        return len(self._arrivals) + len(self._recent)

    @property
    def is_long(self) -> bool:
        """Whether it is time to fold, for what that costs."""
        return len(self._arrivals) > 2 * self._folded + _FOLD

    def fold(self, asked: Iterable[int]) -> None:
        """Add up what makes no difference to a job that arrived at one of *asked*, or that arrives from now on.

        Only these are asked about: so memory grows with the jobs that there are, not with those that there
        were. For any other instant the answer is never more than the work was.
        """
        self._merge()
        arrivals: list[int] = []
        works: list[Work] = []
        borders = iter(sorted(set(asked)))
        border = next(borders, None)
        for arrived_at_ns, work in zip(self._arrivals, self._works, strict=True):
            passed = not arrivals
            while border is not None and border < arrived_at_ns:
                passed, border = True, next(borders, None)
            if passed:
                arrivals.append(arrived_at_ns)
                works.append(work)
            else:
                works[-1] = Work(*map(add, works[-1], work))
        self._arrivals, self._works, self._folded = arrivals, works, len(arrivals)
        self._sums = tuple(
            list(accumulate((work[pool] for work in works), initial=0)) for pool in range(len(self._sums))
        )

    def copy(self) -> PassedWork:
        """Return the same work, to be changed apart from this."""
        other = PassedWork()
        other._arrivals, other._works = self._arrivals.copy(), self._works.copy()
        other._sums = tuple(sums.copy() for sums in self._sums)
        other._recent, other._total, other._folded = self._recent.copy(), self._total, self._folded
        return other

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
        if not self._recent:
            return
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
