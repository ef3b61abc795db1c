"""The index of the waiting jobs, kept from pass to pass by its owner.

Jobs that differ only in priority, arrival and name are of one *shape*: a reason that keeps the first waiting keeps all
of them waiting. So a pass looks at the first of each shape only, and is short while shapes are few.

A job that waits for a condition of its own (an instant, another job) stands beside its shape until that is met, and
blocks no other job. Its place decides how quickly it is found, never whether it may start: `decide` asks every rule
again of each job that it looks at. So an incrementally updated index gives the same answers as a new one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from spool.core.dependencies import DependencyIndex
from spool.core.model import Request, Waiting
from spool.core.runtimes import stem

_FEW = 64  # shapes, or jobs that depend on others: more of them make a pass long

HIGHEST_PRIORITY = 255

Place = tuple[int, int, str]
"""The part of the sort key that no pass changes: 255 - priority, arrival, name. Smaller comes first."""


def place(job: Waiting) -> Place:
    """Return the place of *job* among the jobs of its own shape."""
    return (HIGHEST_PRIORITY - job.spec.priority, job.arrived_at_ns, job.name)


class ShapeKey(NamedTuple):
    """Everything that decides whether a job fits; equal keys fit alike."""

    user: str
    project: str | None
    request: Request
    group: str | None
    group_limit: int | None
    array: str | None
    array_limit: int | None
    time_limit_ns: int | None
    executor_problem: str | None
    stem: str | None = None  # for jobs without a time limit: the key of its learnt run time
    elsewhere: str | None = None
    stated: Request | None = None  # by its file, where the request is another


class Shape:
    """The jobs of one shape: their number, and the places of those that wait for no condition of their own."""

    __slots__ = ("_in_order", "_places", "key", "members")

    def __init__(self, key: ShapeKey) -> None:
        self.key = key
        self.members = 0
        self._places: list[Place] = []
        self._in_order = True

    def add(self, one: Place) -> None:
        """Add a place; those that come in any order are sorted together, when the next one is looked at."""
        self._in_order = self._in_order and (not self._places or self._places[-1] < one)
        self._places.append(one)

    def discard(self, one: Place) -> None:
        """Remove a place."""
        places = self.eligible
        at = bisect_left(places, one)
        if at < len(places) and places[at] == one:
            del places[at]

    @property
    def eligible(self) -> list[Place]:
        """The places, in order; for reading only."""
        if not self._in_order:
            self._places.sort()
            self._in_order = True
        return self._places


def shape_key(job: Waiting) -> ShapeKey:
    """Return the shape of *job*."""
    spec = job.spec
    task = spec.task
    return ShapeKey(
        job.user,
        spec.project,
        job.request,
        spec.group,
        spec.group_limit if spec.group is not None else None,
        task.array if task is not None else None,
        task.max_running if task is not None else None,
        spec.time_limit_ns,
        job.executor_problem,
        None if spec.time_limit_ns is not None else stem(job.name),
        job.elsewhere,
        None if job.sized is None else spec.request,
    )


class WaitingQueue(Mapping[str, Waiting]):
    """The waiting jobs by name, and indexed for `decide`. Iterates over names, in no particular order.

    `put` and `remove` record that a name has come, changed or gone; running and held jobs are found in the view. The
    owner reports every other change of a name's state (such as its outcome) by `changed`, and calls `watch.look_again`
    when names never seen before may have become known.
    """

    def __init__(self, jobs: Iterable[Waiting] = ()) -> None:
        self.watch = DependencyIndex()
        self.shapes: dict[ShapeKey, Shape] = {}
        self.demands: dict[tuple[Request, str | None], dict[ShapeKey, Shape]] = {}  # the shapes by request and machine
        self._jobs: dict[str, Waiting] = {}
        self._shape_of: dict[str, Shape] = {}
        self._closed: set[str] = set()  # jobs beside their shape
        self._opens: dict[str, int] = {}  # of jobs that wait for an instant, or did
        self._deadlines: dict[str, int] = {}
        for job in jobs:
            self.put(job)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __contains__(self, name: object) -> bool:
        return name in self._jobs

    def __getitem__(self, name: str) -> Waiting:
        return self._jobs[name]

    def put(self, job: Waiting) -> None:
        """Add *job*, or replace the job of its name."""
        name = job.name
        self._take_out(name)
        key = shape_key(job)
        shape = self.shapes.get(key)
        if shape is None:
            shape = self.shapes[key] = Shape(key)
            self.demands.setdefault((key.request, key.elsewhere), {})[key] = shape
        shape.members += 1
        self._jobs[name], self._shape_of[name] = job, shape
        if job.opens_at_ns is not None:
            self._opens[name] = job.opens_at_ns
        if job.deadline_ns is not None:
            self._deadlines[name] = job.deadline_ns
        if job.spec.depends_on is not None:
            self.watch.add(job)
        if job.opens_at_ns is not None or job.spec.depends_on is not None:
            self._closed.add(name)
        else:
            shape.add(place(job))
        self.watch.changed(name)

    def remove(self, name: str) -> None:
        """Remove *name*; an unknown name is ignored."""
        if self._take_out(name):
            self.watch.changed(name)

    def changed(self, *names: str) -> bool:
        """Record that the state of these names has changed; without names, that of any may have.

        Return whether a job depends on one of them.
        """
        if not names:
            self.watch.changed_all()
        return sum(map(self.watch.changed, names)) > 0  # a sum, not any(), so that every name is reported

    def _take_out(self, name: str) -> bool:
        """Remove *name*; return whether it was there."""
        job = self._jobs.pop(name, None)
        if job is None:
            self._closed.discard(name)  # a held job, too, may have waited for another
            return False
        shape = self._shape_of.pop(name)
        key = shape.key
        shape.members -= 1
        if name not in self._closed:
            shape.discard(place(job))
        self._closed.discard(name)
        self._opens.pop(name, None)
        self._deadlines.pop(name, None)
        if not shape.members:
            del self.shapes[key]
            shapes = self.demands[key.request, key.elsewhere]
            del shapes[key]
            if not shapes:
                del self.demands[key.request, key.elsewhere]
        if job.spec.depends_on is not None:
            self.watch.discard(name)
        return True

    def requests_here(self) -> Iterator[Request]:
        """Yield every distinct request for room on this machine."""
        return (request for request, elsewhere in self.demands if elsewhere is None)

    # The part that `decide` uses.

    @property
    def is_simple(self) -> bool:
        """Whether a pass over the queue is cheap, however many jobs there are."""
        return len(self.shapes) <= _FEW and len(self.watch) <= _FEW

    def make_ready(self, now_ns: int) -> None:
        """Move the jobs into their shapes whose instant has come and whose dependencies are satisfied; others out."""
        closed = {name for name, opens_ns in self._opens.items() if opens_ns > now_ns} | self.watch.unsatisfied
        for name in closed ^ self._closed:
            job = self._jobs.get(name)
            if job is not None:
                shape = self._shape_of[name]
                (shape.discard if name in closed else shape.add)(place(job))
        self._closed = closed

    def overdue(self, now_ns: int) -> list[str]:
        """Return the jobs that have waited longer than their scheduling timeout, longest overdue first."""
        return [name for _, name in sorted((at_ns, name) for name, at_ns in self._deadlines.items() if at_ns < now_ns)]

    def next_at_ns(self, now_ns: int) -> list[int]:
        """Return the first instant after *now_ns* for which a job waits, and that of a scheduling timeout, if any."""
        opens = [at_ns for at_ns in self._opens.values() if at_ns > now_ns]
        over = [at_ns + 1 for at_ns in self._deadlines.values() if at_ns >= now_ns]
        return [min(times) for times in (opens, over) if times]
