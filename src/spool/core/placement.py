"""Who starts now: every waiting job is considered in order, and what does not fit is passed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from spool.core.backfill import BUSY, FULL, Halt, Protection, as_run, earliest, passed_over_ns
from spool.core.model import Grant, Waiting
from spool.core.order import rank, shares
from spool.core.queue import Shape, WaitingQueue
from spool.core.rules import Rules

_Entry = tuple[int, int, int, int, str, int]  # an order key, and the number of its shape


@dataclass(slots=True)
class Placed:
    """What one pass has placed, in the order in which it was decided."""

    starts: list[tuple[str, Grant]] = field(default_factory=list)
    protected: str | None = None
    starves_at_ns: int | None = None  # when the next of the jobs that do not fit has waited for `starvation_after`


class Placement:
    """One walk over the waiting jobs, the first of each shape at a time."""

    def __init__(self, queue: WaitingQueue, rules: Rules, usage: Mapping[str, float], owed: str | None) -> None:
        self._queue = queue
        self._rules = rules
        self._room = rules.room
        self._by_user = shares(usage, self._room.runs.values(), rules.now_ns, rules.policy)
        self._shapes: list[Shape] = []
        self._next: list[int] = []  # of each shape, where to look for its next job
        self._ranks: list[tuple[int, int]] = []
        self._passed: list[Waiting] = []  # starved jobs for which there is no room, in order
        self._started: set[str] = set()
        self._owed = None if owed is None else queue.get(owed)
        self._placed = Placed()

    def run(self) -> Placed:
        """Walk. The room and the rules then hold what was started and who is protected."""
        heap = self._heads()
        while heap and not isinstance(self._rules.protection, Halt):
            *_, name, number = heappop(heap)
            job = self._queue[name]
            if number < 0:  # the job that was protected before: in its priority it comes first
                self._consider(job)
                continue
            if name in self._started or self._consider(job):
                self._push_next(heap, number)
            # else: what has just failed to fit is not tried again in this pass, and neither is its like
        owed = self._owed
        if owed is not None and self._rules.protection is None and any(job is owed for job in self._passed):
            self._placed.protected = owed.name  # nobody else fits now, but whoever fits next is to leave it its room
        return self._placed

    def _heads(self) -> list[_Entry]:
        heap: list[_Entry] = []
        policy = self._rules.policy
        for shape in self._queue.shapes:
            if shape.ready:
                key = shape.key
                self._shapes.append(shape)
                self._next.append(0)
                self._ranks.append(rank(key.user, key.project, key.time_limit_ns, self._by_user, policy))
                self._push_next(heap, len(self._shapes) - 1, push=False)
        owed = self._owed
        if owed is not None and self._rules.may_be_tried(owed):
            heap.append((255 - owed.spec.priority, -(1 << 62), 0, 0, owed.name, -1))
        heapify(heap)
        return heap

    def _push_next(self, heap: list[_Entry], number: int, *, push: bool = True) -> None:
        """Add the next job of a shape that nothing of its own keeps waiting."""
        ready = self._shapes[number].ready
        at = self._next[number]
        while at < len(ready):
            ahead, arrived, name = ready[at]
            at += 1
            if self._rules.may_be_tried(self._queue[name]):
                share, bonus = self._ranks[number]
                entry = (ahead, share, bonus, arrived, name, number)
                if push:
                    heappush(heap, entry)
                else:
                    heap.append(entry)
                break
        self._next[number] = at

    def _consider(self, job: Waiting) -> bool:
        """Start *job* if nothing speaks against it, and tell whether it was started."""
        rules = self._rules
        reason = next(rules.in_the_way(job), None)
        if reason is not None:
            if rules.policy.strict_order and reason.code in FULL and rules.protection is None:
                rules.protection = Halt(job, rules.now_ns)
            # A job that was protected stays so while its group or quota is full: its room was counted on.
            if reason.code in (BUSY if job is self._owed else FULL):
                self._pass_over(job)
            return False
        self._protect()
        room = self._room
        protection = rules.protection
        grant = room.grant(job) if protection is None else protection.grant(job, room)
        if grant is None:
            return False
        run = as_run(job, grant, rules.now_ns)
        room.start(run)
        if protection is not None:
            protection.started(run)
        self._placed.starts.append((job.name, grant))
        self._started.add(job.name)
        return True

    def _pass_over(self, job: Waiting) -> None:
        rules = self._rules
        missing_ns = rules.policy.starvation_after_ns - passed_over_ns(job, rules.now_ns)
        if missing_ns <= 0:
            self._passed.append(job)
        elif self._placed.starves_at_ns is None or rules.now_ns + missing_ns < self._placed.starves_at_ns:
            self._placed.starves_at_ns = rules.now_ns + missing_ns

    def _protect(self) -> None:
        """Protect the first job that is passed over, once somebody else fits."""
        if self._rules.protection is not None or not self._passed:
            return
        room = self._room
        empty = room.emptied()
        for job in self._passed:
            found = earliest(job, room) if empty.fits(job) else None
            if found is not None:
                at_ns, then = found
                self._rules.protection = Protection(job, at_ns, then, self._rules.now_ns)
                self._placed.protected = job.name
                break
        self._passed.clear()
