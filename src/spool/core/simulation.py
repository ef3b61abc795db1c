"""The planner on an imagined machine: jobs come, run for a known time and end, and nobody waits for a clock.

The same `decide` as everywhere; only the world around it is imagined. Event by event: an event is a job that comes, a
run that ends, or an instant that a plan asked to be woken at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import heappop, heappush

from spool.core.backfill import Holding, as_run
from spool.core.model import Grant, Machine, Policy, Reservation, Result, Running, Spec, State, Waiting
from spool.core.order import ARRIVAL, SHORTEST, SLOWDOWN, Past
from spool.core.plan import Plan, View, decide
from spool.core.queue import WaitingQueue
from spool.core.quotas import Quotas
from spool.core.runs import Runs

NOTHING = Grant()


class Discipline(StrEnum):
    """How waiting jobs are picked."""

    FIFO = "fifo"  # first come, first served: nobody overtakes
    SKIP = "skip"  # first come, first served, and who fits may overtake: wide jobs starve
    EASY = "easy"  # first come, first served, and backfilling that never delays the first that waits
    SJF = "sjf"  # shortest job first, with the same backfilling
    LXF = "lxf"  # who has waited longest for its size first, without fair share or promotion
    SPOOL = "spool"  # as the policy says


@dataclass(frozen=True, slots=True)
class Coming:
    """A job of the future: what it asks for, when it comes, how long it would run if it were let."""

    name: str
    spec: Spec
    submit_at_ns: int
    duration_ns: int
    user: str = "user"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job. Without a start it ended waiting, or waits for ever: then it has no end either."""

    name: str
    submit_at_ns: int
    started_at_ns: int | None
    ended_at_ns: int | None
    state: State
    grant: Grant = NOTHING

    @property
    def waited_ns(self) -> int | None:
        """How long it waited for its start; None without one."""
        return None if self.started_at_ns is None else self.started_at_ns - self.submit_at_ns


def under(discipline: Discipline, policy: Policy) -> Policy:
    """Return *policy* changed to that discipline; priorities count under all of them."""
    if discipline is Discipline.SPOOL:
        return policy
    order = {Discipline.SJF: SHORTEST, Discipline.LXF: SLOWDOWN}.get(discipline, ARRIVAL)
    return replace(
        policy,
        order=order,
        promotes=False,
        fair_share=False,
        protects=discipline is not Discipline.SKIP,
        strict_order=discipline is Discipline.FIFO,
    )


@dataclass(slots=True)
class Pass:
    """One turn of the imagined dispatcher, for whoever wants to look on."""

    now_ns: int
    view: View
    plan: Plan


class Simulation:
    """An imagined spool. Iterate over `run` for the outcomes, in the order in which they come about."""

    def __init__(
        self,
        coming: Iterable[Coming],
        machine: Machine,
        policy: Policy,
        *,
        reservations: Sequence[Reservation] = (),
    ) -> None:
        self._policy = policy
        self._machine = machine
        self._reservations = tuple(reservations)
        self._coming = sorted(coming, key=lambda each: (each.submit_at_ns, each.name), reverse=True)
        self._jobs = {each.name: each for each in self._coming}
        self._arrays: dict[str, tuple[str, ...]] = {}
        for each in reversed(self._coming):
            if each.spec.task is not None:
                array = each.spec.task.array
                self._arrays[array] = (*self._arrays.get(array, ()), each.name)
        self._queue = WaitingQueue()
        self._quotas = Quotas(policy).limited
        self._past = Past(policy)
        self._running = Runs(run_times=self._past.run_times)
        self._ends: list[tuple[int, str]] = []
        self._ended: dict[str, State] = {}
        self._holding = Holding()

    def run(self) -> Iterator[Outcome]:
        """Go on until nothing waits that can start, yielding each outcome as it comes about."""
        for outcome_or_pass in self.steps():
            if isinstance(outcome_or_pass, Outcome):
                yield outcome_or_pass

    def steps(self) -> Iterator[Outcome | Pass]:
        """As `run`, yielding each pass too, before it is performed."""
        now_ns = self._coming[-1].submit_at_ns if self._coming else 0
        while True:
            yield from self._over(now_ns)
            while self._coming and self._coming[-1].submit_at_ns <= now_ns:
                new = self._coming.pop()
                self._queue.put(self._waiting(new))
            view = View(
                self._machine,
                self._queue,
                running=self._running,
                ended=self._ended,
                arrays=self._arrays,
                reservations=self._reservations,
                past=self._past,
                holding=self._holding,
            )
            plan = decide(view, now_ns, self._policy)
            yield Pass(now_ns, view, plan)
            self._holding = plan.holding
            for ending in plan.endings:
                self._end(ending.name, ending.outcome)
                yield self._outcome(ending.name, None, now_ns, ending.outcome, NOTHING)
            for start in plan.starts:
                self._start(start.name, start.grant, now_ns)
            times = [self._coming[-1].submit_at_ns] if self._coming else []
            times += [self._ends[0][0]] if self._ends else []
            times += [] if plan.next_at_ns is None else [plan.next_at_ns]
            if plan.endings:  # others may depend on what has just ended
                times.append(now_ns)
            if not times:
                break
            now_ns = min(times)
        for name in self._queue:
            yield self._outcome(name, None, None, State.QUEUED, NOTHING)

    def _waiting(self, new: Coming) -> Waiting:
        spec = new.spec
        user = new.user
        if not self._reservations and not self._quotas:  # what no rule asks for makes no shapes to look at
            if self._policy.strict_order:
                spec, user = replace(spec, time_limit_ns=None), ""
            elif self._policy.order == ARRIVAL and spec.time_limit_ns is not None:
                user = ""
        return Waiting(new.name, spec, user, new.submit_at_ns, clock_at_ns=new.submit_at_ns)

    def _start(self, name: str, grant: Grant, now_ns: int) -> None:
        run = as_run(self._queue[name], grant, now_ns)
        self._queue.remove(name)
        self._running.put(run)
        self._past.begin(run.user, run.spec.project, grant, now_ns)
        limit = self._jobs[name].spec.time_limit_ns
        duration = self._jobs[name].duration_ns
        heappush(self._ends, (now_ns + (duration if limit is None else min(duration, limit)), name))

    def _over(self, now_ns: int) -> Iterator[Outcome]:
        while self._ends and self._ends[0][0] <= now_ns:
            at_ns, name = heappop(self._ends)
            run = self._running[name]
            self._running.remove(name)
            limit = self._jobs[name].spec.time_limit_ns
            late = limit is not None and self._jobs[name].duration_ns > limit
            state = State.TIMEOUT if late else State.FINISHED
            self._past.end(run.user, run.spec.project, run.grant, at_ns)
            self._past.learn(self._jobs[name].user, self._result(run, at_ns, state))
            self._end(name, state)
            yield self._outcome(name, run.started_at_ns, at_ns, state, run.grant)

    def _result(self, run: Running, at_ns: int, state: State) -> Result:
        arrived_at_ns, request = self._jobs[run.name].submit_at_ns, run.spec.request
        return Result(
            run.name, 1, 1, state, "", arrived_at_ns, run.started_at_ns, at_ns, request=request, grant=run.grant
        )

    def _end(self, name: str, state: State) -> None:
        self._queue.remove(name)
        self._ended[name] = state

    def _outcome(self, name: str, start: int | None, end: int | None, state: State, grant: Grant) -> Outcome:
        return Outcome(name, self._jobs[name].submit_at_ns, start, end, state, grant)


def simulate(
    coming: Iterable[Coming],
    machine: Machine,
    policy: Policy,
    discipline: Discipline = Discipline.SPOOL,
    *,
    reservations: Sequence[Reservation] = (),
) -> Iterator[Outcome]:
    """Yield what becomes of each job on that machine, in the order in which it comes about."""
    return Simulation(coming, machine, under(discipline, policy), reservations=reservations).run()
