"""The decision of a pass: which waiting jobs start with which grant, which end unstarted, and why the others wait.

`decide` is a pure function of the view, the instant and the policy. (The queue in the view is an index that makes
`decide` faster and changes no answer.) The dispatcher carries out the plan, the dry run prints it, `why` queries it,
and the simulator runs on it.

First, jobs that have waited too long, or whose dependencies are impossible, end. Then every waiting job is considered
in order, and jobs that do not fit are skipped. Of each shape the first job is tried; once it does not fit, the others
of its shape are not tried in that pass. If the sums alone show that no waiting job fits, nothing is sorted at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from math import ceil

from msgspec import Struct, field

from spool.core.constraints import BackfillReservation, Constraints, StrictOrder, as_run, budget_s, earliest_start
from spool.core.dependencies import CANCELLED_BY, DependencyIndex, DependencyResolver, DependencyStatus, resolve
from spool.core.gpus import HORIZON_NS
from spool.core.model import SECOND_NS, Grant, Holding, Machine, Policy, Request, Reservation, Running, State, Waiting
from spool.core.priority import SLOWDOWN, Order, OrderFactors, Past
from spool.core.queue import Shape, ShapeKey, WaitingQueue, shape_key
from spool.core.quotas import SharedLimits
from spool.core.reasons import FULL, OF_ROOM, Reason, Until, codes_until
from spool.core.resources import FreeResources, Runs

_Entry = tuple[int, int, float, int, str, int]  # an order key, and the number of the shape

_UNFORESEEN = 3
"""How many jobs without a foreseeable start are skipped in the search for one to protect."""


class View(Struct, frozen=True):
    """The whole spool as seen at one time.

    `ended` gives the newest outcome of a name that neither waits nor runs; only its `get` is used, for the names in
    `queue.watch.names()` and the tasks of the arrays among them, when they have changed. `arrays` gives the tasks of
    each expanded array, `held_arrays` the arrays whose tasks must not start: each is held or cancelled. `holding` comes
    from the previous plan. `elsewhere` are the other machines for jobs.
    """

    machine: Machine
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    held: Mapping[str, Waiting] = field(default_factory=dict)
    running: Runs = field(default_factory=Runs)
    ended: Mapping[str, State] = field(default_factory=dict)
    arrays: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    held_arrays: Mapping[str, State] = field(default_factory=dict)
    array_limits: Mapping[str, int | None] = field(default_factory=dict)
    reservations: tuple[Reservation, ...] = ()
    past: Past = field(default_factory=lambda: Past(Policy()))
    paused: bool = False
    holding: Holding = field(default_factory=Holding)
    elsewhere: Mapping[str, Machine] = field(default_factory=dict)


_BEYOND_HELP = codes_until(Until.CHANGE) | {"dependency"}
_LOOKS = 4  # jobs that are looked at for each one in line


class Start(Struct, frozen=True):
    """A job that starts now, and its grant."""

    name: str
    grant: Grant
    lease: int | None = None  # of the arbiter of a shared machine


class Ending(Struct, frozen=True):
    """A waiting or held job that ends without a start: `unschedulable`, or `cancelled` by its dependencies."""

    name: str
    outcome: State
    reason: str


class Plan(Struct, frozen=True, eq=False):
    """The decision of one pass; `decide` makes it. `starts` are in the order in which they were decided.

    `next_at_ns` is the earliest instant at which the plan may change through time alone, None if there is none.
    `holding` goes into the next view. `protection` keeps resources free for a job, if another could start beside it;
    `holds_back` tells whether a job that fits is held back for it. Why a job waits is worked out when it is asked, with
    the queue as it is then.
    """

    view: View
    now_ns: int
    policy: Policy
    starts: tuple[Start, ...]
    endings: tuple[Ending, ...]
    holding: Holding
    holds_back: bool
    next_at_ns: int | None
    protection: BackfillReservation | StrictOrder | None
    _constraints: Constraints  # as the pass leaves them
    _order: Order
    _started: frozenset[str]
    _known: dict[tuple[ShapeKey, int], Reason | None] = field(default_factory=dict)  # the answers for a shape
    _room_lacks: dict[tuple[ShapeKey, int], bool] = field(default_factory=dict)  # and whether these name room alone

    @property
    def protected(self) -> str | None:
        """The job that resources are kept free for, if any."""
        return self.protection.job.name if self.protection is not None else None

    @property
    def stuck(self) -> bool:
        """Whether the waiting jobs need a user's help: each never fits, or its dependencies neither wait nor run.

        For use when no job is running.
        """
        return all((why := self.reason(name)) is not None and why.code in _BEYOND_HELP for name in self.view.queue)

    def reason(self, name: str) -> Reason | None:
        """Return the first reason why *name* waits or is held; None for a job that starts now or is unknown."""
        job = self.view.queue.get(name)
        if job is None:
            return Reason("held", "held") if name in self.view.held else None
        return None if name in self._started else self._first(job)

    def all_reasons(self, name: str) -> list[Reason]:
        """Return every reason of *name* in the order of the rules; the first is `reason`."""
        job = self.view.queue.get(name)
        if job is not None:
            return [] if name in self._started else list(self._constraints.reasons(job))
        job = self.view.held.get(name)
        return [] if job is None else [Reason("held", "held"), *self._constraints.reasons(job)]

    def in_order(self) -> list[tuple[Waiting, OrderFactors]]:
        """Return every waiting job in the order of consideration, with the factors of its place.

        A job with a higher score than one of its shape that arrived earlier comes right behind that.
        """
        queue, order = self.view.queue, self._order
        shapes = [shape for shape in queue.shapes.values() if shape.eligible]
        for shape in shapes:
            order.of_shape(shape, 0)
        found = []
        left = dict(queue)
        for shape in shapes:
            behind = None
            for *_, name in shape.eligible:
                job = left.pop(name)
                key, standing = order.of_job(job)
                behind = key if behind is None else max(behind, key)
                found.append((behind, job, standing))
        for job in left.values():
            key, standing = order.of_job(job)
            found.append((key, job, standing))
        found.sort(key=lambda each: each[0])
        return [(job, standing) for _, job, standing in found]

    def in_line(self, most: int) -> Iterator[Waiting]:
        """Yield at most *most* jobs that wait only for room, in order; all have the priority of the first job.

        None if the configuration asks for another order than the default one.
        """
        if self.policy.strict_order or self.policy.order != SLOWDOWN:
            return
        order = self._order
        shapes = [shape for shape in self.view.queue.shapes.values() if shape.eligible]
        entries = [(*order.of_shape(shape, 0), number, 0) for number, shape in enumerate(shapes)]
        heapify(entries)
        first = entries[0][0] if entries else 0
        left, tries = most, _LOOKS * most
        while entries and left and tries and entries[0][0] == first:
            *_, name, number, at = entries[0]
            tries -= 1
            if at + 1 < len(shapes[number].eligible):
                heapreplace(entries, (*order.of_shape(shapes[number], at + 1), number, at + 1))
            else:
                heappop(entries)
            if self.waits_for_room(name):
                left -= 1
                yield self.view.queue[name]

    def waits_for_room(self, name: str) -> bool:
        """Whether a job waits, and only for room on this machine."""
        job, constraints = self.view.queue.get(name), self._constraints
        if job is None or job.elsewhere is not None or name in self._started or self.view.paused:
            return False
        if not constraints.may_be_tried(job):
            return False
        key = (shape_key(job), job.spec.priority)
        found = self._room_lacks.get(key)
        if found is None:
            codes = [reason.code for reason in constraints.class_reasons(job)]
            found = self._room_lacks[key] = bool(codes) and OF_ROOM.issuperset(codes)
        return found

    def short_in_line(self, limit_ns: int, most: int, but: Set[str]) -> list[Waiting]:
        """Return the first *most* jobs that wait for room and state at most that limit; of each shape one.

        Those of *but* are left out.
        """
        but = but | self._started
        found = [
            self._order.of_shape(shape, at)
            for shape in self.view.queue.shapes.values()
            if shape.key.time_limit_ns is not None and shape.key.time_limit_ns <= limit_ns
            for at in islice((at for at, (*_, name) in enumerate(shape.eligible) if name not in but), 1)
        ]
        names = [key[4] for key in sorted(map(self._order.placed, found))]
        return list(islice((self.view.queue[name] for name in names if self.waits_for_room(name)), most))

    def room_without(self, runs: Iterable[Running]) -> FreeResources:
        """Return the room beside the runs and starts of this plan, once *runs* have left their own."""
        return self._constraints.room.without(runs)

    def _first(self, job: Waiting) -> Reason | None:
        for reason in self._constraints.job_reasons(job):
            return reason
        if self._constraints.counts_queued:
            return next(self._constraints.reasons(job), None)
        key = (shape_key(job), job.spec.priority)
        if key not in self._known:
            self._known[key] = next(self._constraints.class_reasons(job), None)
        return self._known[key]


def decide(view: View, now_ns: int, policy: Policy) -> Plan:
    """Return the plan for *now_ns*."""
    queue = view.queue
    running = view.running
    queue.watch.sees(running.keys(), view.held, queue)
    names = DependencyResolver(queue, view.held, running.keys(), view.ended.get, view.arrays, queue.watch)
    _resolve_dependencies(view, names, now_ns)
    queue.make_ready(now_ns)
    room = room_in(view, now_ns, policy)
    constraints = Constraints(queue, room, names, paused=view.paused)
    order = Order(queue, room, view.past, constraints.room_helps)
    placed = SchedulingPass(queue, constraints, order, view.holding)
    if not (view.paused or view.machine.refusal or (view.machine.no_leases is not None and not view.elsewhere)):
        placed.run()
    after = constraints.after(placed.protection)
    return Plan(
        view=view,
        now_ns=now_ns,
        policy=policy,
        starts=tuple(placed.starts),
        endings=tuple(_endings(view, after, names)),
        holding=placed.holding,
        holds_back=bool(placed.refused),
        next_at_ns=_next_at_ns(view, constraints, placed),
        protection=placed.protection,
        _constraints=after,
        _order=order,
        _started=frozenset([start.name for start in placed.starts]),
    )


def _endings(view: View, constraints: Constraints, names: DependencyResolver) -> Iterator[Ending]:
    for name, outcome in names.ended_now.items():
        job = view.queue.get(name) or view.held[name]
        if outcome is State.CANCELLED:
            why = f"{CANCELLED_BY}{names.resolution(job).text}"
        else:
            overdue, *others = constraints.job_reasons(job)
            waits_for = others[0] if others else next(constraints.class_reasons(job), None)
            why = str(overdue) if waits_for is None else f"{overdue}; {waits_for}"
        yield Ending(name, outcome, why)


def room_in(view: View, now_ns: int, policy: Policy) -> FreeResources:
    """Return the free resources of the machine of *view* beside the runs, with the limits in force."""
    limits = SharedLimits(view.queue.shapes.keys(), view.running, view.held_arrays, view.array_limits)
    room = FreeResources(view.machine, policy, now_ns, view.running, limits, view.reservations)
    room.elsewhere = view.elsewhere
    return room


def _next_at_ns(view: View, constraints: Constraints, placed: SchedulingPass) -> int | None:
    if view.paused or not view.queue:
        return None
    now_ns = constraints.now_ns
    times = [*view.queue.next_at_ns(now_ns), placed.exhausted_at_ns]
    for each in view.reservations:
        times += (each.start_at_ns - HORIZON_NS, each.start_at_ns, each.end_at_ns)
    return min((at for at in times if at is not None and at > now_ns), default=None)


class SchedulingPass:
    """One walk over the waiting jobs. Afterwards the room has the started jobs.

    `starts` are in the order of the decisions, `protection` is that of the job that the pass protects.
    """

    def __init__(self, queue: WaitingQueue, constraints: Constraints, order: Order, holding: Holding) -> None:
        self._queue = queue
        self._constraints = constraints
        self._room = constraints.room
        self._order = order
        amounts = holding.at(constraints.now_ns)
        self._held = {name: amount for name, amount in amounts.items() if name in queue} if amounts else amounts
        self._shapes: list[Shape] = []
        self._next: list[int] = []  # for each shape, the position of its next job
        self._fits: list[bool] = []  # … and whether it could fit at the beginning
        self._line: list[_Entry] = []  # a heap: the next job of each shape
        self._fitting = 0  # how many of these could fit
        self._ahead: set[str] = set()  # jobs that were started before their turn
        self._tries_left = _UNFORESEEN
        self.protection: BackfillReservation | StrictOrder | None = None
        self.starts: list[Start] = []
        self.refused: list[tuple[Request, int]] = []  # what fits and is held back, how many of a shape
        self.holding = holding
        self.exhausted_at_ns: int | None = None  # when the guess budget of the protected job is used up

    def run(self) -> None:
        """Walk over the waiting jobs."""
        self._line_up()
        while self._fitting and not isinstance(self.protection, StrictOrder):
            *_, name, number = heappop(self._line)
            fits = self._fits[number]
            self._fitting -= fits
            if not fits and (self.protection is not None or not self._tries_left):
                continue  # there is nothing to decide
            if self._is_over(self._queue[name], number) and self._next[number] < len(self._shapes[number].eligible):
                heappush(self._line, (*self._order.of_shape(self._shapes[number], self._next[number]), number))
                self._next[number] += 1
                self._fitting += fits
        self._hold()

    def _line_up(self) -> None:
        """Line up the first job of each shape, if any could fit."""
        room, order = self._room, self._order
        demands = [
            (same.values(), room.may_have(request, elsewhere))
            for (request, elsewhere), same in self._queue.demands.items()
        ]
        if not any(fits for _, fits in demands):
            return
        ready = [(shape, fits) for same, fits in demands for shape in same if shape.eligible]
        self._shapes, self._fits = [shape for shape, _ in ready], [fits for _, fits in ready]
        self._next = [1] * len(ready)
        self._line = [(*order.of_shape(shape, 0), number) for number, shape in enumerate(self._shapes)]
        if order.front:
            self._line = [(*order.placed(entry[:5]), entry[5]) for entry in self._line]
        heapify(self._line)
        self._fitting = sum(self._fits)

    def _is_over(self, job: Waiting, number: int) -> bool:
        """Decide about *job*, the next of the shape *number*; return whether it is the turn of the one behind it."""
        if job.yields_to is not None and self._fits[number]:
            self._put_ahead(job)
        if job.name in self._ahead:
            return True
        if self.protection is not None and job.elsewhere is None and self._room.lacks(job.request):
            return False
        return not self._constraints.may_be_tried(job) or self._consider(job, number)

    def _put_ahead(self, job: Waiting) -> None:
        """Start the job that *job* was preempted for first, if it can start: else *job* would take its room again."""
        other = self._queue.get(job.yields_to or "")
        if other is None or other.name in self._ahead or any(other.name == start.name for start in self.starts):
            return
        if self._constraints.may_be_tried(other) and self._consider(other):
            self._ahead.add(other.name)

    def _consider(self, job: Waiting, number: int | None = None) -> bool:
        """Start *job*, the next of the shape *number*, if nothing prevents it; return whether it was started."""
        constraints, room, protection = self._constraints, self._room, self.protection
        reason = next(constraints.blockers(job), None)
        if reason is not None:
            if reason.code in FULL and protection is None:
                self._protect(job)
            return False
        if protection is None or job.elsewhere is not None:
            grant: Grant | None = room.grant(job)
        else:
            grant = protection.grant(job, room)
        if grant is None:
            # The rest of its shape is held back with it.
            behind = len(self._shapes[number].eligible) - self._next[number] if number is not None else 0
            self.refused.append((job.request, 1 + behind))
            return False
        run = as_run(job, grant, constraints.now_ns)
        room.start(run)
        if protection is not None and job.elsewhere is None:
            protection.started(run)
        self.starts.append(Start(job.name, grant))
        return True

    def _protect(self, job: Waiting) -> None:
        """Protect *job*, the first without room, unless that would cost more than its start is worth."""
        if job.elsewhere is not None:
            return
        constraints, room = self._constraints, self._room
        if constraints.policy.strict_order:
            self.protection = StrictOrder(job, constraints.now_ns)
            return
        if not self._tries_left or not constraints.policy.protects:
            return
        foretold = earliest_start(job, room)
        if foretold is None:
            self._tries_left -= 1
            return
        self._tries_left = 0
        part = constraints.policy.guess_budget
        if foretold.guessed:
            idle = max((pool.free / pool.total for pool in room.scarce(job.request)), default=1.0)
            until_s = (foretold.at_ns - constraints.now_ns) / SECOND_NS
            if idle * until_s > budget_s(job, self._held.get(job.name, 0.0), part, constraints.now_ns):
                return
        self.protection = BackfillReservation(job, foretold, constraints.now_ns, room.runs.run_times)

    def _hold(self) -> None:
        """Set the resources held back from now on for a job whose start rests on a guess, and until when."""
        protection, part = self.protection, self._constraints.policy.guess_budget
        self.holding = Holding(self._held)
        if protection is not None and protection.guessed:
            job, now_ns = protection.job, self._constraints.now_ns
            rate = self._room.held_back(job.request, self.refused)
            left_s = budget_s(job, self._held.get(job.name, 0.0), part, now_ns)
            self.holding = Holding(self._held, job.name, rate, now_ns)
            growth = rate - part  # the budget loses the one and gains the other in each second
            if growth > 0 and left_s / growth <= 1e9:
                self.exhausted_at_ns = now_ns + max(1, ceil(left_s / growth) + 1) * SECOND_NS


def _resolve_dependencies(view: View, names: DependencyResolver, now_ns: int) -> None:
    """Record the jobs that end now in *names*; file all others by the state of their dependencies.

    A job that ends takes with it the jobs that depend on it, held ones included, and so on down the chain.
    """
    for name in () if view.paused else view.queue.overdue(now_ns):
        task = view.queue[name].spec.task
        if task is None or task.array not in view.held_arrays:
            names.end(name, State.UNSCHEDULABLE)
    if view.queue.watch:
        _judge(view.queue.watch, names)
    names.settled = True


def _judge(watch: DependencyIndex, names: DependencyResolver) -> None:
    """Judge the jobs affected by a change."""
    # The order decides nothing. The names are sorted so that it is the same for the same spool, and each stands in the
    # queue once: what depends on an array is judged after all of its tasks that end.
    todo = deque(sorted(watch.unresolved.union(*map(watch.dependents, names.ended_now))))
    listed = set(todo)
    watch.unresolved = set()
    while todo:
        name = todo.popleft()
        listed.discard(name)
        job = watch.jobs.get(name)
        if job is None:
            continue
        if name in names.ended_now:
            watch.unresolved.add(name)  # not judged; it will be, unless it ends
            continue
        resolution = watch.resolved[name] = resolve(job, names)
        if resolution.verdict is DependencyStatus.SATISFIED:
            watch.unsatisfied.discard(name)
            continue
        watch.unsatisfied.add(name)
        if resolution.verdict is DependencyStatus.IMPOSSIBLE and job.spec.cancel_on_dependency_failure:
            watch.unresolved.add(name)  # found again in each pass until it has ended
            names.end(name, State.CANCELLED)
            others = watch.dependents(name) - listed
            todo += sorted(others)
            listed |= others
    for name in names.ended_now:  # jobs judged by decisions of this pass are judged again by their results
        watch.touch(name)
        watch.unresolved |= watch.dependents(name) & watch.resolved.keys()
