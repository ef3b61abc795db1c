"""Who starts now: every waiting job is considered in order, and what does not fit is passed over.

Of each shape the first job is looked at; once it has failed to fit, its like is not tried again in that pass. Shapes
that the sums alone rule out at the beginning of a pass are not even put in order, unless somebody passes them over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from spool.core.backfill import BUSY, FULL, Halt, Protection, as_run, earliest, passed_over_ns
from spool.core.model import Grant, Waiting
from spool.core.order import HIGHEST_PRIORITY, rank, shares
from spool.core.queue import Shape, WaitingQueue
from spool.core.rules import Rules

_Entry = tuple[int, int, int, int, str, int]  # an order key, and the number of the shape

_OWED = -1  # stands for the number of a shape: the job that was protected in the pass before
_BEFORE_ALL = -(1 << 62)


@dataclass(slots=True)
class Placed:
    """What one pass has placed, in the order in which it was decided."""

    starts: list[tuple[str, Grant]] = field(default_factory=list)
    protected: str | None = None
    starves_at_ns: int | None = None  # when the next of the jobs that do not fit has waited for `starvation_after`


class Placement:
    """One walk over the waiting jobs. Afterwards the room holds what was started, the rules who is protected."""

    def __init__(self, queue: WaitingQueue, rules: Rules, usage: Mapping[str, float], owed: str | None) -> None:
        self._queue = queue
        self._rules = rules
        self._room = rules.room
        self._by_user = shares(usage, self._room.runs.values(), rules.now_ns, rules.policy)
        self._shapes: list[Shape] = [shape for shape in queue.shapes if shape.ready]
        self._next = [0] * len(self._shapes)  # of each shape, where to look for its next job
        self._ruled_out: list[int] = []  # shapes for which there was no room at the beginning
        self._first_ruled_out = HIGHEST_PRIORITY + 1  # of these, the first place in the order of priorities
        self._first_arrivals: dict[int, int] = {}  # of these, where starved, by place in the order of priorities
        self._passed: list[_Entry] = []  # a heap: starved jobs for which there is no room
        self._started: set[str] = set()
        job = None if owed is None else queue.get(owed)
        self._owed = job if job is not None and rules.may_be_tried(job) else None
        self._placed = Placed()

    def run(self) -> Placed:
        """Walk."""
        heap = self._heads()
        while heap and not isinstance(self._rules.protection, Halt):
            entry = heappop(heap)
            name, number = entry[4], entry[5]
            started = name in self._started or self._consider(self._queue[name], entry)
            if number != _OWED and started:
                following = self._first_open(number)
                if following is not None:
                    heappush(heap, following)
        self._look_ahead()
        return self._placed

    def _heads(self) -> list[_Entry]:
        heap: list[_Entry] = []
        owed = self._owed
        if owed is not None:  # in its priority it comes first
            heap.append((HIGHEST_PRIORITY - owed.spec.priority, _BEFORE_ALL, 0, 0, owed.name, _OWED))
        strict = self._rules.policy.strict_order
        # The sums alone may rule a shape out; the rules say why, if anyone asks. (As `Room.lacks`, for very many.)
        room = self._room
        cpus, memory = max(room.machine.cpus - room.cpus, 0), max(room.machine.memory_bytes - room.memory_bytes, 0)
        for number, shape in enumerate(self._shapes):
            request = shape.key.request
            if not strict and (
                request.cpus > cpus
                or (request.memory_bytes is not None and request.memory_bytes > memory)
                or (request.gpus and len(room.cards.open_to(request)) < request.gpus)
            ):
                self._ruled_out.append(number)
                self._first_ruled_out = min(shape.ready[0][0], self._first_ruled_out)
                continue
            entry = self._first_open(number)
            if entry is not None:
                heap.append(entry)
        heapify(heap)
        return heap

    def _first_open(self, number: int) -> _Entry | None:
        """Return the next job of a shape that nothing of its own keeps waiting, as an entry of the order."""
        shape = self._shapes[number]
        ready = shape.ready
        at = self._next[number]
        while at < len(ready):
            ahead, arrived, name = ready[at]
            at += 1
            if self._rules.may_be_tried(self._queue[name]):
                self._next[number] = at
                key = shape.key
                share, bonus = rank(key.user, key.project, key.time_limit_ns, self._by_user, self._rules.policy)
                return (ahead, share, bonus, arrived, name, number)
        self._next[number] = at
        return None

    def _consider(self, job: Waiting, entry: _Entry) -> bool:
        """Start *job* if nothing speaks against it, and tell whether it was started."""
        rules = self._rules
        reason = next(rules.in_the_way(job), None)
        if reason is not None:
            if rules.policy.strict_order and reason.code in FULL:
                rules.protection = Halt(job, rules.now_ns)
            # A job that was protected stays so while its group or quota is full: its room was counted on.
            elif reason.code in (BUSY if job is self._owed else FULL):
                self._pass_over(job, entry)
            return False
        self._protect(entry)
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

    def _pass_over(self, job: Waiting, entry: _Entry) -> bool:
        """Remember a job for which there is no room, and tell whether it has waited long enough to be protected."""
        rules = self._rules
        missing_ns = rules.policy.starvation_after_ns - passed_over_ns(job, rules.now_ns)
        if missing_ns <= 0:
            heappush(self._passed, entry)
            return True
        if self._placed.starves_at_ns is None or rules.now_ns + missing_ns < self._placed.starves_at_ns:
            self._placed.starves_at_ns = rules.now_ns + missing_ns
        return False

    def _protect(self, entry: _Entry) -> None:
        """Protect the first job that is passed over by the one of *entry*, which fits.

        That is one that stands before it in the order; or one that arrived before it and for which there was no room
        from the beginning, though a shorter limit or a better share has put the other before it.
        """
        if self._rules.protection is not None or not self._is_passing(entry):
            return
        if not self._protect_one(entry) and self._ruled_out and self._is_passing(entry):
            self._protect_one(entry)

    def _protect_one(self, entry: _Entry) -> bool:
        rules = self._rules
        empty = self._room.emptied()
        self._passed.sort()  # and so it remains a heap
        for passed in tuple(self._passed):
            if not (passed < entry or _arrived_before(passed, entry)):
                continue
            self._passed.remove(passed)
            name = passed[4]
            job = self._queue[name]
            reason = next(rules.in_the_way(job), None)
            if job is not self._owed and (reason is None or reason.code not in FULL):
                continue
            found = earliest(job, self._room) if empty.fits(job) else None
            if found is not None:
                at_ns, then = found
                rules.protection = Protection(job, at_ns, then, rules.now_ns)
                self._placed.protected = name
                return True
        return False

    def _is_passing(self, entry: _Entry) -> bool:
        """Tell whether the job of *entry* passes over a starved one."""
        if self._passed and self._passed[0][5] == _OWED and self._passed[0][0] <= self._first_ruled_out:
            return self._passed[0] < entry  # no shape that was ruled out has anybody before the one that is owed
        self._look_at_ruled_out()
        if self._passed and self._passed[0] < entry:
            return True
        return any(ahead <= entry[0] and arrived < entry[3] for ahead, arrived in self._first_arrivals.items())

    def _look_at_ruled_out(self) -> None:
        for number in self._ruled_out:
            entry = self._first_open(number)
            if entry is not None and self._pass_over(self._queue[entry[4]], entry):
                ahead, arrived = entry[0], entry[3]
                self._first_arrivals[ahead] = min(arrived, self._first_arrivals.get(ahead, arrived))
        self._ruled_out.clear()

    def _look_ahead(self) -> None:
        """Go on protecting the job that was protected and does not fit yet, though nobody else fits either."""
        owed = self._owed
        if owed is not None and self._rules.protection is None and any(entry[5] == _OWED for entry in self._passed):
            self._placed.protected = owed.name


def _arrived_before(one: _Entry, other: _Entry) -> bool:
    """Tell whether *one*, of no lower priority, arrived before *other*."""
    return one[0] <= other[0] and one[3] < other[3]
