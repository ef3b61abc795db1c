"""The order of waiting jobs: by priority, then the longest wait relative to size; with fairness among users.

The rule and its constants were found by experiment; benchmarks/README.md has what was tried. Of two jobs of equal
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
for the pools that it took: processors, memory, GPUs, named resources. A job goes to the front of its priority once
later arrivals have used the whole pool that it lacks for longer than 8 hours, and for longer than 15% of the time that
it has waited; and, where its user was served more of that pool since, twice as much again as that is more. Without the
last, every job of a flood would go first once the others had used 8 hours. Age alone would do worse: under load
everything becomes old, and the order becomes that of arrival.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, NamedTuple, Self

from msgspec import Struct

from spool.core.layout import engine_of
from spool.core.model import SECOND_NS, Grant, Policy, Result, Waiting
from spool.core.queue import Place, Shape, ShapeKey, WaitingQueue, place, shape_key
from spool.core.resources import CPUS, GPUS, MEMORY, RUNS, FreeResources, PoolName
from spool.core.runtimes import TEACHES, Expected, RunTimes
from spool.core.units import show_duration

if TYPE_CHECKING:
    from spool.core.sizes import Sizes


LEAST = 1 / 1.5
"""The factor of the heaviest user."""

_STEEP = 0.5
_NEGLIGIBLE = 1000  # users below 1/1000 of the whole usage do not count towards the average
_NOISE = 1e-6  # relative noise of a rate: below it, nothing runs
LEAST_PASSED_NS = 8 * 3600 * SECOND_NS
PART = 0.15
LONG_NS = int(LEAST_PASSED_NS / PART)  # after a longer wait, the work needed to be passed grows with the wait
_OWN = 2  # how much more later work passes a job for each part of own service beyond the threshold

_UNITS = 1_000_000  # usage per second is counted in millionths, so that own service is exact
_POINTS = 4096  # points of a line that are at least kept

_NEAR = 100


CPU_WEIGHT = 0.05
"""What a second of a CPU counts, where one of a GPU is 1."""

HALF_LIFE_NS = 7 * 86400 * SECOND_NS
"""Usage that is this old counts half."""


def share_key(user: str, project: str | None, policy: Policy) -> str:
    """Return the key under which usage is counted: the user, or the project ("" for none) if so configured."""
    return (project or "") if policy.fair_share_by == "project" else user


def weigh(grant: Grant) -> float:
    """Return the usage per second of a run with that grant: its GPUs, and its CPUs times `CPU_WEIGHT`."""
    return grant.gpu_count + grant.cpus * CPU_WEIGHT


class DecayedUse(NamedTuple):
    """The decayed usage of one key until an instant, and what it uses per second from then on."""

    until: float = 0.0
    rate: float = 0.0
    at_ns: int = 0


class _Sums:
    """Sums that are copied: their attributes are numbers, and lists or mappings of values."""

    __slots__: tuple[str, ...] = ()

    def copy(self) -> Self:
        """Return an independent copy."""
        other = copy(self)
        for name in self.__slots__:
            setattr(other, name, copy(getattr(self, name)))
        return other


class Shares(_Sums):
    """The decayed usage of each user or project, from intervals of constant usage per second."""

    __slots__ = ("_usage",)

    def __init__(self) -> None:
        self._usage: dict[str, DecayedUse] = {}

    def change(self, key: str, rate: float, at_ns: int) -> None:
        """Count *rate* more for *key* per second from then on, or less."""
        before = self._usage.get(key, DecayedUse(at_ns=at_ns))
        later_ns = max(before.at_ns, at_ns)
        until = self._used(before, later_ns) + rate * self._integral_s(later_ns - at_ns)
        now = before.rate + rate
        self._usage[key] = DecayedUse(until, 0.0 if now < abs(rate) * _NOISE else now, later_ns)  # no rest of rounding

    def recall(self, key: str, used: float, at_ns: int) -> None:
        """Add usage that `used` has returned at that instant."""
        self.change(key, 0.0, at_ns)
        before = self._usage[key]
        self._usage[key] = before._replace(until=before.until + used)

    def used(self, at_ns: int) -> dict[str, float]:
        """Return the decayed usage of each key, in seconds at a usage of 1 per second."""
        return {key: max(self._used(usage, at_ns), 0.0) for key, usage in self._usage.items()}

    def factors(self, now_ns: int, active: Collection[str]) -> dict[str, float]:
        """Return the factor of each of *active*, the keys with waiting or running jobs."""
        levels = self.levels(now_ns, active)
        if not levels:
            return dict.fromkeys(active, 1.0)
        return {key: max(math.pow(2.0, _STEEP * (1 - level)), LEAST) for key, level in levels.items()}

    def levels(self, now_ns: int, active: Collection[str]) -> dict[str, float]:
        """Return the level of each of *active*: 1 for average usage. Empty if nothing has been used."""
        used = self.used(now_ns)
        total = sum(used.values())
        if not total:
            return {}
        keys = len(active) + sum(amount > total / _NEGLIGIBLE for key, amount in used.items() if key not in active)
        return {key: used.get(key, 0.0) / total * keys for key in active}

    def _used(self, usage: DecayedUse, at_ns: int) -> float:
        past_ns = max(at_ns - usage.at_ns, 0)
        return usage.until * self._left(past_ns) + usage.rate * self._integral_s(past_ns)

    def _left(self, past_ns: int) -> float:
        return math.pow(2.0, -past_ns / HALF_LIFE_NS)

    def _integral_s(self, past_ns: int) -> float:
        return (1 - self._left(past_ns)) * HALF_LIFE_NS / SECOND_NS / math.log(2)


class Served(_Sums):
    """What a key has had of a pool until each instant: a line through points, with a slope after the last of them.

    Exact wherever no points were thinned out.
    """

    __slots__ = ("_amounts", "_slope", "_times")

    def __init__(self) -> None:
        self._times: list[int] = []
        self._amounts: list[int] = []
        self._slope = 0

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
            kept = _apart(times)
            self._times = [times[at] for at in kept]
            self._amounts = [amounts[at] for at in kept]

    def until(self, at_ns: int) -> int:
        """Return the amount until then."""
        times, amounts = self._times, self._amounts
        at = bisect_right(times, at_ns)
        if not at:
            return 0
        before, amount = times[at - 1], amounts[at - 1]
        if at == len(times):
            return amount + self._slope * (at_ns - before)
        return amount + (amounts[at] - amount) * (at_ns - before) // (times[at] - before)


class PassedWork(_Sums):
    """The work of ended runs in one pool, by when their jobs arrived."""

    __slots__ = ("_arrivals", "_sums")

    def __init__(self) -> None:
        self._arrivals: list[int] = []  # in order
        self._sums = [0]  # of the works before each position

    def __len__(self) -> int:
        """Return how many entries are kept apart."""
        return len(self._arrivals)

    def add(self, arrived_at_ns: int, work: int) -> None:
        """Count the work of a run whose job arrived then."""
        at = bisect_right(self._arrivals, arrived_at_ns)
        self._arrivals.insert(at, arrived_at_ns)
        self._sums[at + 1 :] = [before + work for before in self._sums[at:]]
        if len(self._arrivals) > 2 * _POINTS:
            kept = _apart(self._arrivals)
            # Of those that are merged the first arrival stays, so that no job counts more than what came later.
            self._sums = [*(self._sums[at] for at in kept), self._sums[-1]]
            self._arrivals = [self._arrivals[at] for at in kept]

    def later(self, arrived_at_ns: int) -> int:
        """Return the work of all jobs that arrived after that instant."""
        return self._sums[-1] - self._sums[bisect_right(self._arrivals, arrived_at_ns)]


def _apart(times: Sequence[int]) -> list[int]:
    """Return the positions of the instants to keep, so that memory does not grow with time.

    These are the newest, and of the old ones those that lie a hundredth of their age behind the one before.
    """
    newest, kept = times[-1], [0]
    for at in range(1, len(times)):
        if at >= len(times) - _POINTS or (times[at] - times[kept[-1]]) * _NEAR > newest - times[at]:
            kept.append(at)
    return kept


OrderKey = tuple[int, int, float, int, str]
"""The full sort key: 255 - priority, 0 for a promoted job, -score (or arrival), arrival, name. Smaller comes first."""

ARRIVAL, SLOWDOWN, SHORTEST, MULTIFACTOR = "arrival", "slowdown", "shortest", "multifactor"  # the last two: simulated


LEAST_NS = 60 * SECOND_NS
"""Shorter jobs count as this long: whether a job takes a second or two should not affect its place."""

_SHARE_WEIGHT = 10  # of fair share in the order `multifactor`, as clusters often configure it; that of age is 1
_FULL_AGE_NS = 7 * 24 * 3600 * SECOND_NS  # … after which a job gets no older

_DECIMALS = 6  # of a score, at most
_BEHIND = 32  # jobs of a shape that are checked if the first has waited very long


class Past:
    """Lessons from ended runs: run times, usage by user, and the work that has passed waiting jobs.

    The owner reports the begin and end of runs, and once each result, in order.
    """

    def __init__(self, policy: Policy) -> None:
        self.run_times = RunTimes()
        self.shares = Shares()
        self.served = defaultdict[tuple[str, PoolName], Served](Served)  # by the keys of the shares
        self.passed = defaultdict[PoolName, PassedWork](PassedWork)
        self._policy = policy
        self.sizes: Sizes | None = None  # where a job leaves its size to spool

    def begin(self, user: str, project: str | None, grant: Grant, at_ns: int) -> None:
        """Count the usage of a run from its start on."""
        self._use(user, project, grant, at_ns, 1)

    def end(self, user: str, project: str | None, grant: Grant, at_ns: int) -> None:
        """Count the usage up to its end."""
        self._use(user, project, grant, at_ns, -1)

    def _use(self, user: str, project: str | None, grant: Grant, at_ns: int, sign: int) -> None:
        key = share_key(user, project, self._policy)
        self.shares.change(key, sign * weigh(grant), at_ns)
        for pool, amount in amounts(grant):
            self.served[key, pool].turn(sign * amount, at_ns)

    def copy(self) -> Past:
        """Return an independent copy; the learnt run times are shared, for reading only."""
        other = copy(self)
        other.shares = self.shares.copy()
        other.served = defaultdict(Served, {key: served.copy() for key, served in self.served.items()})
        other.passed = defaultdict(PassedWork, {pool: passed.copy() for pool, passed in self.passed.items()})
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
        if engine_of(result.executor) is None:
            self.pass_by(result.submitted_at_ns, result.grant, ran_ns)
        return self.sizes is not None and self.sizes.add(user, result)

    def pass_by(self, arrived_at_ns: int | None, grant: Grant, ran_ns: int) -> None:
        """Count the work of a run here that has ended, whose job arrived at *arrived_at_ns*, for the jobs it passed."""
        if arrived_at_ns is None:
            return
        for pool, amount in amounts(grant):
            self.passed[pool].add(arrived_at_ns, amount * ran_ns)


def amounts(grant: Grant) -> list[tuple[PoolName, int]]:
    """Return what a run with that grant has of each pool, without those that it has nothing of."""
    found: list[tuple[PoolName, int]] = [(RUNS, 1), (CPUS, grant.cpus), (MEMORY, grant.memory_bytes or 0)]
    found += [(GPUS, grant.gpu_count), *grant.resources]
    return [(pool, amount) for pool, amount in found if amount]


class OrderFactors(Struct, frozen=True):
    """The factors of a job's place. `score` is None if the order is not by slowdown."""

    waited_ns: int
    expected: Expected
    factor: float  # of fair share; 1 if no other user competes
    own_ns: int  # what its user was served since it arrived, in time of the whole machine; 0 if no other competes
    score: float | None
    was_passed: bool  # overtaken by enough later work to go first
    served_more: bool = False  # … by enough, but its own user was served more

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
        why_not = "; later arrivals have passed it by much work, but its own user got more" if self.served_more else ""
        return f"score {show_score(self.score, other)} ({terms}){why_not}"

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


class _Sharing(NamedTuple):
    """The factor of a key, and of each pool it was served: its weight, the line, and the amount until now."""

    key: str
    factor: float
    lines: tuple[tuple[int, Served, int], ...]  # none if own service makes no difference


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
        self._promotes = policy.promotes and policy.order == SLOWDOWN
        self._past = past
        self._room = room
        self._scarce: dict[int, list[tuple[PoolName, int]]] = {}  # by request
        self._room_helps = room_helps
        self._order = policy.order
        self._shapes = queue.shapes
        self._factors: Mapping[str, float] | None = None
        self._levels: Mapping[str, float] | None = None
        self._weights = ((GPUS, _UNITS), (CPUS, round(CPU_WEIGHT * _UNITS)))  # of the pools, in usage
        self._whole = len(room.machine.gpus) * _UNITS + room.machine.cpus * self._weights[1][1]
        self._sharing: dict[tuple[str, str | None], _Sharing] = {}
        self.front: dict[int, tuple[int, str]] = {}  # by priority: the arrival and the name of the promoted job

    def _share(self, user: str, project: str | None) -> _Sharing:
        """Return the fair-share factor of that user (or project), and what it has been served, if that counts."""
        found = self._sharing.get((user, project))
        if found is None:
            key = share_key(user, project, self._policy)
            if self._factors is None:
                competes = self._policy.fair_share and self._order == SLOWDOWN and len(self._waiting()) > 1
                self._factors = self._past.shares.factors(self._now_ns, self._active()) if competes else {}
            lines = []
            for pool, weight in self._weights:
                served = self._past.served.get((key, pool)) if self._factors and self._whole else None
                if served is not None and weight:
                    lines.append((weight, served, served.until(self._now_ns)))
            found = self._sharing[user, project] = _Sharing(key, self._factors.get(key, 1.0), tuple(lines))
        return found

    def _own_ns(self, sharing: _Sharing, arrived_at_ns: int) -> int:
        """Return what a key was served since then, in time of the whole machine; 0 if the clock was set back."""
        units = 0
        for weight, served, until_now in sharing.lines:
            units += weight * (until_now - served.until(arrived_at_ns))
        return max(units, 0) // self._whole if units else 0

    def _waiting(self) -> set[str]:
        return {share_key(key.user, key.project, self._policy) for key in self._shapes}

    def _active(self) -> set[str]:
        counts = self._room.runs.counts
        by_project = self._policy.fair_share_by == "project"
        return self._waiting() | {key or "" for key in (counts.projects if by_project else counts.users)}

    def _without_score(self, arrived_at_ns: int, expected_ns: int, user: str, project: str | None) -> float:
        """Return the part of the sort key that stands for the score in an order without one."""
        if self._order != MULTIFACTOR:
            return arrived_at_ns if self._order == ARRIVAL else expected_ns
        if self._levels is None:
            self._levels = self._past.shares.levels(self._now_ns, self._active())
        level = self._levels.get(share_key(user, project, self._policy), 0.0)
        age = min((self._now_ns - arrived_at_ns) / _FULL_AGE_NS, 1.0)
        return -(_SHARE_WEIGHT * math.pow(2.0, -level) + age)

    def of_shape(self, shape: Shape, at: int) -> OrderKey:
        """Return the sort key of the first ready job of a shape, the one at index *at*.

        It ignores promotion: `front` is known only after all shapes were asked for.
        """
        where, key = shape.eligible[at], shape.key
        expected_ns = key.time_limit_ns
        if expected_ns is None:
            expected_ns = self._run_times.guess(key.user, key.stem or "", key.stated or key.request).ns
        if self._promotes and key.elsewhere is None and self._now_ns - where[1] > LEAST_PASSED_NS:
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
            waited_ns = self._now_ns - arrived_at_ns
            if other != ahead or waited_ns <= LEAST_PASSED_NS or (best is not None and best <= (arrived_at_ns, name)):
                return
            if self._is_passed(arrived_at_ns, shape.key):
                if self._room_helps(name):  # else it would keep its place for nothing, and with it all others
                    self.front[ahead] = arrived_at_ns, name
                return
            if waited_ns <= LONG_NS:
                return  # less work has passed those behind it

    def of_job(self, job: Waiting) -> tuple[OrderKey, OrderFactors]:
        """Return the sort key and the factors of *job*. Call this after all shapes were asked for."""
        expected, project = self._run_times.of_job(job), job.spec.project
        sharing = self._share(job.user, project)
        factor, own_ns = sharing.factor, self._own_ns(sharing, job.arrived_at_ns)
        waited_ns = max(self._now_ns - job.arrived_at_ns, 0)
        key = self.placed(self._score(place(job), expected.ns, job.user, project))
        was_passed = not key[1]
        served_more = bool(own_ns) and not was_passed and self._promotes and waited_ns > LEAST_PASSED_NS
        if served_more and job.elsewhere is None:
            shape = shape_key(job)
            served_more = self._is_passed(job.arrived_at_ns, shape, own_counts=False)
            served_more = served_more and not self._is_passed(job.arrived_at_ns, shape)
        score = None if was_passed or self._order != SLOWDOWN else -key[2]
        return key, OrderFactors(waited_ns, expected, factor, own_ns, score, was_passed, served_more)

    def placed(self, key: OrderKey) -> OrderKey:
        """Return *key*, moved to the front if its job is the promoted one."""
        front = self.front.get(key[0])
        if front is None or front[1] != key[4]:
            return key
        return key[0], 0, front[0], key[3], key[4]

    def _score(self, where: Place, expected_ns: int, user: str, project: str | None) -> OrderKey:
        ahead, arrived_at_ns, name = where
        if self._order != SLOWDOWN:
            return ahead, 1, self._without_score(arrived_at_ns, expected_ns, user, project), arrived_at_ns, name
        waited_ns = self._now_ns - arrived_at_ns
        if waited_ns < 0:
            waited_ns = 0
        if expected_ns < LEAST_NS:
            expected_ns = LEAST_NS
        sharing = self._sharing.get((user, project)) or self._share(user, project)
        if sharing.lines and waited_ns:
            expected_ns += self._own_ns(sharing, arrived_at_ns)
        return ahead, 1, -((waited_ns + expected_ns) / expected_ns * sharing.factor), arrived_at_ns, name

    def _is_passed(self, arrived_at_ns: int, key: ShapeKey, *, own_counts: bool = True) -> bool:
        """Whether a job goes first: later arrivals have used too much of a pool that it lacks.

        If *own_counts*, what its user was served of that pool beyond the threshold, they must have used twice more.
        """
        request, sharing = key.request, self._share(key.user, key.project)
        if id(request) not in self._scarce:
            most = self._policy.max_running
            runs = [] if most is None else [(RUNS, most)]
            self._scarce[id(request)] = [*runs, *((pool.name, pool.total) for pool in self._room.scarce(request))]
        for pool, total in self._scarce[id(request)]:
            passed = self._past.passed.get(pool)
            enough = max(LEAST_PASSED_NS, int(PART * (self._now_ns - arrived_at_ns))) * total
            later = 0 if passed is None else passed.later(arrived_at_ns)
            own = self._served(sharing, pool, arrived_at_ns) if own_counts and later > enough else 0
            if later > enough + _OWN * max(own - enough, 0):
                return True
        return False

    def _served(self, sharing: _Sharing, pool: PoolName, since_ns: int) -> int:
        """Return what a key was served of that pool since then, if that counts."""
        served = self._past.served.get((sharing.key, pool)) if self._factors else None
        return 0 if served is None else served.until(self._now_ns) - served.until(since_ns)
