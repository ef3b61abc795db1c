"""Who starts now: every waiting job is considered in order, and what does not fit is passed over.

Of each shape the first job is looked at; once it has failed to fit, its like is not tried again in that pass. Where
nothing that waits could fit by the sums alone, nothing is put in order at all.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from spool.core.backfill import (
    FULL,
    Halt,
    Holding,
    Protection,
    as_run,
    budget_s,
    exhausted_at_ns,
    foretell,
)
from spool.core.model import SECOND_NS, Grant, Request, Waiting
from spool.core.order import Order
from spool.core.queue import Shape, WaitingQueue
from spool.core.rules import Rules

_Entry = tuple[int, int, float, int, str, int]  # an order key, and the number of the shape

_TRIES = 3
"""How many jobs that do not fit are looked at to find one that is worth protecting: by experiment, of 1, 3 and 9."""


@dataclass(slots=True)
class Placed:
    """What one pass has placed, in the order in which it was decided."""

    starts: list[tuple[str, Grant]] = field(default_factory=list)
    holding: Holding = field(default_factory=Holding)
    exhausted_at_ns: int | None = None  # when guesses may hold nothing more for the protected job


class Placement:
    """One walk over the waiting jobs. Afterwards the room holds what was started, the rules who is protected."""

    def __init__(self, queue: WaitingQueue, rules: Rules, order: Order, holding: Holding) -> None:
        self._queue = queue
        self._rules = rules
        self._room = rules.room
        self._order = order
        amounts = holding.at(rules.now_ns)
        self._held = {name: amount for name, amount in amounts.items() if name in queue} if amounts else amounts
        self._shapes: list[Shape] = []
        self._next: list[int] = []  # of each shape, where to look for its next job
        self._entries: list[_Entry] = []  # the first of each shape that could fit, in order
        self._blocked: list[_Entry] = []  # a heap: … for which there was no room from the beginning
        self._tries = 0
        self._refused: list[tuple[Request, int]] = []  # what would fit, and is held back; how many of each shape
        self._placed = Placed()

    def run(self) -> Placed:
        """Walk."""
        self._placed.holding = Holding(self._held)
        if self._line_up():
            self._walk()
            self._hold()
        return self._placed

    def _line_up(self) -> bool:
        """Put the first of each shape in order; return whether there is any that could fit."""
        room, of_shape = self._room, self._order.of_shape
        demands = [(demand, room.may_have(demand.request)) for demand in self._queue.demands]
        if not any(fits for _, fits in demands):
            return False
        shapes = self._shapes
        for demand, fits in demands:
            entries = self._entries if fits else self._blocked
            for shape in demand.shapes.values():
                if shape.ready:
                    entries.append((*of_shape(shape, 0), len(shapes)))
                    shapes.append(shape)
        self._next = [1] * len(shapes)
        if self._order.front:
            placed = self._order.placed
            self._entries = [(*placed(entry[:5]), entry[5]) for entry in self._entries]
            self._blocked = [(*placed(entry[:5]), entry[5]) for entry in self._blocked]
        self._entries.sort()
        heapify(self._blocked)
        return True

    def _walk(self) -> None:
        entries, rules, queue = self._entries, self._rules, self._queue
        at = 0
        while at < len(entries):
            entry = entries[at]
            at += 1
            if rules.protection is None and self._blocked and self._blocked[0] < entry:
                self._protect_before(entry)
            if isinstance(rules.protection, Halt):
                return
            job = queue[entry[4]]
            if rules.protection is not None and self._room.lacks(job.spec.request):
                continue
            if not rules.may_be_tried(job) or self._consider(job, entry[5]):
                following = self._following(entry[5])
                if following is not None:
                    insort(entries, following, at)

    def _following(self, number: int) -> _Entry | None:
        """Return the next job of a shape, as an entry."""
        shape, at = self._shapes[number], self._next[number]
        if at >= len(shape.ready):
            return None
        self._next[number] = at + 1
        return (*self._order.of_shape(shape, at), number)

    def _protect_before(self, entry: _Entry) -> None:
        """Protect the first of those that stand before *entry*, and for which there was no room from the beginning."""
        blocked = self._blocked
        while blocked and blocked[0] < entry and self._rules.protection is None:
            first = heappop(blocked)
            job = self._queue[first[4]]
            if not self._rules.may_be_tried(job):
                following = self._following(first[5])
                if following is not None:
                    heappush(blocked, following)
                continue
            reason = next(self._rules.in_the_way(job), None)
            if reason is not None and reason.code in FULL:
                self._protect(job)

    def _consider(self, job: Waiting, number: int) -> bool:
        """Start *job*, of the shape of that number, if nothing speaks against it; tell whether it was started."""
        rules, room = self._rules, self._room
        protection = rules.protection
        reason = next(rules.in_the_way(job), None)
        if reason is not None:
            if reason.code in FULL and protection is None:
                self._protect(job)
            return False
        grant = room.grant(job) if protection is None else protection.grant(job, room)
        if grant is None:
            behind = len(self._shapes[number].ready) - self._next[number]  # its like, held back with it
            self._refused.append((job.spec.request, 1 + behind))
            return False
        run = as_run(job, grant, rules.now_ns)
        room.start(run)
        if protection is not None:
            protection.started(run)
        self._placed.starts.append((job.name, grant))
        return True

    def _protect(self, job: Waiting) -> None:
        """Protect *job*, for which there is no room, unless that would cost more than its start is worth."""
        rules, room = self._rules, self._room
        if rules.policy.strict_order:
            rules.protection = Halt(job, rules.now_ns)
            return
        self._tries += 1
        if self._tries > _TRIES or not rules.policy.protects:
            return
        foretold = foretell(job, room)
        if foretold is None:
            return
        part = rules.policy.guess_budget
        if foretold.guessed and part is not None:
            idle = max((free / total for free, total in room.lacking(job.spec.request)), default=1.0)
            until_s = (foretold.at_ns - rules.now_ns) / SECOND_NS
            if idle * until_s > budget_s(job, self._held.get(job.name, 0.0), part, rules.now_ns):
                return
        rules.protection = Protection(job, foretold, rules.now_ns, room.runs.run_times)

    def _hold(self) -> None:
        """Work out what is held back from now on for a job whose start rests on a guess."""
        protection, part = self._rules.protection, self._rules.policy.guess_budget
        if protection is None or not protection.guessed or part is None:
            return
        job, now_ns = protection.job, self._rules.now_ns
        rate = self._room.held_back(job.spec.request, self._refused)
        self._placed.holding = Holding(self._held, job.name, rate, now_ns)
        left_s = budget_s(job, self._held.get(job.name, 0.0), part, now_ns)
        self._placed.exhausted_at_ns = exhausted_at_ns(left_s, rate, part, now_ns)
