"""The order of waiting jobs: by priority, then the longest wait relative to size; with fairness among users.

The rule and its constants were found by experiment; docs/SCHEDULING.md has what was tried. Of two jobs of equal
priority, the one with the higher score comes first: `(waited + expected) / expected` times the factor of its user's
fair share (see below). While jobs of several users wait, `expected` includes what the job's user was served since the
job arrived. Ahead of them goes the earliest of the jobs that too much later work has passed: one at a time, so that the
others keep their order. The order is computed anew in each pass. Within one shape of jobs (see `queue`) only priority,
arrival and name differ, and the first to arrive goes first: the queue keeps each shape sorted whatever the usage of the
machine.

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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import add, itemgetter
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from spool.core.layout import LOCAL_EXECUTORS
from spool.core.model import SECOND_NS, Grant, Machine, Policy, Pool, Request, Result, Waiting
from spool.core.queue import Place, Shape, WaitingQueue, place
from spool.core.resources import FreeResources
from spool.core.runtimes import TEACHES, Expected, RunTimes
from spool.core.units import show_duration

if TYPE_CHECKING:
    from spool.core.sizes import Sizes


LEAST = 1 / 1.5
"""The factor of the heaviest user."""

_STEEP = 0.5
_NEGLIGIBLE = 1000  # users below 1/1000 of the whole usage do not count towards the average
_NOISE = 1e-12  # relative noise of the sums: below it, nothing has run yet
_TOO_LARGE = 256.0  # doublings since the reference: beyond it, the numbers are rebased
LEAST_PASSED_NS = 8 * 3600 * SECOND_NS
PART = 0.15
LONG_NS = int(LEAST_PASSED_NS / PART)  # after a longer wait, the work needed to be passed grows with the wait

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
        if waited_ns <= LEAST_PASSED_NS:
            return False  # that much work is impossible in so short a time
        enough_ns = max(LEAST_PASSED_NS, int(PART * waited_ns))
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


OrderKey = tuple[int, int, float, int, str]
"""The full sort key: 255 - priority, 0 for a promoted job, -score (or arrival), arrival, name. Smaller comes first."""

ARRIVAL, SLOWDOWN, SHORTEST, MULTIFACTOR = "arrival", "slowdown", "shortest", "multifactor"  # the last two: simulated


LEAST_NS = 60 * SECOND_NS
"""Shorter jobs count as this long: whether a job takes a second or two should not affect its place."""

_SHARE_WEIGHT = 10  # of fair share in the order `multifactor`, as clusters often configure it; that of age is 1
_FULL_AGE_NS = 7 * 24 * 3600 * SECOND_NS  # … after which a job gets no older

_DECIMALS = 6  # of a score, at most
_BEHIND = 32  # jobs of a shape that are checked if the first has waited very long


_RUNS = ""  # name of the pool that `max_running` makes: the runs themselves

Scarce = tuple[tuple[int, ...], Sequence[Pool]]


class Past:
    """Lessons from ended runs: run times, usage by user, and the work that has passed waiting jobs.

    The owner reports the begin and end of runs, and once each result, in order.
    """

    def __init__(self, policy: Policy, asked: Callable[[], Iterable[int]] | None = None) -> None:
        """Start empty; *asked* returns the arrivals of the waiting and running jobs, which can have been passed."""
        self._asked = asked
        self.run_times = RunTimes(learns=policy.learn_run_times)
        self.shares = Shares(policy.half_life_ns)
        self.served: dict[str, Served] = {}  # by the keys of the shares
        self.passed = PassedWork()
        self.passed_by: dict[str, PassedWork] = {}  # by named resource; its use is the first pool
        self._policy = policy
        self.sizes: Sizes | None = None  # where a job leaves its size to spool

    def asked_by(self, asked: Callable[[], Iterable[int]]) -> None:
        """From now on *asked* returns these arrivals."""
        self._asked = asked

    def begin(self, user: str, project: str | None, grant: Grant, at_ns: int) -> None:
        """Count the usage of a run from its start on."""
        key, rate = share_key(user, project, self._policy), weigh(grant, self._policy)
        self.shares.begin(key, rate, at_ns)
        self._serve(key, in_units(rate), at_ns)

    def end(self, user: str, project: str | None, grant: Grant, at_ns: int) -> None:
        """Count the usage up to its end."""
        key, rate = share_key(user, project, self._policy), weigh(grant, self._policy)
        self.shares.end(key, rate, at_ns)
        self._serve(key, -in_units(rate), at_ns)

    def _serve(self, key: str, units: int, at_ns: int) -> None:
        if units:
            served = self.served.get(key)
            if served is None:
                served = self.served[key] = Served()
            served.turn(units, at_ns)

    def copy(self) -> Past:
        """Return an independent copy; the learnt run times are shared, for reading only."""
        other = Past.__new__(Past)
        other._asked = None  # the owner of the copy knows its jobs
        other._policy, other.run_times, other.sizes = self._policy, self.run_times, self.sizes
        other.shares, other.passed = self.shares.copy(), self.passed.copy()
        other.served = {key: served.copy() for key, served in self.served.items()}
        other.passed_by = {name: passed.copy() for name, passed in self.passed_by.items()}
        return other

    def learn(self, user: str, result: Result) -> bool:
        """Use the result of a run: its run time for later guesses, its work for the jobs that it passed, its peaks.

        Return whether jobs like it have another size now.
        """
        if result.started_at_ns is None or result.ended_at_ns is None:
            return False
        ran_ns = max(result.ended_at_ns - result.started_at_ns, 0)
        if result.outcome in TEACHES:
            self.run_times.add(user, result.job, result.request, max(ran_ns - result.suspended_ns, 0))
        elsewhere = result.executor not in (None, *LOCAL_EXECUTORS)
        self.pass_by(result.submitted_at_ns, result.grant, ran_ns, elsewhere=elsewhere)
        return self.sizes is not None and self.sizes.add(user, result)

    def pass_by(self, arrived_at_ns: int | None, grant: Grant, ran_ns: int, *, elsewhere: bool) -> None:
        """Count the work of an ended run, whose job arrived at *arrived_at_ns*, for the jobs that it passed."""
        if arrived_at_ns is None or elsewhere:
            return
        self._add(self.passed, arrived_at_ns, Work.of(grant, ran_ns))
        runs = () if self._policy.max_running is None else ((_RUNS, 1),)
        for name, count in (*grant.resources, *runs):
            passed = self.passed_by.setdefault(name, PassedWork())
            self._add(passed, arrived_at_ns, Work(count * ran_ns, 0, 0))

    def _add(self, passed: PassedWork, arrived_at_ns: int, work: Work) -> None:
        passed.add(arrived_at_ns, work)
        if self._asked is not None and passed.is_long:
            passed.fold(self._asked())


class OrderFactors(Struct, frozen=True):
    """The factors of a job's place. `score` is None if the order is not by slowdown."""

    waited_ns: int
    expected: Expected
    factor: float  # of fair share; 1 if no other user competes
    own_ns: int  # what its user was served since it arrived, in time of the whole machine; 0 if no other competes
    score: float | None
    was_passed: bool  # overtaken by enough later work to go first

    def words(self, other: float | None = None) -> str:
        """Return the numbers that determine the job's place; the score with the digits that tell it from *other*."""
        waited = f"waited {show_duration(self.waited_ns)}"
        if self.was_passed:
            return f"{waited}; goes first: later arrivals have passed it by too much work"
        if self.score is None:
            return waited
        counts_as = f"counted as {show_duration(LEAST_NS)}" if self.expected.ns < LEAST_NS else ""
        terms = f"{waited}, expected run time {counts_as or show_duration(self.expected.ns)}"
        if self.own_ns >= SECOND_NS:
            terms = f"{terms}, own service {show_duration(self.own_ns)}"
        if abs(self.factor - 1) >= 0.005:
            terms = f"{terms}, fair share \N{MULTIPLICATION SIGN}{self.factor:.2f}"
        return f"score {show_score(self.score, other)} ({terms})"

    def words_behind(self, first: OrderFactors) -> str:
        """Return why a job comes after one of the same priority, whose factors are *first*; "" if the order says it."""
        if self.score is None or first.score is None:
            return ""
        theirs = show_score(first.score, self.score)
        if theirs == show_score(self.score, first.score):
            return "with the same score"
        why = "" if first.score > self.score else ", since a job like this one arrived before it"
        return f"score {theirs}{why}"


def show_score(score: float, other: float | None = None) -> str:
    """Return *score* with one decimal, or with as many, up to six, as tell it from *other*."""
    other = float("nan") if other is None else other
    decimals = range(1, _DECIMALS + 1)
    return next((f"{score:.{n}f}" for n in decimals if f"{score:.{n}f}" != f"{other:.{n}f}"), f"{score:.1f}")


class Order:
    """The order of one pass.

    *room_helps* tells whether a job waits for room only.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        room: FreeResources,
        past: Past,
        room_helps: Callable[[str], bool],
    ) -> None:
        policy = room.policy
        self._now_ns = room.now_ns
        self._policy = policy
        self._run_times = past.run_times
        self._passed = past.passed if policy.promotes and policy.order == SLOWDOWN else None
        self._passed_by = past.passed_by
        self._whole = Work.whole(room.machine)
        self._scarce = room.scarce
        self._known: dict[int, Scarce] = {}
        self._room_helps = room_helps
        self._order = policy.order
        self._shares = past.shares
        self._by_project = policy.fair_share_by == "project"
        self._waiting = queue.projects if self._by_project else queue.users
        self._running = room.runs.counts.projects if self._by_project else room.runs.counts.users
        self._factors: Mapping[str, float] | None = None
        self._levels: Mapping[str, float] | None = None
        self._served = past.served
        self._whole_units = in_units(len(room.machine.gpus) + room.machine.cpus * policy.cpu_weight)
        self._sharing: dict[str, tuple[float, Served | None, int]] = {}  # by key: see `_share`
        self.front: dict[int, tuple[int, str]] = {}  # by priority: the arrival and the name of the promoted job

    def _share(self, user: str, project: str | None) -> tuple[float, Served | None, int]:
        """Return the fair-share factor of that user (or project), and what it has been served until now.

        The line of its service is None if it makes no difference.
        """
        key = (project or "") if self._by_project else user
        found = self._sharing.get(key)
        if found is None:
            if self._factors is None:
                competes = self._policy.fair_share and self._order == SLOWDOWN and len(self._waiting) > 1
                self._factors = self._shares.factors(self._now_ns, self._active()) if competes else {}
            factors = self._factors
            served = self._served.get(key) if factors and self._whole_units else None
            until_now = 0 if served is None else served.until(self._now_ns)
            found = self._sharing[key] = factors.get(key, 1.0), served, until_now
        return found

    def _active(self) -> set[str]:
        return {key or "" for key in (*self._waiting, *self._running)}

    def _without_score(self, arrived_at_ns: int, expected_ns: int, user: str, project: str | None) -> float:
        """Return the part of the sort key that stands for the score in an order without one."""
        if self._order != MULTIFACTOR:
            return arrived_at_ns if self._order == ARRIVAL else expected_ns
        if self._levels is None:
            self._levels = self._shares.levels(self._now_ns, self._active())
        level = self._levels.get((project or "") if self._by_project else user, 0.0)
        age = min((self._now_ns - arrived_at_ns) / _FULL_AGE_NS, 1.0)
        return -(_SHARE_WEIGHT * math.pow(2.0, -level) + age)

    def of_shape(self, shape: Shape, at: int) -> OrderKey:
        """Return the sort key of the first ready job of a shape, the one at index *at*.

        It ignores promotion: `front` is known only after all shapes were asked for.
        """
        where, key = shape.eligible[at], shape.key
        expected_ns = key.time_limit_ns
        if expected_ns is None and self._order != ARRIVAL:
            expected_ns = self._run_times.guess(key.user, key.stem or "", key.stated or key.request).ns
        if self._order != SLOWDOWN:
            return (
                where[0],
                1,
                self._without_score(where[1], expected_ns or 0, key.user, key.project),
                where[1],
                where[2],
            )
        assert expected_ns is not None
        if self._passed is not None and key.elsewhere is None and self._now_ns - where[1] > LEAST_PASSED_NS:
            self._look_at_passed(shape, at)
        return self._score(where, expected_ns, key.user, key.project)

    def _look_at_passed(self, shape: Shape, at: int) -> None:
        """Record the first job of a shape in `front` if it is the one to promote.

        A job that has waited very long must be passed by more work than a later one of its shape. If the later one
        qualifies, the first one is promoted.
        """
        ahead, _, name = shape.eligible[at]
        best = self.front.get(ahead)
        for other, arrived_at_ns, _ in shape.eligible[at : at + _BEHIND]:
            if other != ahead or self._now_ns - arrived_at_ns <= LEAST_PASSED_NS:
                return
            if best is not None and best <= (arrived_at_ns, name):
                return
            if self._is_passed(arrived_at_ns, shape.key.request):
                if self._room_helps(name):  # else it would keep its place for nothing, and with it all others
                    self.front[ahead] = arrived_at_ns, name
                return
            if self._now_ns - arrived_at_ns <= LONG_NS:
                return  # less work has passed those behind it

    def of_job(self, job: Waiting) -> tuple[OrderKey, OrderFactors]:
        """Return the sort key and the factors of *job*. Call this after all shapes were asked for."""
        expected = self._run_times.of_job(job)
        spec = job.spec
        where = place(job)
        factor, served, until_now = self._share(job.user, spec.project)
        own_ns = 0 if served is None else max(until_now - served.until(job.arrived_at_ns), 0) // self._whole_units
        waited_ns = max(self._now_ns - job.arrived_at_ns, 0)
        if self._order != SLOWDOWN:
            stands_for_it = self._without_score(where[1], expected.ns, job.user, spec.project)
            key: OrderKey = (where[0], 1, stands_for_it, where[1], where[2])
            return key, OrderFactors(waited_ns, expected, factor, 0, None, was_passed=False)
        key = self.placed(self._score(where, expected.ns, job.user, spec.project))
        return key, OrderFactors(
            waited_ns, expected, factor, own_ns, -key[2] if key[1] else None, was_passed=not key[1]
        )

    def placed(self, key: OrderKey) -> OrderKey:
        """Return *key*, moved to the front if its job is the promoted one."""
        front = self.front.get(key[0])
        if front is None or front[1] != key[4]:
            return key
        return key[0], 0, front[0], key[3], key[4]

    def _score(self, where: Place, expected_ns: int, user: str, project: str | None) -> OrderKey:
        ahead, arrived_at_ns, name = where
        waited_ns = self._now_ns - arrived_at_ns
        if waited_ns < 0:
            waited_ns = 0
        if expected_ns < LEAST_NS:
            expected_ns = LEAST_NS
        sharing = self._sharing.get((project or "") if self._by_project else user)
        factor, served, until_now = sharing or self._share(user, project)
        if served is not None and waited_ns:
            expected_ns += max(until_now - served.until(arrived_at_ns), 0) // self._whole_units  # the clock may go back
        return ahead, 1, -((waited_ns + expected_ns) / expected_ns * factor), arrived_at_ns, name

    def _is_passed(self, arrived_at_ns: int, request: Request) -> bool:
        if self._passed is None:
            return False
        if id(request) not in self._known:
            self._known[id(request)] = self._scarce(request)
        pools, named = self._known[id(request)]
        if self._passed.is_passed(arrived_at_ns, self._now_ns, self._whole, pools):
            return True
        totals = [(pool.name, pool.total) for pool in named]
        if self._policy.max_running is not None:
            totals.append((_RUNS, self._policy.max_running))
        for name, total in totals:
            passed = self._passed_by.get(name)
            if passed is not None and passed.is_passed(arrived_at_ns, self._now_ns, Work(total, 0, 0), (0,)):
                return True
        return False
