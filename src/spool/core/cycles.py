"""Jobs that wait for each other in a circle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from spool.core.dependencies import Names, Verdict, referred, twin
from spool.core.model import Waiting

_ARRAY = "/"  # in no name: marks an array among the nodes, which may have a job's name


class Cycles:
    """Which of some jobs with dependencies stand in a circle, found when first asked."""

    def __init__(self, jobs: Iterable[Waiting], names: Names) -> None:
        self._jobs = jobs
        self._names = names
        self._clear: set[str] = set()  # nodes from which no circle can be reached
        self._stuck: dict[str, Waiting] | None = None

    def through(self, job: Waiting) -> tuple[str, ...]:
        """Return a shortest circle through *job*, from it back to it, or () if it stands in none."""
        if self._is_clear(job.name):
            return ()
        if self._stuck is None:
            self._stuck = _stuck(self._jobs, self._names)
        if job.name not in self._stuck:
            return ()
        came_from: dict[str, str] = {}
        todo = deque([job.name])
        while todo:
            name = todo.popleft()
            for other in self._waits_for(self._stuck[name]):
                if other == job.name:
                    path = [job.name, name]
                    while path[-1] != job.name:
                        path.append(came_from[path[-1]])
                    return tuple(reversed(path))
                if other in self._stuck and other not in came_from:
                    came_from[other] = name
                    todo.append(other)
        return ()

    def _is_clear(self, name: str) -> bool:
        """Tell whether every way on from *name* has an end. Whatever was found on the way is kept.

        Which alternatives are enough is not asked here, so a no is not yet a circle.
        """
        clear = self._clear
        trail = [] if name in clear else [(name, self._next(name))]
        on_trail = {name}
        while trail:
            node, ways = trail[-1]
            for other in ways:
                if other in on_trail:
                    return False
                if other not in clear:
                    trail.append((other, self._next(other)))
                    on_trail.add(other)
                    break
            else:
                clear.add(node)
                on_trail.discard(node)
                trail.pop()
        return True

    def _next(self, node: str) -> Iterator[str]:
        """Yield where *node* leads: a job to what it depends on, an array (marked) to its tasks."""
        if node.startswith(_ARRAY):
            yield from self._names.members(node.removeprefix(_ARRAY))
            return
        job = self._names.pending(node)
        for unit in () if job is None else referred(job):
            members = self._names.members(unit)
            yield unit if members == (unit,) else _ARRAY + unit

    def _waits_for(self, job: Waiting) -> list[str]:
        return [member for name in referred(job) for member in self._names.members(name)]


def _stuck(jobs: Iterable[Waiting], names: Names) -> dict[str, Waiting]:
    """Return the jobs that can never be satisfied: those in a circle, and those behind one.

    All jobs that wait are taken to be stuck, and set free one after the other: first those that wait for something
    which is not among them, then those that wait for nothing but these, and so on.
    """
    stuck = {job.name: job for job in jobs if names.judgement(job).verdict is Verdict.NOT_YET}
    missing: dict[str, int] = {}  # how many clauses of each job are not met yet
    waiters: dict[str, list[str]] = {}  # unit -> jobs with a clause that needs it
    choices: dict[str, list[str]] = {}  # unit -> jobs for which it would be enough
    blocked: dict[str, int] = {}  # unit -> members that are stuck
    units: dict[str, list[str]] = {}  # member -> units that it is in
    chosen: set[str] = set()

    def need(unit: str) -> bool:
        if unit not in blocked:
            members = [member for member in names.members(unit) if member in stuck]
            blocked[unit] = len(members)
            for member in members:
                units.setdefault(member, []).append(unit)
        return blocked[unit] > 0

    for name, job in stuck.items():
        depends = job.spec.depends_on
        if depends is None:
            continue
        hard = [*depends.all, *depends.ended, *depends.failed]
        if depends.each is not None:
            hard.append(twin(job, depends))
        missing[name] = 0
        for unit in hard:
            if need(unit):
                missing[name] += 1
                waiters.setdefault(unit, []).append(name)
        live = [unit for unit in depends.any if names.tally(unit).worst is None]
        blocking = [unit for unit in live if need(unit)]
        if live and len(blocking) == len(live):
            missing[name] += 1
            for unit in live:
                choices.setdefault(unit, []).append(name)
    free = [name for name, count in missing.items() if not count]
    while free:
        member = free.pop()
        del stuck[member]
        for unit in units.get(member, ()):
            blocked[unit] -= 1
            if blocked[unit]:
                continue
            met = list(waiters.get(unit, ()))
            for name in choices.get(unit, ()):
                if name not in chosen:
                    chosen.add(name)
                    met.append(name)
            for name in met:
                missing[name] -= 1
                if not missing[name]:
                    free.append(name)
    return stuck
