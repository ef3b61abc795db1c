"""The order of waiting jobs: by priority, then the longest wait relative to size.

The rule and its constants were found by experiment; docs/SCHEDULING.md has what was tried. Of two jobs of equal
priority, the one with the higher score comes first: `(waited + expected) / expected` times the factor of its user's
share (see `fairness`). While jobs of several users wait, `expected` includes what the job's user was served since the
job arrived. Ahead of them goes the earliest of the jobs that too much later work has overtaken (see
`fairness`): one at a time, so that the others keep their order. The order is computed anew in each pass. Within one
shape of jobs (see `queue`) only priority, arrival and name differ, and the first to arrive goes first: the queue keeps
each shape sorted whatever the usage of the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from spool.core.fairness import LEAST_NS as LEAST_PASSED_NS
from spool.core.fairness import LONG_NS, PassedWork, Served, Shares, Work, in_units, share_key, weigh, weigh_whole
from spool.core.model import SECOND_NS, Grant, Policy, Pool, Request, Result, Waiting
from spool.core.names import LOCAL_EXECUTORS
from spool.core.queue import Place, Shape, WaitingQueue, place
from spool.core.resources import FreeResources
from spool.core.runtimes import TEACHES, Expected, RunTimes
from spool.core.units import show_duration

if TYPE_CHECKING:
    from spool.core.sizes import Sizes

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
        self._whole_units = in_units(weigh_whole(room.machine, policy))
        self._sharing: dict[str, tuple[float, Served | None, int]] = {}  # by key: see `_share`
        self.front: dict[int, tuple[int, str]] = {}  # by priority: the arrival and the name of the promoted job

    def _share(self, user: str, project: str | None) -> tuple[float, Served | None, int]:
        """Return the fair-share factor of that user (or project), and what it has been served until now.

        The line of its service is None if it makes no difference.
        """
        key = (project or "") if self._by_project else user
        found = self._sharing.get(key)
        if found is None:
            factors = self._factors
            if factors is None:
                factors = self._factors = self._work_out_factors()
            served = self._served.get(key) if factors and self._whole_units else None
            until_now = 0 if served is None else served.until(self._now_ns)
            found = self._sharing[key] = factors.get(key, 1.0), served, until_now
        return found

    def _work_out_factors(self) -> Mapping[str, float]:
        if not self._policy.fair_share or self._order != SLOWDOWN or len(self._waiting) < 2:
            return {}  # no other user competes
        return self._shares.factors(self._now_ns, self._active())

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

    def _lacking(self, request: Request) -> Scarce:
        known = self._known.get(id(request))
        if known is None:
            known = self._known[id(request)] = self._scarce(request)
        return known

    def _is_passed(self, arrived_at_ns: int, request: Request) -> bool:
        if self._passed is None:
            return False
        pools, named = self._lacking(request)
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
