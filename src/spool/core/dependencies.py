"""Dependencies of jobs: satisfied, not yet satisfied, or impossible, as for jobs that wait for each other in a cycle.

An array's name means all its tasks, as one: it has finished when all have, ended when all have, and ended badly when
all have ended and at least one badly. A name never seen is waited for, because files arrive in any order. For a name
that has ended and waits or runs again, its present state counts.

A job is judged when something that it depends on changes, and the judgement is kept (`DependencyIndex`) until the next
change. Only the changed tasks of an array are counted again. So the cost of a pass is in proportion to the changes
since the last.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Set
from enum import Enum

from msgspec import Struct

from spool.core.model import BAD, Dependencies, State, Waiting

_TASK = re.compile(r"(.+)_[0-9]+", re.DOTALL)


class DependencyStatus(Enum):
    """The state of a job's dependencies."""

    SATISFIED = "satisfied"
    NOT_YET = "not yet"
    IMPOSSIBLE = "impossible"


class Resolution(Struct, frozen=True):
    """The status of a job's dependencies, and in words what is missing or what makes them impossible."""

    verdict: DependencyStatus
    text: str = ""
    unseen: bool = False  # depends on a name that was never seen


class NameProgress(Struct, frozen=True):
    """The progress of one name (a job, or an array with all its tasks)."""

    name: str
    total: int
    finished: int
    bad: int
    pending: tuple[str, State | None] | None  # the first that has not ended, and its state
    worst: tuple[str, State] | None  # the first that ended badly
    unseen: bool = False  # one at least has never been seen

    @property
    def is_finished(self) -> bool:
        """Whether all have finished."""
        return self.finished == self.total


CANCELLED_BY = "dependency: "
"""Prefix of the reason of a job that was cancelled because its dependencies can never be satisfied."""


def dependencies_of(job: Waiting) -> tuple[str, ...]:
    """Return every name that *job* depends on, with `each` resolved to one task."""
    depends = job.spec.depends_on
    if depends is None:
        return ()
    return (*depends.all, *depends.any, *depends.ended, *depends.failed, *_each_of(job, depends))


def _each_of(job: Waiting, depends: Dependencies) -> tuple[str, ...]:
    """Return the task of the array `each` that has the index of *job*; if *job* is not a task, the array itself."""
    task = job.spec.task
    if depends.each is None:
        return ()
    return (depends.each if task is None else f"{depends.each}_{task.index}",)


def aliases(name: str) -> tuple[str, ...]:
    """Return the names by which jobs may depend on *name*: its own, and that of the array it may belong to."""
    task = _TASK.fullmatch(name)
    return (name,) if task is None else (name, task.group(1))


class DependencyResolver:
    """The state of every name within one pass. *ended_now* holds the outcomes that the pass itself has decided.

    It reads the cache of a *watch*. Only `settle` updates that cache: later callers get the state of that time.
    """

    def __init__(
        self,
        queue: Mapping[str, Waiting],
        held: Mapping[str, Waiting],
        running: Set[str],
        ended: Callable[[str], State | None],
        arrays: Mapping[str, tuple[str, ...]],
        watch: DependencyIndex,
    ) -> None:
        self._queue = queue
        self._held = held
        self._running = running
        self._ended = ended
        self._arrays = arrays
        self._watch = watch
        self.settled = False  # then the watch's cache is left alone: names may change between this pass and questions
        self._tallies: dict[str, NameProgress] = {}
        self.ended_now: dict[str, State] = {}

    def doing(self, name: str) -> State | None:
        """Return the state of *name*; None if it has never been seen."""
        if name in self._running:
            return State.RUNNING
        if name in self.ended_now:
            return self.ended_now[name]
        if name in self._queue:
            return State.QUEUED
        if name in self._held:
            return State.HELD
        return self._ended(name)

    def members(self, name: str) -> tuple[str, ...]:
        """Return the tasks of the array *name*, or *name* itself if it is not an array."""
        return self._arrays.get(name) or (name,)

    def end(self, name: str, outcome: State) -> None:
        """Record that this pass ends the waiting or held job *name*."""
        self.ended_now[name] = outcome
        self._watch.touch(name)
        for unit in aliases(name):
            self._tallies.pop(unit, None)

    def resolution(self, job: Waiting) -> Resolution:
        """Return the resolution of *job*, as found when one of its dependencies last changed."""
        if job.name in self.ended_now:  # jobs that end in this pass are not judged again
            return resolve(job, self)
        return self._watch.resolved.get(job.name) or resolve(job, self)

    def tally(self, name: str) -> NameProgress:
        """Return the progress of *name*."""
        known = self._tallies.get(name)
        if known is None:
            members = self.members(name)
            keeps = not self.settled and len(members) > 1
            progress = self._watch.progress(name, members) if keeps else ArrayProgress(name, members)
            known = self._tallies[name] = progress.tally(self.doing)
        return known


def resolve(job: Waiting, names: DependencyResolver) -> Resolution:
    """Return the resolution of *job*. Every one of its clauses must be satisfied."""
    depends = job.spec.depends_on
    if depends is None:
        return Resolution(DependencyStatus.SATISFIED)
    found = []
    unseen = False
    must = (*depends.all, *_each_of(job, depends))
    for clause, listed in ((_all, must), (_any, depends.any), (_ended, depends.ended), (_failed, depends.failed)):
        if listed:
            tallies = [names.tally(name) for name in listed]
            found.append(clause(tallies))
            unseen = unseen or any(tally.unseen for tally in tallies)
    for verdict in (DependencyStatus.IMPOSSIBLE, DependencyStatus.NOT_YET):
        for resolution in found:
            if resolution.verdict is verdict:
                return Resolution(verdict, resolution.text, unseen)
    return Resolution(DependencyStatus.SATISFIED)


def _all(tallies: list[NameProgress]) -> Resolution:
    for tally in tallies:
        if tally.worst is not None:
            return Resolution(DependencyStatus.IMPOSSIBLE, _ended_as(*tally.worst))
    return _until(tallies, lambda tally: tally.is_finished, sum(tally.finished for tally in tallies))


def _any(tallies: list[NameProgress]) -> Resolution:
    if any(tally.is_finished for tally in tallies):
        return Resolution(DependencyStatus.SATISFIED)
    if all(tally.worst is not None for tally in tallies):
        name, outcome = next(tally.worst for tally in tallies if tally.worst is not None)
        more = f", and {len(tallies) - 1} more did not finish" if len(tallies) > 1 else ""
        return Resolution(DependencyStatus.IMPOSSIBLE, _ended_as(name, outcome) + more)
    first = next(tally.pending for tally in tallies if tally.pending is not None and tally.worst is None)
    return Resolution(DependencyStatus.NOT_YET, f"{_does(*first)} (0 of {len(tallies)} done, 1 is enough)")


def _ended(tallies: list[NameProgress]) -> Resolution:
    return _until(tallies, lambda tally: tally.pending is None, sum(tally.finished + tally.bad for tally in tallies))


def _failed(tallies: list[NameProgress]) -> Resolution:
    for tally in tallies:
        if tally.is_finished:
            return Resolution(DependencyStatus.IMPOSSIBLE, f"{tally.name} finished, but should have failed")
    return _ended(tallies)


def _until(tallies: list[NameProgress], satisfied: Callable[[NameProgress], bool], done: int) -> Resolution:
    for tally in tallies:
        if not satisfied(tally):
            missing = tally.pending or (tally.name, None)
            total = sum(each.total for each in tallies)
            return Resolution(DependencyStatus.NOT_YET, f"{_does(*missing)} ({done} of {total} done)")
    return Resolution(DependencyStatus.SATISFIED)


def _does(name: str, state: State | None) -> str:
    return f"{name} has not been seen yet" if state is None else f"{name} is {state}"


def _ended_as(name: str, outcome: State) -> str:
    return f"{name} ended as {outcome}"


class ArrayProgress:
    """The progress of one array's tasks, kept from pass to pass: only changed tasks are looked up again."""

    def __init__(self, name: str, members: tuple[str, ...]) -> None:
        self.members = members
        self._name = name
        self._states: dict[str, State | None] = dict.fromkeys(members)
        self.changed = set(members)

    def tally(self, doing: Callable[[str], State | None]) -> NameProgress:
        """Return the progress of the array; *doing* returns the state of a changed task."""
        for member in self.changed & self._states.keys():
            self._states[member] = doing(member)
        self.changed.clear()
        states, counts = self._states.items(), Counter(self._states.values())
        bad = sum(counts[state] for state in BAD)
        total, finished = len(self.members), counts[State.FINISHED]
        pending = worst = None
        if finished + bad < total:
            pending = next((name, state) for name, state in states if state is not State.FINISHED and state not in BAD)
        if bad:
            worst = next((name, state) for name, state in states if state in BAD)
        return NameProgress(self._name, total, finished, bad, pending, worst, counts[None] > 0)


class DependencyIndex:
    """The jobs that depend on others, the state of their dependencies, and the jobs that must be judged again.

    The owner calls `changed` when the state of a name changes. Nothing reports that a name which was never seen ended
    long ago: `look_again` judges the jobs again that wait for such names.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Waiting] = {}  # held ones included
        self._by_name: dict[str, set[str]] = {}
        self._held: dict[str, Waiting] = {}  # of the jobs, the ones held at the last `sees`
        self._seen: Set[str] = frozenset()
        self._progress: dict[str, ArrayProgress] = {}  # of the arrays that some job depends on
        self.resolved: dict[str, Resolution] = {}  # as of the last change
        self.unresolved: set[str] = set()  # jobs not judged since a change, and those to judge in each pass
        self.unsatisfied: set[str] = set()  # jobs that waited for others when last judged, or never were

    def __len__(self) -> int:
        return len(self.jobs)

    def names(self) -> Set[str]:
        """Return the names that some waiting job depends on: the ones whose outcome matters."""
        return self._by_name.keys()

    def add(self, job: Waiting) -> None:
        """Watch the dependencies of *job*, which replaces another of its name."""
        self.discard(job.name)
        self.jobs[job.name] = job
        self.unresolved.add(job.name)
        self.unsatisfied.add(job.name)
        for name in dependencies_of(job):
            self._by_name.setdefault(name, set()).add(job.name)

    def discard(self, name: str) -> None:
        """Stop watching the job *name*."""
        job = self.jobs.pop(name, None)
        if job is None:
            return
        self.resolved.pop(name, None)
        self.unresolved.discard(name)
        self.unsatisfied.discard(name)
        for other in dependencies_of(job):
            dependents = self._by_name.get(other)
            if dependents is not None:
                dependents.discard(name)
                if not dependents:
                    del self._by_name[other]
                    self._progress.pop(other, None)

    def dependents(self, name: str) -> Set[str]:
        """Return the jobs that depend on *name*, or on the array that it is a task of."""
        return frozenset().union(*map(self.naming, aliases(name)))

    def naming(self, unit: str) -> Set[str]:
        """Return the jobs that depend on *unit* by that name."""
        return self._by_name.get(unit, frozenset())

    def changed(self, name: str) -> bool:
        """Mark the jobs that depend on *name* to be judged again; return whether there are any."""
        if not self._by_name:
            return False
        self.touch(name)
        self._progress.pop(name, None)  # the array may have other tasks now
        dependents = self.dependents(name)
        self.unresolved |= dependents
        return bool(dependents)

    def changed_all(self) -> None:
        """Mark every job to be judged again."""
        self._progress.clear()
        self.unresolved |= self.jobs.keys()

    def look_again(self) -> None:
        """Mark the jobs to be judged again that depend on a name never seen."""
        unseen = {name for name, resolution in self.resolved.items() if resolution.unseen}
        if unseen:
            self._progress.clear()
            self.unresolved |= unseen

    def touch(self, name: str) -> None:
        """Mark *name* as changed in the progress of its array."""
        for unit in aliases(name) if self._progress else ():
            if unit in self._progress:
                self._progress[unit].changed.add(name)

    def progress(self, name: str, members: tuple[str, ...]) -> ArrayProgress:
        """Return the progress of the array *name* with these *members*."""
        known = self._progress.get(name)
        if known is None or known.members is not members:
            known = ArrayProgress(name, members)
            if name in self._by_name:
                self._progress[name] = known
        return known

    def sees(self, running: Set[str], held: Mapping[str, Waiting], queue: Mapping[str, Waiting]) -> None:
        """Record the running and held jobs: jobs that depend on a name that came or went are judged again."""
        before = self._held
        self._held = {name: job for name, job in held.items() if job.spec.depends_on is not None and name not in queue}
        for name, job in before.items():
            if self.jobs.get(name) is job is not self._held.get(name) and queue.get(name) is not job:
                self.discard(name)
        for name, job in self._held.items():
            if self.jobs.get(name) is not job:
                self.add(job)
        if not self._by_name:
            self._seen = frozenset()
            return
        seen = running | held.keys()
        for name in seen ^ self._seen:
            self.changed(name)
        self._seen = seen


def circle_through(job: Waiting, stuck: Mapping[str, Waiting], names: DependencyResolver) -> tuple[str, ...]:
    """Return a shortest cycle through *job*, from it back to it, or () if it is in none; all such jobs are *stuck*."""
    came_from: dict[str, str] = {}
    todo = deque([job.name] if job.name in stuck else [])
    while todo:
        name = todo.popleft()
        for other in (member for unit in dependencies_of(stuck[name]) for member in names.members(unit)):
            if other == job.name:
                path = [job.name, name]
                while path[-1] != job.name:
                    path.append(came_from[path[-1]])
                return tuple(reversed(path))
            if other in stuck and other not in came_from:
                came_from[other] = name
                todo.append(other)
    return ()


def stuck_jobs(watch: DependencyIndex, names: DependencyResolver) -> dict[str, Waiting]:
    """Return the jobs that can never be satisfied: those in a cycle, and those behind one.

    All waiting jobs are assumed stuck, then freed one after the other: first those whose dependencies lie outside this
    set, then those that depend only on freed jobs, and so on.
    """
    stuck = {job.name: job for job in watch.jobs.values() if names.resolution(job).verdict is DependencyStatus.NOT_YET}
    left: dict[str, list[str]] = {}  # unit -> its members, up to the last one that is stuck

    def blocks(unit: str) -> bool:
        members = left.get(unit)
        if members is None:
            members = left[unit] = list(names.members(unit))
        while members and members[-1] not in stuck:
            members.pop()
        return bool(members)

    def is_free(job: Waiting, depends: Dependencies) -> bool:
        if any(map(blocks, (*depends.all, *_each_of(job, depends), *depends.ended, *depends.failed))):
            return False
        possible = [unit for unit in depends.any if names.tally(unit).worst is None]
        return not possible or not all(map(blocks, possible))

    todo = list(stuck)
    while todo:
        name = todo.pop()
        job = stuck.get(name)
        if job is not None and job.spec.depends_on is not None and is_free(job, job.spec.depends_on):
            del stuck[name]
            for unit in aliases(name):
                todo += () if blocks(unit) else watch.naming(unit)
    return stuck
