"""What to do now: which waiting jobs start with what, which end without a start, and why each other one waits.

`decide` is a pure function of the view, the instant and the policy. (The queue in the view is an index; `decide` lets
it find things faster, which changes no answer.) The dispatcher performs the plan, the dry run prints it, `why` asks
it, and the simulator runs on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, tzinfo

from spool.core.backfill import Expectation, Holding, expect
from spool.core.cycles import Cycles
from spool.core.dependencies import Names, Verdict
from spool.core.model import Grant, Machine, Policy, Reservation, State, Waiting
from spool.core.order import Order, Past, Standing
from spool.core.placement import Placed, Placement
from spool.core.queue import ShapeKey, WaitingQueue, shape_key
from spool.core.quotas import SharedLimits
from spool.core.reasons import Reason
from spool.core.resources import Room
from spool.core.rules import Rules
from spool.core.runs import Runs
from spool.core.settle import settle

_NO_TIME = frozenset({"paused", "running", "scheduling_timeout"})  # reasons of which nobody knows how long they stand


@dataclass(frozen=True, slots=True)
class View:
    """The whole spool as it was seen once.

    `ended` gives the newest outcome of a name that neither waits nor runs; only `get` is asked of it, and only for the
    names in `queue.watch.names()` and the tasks of the arrays among them, when they have changed. `arrays`
    gives the tasks of each expanded array, `held_arrays` those of which nothing is to start. `holding` is that of the
    plan before.
    """

    machine: Machine
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    held: Mapping[str, Waiting] = field(default_factory=dict)
    running: Runs = field(default_factory=Runs)
    ended: Mapping[str, State] = field(default_factory=dict)
    arrays: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    held_arrays: Set[str] = frozenset()
    reservations: tuple[Reservation, ...] = ()
    past: Past = field(default_factory=lambda: Past(Policy()))
    paused: bool = False
    holding: Holding = field(default_factory=Holding)
    zone: tzinfo = UTC  # in which instants are told to people


_BEYOND_HELP = frozenset({"never_fits", "dependency"})


@dataclass(frozen=True, slots=True)
class Start:
    """A job that starts now, and what it is given."""

    name: str
    grant: Grant


@dataclass(frozen=True, slots=True)
class Ending:
    """A waiting or held job that ends without having started: `unschedulable`, or `cancelled` by what it depends on."""

    name: str
    outcome: State
    reason: str


class Plan:
    """The decision of one pass; `decide` makes it. `starts` are in the order in which they were decided.

    `next_at_ns` is the earliest instant at which the passing of time alone may change the answer, None if there is
    none. `holding` is to be handed to the next view. `protected` is the job that room is left for, where anything
    could start beside it; it could start at `protected_until_ns`, which rests on a guess if `protected_by_guess`.
    """

    def __init__(
        self, view: View, rules: Rules, order: Order, names: Names, placed: Placed, next_at_ns: int | None
    ) -> None:
        self.starts = tuple(Start(name, grant) for name, grant in placed.starts)
        protection = rules.protection
        self.protected = None if protection is None else protection.job.name
        self.protected_until_ns = None if protection is None else protection.at_ns
        self.protected_by_guess = protection is not None and protection.guessed
        self.holding = placed.holding
        self.next_at_ns = next_at_ns
        self._order = order
        self._view = view
        self._rules = rules
        self._names = names
        self._started = {start.name for start in self.starts}
        self._known: dict[tuple[ShapeKey, int], Reason | None] = {}
        rules.cycles = Cycles(view.queue.watch.jobs(), names)
        self.endings = tuple(
            Ending(name, outcome, self._why_ended(name, outcome)) for name, outcome in names.ended_now.items()
        )

    @property
    def stuck(self) -> bool:
        """Whether only people can help what waits: each job never fits, or what it depends on neither waits nor runs.

        Asked when nothing runs.
        """
        return all((why := self.reason(name)) is not None and why.code in _BEYOND_HELP for name in self._view.queue)

    def reason(self, name: str) -> Reason | None:
        """Return why *name* waits or is held, the first "no"; None for a job that starts now or is not known."""
        job = self._view.queue.get(name)
        if job is None:
            return Reason("held", "held") if name in self._view.held else None
        return None if name in self._started else self._first(job)

    def all_noes(self, name: str) -> list[Reason]:
        """Return every "no" to *name* in the order of the rules; the first is `reason`."""
        job = self._view.queue.get(name)
        if job is not None:
            return [] if name in self._started else list(self._rules.noes(job))
        job = self._view.held.get(name)
        return [] if job is None else [Reason("held", "held"), *self._rules.noes(job)]

    def expected_start(self, name: str) -> Expectation | None:
        """Return when *name* could start at the earliest if every limit holds, and which runs would have to end first.

        Runs without a limit are taken to last as long as their like (see `runtimes`). Other waiting jobs are not
        thought of. None where it is unknown: what it depends on has not ended, somebody has to do
        something first, or it never fits.
        """
        job = self._view.queue.get(name) or self._view.held.get(name)
        if job is None or name in self._started:
            return None
        if job.executor_problem is not None or any(no.code in _NO_TIME for no in self._rules.own(job)):
            return None
        if job.spec.depends_on is not None and self._names.judgement(job).verdict is not Verdict.SATISFIED:
            return None
        return expect(job, self._rules.room)

    def in_order(self) -> list[tuple[Waiting, Standing]]:
        """Return every waiting job in the order in which they are considered, and why it stands there."""
        for demand in self._view.queue.demands:
            for shape in demand.shapes.values():
                if shape.ready:
                    self._order.of_shape(shape, 0)
        found = [(self._order.of_job(job), job) for job in self._view.queue.values()]
        found.sort(key=lambda each: each[0][0])
        return [(job, standing) for (_, standing), job in found]

    def _first(self, job: Waiting) -> Reason | None:
        for reason in self._rules.own(job):
            return reason
        if self._rules.counts_queued:
            return next(self._rules.noes(job), None)
        key = (shape_key(job), job.spec.priority)
        if key not in self._known:
            self._known[key] = next(self._rules.shared(job), None)
        return self._known[key]

    def _why_ended(self, name: str, outcome: State) -> str:
        job = self._view.queue.get(name) or self._view.held[name]
        if outcome is State.CANCELLED:
            return f"dependency: {self._names.judgement(job).text}"
        own = list(self._rules.own(job))
        waited_for = own[1] if len(own) > 1 else next(self._rules.shared(job), None)
        return f"{own[0]}; {waited_for}" if waited_for is not None else str(own[0])


def decide(view: View, now_ns: int, policy: Policy) -> Plan:
    """Return what to do at *now_ns*."""
    queue = view.queue
    queue.ripen(now_ns)
    running, past = view.running, view.past
    queue.watch.sees(running.keys(), view.held, queue)
    names = Names(queue, view.held, running.keys(), view.ended.get, view.arrays, queue.watch)
    settle(queue, names, now_ns, paused=view.paused, held_arrays=view.held_arrays)
    limits = SharedLimits(
        (queue.group_limits, running.group_limits), (queue.array_limits, running.array_limits), view.held_arrays
    )
    room = Room(view.machine, policy, now_ns, running, limits, view.reservations, view.zone)
    rules = Rules(queue, room, names, running.keys(), paused=view.paused, zone=view.zone)
    order = Order(queue, running, past, policy, view.machine, now_ns, room.scarce, rules.room_helps)
    nothing = view.paused or bool(view.machine.refusal)
    placed = Placed(holding=view.holding) if nothing else Placement(queue, rules, order, view.holding).run()
    return Plan(view, rules, order, names, placed, _next_at_ns(view, rules, placed))


def _next_at_ns(view: View, rules: Rules, placed: Placed) -> int | None:
    if view.paused or not view.queue:
        return None
    now_ns, policy = rules.now_ns, rules.policy
    times = [view.queue.next_opening_ns(now_ns), view.queue.next_overdue_ns(now_ns), placed.exhausted_at_ns]
    for each in view.reservations:
        times += (each.start_at_ns - policy.reservation_horizon_ns, each.start_at_ns, each.end_at_ns)
    return min((at for at in times if at is not None and at > now_ns), default=None)
