"""The free resources of a machine at one instant, whether a job fits into them, and the runs that hold the others.

A room is made for one pass from the sums of the runs' index (`Runs`); it changes only its own copy. A job for another
machine obeys the limits of groups, arrays, users, projects and the spool here, and its engine finds room for it there.
It never waits for a protected job: room is kept free only for jobs on this machine.

The sums are updated with each run, so that the cost of a pass depends on the changes only. A property test compares
them with sums computed from scratch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import copy
from typing import NamedTuple

from msgspec import Struct

from spool.core import gpus
from spool.core.gpus import HORIZON_NS, GpuSlot, GpuSlots, Moment, holds, is_active
from spool.core.model import Grant, Machine, Policy, Request, Reservation, Running, Waiting
from spool.core.quotas import Counts, Quotas, SharedLimits, hold_words, why_never
from spool.core.reasons import Reason, count_of, ranges_of
from spool.core.runtimes import Expected, RunTimes
from spool.core.units import cpus_in, show_size


class OnEngine(Struct):
    """How many runs are on an engine, which finds room for them by itself."""

    runs: int = 0
    pending: int = 0  # of these, the ones that wait for room
    blocked: int = 0  # … and for something else

    def add(self, run: Running, sign: int = 1) -> None:
        """Count *run*; with sign -1, uncount it."""
        self.runs += sign
        if run.submitted and run.blocked:
            self.blocked += sign
        elif run.submitted:
            self.pending += sign


class Runs(Mapping[str, Running]):
    """The runs by the names of their jobs. `put` and `remove` update every sum; everything else only reads."""

    def __init__(self, runs: Iterable[Running] = (), run_times: RunTimes | None = None) -> None:
        self.run_times = run_times or RunTimes()
        self.counts = Counts()
        self.with_gpus: dict[str, Running] = {}
        self.engines = defaultdict[str, OnEngine](OnEngine)
        self._runs: dict[str, Running] = {}
        self._expected: dict[str, Expected] = {}  # as of the begin of the run, or of its recovery
        self.preemptible: set[str] = set()  # the jobs whose runs may be preempted, now or later
        for run in runs:
            self.put(run)

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __contains__(self, name: object) -> bool:
        return name in self._runs

    def __getitem__(self, name: str) -> Running:
        return self._runs[name]

    def put(self, run: Running) -> None:
        """Add *run*, replacing another of its name."""
        name = run.name
        before = self._runs.get(name)
        if before == run:
            return
        expected = None
        if before is not None:
            if (before.run, before.started_at_ns, before.spec) == (run.run, run.started_at_ns, run.spec):
                expected = self._expected[name]
            self._discount(before)
        self._runs[name] = run
        self._count(run, expected or self.run_times.of_job(run))

    def remove(self, name: str) -> None:
        """Remove the run of that job; an unknown name is ignored."""
        run = self._runs.pop(name, None)
        if run is not None:
            self._discount(run)

    def copy(self) -> Runs:
        """Return an independent copy, with the expected run times."""
        other = Runs(run_times=self.run_times)
        for name, run in self._runs.items():
            other._runs[name] = run
            other._count(run, self._expected[name])
        return other

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Exclude the run of that job inside `with`."""
        everything, expected = self._runs, self._expected[name]
        run = everything[name]
        self._runs = {other: everything[other] for other in everything if other != name}
        self._discount(run)
        try:
            yield
        finally:
            self._runs = everything
            self._count(run, expected)

    def _count(self, run: Running, expected: Expected) -> None:
        self.counts.add(run)
        self._expected[run.name] = expected
        if run.elsewhere is not None:
            self.engines[run.elsewhere].add(run)
            return
        if run.grant.gpu_uuids:
            self.with_gpus[run.name] = run
        if run.spec.preemptible:
            self.preemptible.add(run.name)

    def _discount(self, run: Running) -> None:
        self.counts.add(run, -1)
        if run.elsewhere is not None:
            self.engines[run.elsewhere].add(run, -1)
        self.with_gpus.pop(run.name, None)
        self.preemptible.discard(run.name)
        del self._expected[run.name]

    def on_gpus(self) -> defaultdict[str, list[Running]]:
        """Return the runs on each GPU of this machine, by UUID."""
        found = defaultdict[str, list[Running]](list)
        for run in self.with_gpus.values():
            for uuid in run.grant.gpu_uuids:
                found[uuid].append(run)
        return found

    @property
    def suspended(self) -> Set[str]:
        """The jobs whose runs are suspended and not being stopped."""
        return {name for name, run in self._runs.items() if run.suspended and not run.stopping}

    def learn_from(self, run_times: RunTimes) -> None:
        """Estimate every run time anew, from now on by *run_times*."""
        self.run_times = run_times
        runs = list(self._runs.values())
        for run in runs:
            self.remove(run.name)
        for run in runs:
            self.put(run)

    def ends(self, now_ns: int) -> list[tuple[int, str]]:
        """Return when each run is expected to have ended, earliest first.

        A run that is being stopped has ended once its grace is over, which counts from the order, or from the end of
        the command whose processes go on. Such an instant, and that of a limit, may have passed: the run is about to
        end. A guess that has passed is replaced by another, which depends only on the instant and the past. A suspended
        run keeps the time that was left then, as if it resumed now.
        """
        return sorted((self._end_ns(run, now_ns), name) for name, run in self._runs.items())

    def _end_ns(self, run: Running, now_ns: int) -> int:
        expected = self._expected[run.name]
        end_ns = run.counts_from_ns + expected.ns
        if run.stopping:
            graced_ns = min(run.stop_at_ns or now_ns, now_ns) + run.spec.kill_grace_ns
            return graced_ns if expected.is_guess or run.stop_at_ns is not None else min(end_ns, graced_ns)
        since_ns = (run.suspension.since_ns or now_ns) if run.suspended else now_ns
        if end_ns <= since_ns and expected.is_guess:
            ran_ns = since_ns - run.counts_from_ns
            end_ns = run.counts_from_ns + self.run_times.overrun(run, expected.ns, ran_ns)
        return now_ns + max(0, end_ns - since_ns) if run.suspended else end_ns


PoolName = int | str
"""What a job can lack: one of these pools, or a named resource."""

CPUS, MEMORY, GPUS = range(3)

RUNS = ""
"""The pool that `max_running` makes: the runs themselves."""


class FreePool(NamedTuple):
    """One pool, and what of it is free."""

    name: PoolName
    free: int
    total: int


def _asked_of(pool: PoolName, request: Request) -> int:
    if isinstance(pool, str):
        return dict(request.resources).get(pool, 0)
    return (request.cpus, request.memory_bytes or 0, request.gpus)[pool]


UNLIMITED = SharedLimits()


class FreeResources:
    """A machine with its runs. `claim` and `release` update every sum; the rules only read.

    It begins with the sums that *runs* keeps, and changes none of them. `elsewhere` are the engines of other machines:
    for the jobs that they run, only their number counts.
    """

    def __init__(
        self,
        machine: Machine,
        policy: Policy,
        now_ns: int,
        runs: Runs,
        limits: SharedLimits = UNLIMITED,
        reservations: Sequence[Reservation] = (),
    ) -> None:
        self.machine = machine
        self.policy = policy
        self.limits = limits
        self.reservations = reservations
        self.now_ns = now_ns
        self.runs = runs
        self.counts = runs.counts.copy()
        self.quotas = Quotas(policy)
        self.available_bytes = machine.memory_available_bytes
        self.with_gpus = runs.with_gpus.copy()
        self.cards = self._claimed_cards()
        self.started: list[Running] = []
        self.elsewhere: Mapping[str, Machine] = {}
        self.engines = defaultdict(OnEngine, {name: copy(there) for name, there in runs.engines.items()})

    def then(self) -> FreeResources:
        """Return a copy, to be changed into a later room."""
        room = copy(self)
        room.counts, room.with_gpus = self.counts.copy(), self.with_gpus.copy()
        room.cards = room._claimed_cards()
        room.started = self.started.copy()
        return room

    def without(self, runs: Iterable[Running]) -> FreeResources:
        """Return a copy as if these runs had left: what the kernel could give then is unknown."""
        room = self.then()
        for run in runs:
            room.release(run)
            room.available_bytes = None
        return room

    def _claimed_cards(self) -> GpuSlots:
        slots = GpuSlots(self.machine, self.policy)
        for run in self.with_gpus.values() if slots.cards else ():
            slots.claim(run)
        return slots

    def claim(self, run: Running) -> None:
        """Add the grant of *run*."""
        self.counts.add(run, owners=self.quotas.limited)
        if run.grant.gpu_uuids and run.elsewhere is None:
            self.with_gpus[run.name] = run
            self.cards.claim(run)

    def release(self, run: Running) -> None:
        """Subtract the grant of *run*."""
        self.counts.add(run, -1, owners=self.quotas.limited)
        if run.grant.gpu_uuids and run.elsewhere is None:
            del self.with_gpus[run.name]
            self.cards.release(run)

    def start(self, run: Running) -> None:
        """Add a run that starts in this pass: the kernel still reports its memory as free."""
        self.claim(run)
        self.started.append(run)
        if run.elsewhere is not None:
            self.engines[run.elsewhere].add(run)
        elif self.available_bytes is not None:
            self.available_bytes -= run.grant.memory_bytes or 0

    def lacks(self, request: Request) -> bool:
        """Tell quickly whether the sums of processors, memory and named resources leave no room for *request*."""
        cpus, memory = request.cpus, request.memory_bytes
        return bool(
            (cpus and cpus > self.machine.cpus - self.counts.cpus)
            or (memory and memory > self.machine.memory_bytes - self.counts.memory_bytes)
            or (request.resources and (why_never(request, self.machine.resources) or self._named_lack(request)))
        )

    def may_have(self, request: Request, elsewhere: str | None) -> bool:
        """Tell quickly whether the sums, and the GPUs that have room, leave enough for *request*."""
        if elsewhere is not None:
            return self._full_engine(elsewhere) is None
        return not self.lacks(request) and (not request.gpus or len(self.cards.open_to(request)) >= request.gpus)

    def held_back(self, request: Request, refused: Sequence[tuple[Request, int]]) -> float:
        """Return the largest share of a pool that *request* lacks and that lies idle for it.

        *refused* are the requests that would fit, each with its number of jobs.
        """
        parts = []
        for pool in self.scarce(request):
            wanted = sum(_asked_of(pool.name, each) * number for each, number in refused)
            parts.append(min(pool.free, wanted) / pool.total)
        return max(parts, default=0.0)

    def scarce(self, request: Request) -> list[FreePool]:
        """Return the pools that have too little for *request*; if none, all that it asks for."""
        machine, counts = self.machine, self.counts
        gpus = len(self.cards.open_to(request)) if request.gpus else 0
        free = (machine.cpus - counts.cpus, machine.memory_bytes - counts.memory_bytes, gpus)
        totals = (machine.cpus, machine.memory_bytes, len(machine.gpus))
        pools = [FreePool(place, max(free[place], 0), totals[place]) for place in range(len(totals))]
        if request.resources:
            pools += [FreePool(pool.name, counts.named.free(pool), pool.total) for pool in machine.resources]
        asked = [pool for pool in pools if _asked_of(pool.name, request) and pool.total]
        return [pool for pool in asked if _asked_of(pool.name, request) > pool.free] or asked

    # The rules, in order. Each returns its reason, or None.

    def group(self, job: Waiting) -> Reason | None:
        """Limit the running jobs of a group."""
        group = job.spec.group or ""
        limit, running = self.limits.of_group(group), self.counts.groups.get(group, 0)
        if limit is None or running < limit:
            return None
        return Reason("group", f"group {group} is full: {running} of {limit} running")

    def array(self, job: Waiting) -> Reason | None:
        """Limit the running tasks of an array."""
        task = job.spec.task
        if task is None:
            return None
        if (state := self.limits.held.get(task.array)) is not None:
            return Reason("held", f"array {task.array} is {state}")
        limit, running = self.limits.of_array(task.array), self.counts.arrays.get(task.array, 0)
        if limit is None or running < limit:
            return None
        return Reason("array", f"array limit: {running} of {limit} running")

    def quota(self, job: Waiting) -> Reason | None:
        """Limit what each user and project uses at once."""
        full = self.quotas.why_full(job, self.counts)
        if full is None:
            return None
        why, ever = full
        text = f"quota: {why}"
        return Reason("never_fits", text) if ever else Reason("quota", text)

    def max_running(self) -> Reason | None:
        """Limit the running jobs of the whole spool."""
        running, limit = self.counts.runs, self.policy.max_running
        if limit is None or running < limit:
            return None
        return Reason("max_running", f"spool is full: {running} of {limit} running")

    def never_fits(self, job: Waiting) -> Reason | None:
        """Refuse more than the whole machine has."""
        why = _why_never(job.request, self.machine, self.cards)
        return None if why is None else Reason("never_fits", f"never fits: {why}")

    def memory(self, job: Waiting) -> Reason | None:
        """Exceed neither the sum of the grants nor what the kernel can actually give."""
        need = job.request.memory_bytes
        if not need:
            return None
        free = self.machine.memory_bytes - self.counts.memory_bytes
        if need > free:
            holders, held = self.counts.memory_holders, self.counts.memory_bytes
            return Reason(
                "memory",
                lambda: (
                    f"memory: needs {show_size(need)}, {show_size(max(free, 0))} free"
                    + hold_words(holders, show_size(held))
                ),
            )
        available = self.available_bytes
        if available is not None and need > available:
            return Reason(
                "memory",
                lambda: (
                    f"memory: needs {show_size(need)}, {show_size(max(available, 0))} actually "
                    f"free ({show_size(free)} not granted to runs)"
                ),
            )
        return None

    def processors(self, job: Waiting) -> Reason | None:
        """Do not exceed the processors of this machine."""
        need = job.request.cpus
        free = self.machine.cpus - self.counts.cpus
        if need <= free or not need:
            return None
        holders, held = self.counts.cpu_holders, self.counts.cpus
        return Reason("cpus", lambda: f"cpus: needs {need}, {max(free, 0)} free" + hold_words(holders, str(held)))

    def resources(self, job: Waiting) -> Reason | None:
        """Return why the named resources are short; "never fits" for a resource that does not exist."""
        why = self._named_lack(job.request) if job.request.resources else ""
        return Reason("resources", why) if why else None

    def _named_lack(self, request: Request) -> str:
        return self.counts.named.why_full(request, self.machine.resources)

    def gpus(self, job: Waiting) -> Reason | None:
        """Return why too few GPUs have room, reserved or not."""
        request = job.request
        if len(self.cards.open_to(request)) >= request.gpus or not request.gpus:
            return None
        return Reason("gpus", lambda: f"gpus: {self.cards.full(request)}")

    def kept(self, job: Waiting) -> Reason | None:
        """Return why too few of these are unreserved."""
        request = job.request
        if not self.reservations or not request.gpus or self.choose(job) is not None:
            return None

        def why() -> str:
            moment = gpus.binding(self.cards.open_to(request), request.gpus, self._moments(job))
            return f"reserved: {gpus.holders(moment, self.now_ns, self._end_ns(job))}"

        return Reason("reserved", why)

    def reasons(self, job: Waiting) -> Iterator[Reason]:
        """Yield every reason of this room against *job*, in order."""
        spec, request = job.spec, job.request
        if spec.group is not None or spec.task is not None or self.quotas.limited:
            yield from self._broken(job, self.group, self.array, self.quota)
        if (reason := self.max_running()) is not None:
            yield reason
        if job.elsewhere is not None:
            if (reason := self._full_engine(job.elsewhere)) is not None:
                yield reason
            return
        yield from self._broken(job, self.never_fits)
        if not (request.gpus or request.memory_bytes or self.lacks(request)):
            return
        lacks_gpus = None
        for lacks_gpus in (rule(job) for rule in (self.memory, self.processors, self.resources, self.gpus)):
            if lacks_gpus is not None:
                yield lacks_gpus
        if lacks_gpus is None:  # the GPUs have room; is it reserved?
            yield from self._broken(job, self.kept)

    @staticmethod
    def _broken(job: Waiting, *rules: Callable[[Waiting], Reason | None]) -> Iterator[Reason]:
        return (reason for rule in rules if (reason := rule(job)) is not None)

    def _full_engine(self, name: str) -> Reason | None:
        """Return why an engine takes no more jobs: those that cannot start there do not count, up to as many again."""
        machine, there = self.elsewhere.get(name), self.engines[name]
        if machine is None or machine.most_runs is None:
            return None
        where, in_flight = machine.title or name, there.runs - min(there.blocked, machine.most_runs)
        if in_flight >= machine.most_runs:
            return Reason("max_in_flight", f"max_in_flight: {in_flight} of {machine.most_runs} are in {where}")
        if machine.most_pending is not None and there.pending >= machine.most_pending:
            return Reason("max_pending", f"max_pending: {there.pending} of {machine.most_pending} wait in {where}")
        return None

    def fits(self, job: Waiting) -> bool:
        """Tell whether *job* could start here and now."""
        return next(self.reasons(job), None) is None

    def choose(self, job: Waiting, avoid: frozenset[str] = frozenset()) -> list[GpuSlot] | None:
        """Return the GPUs that *job* would get, preferably none of *avoid*; None if too few."""
        request = job.request
        if not request.gpus:
            return []
        cards = self.cards.in_order(self.cards.open_to(request), request, self.now_ns)
        if self.machine.cores and self.cards.strategy is None and request.gpu_memory_bytes is None:
            cards = self._linked_first(cards, request)
        bound: Sequence[Moment] = ()
        if self.reservations:
            bound = self._moments(job)
            mine, soon = set[int](), set[int]()
            for each in self.reservations:
                if holds(each, job.user, job.spec.project):
                    mine.update(each.gpu_indices if is_active(each, self.now_ns) else ())
                elif each.end_at_ns > self.now_ns:
                    soon.update(each.gpu_indices)
            cards.sort(key=lambda card: (card.gpu.index not in mine, card.gpu.index in soon))
        if avoid:
            cards.sort(key=lambda card: card.gpu.uuid in avoid)
        return gpus.choose(cards, request.gpus, bound)

    def grant(self, job: Waiting, avoid: frozenset[str] = frozenset()) -> Grant:
        """Return the grant for *job*, which must fit."""
        request = job.request
        if job.elsewhere is not None:  # its engine chooses what it gets there
            return Grant(request.cpus, request.memory_bytes, resources=request.resources, gpus_elsewhere=request.gpus)
        cards = sorted(self.choose(job, avoid) or [], key=lambda card: card.gpu.index)
        return Grant(
            cpus=request.cpus,
            memory_bytes=request.memory_bytes,
            gpu_uuids=tuple(card.gpu.uuid for card in cards),
            gpu_indices=tuple(card.gpu.index for card in cards),
            gpu_memory_bytes=request.gpu_memory_bytes if cards else None,
            resources=request.resources,
            resource_indices=self.counts.named.take(request, self.machine.resources) if request.resources else (),
            cpu_list=self._cpu_list(request.cpus, cards) if self.machine.cores else "",
        )

    def _cpu_list(self, cpus: int, cards: Sequence[GpuSlot]) -> str:
        """Return the CPUs for a run that gets these GPUs; "" if the lists of the runs, after an edit, leave too few."""
        near = {card.gpu.node for card in cards}
        return ranges_of(gpus.choose_cpus(self.machine.cores, self._pinned(), cpus, near))

    def _pinned(self) -> set[int]:
        lists = {run.grant.cpu_list for run in (*self.runs.values(), *self.started) if run.elsewhere is None}
        return {cpu for text in lists for cpu in cpus_in(text)}

    def _linked_first(self, cards: list[GpuSlot], request: Request) -> list[GpuSlot]:
        """Return *cards* in order, those first that suit each other and the free CPUs, among equally large ones."""
        pinned, free = self._pinned(), dict[int | None, int]()
        for core in self.machine.cores:
            free[core.node] = free.get(core.node, 0) + sum(cpu not in pinned for cpu in core.cpus)
        slots = {card.gpu.uuid: card for card in cards}
        ordered = gpus.linked_first([card.gpu for card in cards], request.gpus, free, request.cpus)
        return [slots[gpu.uuid] for gpu in ordered]

    def _end_ns(self, job: Waiting) -> int | None:
        limit = job.spec.time_limit_ns
        return None if limit is None else self.now_ns + limit

    def _moments(self, job: Waiting) -> list[Moment]:
        """Return every moment at which reservations bind *job* if it starts now.

        These are now, for the active reservations, and the start of each future one within the horizon and before the
        job has ended.
        """
        now_ns, end_ns = self.now_ns, self._end_ns(job)
        starts = {
            each.start_at_ns
            for each in self.reservations
            if now_ns < each.start_at_ns <= now_ns + HORIZON_NS and (end_ns is None or each.start_at_ns < end_ns)
        }
        found = []
        for at_ns in sorted({now_ns, *starts}):
            active = [each for each in self.reservations if is_active(each, at_ns)]
            if not all(holds(each, job.user, job.spec.project) for each in active):
                found.append(self._moment(active, job, at_ns))
        return found

    def _moment(self, active: Sequence[Reservation], job: Waiting, at_ns: int) -> Moment:
        others = [each for each in active if not holds(each, job.user, job.spec.project)]
        by_index = {index for each in active for index in each.gpu_indices}
        counted = [each for each in active if each.gpu_count]
        left = {each.name: each.gpu_count or 0 for each in counted}
        available = set()
        for card in self.cards.cards:
            if card.gpu.index in by_index:
                continue
            here = [self.with_gpus[name] for name in (*card.alone, *card.shares)]
            if at_ns > self.now_ns:
                here = [run for run in here if not _is_over(run, at_ns)]
            for run in here:  # a GPU held by a run of the reservation's owner counts towards one of its reservations
                mine = next(
                    (each for each in counted if left[each.name] and holds(each, run.user, run.spec.project)), None
                )
                if mine is not None:
                    left[mine.name] -= 1
                    break
            if not here and card.given and not card.gpu.foreign and card.gpu.problem is None:
                available.add(card.gpu.uuid)
        closed = {index: each for each in others for index in each.gpu_indices}
        others = [each for each in others if each.gpu_count]
        budget = max(len(available) - sum(left[each.name] for each in others), 0)
        return Moment(at_ns, closed, frozenset(available), budget, others)


def _is_over(run: Running, at_ns: int) -> bool:
    limit_ns = run.spec.time_limit_ns
    return limit_ns is not None and not run.suspended and run.counts_from_ns + limit_ns <= at_ns


def _why_never(request: Request, machine: Machine, cards: GpuSlots) -> str | None:
    if request.cpus > machine.cpus:
        return f"needs {count_of(request.cpus, 'CPU')}, the machine has {machine.cpus}"
    if request.memory_bytes is not None and request.memory_bytes > machine.memory_bytes:
        return f"needs {show_size(request.memory_bytes)}, the machine has {show_size(machine.memory_bytes)}"
    return why_never(request, machine.resources) or cards.never(request)


def could_run(request: Request, machine: Machine, policy: Policy) -> bool:
    """Whether the machine, with no runs on it, has the resources of *request*."""
    return _why_never(request, machine, GpuSlots(machine, policy)) is None
