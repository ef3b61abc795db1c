"""What a job depends on: satisfied, not yet, or never.

An array's name means all its tasks, as one: it has finished when all have, ended when all have, ended badly when
all have ended and one did badly. A name never seen is waited for, because files arrive in any order. Of a name that
has ended and waits or runs again, what it does now counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum

from spool.core.model import Dependencies, State, Waiting

_TASK = re.compile(r"(.+)_[0-9]+", re.DOTALL)


class Verdict(Enum):
    """What the dependencies of a job come to."""

    SATISFIED = "satisfied"
    NOT_YET = "not yet"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and in words what is still missing or what has made it impossible."""

    verdict: Verdict
    text: str = ""
    unseen: bool = False  # waits for a name that does nothing yet


@dataclass(frozen=True, slots=True)
class Tally:
    """How far one name (a job, or an array with all its tasks) has come."""

    name: str
    total: int
    finished: int
    bad: int
    pending: tuple[str, State | None] | None  # the first that has not ended, and what it does
    worst: tuple[str, State] | None  # the first that ended badly
    unseen: bool = False  # one at least has never been seen

    @property
    def is_finished(self) -> bool:
        """Every one finished."""
        return self.total > 0 and self.finished == self.total

    @property
    def is_ended(self) -> bool:
        """Every one ended."""
        return self.total > 0 and self.pending is None


def referred(job: Waiting) -> tuple[str, ...]:
    """Return every name that *job* depends on; `each` as the one task that is meant."""
    depends = job.spec.depends_on
    if depends is None:
        return ()
    names = depends.all + depends.any + depends.ended + depends.failed
    return names if depends.each is None else (*names, twin(job, depends))


def twin(job: Waiting, depends: Dependencies) -> str:
    """Return the task of the array `each` that has the index of *job*; for a job of no array the array itself."""
    task = job.spec.task
    return depends.each or "" if task is None else f"{depends.each}_{task.index}"


def units(name: str) -> tuple[str, ...]:
    """Return under which names others may depend on *name*: its own, and that of the array it may be a task of."""
    task = _TASK.fullmatch(name)
    return (name,) if task is None else (name, task.group(1))


class Names:
    """What every name is doing, in one pass. *ended_now* holds what the pass itself has decided to end."""

    def __init__(
        self,
        queue: Mapping[str, Waiting],
        held: Mapping[str, Waiting],
        running: Set[str],
        ended: Callable[[str], State | None],
        arrays: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._queue = queue
        self._held = held
        self._running = running
        self._ended = ended
        self._arrays = arrays
        self._tallies: dict[str, Tally] = {}
        self.ended_now: dict[str, State] = {}

    def doing(self, name: str) -> State | None:
        """Return what *name* is doing; None if it has never been seen."""
        if name in self._running:
            return State.RUNNING
        if name in self.ended_now:
            return self.ended_now[name]
        if name in self._queue:
            return State.QUEUED
        if name in self._held:
            return State.HELD
        return self._ended(name)

    def pending(self, name: str) -> Waiting | None:
        """Return the job *name* if it waits or is held, and this pass does not end it."""
        if name in self._running or name in self.ended_now:
            return None
        return self._queue.get(name) or self._held.get(name)

    def members(self, name: str) -> tuple[str, ...]:
        """Return the tasks of the array *name*, or *name* itself where it is no array."""
        return self._arrays.get(name) or (name,)

    def end(self, name: str, outcome: State) -> None:
        """Note that this pass ends *name*, which waited or was held."""
        self.ended_now[name] = outcome
        self._tallies.clear()

    def tally(self, name: str) -> Tally:
        """Return how far *name* has come."""
        known = self._tallies.get(name)
        if known is None:
            known = self._tallies[name] = self._count(name)
        return known

    def _count(self, name: str) -> Tally:
        members = self.members(name)
        finished = bad = 0
        unseen = False
        pending: tuple[str, State | None] | None = None
        worst: tuple[str, State] | None = None
        for member in members:
            state = self.doing(member)
            if state is State.FINISHED:
                finished += 1
            elif state is not None and state.ended:
                bad += 1
                worst = worst or (member, state)
            else:
                pending = pending or (member, state)
                unseen = unseen or state is None
        return Tally(name, len(members), finished, bad, pending, worst, unseen)


def judge(job: Waiting, names: Names) -> Judgement:
    """Return what the dependencies of *job* come to. A job with several clauses needs every one of them."""
    depends = job.spec.depends_on
    if depends is None:
        return Judgement(Verdict.SATISFIED)
    must = depends.all if depends.each is None else (*depends.all, twin(job, depends))
    found = []
    unseen = False
    for clause, listed in ((_all, must), (_any, depends.any), (_ended, depends.ended), (_failed, depends.failed)):
        if listed:
            tallies = [names.tally(name) for name in listed]
            found.append(clause(tallies))
            unseen = unseen or any(tally.unseen for tally in tallies)
    for verdict in (Verdict.IMPOSSIBLE, Verdict.NOT_YET):
        for judgement in found:
            if judgement.verdict is verdict:
                return Judgement(verdict, judgement.text, unseen)
    return Judgement(Verdict.SATISFIED)


def _all(tallies: list[Tally]) -> Judgement:
    for tally in tallies:
        if tally.worst is not None:
            return Judgement(Verdict.IMPOSSIBLE, _ended_as(*tally.worst))
    return _until(tallies, lambda tally: tally.is_finished, sum(tally.finished for tally in tallies))


def _any(tallies: list[Tally]) -> Judgement:
    if any(tally.is_finished for tally in tallies):
        return Judgement(Verdict.SATISFIED)
    if all(tally.worst is not None for tally in tallies):
        name, outcome = next(tally.worst for tally in tallies if tally.worst is not None)
        more = f", and {len(tallies) - 1} more did not finish" if len(tallies) > 1 else ""
        return Judgement(Verdict.IMPOSSIBLE, _ended_as(name, outcome) + more)
    first = next(tally.pending for tally in tallies if tally.pending is not None and tally.worst is None)
    return Judgement(Verdict.NOT_YET, f"{_does(*first)} (0 of {len(tallies)} done, 1 is enough)")


def _ended(tallies: list[Tally]) -> Judgement:
    return _until(tallies, lambda tally: tally.is_ended, sum(tally.finished + tally.bad for tally in tallies))


def _failed(tallies: list[Tally]) -> Judgement:
    for tally in tallies:
        if tally.is_ended and not tally.bad:
            return Judgement(Verdict.IMPOSSIBLE, f"{tally.name} finished, and was to fail")
    return _until(tallies, lambda tally: tally.is_ended, sum(tally.finished + tally.bad for tally in tallies))


def _until(tallies: list[Tally], satisfied: Callable[[Tally], bool], done: int) -> Judgement:
    for tally in tallies:
        if not satisfied(tally):
            missing = tally.pending or (tally.name, None)
            total = sum(each.total for each in tallies)
            return Judgement(Verdict.NOT_YET, f"{_does(*missing)} ({done} of {total} done)")
    return Judgement(Verdict.SATISFIED)


def _does(name: str, state: State | None) -> str:
    return f"{name} has not been seen yet" if state is None else f"{name} is {state}"


def _ended_as(name: str, outcome: State) -> str:
    return f"{name} ended as {outcome}"


class Watch:
    """Which waiting jobs are to be judged again because something that they depend on has changed."""

    __slots__ = ("_by_name", "_jobs", "_seen", "doomed", "doubtful")

    def __init__(self) -> None:
        self._by_name: dict[str, set[str]] = {}
        self._jobs: set[str] = set()
        self._seen: Set[str] = frozenset()
        self.doubtful: set[str] = set()  # jobs not judged since something changed
        self.doomed: set[str] = set()  # jobs that impossible dependencies were to end when last judged

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def names(self) -> Set[str]:
        """Return the names that some waiting job depends on: the ones whose outcome matters."""
        return self._by_name.keys()

    def add(self, job: Waiting) -> None:
        """Watch what *job* depends on."""
        self._jobs.add(job.name)
        self.doubtful.add(job.name)
        for name in referred(job):
            self._by_name.setdefault(name, set()).add(job.name)

    def discard(self, job: Waiting) -> None:
        """Watch no longer for *job*."""
        self._jobs.discard(job.name)
        self.doubtful.discard(job.name)
        self.doomed.discard(job.name)
        for name in referred(job):
            dependents = self._by_name.get(name)
            if dependents is not None:
                dependents.discard(job.name)
                if not dependents:
                    del self._by_name[name]

    def dependents(self, name: str) -> Set[str]:
        """Return the jobs that depend on *name*, or on the array that it is a task of."""
        found: Set[str] = frozenset()
        for unit in units(name):
            found = found | self._by_name.get(unit, frozenset())
        return found

    def changed(self, name: str) -> None:
        """Judge again whoever depends on *name*."""
        if self._by_name:
            self.doubtful |= self.dependents(name)

    def changed_all(self) -> None:
        """Judge everybody again."""
        self.doubtful |= self._jobs

    def sees(self, running: Set[str], held: Set[str]) -> None:
        """Take note of what runs and is held now: whoever depends on a name that came or went is judged again."""
        if not self._by_name:
            self._seen = frozenset()
            return
        seen = running | held
        for name in seen ^ self._seen:
            self.changed(name)
        self._seen = seen
