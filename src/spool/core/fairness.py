"""Fairness among waiting jobs: the usage of each user, recent and since a job arrived, and the work that passed a job.

Fair share: jobs of users with more usage than others wait somewhat longer. The score of a waiting job (see `order`) is
multiplied by `2^(0.5 * (1 - level))`, but by at least 1/1.5; `level` is 1 for average usage, 2 for twice the average, 0
for none. Usage halves with every half-life. An absolute rank by usage would starve heavy users, so the factor is
bounded.

Own service: what a user has been served since a job arrived counts as size of that job. A user's thousand short jobs
then count together, and do not outrank, one after the other, everything that others wait for.

Passed work: a job that has been overtaken by a certain amount of later work goes first. Work counts when its run ends,
for the pool that it took: processors, memory, GPUs. A job goes to the front of its priority once later arrivals have
used the whole pool that it lacks for longer than 8 hours, and for longer than 15% of the time that it has waited. Age
alone would do worse: under load everything becomes old, and the order becomes that of arrival.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from itertools import accumulate
from operator import add, itemgetter
from typing import NamedTuple

from spool.core.model import SECOND_NS, Grant, Machine, Policy

LEAST = 1 / 1.5
"""The factor of the heaviest user."""

_STEEP = 0.5
_NEGLIGIBLE = 1000  # users below 1/1000 of the whole usage do not count towards the average
_NOISE = 1e-12  # relative noise of the sums: below it, nothing has run yet
_TOO_LARGE = 256.0  # doublings since the reference: beyond it, the numbers are rebased
LEAST_NS = 8 * 3600 * SECOND_NS
PART = 0.15
LONG_NS = int(LEAST_NS / PART)  # after a longer wait, the work needed to be passed grows with the wait

_UNITS = 1_000_000  # usage per second is counted in millionths, so that the sums of own service are exact
_POINTS = 4096  # points of a line that are at least kept

_NEAR = 100

_RECENT = 128  # entries not in order yet
_FOLD = 4096  # entries that are worth folding
_KNOWN = 4096  # cached answers


def share_key(user: str, project: str | None, policy: Policy) -> str:
    """Return the key under which usage is counted: the user, or the project ("" for none) if so configured."""
    return (project or "") if policy.fair_share_by == "project" else user


def weigh(grant: Grant, policy: Policy) -> float:
    """Return the usage per second of a run with that grant: its GPUs, and its CPUs times `cpu_weight`."""
    return grant.gpu_count + grant.cpus * policy.cpu_weight


def weigh_whole(machine: Machine, policy: Policy) -> float:
    """Return the usage per second of the whole machine."""
    return len(machine.gpus) + machine.cpus * policy.cpu_weight


def in_units(rate: float) -> int:
    """Return a usage per second as an integer, for `Served`."""
    return round(rate * _UNITS)


class Shares:
    """The decayed usage of each user or project, from intervals of constant usage per second.

    Nothing decays step by step: later usage weighs more instead, and only ratios are returned. So each start and each
    end changes two numbers, and the cost of a question does not grow with the number of runs.
    """

    def __init__(self, half_life_ns: int) -> None:
        self._half_life_s = max(half_life_ns, SECOND_NS) / SECOND_NS
        self._reference_ns: int | None = None
        self._base: dict[str, float] = {}
        self._rate: dict[str, float] = {}
        self._sum_base = self._sum_rate = 0.0

    def copy(self) -> Shares:
        """Return an independent copy."""
        other = Shares.__new__(Shares)
        other.__dict__.update(self.__dict__)
        other._base, other._rate = self._base.copy(), self._rate.copy()
        return other

    def begin(self, key: str, rate: float, at_ns: int) -> None:
        """Count *rate* for *key* per second from then on."""
        if not rate:
            return
        before = rate * self._grown(at_ns)
        self._base[key] = self._base.get(key, 0.0) - before
        self._rate[key] = self._rate.get(key, 0.0) + rate
        self._sum_base -= before
        self._sum_rate += rate

    def end(self, key: str, rate: float, at_ns: int) -> None:
        """Stop counting it."""
        if not rate:
            return
        until = rate * self._grown(at_ns)
        self._base[key] = self._base.get(key, 0.0) + until
        self._rate[key] = self._rate.get(key, 0.0) - rate
        self._sum_base += until
        self._sum_rate -= rate
        if self._rate[key] < rate * 1e-6:  # nothing of it runs: the rest is rounding noise
            self._sum_rate -= self._rate.pop(key)
            if not self._rate:
                self._sum_rate = 0.0

    def used(self, at_ns: int) -> dict[str, float]:
        """Return the decayed usage of each key, in seconds at a usage of 1 per second."""
        grown = self._grown(at_ns)
        scale = self._scale(grown)
        return {key: max(base + self._rate.get(key, 0.0) * grown, 0.0) / scale for key, base in self._base.items()}

    def recall(self, key: str, used: float, at_ns: int) -> None:
        """Add usage that `used` has returned at that instant."""
        amount = used * self._scale(self._grown(at_ns))
        self._base[key] = self._base.get(key, 0.0) + amount
        self._sum_base += amount

    def factors(self, now_ns: int, active: Collection[str]) -> dict[str, float]:
        """Return the factor of each of *active*, the keys with waiting or running jobs."""
        levels = self.levels(now_ns, active)
        if not levels:
            return dict.fromkeys(active, 1.0)
        return {key: max(math.pow(2.0, _STEEP * (1 - level)), LEAST) for key, level in levels.items()}

    def levels(self, now_ns: int, active: Collection[str]) -> dict[str, float]:
        """Return the level of each of *active*: 1 for average usage. Empty if nothing has been used."""
        grown = self._grown(now_ns)
        total = self._sum_base + self._sum_rate * grown
        if total <= self._sum_rate * grown * _NOISE:
            return {}
        least = total / _NEGLIGIBLE
        keys = len(active)
        for key, used in self._base.items():  # of a key without runs that is all
            keys += used > least and key not in self._rate and key not in active
        found = {}
        for key in active:
            used = self._base.get(key, 0.0) + self._rate.get(key, 0.0) * grown
            found[key] = max(used, 0.0) / total * keys
        return found

    def _scale(self, grown: float) -> float:
        """Return how much more usage weighs at an instant than at the reference, from `_grown` of it."""
        return grown * math.log(2) / self._half_life_s

    def _grown(self, at_ns: int) -> float:
        """Return the weighted usage until then at a rate of 1 per second, relative to the current reference."""
        if self._reference_ns is None:
            self._reference_ns = at_ns
        doublings = (at_ns - self._reference_ns) / SECOND_NS / self._half_life_s
        if doublings > _TOO_LARGE:
            self._move(at_ns, doublings)
            doublings = 0.0
        return math.pow(2.0, max(doublings, -_TOO_LARGE)) * self._half_life_s / math.log(2)

    def _move(self, at_ns: int, doublings: float) -> None:
        smaller = math.pow(2.0, -min(doublings, 1000.0))
        self._reference_ns = at_ns
        for key in self._base:
            self._base[key] *= smaller
        self._sum_base = sum(self._base.values())


class Served:
    """What a key has been served until each instant: a line through points, with a slope after the last of them.

    Exact, in units times nanoseconds, wherever no points were thinned out.
    """

    __slots__ = ("_amounts", "_slope", "_times")

    def __init__(self) -> None:
        self._times: list[int] = []
        self._amounts: list[int] = []
        self._slope = 0

    def copy(self) -> Served:
        """Return an independent copy."""
        other = Served()
        other._times, other._amounts, other._slope = self._times.copy(), self._amounts.copy(), self._slope
        return other

    def turn(self, units: int, at_ns: int) -> None:
        """Let the line rise by *units* per nanosecond more from then on (or less), in the past too."""
        times, amounts = self._times, self._amounts
        at = bisect_left(times, at_ns)
        if at == len(times) or times[at] != at_ns:
            amounts.insert(at, self.until(at_ns))
            times.insert(at, at_ns)
        for later in range(at + 1, len(times)):
            amounts[later] += units * (times[later] - at_ns)
        self._slope += units
        if len(times) > 2 * _POINTS:
            self._thin_out()

    def until(self, at_ns: int) -> int:
        """Return the amount until then."""
        times, amounts = self._times, self._amounts
        at = bisect_right(times, at_ns)
        if not at:
            return 0
        before, amount = times[at - 1], amounts[at - 1]
        if at == len(times):
            return amount + self._slope * (at_ns - before)
        if amounts[at] == amount:
            return amount
        return amount + (amounts[at] - amount) * (at_ns - before) // (times[at] - before)

    def _thin_out(self) -> None:
        """Drop old points within a hundredth of their age of the one before, so that memory does not grow with time."""
        newest, kept = self._times[-1], [0]
        for at in range(1, len(self._times)):
            at_ns = self._times[at]
            if at >= len(self._times) - _POINTS or (at_ns - self._times[kept[-1]]) * _NEAR > newest - at_ns:
                kept.append(at)
        self._times = [self._times[at] for at in kept]
        self._amounts = [self._amounts[at] for at in kept]


class Work(NamedTuple):
    """Pools times nanoseconds: the work of runs, or the capacity of a machine."""

    cpus: int
    memory: int
    gpus: int

    @classmethod
    def of(cls, grant: Grant, ran_ns: int) -> Work:
        """Return the work of a run with that grant in that time."""
        return cls(grant.cpus * ran_ns, (grant.memory_bytes or 0) * ran_ns, grant.gpu_count * ran_ns)

    @classmethod
    def whole(cls, machine: Machine) -> Work:
        """Return the work of the whole machine in a nanosecond."""
        return cls(machine.cpus, machine.memory_bytes, len(machine.gpus))


class PassedWork:
    """The work of ended runs, by when their jobs arrived."""

    __slots__ = ("_arrivals", "_folded", "_known", "_recent", "_sums", "_total", "_works")

    def __init__(self) -> None:
        self._arrivals: list[int] = []  # in order
        self._works: list[Work] = []
        self._sums: tuple[list[int], ...] = ([0], [0], [0])  # by pool: the sum of all entries before each position
        self._recent: list[tuple[int, Work]] = []
        self._total = Work(0, 0, 0)  # of all ended runs
        self._known: dict[int, tuple[Work, Work]] = {}  # by arrival: the later work, and the total at that time
        self._folded = 0  # number of entries after the last fold

    def __len__(self) -> int:
        """Return how many entries are kept apart."""
        return len(self._arrivals) + len(self._recent)

    @property
    def is_long(self) -> bool:
        """Whether enough entries have come to make a fold worth its cost."""
        return len(self._arrivals) > 2 * self._folded + _FOLD

    def fold(self, asked: Iterable[int]) -> None:
        """Merge entries that make no difference to jobs that arrived at one of *asked*, or that arrive from now on.

        Only these jobs are asked about. So memory grows with the present jobs, not with all past ones. For any other
        instant the answer never exceeds the true work.
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
        """Return an independent copy."""
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
        """Whether a job that arrived then goes first; *pools*, indices into `Work`, are those that it lacks."""
        waited_ns = now_ns - arrived_at_ns
        if waited_ns <= LEAST_NS:
            return False  # that much work is impossible in so short a time
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
                undecided = True  # the question is not repeated until enough work has ended to change the answer
        if not undecided:
            return False
        if len(self._known) > _KNOWN:
            self._known.clear()
        later = self.later(arrived_at_ns)
        self._known[arrived_at_ns] = later, total
        return any(later[pool] > enough_ns * whole[pool] for pool in pools)

    def later(self, arrived_at_ns: int) -> Work:
        """Return the work of all jobs that arrived after that instant."""
        at = bisect_right(self._arrivals, arrived_at_ns)
        cpus, memory, gpus = (sums[-1] - sums[at] for sums in self._sums)
        for arrival, work in self._recent:
            if arrival > arrived_at_ns:
                cpus += work.cpus
                memory += work.memory
                gpus += work.gpus
        return Work(cpus, memory, gpus)

    def _merge(self) -> None:
        """Merge recent entries into the sorted ones; nearly all of them arrived lately, so few entries move."""
        if not self._recent:
            return
        arrivals, works = self._arrivals, self._works
        first = bisect_right(arrivals, min(arrival for arrival, _ in self._recent))
        entries = [*zip(arrivals[first:], works[first:], strict=True), *self._recent]
        entries.sort(key=itemgetter(0))
        self._recent = []
        arrivals[first:] = [arrival for arrival, _ in entries]
        works[first:] = [work for _, work in entries]
        for pool, sums in enumerate(self._sums):
            del sums[first + 1 :]
            sums[first:] = accumulate((work[pool] for work in works[first:]), initial=sums[first])
