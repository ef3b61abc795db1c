"""The index of the waiting jobs, kept from pass to pass by its owner.

Jobs that differ only in priority, arrival and name are of one *shape*: a reason that keeps the first waiting keeps all
of them waiting. So a pass looks at the first of each shape only, and is short while shapes are few.

A job that waits for a condition of its own (an instant, another job) stands beside its shape until that is met, and
blocks no other job. Its place decides how quickly it is found, never whether it may start: `decide` asks every rule
again of each job that it looks at. So an incrementally updated index gives the same answers as a new one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from spool.core.dependencies import DependencyIndex
from spool.core.model import Request, Waiting
from spool.core.quotas import Lowest, count
from spool.core.runtimes import stem

Entry = TypeVar("Entry", bound=tuple[object, ...])

_ONE_BY_ONE = 8  # up to this number are inserted so; more are sorted together with the existing ones
_SHORT = 1_000  # inserting into a shorter list costs next to nothing


class Ordered(Generic[Entry]):
    """Entries in order. Entries added to a long list are sorted in at the next read, all of them at once.

    So 100,000 entries in any order cost one sort, instead of moving a long list for each of them.
    """

    __slots__ = ("_entries", "_late")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._late: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """Add an entry; free if it comes after all the others."""
        entries = self._entries
        if not self._late and (not entries or entries[-1] < entry):
            entries.append(entry)
        elif len(entries) <= _SHORT:
            insort(entries, entry)
        else:
            self._late.append(entry)

    def discard(self, entry: Entry) -> None:
        """Remove an entry, if present."""
        entries = self.entries
        at = bisect_left(entries, entry)
        if at < len(entries) and entries[at] == entry:
            del entries[at]

    @property
    def is_settled(self) -> bool:
        """Whether all entries are in their places."""
        return not self._late

    @property
    def entries(self) -> list[Entry]:
        """All of them, in order; for reading only. The list object never changes."""
        self.settle()
        return self._entries

    def settle(self) -> None:
        """Sort in the pending entries."""
        late = self._late
        if not late:
            return
        if len(late) < _ONE_BY_ONE:
            for entry in late:
                insort(self._entries, entry)
        else:
            self._entries.extend(late)
            self._entries.sort()
        late.clear()


_NEVER = -(1 << 63)
_FEW = 64  # shapes, or jobs that depend on others: more of them make a pass long
_TIME = 1  # stands beside its shape until its instant
_DEPENDENCY = 2  # … until its dependencies are satisfied


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
    """The jobs of one shape: their number, and those without a condition of their own."""

    __slots__ = ("eligible", "key", "members", "open")

    def __init__(self, key: ShapeKey) -> None:
        self.key = key
        self.members = 0
        self.open: Ordered[Place] = Ordered()
        self.eligible = self.open.entries  # in order after each call of `WaitingQueue.demands`; for reading only


class Demand:
    """The shapes with the same request: if there is no room for one, there is none for the others."""

    __slots__ = ("elsewhere", "request", "shapes")

    def __init__(self, request: Request, elsewhere: str | None) -> None:
        self.request = request
        self.elsewhere = elsewhere
        self.shapes: dict[ShapeKey, Shape] = {}


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
    owner reports every other change of a name's state (such as its outcome) by `changed`, and calls `look_again` when
    names never seen before may have become known.
    """

    def __init__(self, jobs: Iterable[Waiting] = ()) -> None:
        self.watch = DependencyIndex()
        self._jobs: dict[str, Waiting] = {}
        self._shapes: dict[ShapeKey, Shape] = {}
        self._demands: dict[tuple[Request, str | None], Demand] = {}
        self.group_limits = Lowest()
        self.array_limits = Lowest()
        self._unsettled: list[Shape] = []
        self._closed: dict[str, int] = {}  # jobs beside their shape, and why
        self._times: Ordered[tuple[int, str]] = Ordered()  # instant and job, whether the instant has passed or not
        self._ripe_ns = _NEVER  # instants up to this one have passed
        self._deadlines: Ordered[tuple[int, str]] = Ordered()
        self._arrivals: dict[tuple[str, str], Ordered[tuple[int, str]]] = {}  # built on first use
        self.gpu_requests = 0  # distinct requests for GPUs of this machine
        self.memory_requests = 0  # … for memory
        self.users: dict[str, int] = {}  # users with waiting jobs, and how many
        self.projects: dict[str | None, int] = {}
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
        old = self._jobs.get(name)
        if old is not None:
            self._take_out(old)
        self._jobs[name] = job
        key = shape_key(job)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = Shape(key)
            at = key.request, key.elsewhere
            demand = self._demands.get(at)
            if demand is None:
                demand = self._demands[at] = Demand(*at)
                self._count_demand(demand, 1)
            demand.shapes[key] = shape
            self._count_limits(key, 1)
        shape.members += 1
        self._count(job, 1)
        for owner in _owners(job):
            arrivals = self._arrivals.get(owner)
            if arrivals is not None:
                arrivals.add((job.arrived_at_ns, name))
        closed = 0
        opens = job.opens_at_ns
        if opens is not None:
            self._times.add((opens, name))
            closed = _TIME if opens > self._ripe_ns else 0
        if job.spec.depends_on is not None:
            closed |= _DEPENDENCY
            self.watch.add(job)
        if closed:
            self._closed[name] = closed
        else:
            self._add(shape, place(job))
        deadline = job.deadline_ns
        if deadline is not None:
            self._deadlines.add((deadline, name))
        self.watch.changed(name)

    def _count_limits(self, key: ShapeKey, sign: int) -> None:
        self.group_limits.count(key.group, key.group_limit, sign)
        self.array_limits.count(key.array, key.array_limit, sign)

    def _add(self, shape: Shape, one: Place) -> None:
        was_settled = shape.open.is_settled
        shape.open.add(one)
        if was_settled and not shape.open.is_settled:
            self._unsettled.append(shape)

    def remove(self, name: str) -> None:
        """Remove *name*; an unknown name is ignored."""
        job = self._jobs.pop(name, None)
        if job is not None:
            self._take_out(job)
            self.watch.changed(name)

    def changed(self, *names: str) -> bool:
        """Record that the state of these names has changed; without names, that of any may have.

        Return whether a job depends on one of them.
        """
        if not names:
            self.watch.changed_all()
        return sum(map(self.watch.changed, names)) > 0  # a sum, not any(), so that every name is reported

    def look_again(self) -> None:
        """Record that names never seen before may have become known."""
        self.watch.look_again()

    def _take_out(self, job: Waiting) -> None:
        name = job.name
        key = shape_key(job)
        shape = self._shapes[key]
        shape.members -= 1
        closed = self._closed.pop(name, 0)
        if not closed:
            shape.open.discard(place(job))
        if not shape.members:
            del self._shapes[key]
            at = key.request, key.elsewhere
            demand = self._demands[at]
            del demand.shapes[key]
            if not demand.shapes:
                del self._demands[at]
                self._count_demand(demand, -1)
            self._count_limits(key, -1)
        opens = job.opens_at_ns
        if opens is not None:
            self._times.discard((opens, name))
        if job.spec.depends_on is not None:
            self.watch.discard(name)
        deadline = job.deadline_ns
        if deadline is not None:
            self._deadlines.discard((deadline, name))
        self._count(job, -1)
        for owner in _owners(job):
            arrivals = self._arrivals.get(owner)
            if arrivals is not None:
                arrivals.discard((job.arrived_at_ns, name))

    def _count(self, job: Waiting, sign: int) -> None:
        count(self.users, job.user, sign)
        count(self.projects, job.spec.project, sign)

    # The part that `decide` uses.

    @property
    def demands(self) -> Iterable[Demand]:
        """Every distinct request, with its shapes in order."""
        while self._unsettled:
            self._unsettled.pop().open.settle()
        return self._demands.values()

    def _count_demand(self, demand: Demand, change: int) -> None:
        if demand.elsewhere is None:
            self.gpu_requests += change if demand.request.gpus else 0
            self.memory_requests += change if demand.request.memory_bytes else 0

    @property
    def shape_count(self) -> int:
        """The number of shapes with members, which is the cost of a pass over them."""
        return len(self._shapes)

    @property
    def is_simple(self) -> bool:
        """Whether a pass over the queue is cheap, however many jobs there are."""
        return len(self._shapes) <= _FEW and len(self.watch) <= _FEW

    def mark_eligible(self, now_ns: int) -> None:
        """Move the jobs whose instant has come into their shapes, and the others out if the clock was set back."""
        times = self._times.entries
        before, after = (bisect_left(times, (at_ns + 1,)) for at_ns in (self._ripe_ns, now_ns))
        self._ripe_ns = now_ns
        self._open([name for _, name in times[before:after]], _TIME)
        for _, name in times[after:before]:
            self._close(name, _TIME)

    def open_dependency(self, names: Iterable[str]) -> None:
        """Move the jobs whose dependencies are satisfied into their shapes."""
        self._open(names, _DEPENDENCY)

    def close_dependency(self, name: str) -> None:
        """Move a job whose dependencies are not (or no longer) satisfied out of its shape."""
        self._close(name, _DEPENDENCY)

    def _close(self, name: str, gate: int) -> None:
        closed = self._closed.get(name, 0)
        if not closed:
            job = self._jobs[name]
            self._shapes[shape_key(job)].open.discard(place(job))
        self._closed[name] = closed | gate

    def _open(self, names: Iterable[str], gate: int) -> None:
        for name in names:
            before = self._closed.get(name, 0)
            closed = before & ~gate
            if closed:
                self._closed[name] = closed
            elif before:
                del self._closed[name]
                job = self._jobs[name]
                self._add(self._shapes[shape_key(job)], place(job))

    def overdue(self, now_ns: int) -> list[str]:
        """Return the jobs that have waited longer than their scheduling timeout, longest overdue first."""
        deadlines = self._deadlines.entries
        return [name for _, name in deadlines[: bisect_left(deadlines, (now_ns,))]]

    def next_at_ns(self, now_ns: int) -> list[int]:
        """Return the first instant after *now_ns* for which a job waits, and that of a scheduling timeout, if any."""
        times, deadlines = self._times.entries, self._deadlines.entries
        opens, over = bisect_left(times, (now_ns + 1,)), bisect_left(deadlines, (now_ns,))
        return [*(at for at, _ in times[opens : opens + 1]), *(at + 1 for at, _ in deadlines[over : over + 1])]

    def is_among_first(self, job: Waiting, most: int, *, by_project: bool = False) -> bool:
        """Tell whether *job* is one of the *most* jobs of its user (or project) that arrived first."""
        owner = ("project", job.spec.project or "") if by_project else ("user", job.user)
        if (self.projects[job.spec.project] if by_project else self.users[job.user]) <= most:
            return True
        arrivals = self._arrivals.get(owner)
        if arrivals is None:
            arrivals = self._arrivals[owner] = Ordered()
            for each in self._jobs.values():
                if owner in _owners(each):
                    arrivals.add((each.arrived_at_ns, each.name))
        return bisect_right(arrivals.entries, (job.arrived_at_ns, job.name)) <= most


def _owners(job: Waiting) -> tuple[tuple[str, str], ...]:
    project = job.spec.project
    return (("user", job.user),) if project is None else (("user", job.user), ("project", project))
