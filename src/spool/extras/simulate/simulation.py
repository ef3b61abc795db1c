"""The scheduler on a simulated machine, and the quality of the resulting schedule.

Jobs arrive, run for a known time and end, without a real clock: the same `decide` as everywhere; only the world around
it is simulated. It goes event by event: a job that arrives, a run that ends, or an instant that a plan asked for.

The quality of a schedule: how long jobs waited, and how much of the machine was used. See Feitelson 2001, "Metrics for
Parallel Job Scheduling and Their Convergence".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import ClassVar, TypeVar

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from spool.core.forecast import Playback, preempt
from spool.core.model import SECOND_NS, Grant, Machine, Policy, Reservation, Result, Running, Spec, State, Waiting
from spool.core.priority import ARRIVAL, MULTIFACTOR, SHORTEST, SLOWDOWN, Past
from spool.core.quotas import Quotas
from spool.core.resources import Runs
from spool.core.scheduler import Plan, View
from spool.core.units import nearest_rank

NOTHING = Grant()
TAU_NS = 10 * SECOND_NS
"""Jobs shorter than this count as this long in the bounded slowdown: 3 s of waiting do not matter for 0.1 s of work."""

CHECKPOINT_NS = 900 * SECOND_NS
"""How often an imagined preemptible job saves its state; what it has done since is repeated after a preemption."""

RESTART_NS = 60 * SECOND_NS
"""How long it takes to continue from there."""

Key = TypeVar("Key", bound=Hashable)


class SimulatedPolicy(StrEnum):
    """The scheduling policies to compare."""

    FIFO = "fifo"  # first come, first served: no overtaking
    SKIP = "skip"  # first come, first served, and any job that fits may overtake: wide jobs starve
    EASY = "easy"  # first come, first served, with backfilling that never delays the first job
    SJF = "sjf"  # shortest job first, with the same backfilling
    MULTIFACTOR = "multifactor"  # fair share and age as in Slurm, with the same backfilling
    LXF = "lxf"  # longest wait relative to size first, without fair share or promotion
    SPOOL = "spool"  # as the configuration says


class SimulatedJob(Struct, frozen=True):
    """A job of the future: its request, its arrival, and its run time if it is not stopped."""

    name: str
    spec: Spec
    submit_at_ns: int
    duration_ns: int
    user: str = "user"


class Outcome(Struct, frozen=True):
    """The fate of a job. Without a start it ended waiting, or waits for ever: then it has no end either."""

    job: SimulatedJob
    started_at_ns: int | None
    ended_at_ns: int | None
    state: State
    grant: Grant = NOTHING
    pauses: tuple[tuple[int, int], ...] = ()  # from each preemption to the next start
    repeated_ns: int = 0  # run time that it would not have needed without them

    @property
    def waited_ns(self) -> int | None:
        """How long it waited for its start, and after preemptions; None without a start."""
        return None if self.started_at_ns is None else self.started_at_ns - self.job.submit_at_ns + self._paused_ns

    @property
    def ran_ns(self) -> int:
        """How long it ran, if it has ended."""
        began, ended = self.started_at_ns, self.ended_at_ns
        return 0 if began is None or ended is None else ended - began - self._paused_ns

    @property
    def _paused_ns(self) -> int:
        return sum(until - since for since, until in self.pauses)


def under(discipline: SimulatedPolicy, policy: Policy) -> Policy:
    """Return *policy* changed to that discipline; priorities count in all of them."""
    if discipline is SimulatedPolicy.SPOOL:
        return policy
    return replace(
        policy,
        order={"sjf": SHORTEST, "lxf": SLOWDOWN, "multifactor": MULTIFACTOR}.get(discipline, ARRIVAL),
        promotes=False,
        fair_share=False,
        protects=discipline is not SimulatedPolicy.SKIP,
        strict_order=discipline is SimulatedPolicy.FIFO,
        preemption=False,
    )


class Pass(Struct):
    """One turn of the simulated dispatcher, for observers."""

    now_ns: int
    view: View
    plan: Plan


class _Begun(Struct):
    """A job that was preempted: its first start, what is left of its work, and when it waited again."""

    started_at_ns: int
    left_ns: int
    paused_ns: int = 0
    repeated_ns: int = 0
    pauses: list[tuple[int, int]] = field(default_factory=list)


class Simulation:
    """A simulated spool."""

    def __init__(
        self,
        coming: Iterable[SimulatedJob],
        machine: Machine,
        policy: Policy,
        *,
        reservations: Sequence[Reservation] = (),
    ) -> None:
        self._policy = policy
        # Shapes that no rule needs are merged.
        self._merges_shapes = policy.strict_order and not reservations and not Quotas(policy).limited
        self._coming = sorted(coming, key=lambda each: (each.submit_at_ns, each.name), reverse=True)
        self._jobs = {each.name: each for each in self._coming}
        arrays: dict[str, tuple[str, ...]] = {}
        for each in reversed(self._coming):
            if each.spec.task is not None:
                array = each.spec.task.array
                arrays[array] = (*arrays.get(array, ()), each.name)
        self._begun: dict[str, _Begun] = {}  # of the jobs that were preempted
        past, kept = Past(policy), tuple(reservations)
        running = Runs(run_times=past.run_times)
        self._spool = Playback(View(machine, running=running, arrays=arrays, reservations=kept, past=past), policy)

    def steps(self) -> Iterator[Outcome | Pass]:
        """Simulate until no waiting job can start any more.

        Yield each outcome, in the order of the events, and each pass, before it is performed.
        """
        spool, now_ns = self._spool, self._coming[-1].submit_at_ns if self._coming else 0
        while True:
            yield from self._over(now_ns)
            while self._coming and self._coming[-1].submit_at_ns <= now_ns:
                new = self._coming.pop()
                spec, user = new.spec, new.user
                if self._merges_shapes:
                    spec, user = replace(spec, time_limit_ns=None), ""
                spool.queue.put(Waiting(new.name, spec, user, new.submit_at_ns, clock_at_ns=new.submit_at_ns))
            plan = spool.decide(now_ns)
            yield Pass(now_ns, spool.view, plan)
            preempted = preempt(plan)
            begun = spool.perform(plan, now_ns)
            for ending in plan.endings:
                yield self._outcome(ending.name, None, now_ns, ending.outcome, NOTHING)
            for _, run in begun:
                spool.ends_at(run, now_ns + self._lasts_ns(run.name, now_ns))
            times = [self._coming[-1].submit_at_ns] if self._coming else []
            if preempted is not None:
                self._preempt(spool.running[preempted.victim], preempted.winner, now_ns)
                times.append(now_ns)
            if (next_at_ns := spool.next_at_ns(plan, now_ns)) is not None:
                times.append(next_at_ns)
            if not times:
                break
            now_ns = min(times)
        for name in spool.queue:
            yield self._outcome(name, None, None, State.QUEUED, NOTHING)

    def _preempt(self, run: Running, winner: str, now_ns: int) -> None:
        """Let a run end and its job wait again; what it did up to its last checkpoint is done."""
        job = self._jobs[run.name]
        known = self._begun.setdefault(run.name, _Begun(run.started_at_ns, job.duration_ns))
        saved_ns = (now_ns - run.started_at_ns) // CHECKPOINT_NS * CHECKPOINT_NS
        left_ns = known.left_ns - saved_ns + RESTART_NS
        known.repeated_ns += now_ns - run.started_at_ns + left_ns - known.left_ns
        known.left_ns, known.paused_ns = left_ns, now_ns
        self._spool.past.learn(job.user, self._result(run, now_ns, State.PREEMPTED))
        self._spool.preempt(run, winner, now_ns)

    def _lasts_ns(self, name: str, now_ns: int) -> int:
        """Return how long the run lasts that starts now."""
        limit, known = self._jobs[name].spec.time_limit_ns, self._begun.get(name)
        duration = self._jobs[name].duration_ns
        if known is not None:
            known.pauses.append((known.paused_ns, now_ns))
            duration = known.left_ns
        return duration if limit is None else min(duration, limit)

    def _over(self, now_ns: int) -> Iterator[Outcome]:
        for at_ns, run in self._spool.take_ended(now_ns):
            name = run.name
            limit = self._jobs[name].spec.time_limit_ns
            late = limit is not None and self._jobs[name].duration_ns > limit
            state = State.TIMEOUT if late else State.FINISHED
            self._spool.past.learn(self._jobs[name].user, self._result(run, at_ns, state))
            self._spool.conclude(name, state)
            yield self._outcome(name, run.started_at_ns, at_ns, state, run.grant)

    def _result(self, run: Running, at_ns: int, state: State) -> Result:
        arrived_at_ns, request = self._jobs[run.name].submit_at_ns, run.spec.request
        return Result(
            run.name, 1, 1, state, "", arrived_at_ns, run.started_at_ns, at_ns, request=request, grant=run.grant
        )

    def _outcome(self, name: str, start: int | None, end: int | None, state: State, grant: Grant) -> Outcome:
        known = self._begun.get(name)
        if known is None:
            return Outcome(self._jobs[name], start, end, state, grant)
        pauses = tuple(known.pauses)
        return Outcome(self._jobs[name], known.started_at_ns, end, state, grant, pauses, known.repeated_ns)


def simulate(
    coming: Iterable[SimulatedJob],
    machine: Machine,
    policy: Policy,
    discipline: SimulatedPolicy = SimulatedPolicy.SPOOL,
    *,
    reservations: Sequence[Reservation] = (),
) -> Iterator[Outcome]:
    """Yield the outcome of each job on that machine, in the order of events."""
    steps = Simulation(coming, machine, under(discipline, policy), reservations=reservations).steps()
    return (each for each in steps if isinstance(each, Outcome))


class WaitSummary(Struct, frozen=True):
    """How long jobs waited, and how much of the machine they had. Means are None without data.

    Waits are of jobs that started; `left` counts those that never did. Utilisation is between 0 and 1, of the time
    from the first submission to the last end of the whole schedule; that of GPUs is None for a machine without.
    """

    jobs: int
    left: int
    mean_wait_ns: int | None
    median_wait_ns: int | None
    wait_99_ns: int | None  # 99 of 100 jobs waited no longer
    longest_wait_ns: int | None
    mean_bounded_slowdown: float | None
    utilisation: float | None
    gpu_utilisation: float | None
    PUBLIC: ClassVar[str] = """
        jobs left mean_wait_ns median_wait_ns wait_99_ns longest_wait_ns mean_bounded_slowdown utilisation
        gpu_utilisation
    """


class Figures(WaitSummary, frozen=True):
    """A whole schedule in numbers. Its makespan is the time from the first submission to the last end."""

    makespan_ns: int
    preemptions: int
    repeated: float  # work that was done again after preemptions, as a share of all work of CPUs or GPUs
    PUBLIC: ClassVar[str] = f"{WaitSummary.PUBLIC} makespan_ns preemptions repeated"


def figures(outcomes: Sequence[Outcome], cpus: int, gpus: int = 0) -> Figures:
    """Return the figures of a schedule on a machine of that size."""
    makespan_ns = _makespan_ns(outcomes)
    # The work that was done again is that of GPUs, if any job has some, else of CPUs.
    weights = [len(each.grant.gpu_uuids) for each in outcomes]
    if not any(weights):
        weights = [each.grant.cpus for each in outcomes]
    done = sum(weight * each.ran_ns for weight, each in zip(weights, outcomes, strict=True))
    again = sum(weight * each.repeated_ns for weight, each in zip(weights, outcomes, strict=True))
    return Figures(
        **asdict(_waits(outcomes, cpus * makespan_ns, gpus * makespan_ns)),
        makespan_ns=makespan_ns,
        preemptions=sum(len(each.pauses) for each in outcomes),
        repeated=again / done if done else 0.0,
    )


def grouped(
    outcomes: Sequence[Outcome], key: Callable[[Outcome], Key], cpus: int, gpus: int = 0
) -> dict[Key, WaitSummary]:
    """Return the figures of each group of jobs, in the order in which *key* first returns them."""
    makespan_ns = _makespan_ns(outcomes)
    members: dict[Key, list[Outcome]] = {}
    for each in outcomes:
        members.setdefault(key(each), []).append(each)
    return {group: _waits(listed, cpus * makespan_ns, gpus * makespan_ns) for group, listed in members.items()}


def _makespan_ns(outcomes: Sequence[Outcome]) -> int:
    start = min((each.job.submit_at_ns for each in outcomes), default=0)
    return max((each.ended_at_ns for each in outcomes if each.ended_at_ns is not None), default=start) - start


def _waits(outcomes: Sequence[Outcome], room: int, gpu_room: int) -> WaitSummary:
    """Return the waits of some jobs; *room* is processors times ns, *gpu_room* the same of GPUs."""
    began = [(each, each.waited_ns, each.ran_ns) for each in outcomes]
    started = [(each, wait, ran) for each, wait, ran in began if wait is not None]
    waits = sorted(wait for _, wait, _ in started)
    slowdown = sum(max((wait + ran) / max(ran - each.repeated_ns, TAU_NS), 1.0) for each, wait, ran in started)
    used = sum(each.grant.cpus * ran for each, _, ran in started)
    gpu_used = sum(len(each.grant.gpu_uuids) * ran for each, _, ran in started)
    return WaitSummary(
        len(outcomes),
        len(outcomes) - len(waits),
        sum(waits) // len(waits) if waits else None,
        nearest_rank(waits, 50),
        nearest_rank(waits, 99),
        waits[-1] if waits else None,
        slowdown / len(waits) if waits else None,
        used / room if room else None,
        gpu_used / gpu_room if gpu_room else None,
    )
