"""The planner on an imagined machine, and what its schedules are worth; whole days, decision by decision."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import GIB, NOW, S, at, grant_of, machine, spec
from core.test_gpus import mixed
from core.worlds import BOX, POLICIES, SPECS, over_committed
from spool.core.constraints import as_run
from spool.core.forecast import forecast
from spool.core.model import Dependencies, Grant, Limits, Machine, Policy, Pool, Request, Reservation, Spec, State
from spool.core.reasons import in_words
from spool.core.resources import could_run
from spool.extras.simulate.simulation import (
    Outcome,
    Pass,
    SimulatedJob,
    SimulatedPolicy,
    Simulation,
    figures,
    grouped,
    simulate,
    under,
)

HOUR = 3600 * S


@st.composite
def comings(draw: st.DrawFn, **fixed: object) -> list[SimulatedJob]:
    """Draw jobs that come over an hour and end within their limits."""
    jobs = []
    for number in range(draw(st.integers(1, 12))):
        spec = replace(draw(SPECS), **fixed)
        limit = spec.time_limit_ns
        duration = draw(st.integers(1, 900)) * S
        jobs.append(
            SimulatedJob(
                f"j{number:02}",
                spec,
                NOW + draw(st.sampled_from([0, 0, 5, 60, 700, 3600])) * S,
                duration if limit is None else min(duration, limit),
                draw(st.sampled_from(["alice", "bob"])),
            )
        )
    return jobs


def passes(jobs, policy, box=BOX):
    """Yield each pass, with the runs that there are once it has been performed and the jobs that go on waiting."""
    for step in Simulation(jobs, box, policy).steps():
        if isinstance(step, Pass):
            view, plan = step.view, step.plan
            gone = {start.name for start in plan.starts} | {ending.name for ending in plan.endings}
            new = [as_run(view.queue[start.name], start.grant, step.now_ns) for start in plan.starts]
            left = [waits for name, waits in view.queue.items() if name not in gone]
            yield step, [*view.running.values(), *new], new, left


@given(comings(), POLICIES)
def test_nothing_is_ever_over_committed(jobs, policy):
    """At every moment of every schedule no pool, GPU, group, array or quota is exceeded."""
    for step, runs, new, _ in passes(jobs, policy):
        limits = [each.spec for each in step.view.queue.values()]
        wrong = over_committed(BOX, runs, policy, limits)
        if not any(run.spec.group for run in new):  # a limit that came later stops nobody who runs
            wrong = [what for what in wrong if what != "group"]
        if not any(run.spec.task for run in new):
            wrong = [what for what in wrong if what != "array"]
        assert wrong == []


@given(comings(), POLICIES)
def test_whoever_waits_is_told_why_and_nothing_that_fits_waits(jobs, policy):
    """Every job that waits has a reason; unless room is kept free for another, no choice of GPUs would let it start."""
    for step, runs, _, left in passes(jobs, policy):
        limits = [each.spec for each in step.view.queue.values()]
        standing = over_committed(BOX, runs, policy, limits)
        for waits in left:
            reasons = step.plan.all_reasons(waits.name)
            assert reasons
            assert reasons[0] == step.plan.reason(waits.name)
            if reasons[0].code == "left":
                assert step.plan.protected not in (None, waits.name)
                continue
            request = waits.spec.request
            for chosen in combinations(range(4), request.gpus):
                one_more = as_run(waits, grant_of(request, chosen), step.now_ns)
                assert over_committed(BOX, [*runs, one_more], policy, limits) != standing or standing


@given(comings(), POLICIES, st.integers(1, 3))
def test_everything_that_fits_the_machine_starts(jobs, policy, most):
    """With finite jobs, every job that the machine and the quotas could ever let run starts, in a full spool too."""
    quota = policy.default_user_limits
    began = {each.job.name for each in simulate(jobs, BOX, policy) if each.started_at_ns is not None}
    full = replace(policy, max_running=most)
    for step in Simulation(jobs, BOX, full).steps():
        assert not isinstance(step, Pass) or len(step.view.running) + len(step.plan.starts) <= most
    assert began == {each.job.name for each in simulate(jobs, BOX, full) if each.started_at_ns is not None}
    for each in jobs:
        request = each.spec.request
        possible = (
            could_run(request, BOX, policy)
            and (quota.max_running_gpus is None or request.gpus <= quota.max_running_gpus)
            and (quota.max_running_cpus is None or request.cpus <= quota.max_running_cpus)
            and (
                quota.max_running_memory_bytes is None or (request.memory_bytes or 0) <= quota.max_running_memory_bytes
            )
        )
        assert (each.name in began) == possible


def could_start_at(waits, runs, policy, now_ns):
    """Return when *waits* could start beside these runs, each of which ends at its limit: tried out, end by end."""
    ends = {run.name: max(run.started_at_ns + run.spec.time_limit_ns, now_ns) for run in runs}
    for moment in sorted({now_ns, *ends.values()}):
        there = [run for run in runs if ends[run.name] > moment]
        for chosen in combinations(range(4), waits.spec.request.gpus):
            one_more = as_run(waits, grant_of(waits.spec.request, chosen), now_ns)
            if not over_committed(BOX, [*there, one_more], policy, []):
                return moment
    return None


@given(comings(priority=10, group=None, task=None), POLICIES)
def test_a_protected_job_is_not_delayed_by_those_behind_it(jobs, policy):
    """Limits being stated and kept, what starts behind a protected job in the order does not put its start off.

    Who stands before it may: it has waited longer for its size. A protected job that was promoted has nobody before
    it but those that came earlier.
    """
    jobs = [replace(each, spec=replace(each.spec, time_limit_ns=each.spec.time_limit_ns or 1800 * S)) for each in jobs]
    for step, runs, new, _ in passes(jobs, policy):
        plan, now_ns = step.plan, step.now_ns
        if plan.protected is None:
            continue
        names = [job.name for job, _ in plan.in_order()]
        behind = set(names[names.index(plan.protected) :])
        kept = [run for run in runs if run not in new or run.name not in behind]
        waits = step.view.queue[plan.protected]
        undelayed = could_start_at(waits, kept, policy, now_ns)
        assert undelayed == could_start_at(waits, runs, policy, now_ns) == plan.protection.at_ns


@pytest.mark.parametrize(
    ("limit_s", "wide_s", "user", "at_most"),
    [(600, 600, "user", 600), (600, 7200, "bob", 1800), (600, 7200, "user", 36_000)]
    + [(None, None, user, 7200) for user in ("bob", "user")],
)
def test_a_large_job_in_a_stream_of_small_ones_starts(limit_s, wide_s, user, at_most):
    """A 4-GPU job is not passed for ever by one-GPU jobs that keep 4 GPUs busy: in ten minutes its turn has come.

    Where it states more than it needs it has to wait longer; but not much longer than the eight hours of work by
    which the others may pass it. Where nobody states a limit, what guesses may hold back, a tenth of its wait, is
    enough before the half day is over.
    """
    small = spec(cpus=1, gpus=1, time_limit_ns=limit_s and limit_s * S)
    jobs = [SimulatedJob(f"s{n:03}", small, NOW + n * 150 * S, 600 * S, user) for n in range(300)]
    jobs.append(SimulatedJob("big", spec(cpus=1, gpus=4, time_limit_ns=wide_s and wide_s * S), NOW + S, 600 * S))
    found = {each.job.name: each for each in simulate(jobs, machine(16, gpus=4), Policy())}
    assert found["big"].waited_ns <= at_most * S


def test_dependencies_and_instants_hold_in_the_simulator():
    """What a job waits for happens there too, and what never happens leaves it waiting."""
    jobs = [
        SimulatedJob("arr_0", spec(task=("arr", 0)), NOW, 5 * S),
        SimulatedJob("b", spec(depends_on="arr"), NOW, S),
        SimulatedJob("t", spec(time_limit_ns=S), NOW, 2 * S),
        SimulatedJob("c", spec(depends_on=Dependencies(failed=("t",))), NOW, S),
        SimulatedJob("d", spec(depends_on="t"), NOW, S),
        SimulatedJob("e", spec(start_after_ns=NOW + 9 * S), NOW, S),
        SimulatedJob("f", spec(depends_on="nobody"), NOW, S),
        SimulatedJob("late", spec(cpus=9, scheduling_timeout_ns=S), NOW, S),
    ]
    found = {each.job.name: each for each in simulate(jobs, machine(), Policy())}
    starts = {name: each.waited_ns and each.waited_ns // S for name, each in found.items()}
    assert starts == {"arr_0": 0, "b": 5, "t": 0, "c": 1, "d": None, "e": 9, "f": None, "late": None}
    assert [found[name].state for name in ("d", "f", "late")] == [State.CANCELLED, State.QUEUED, State.UNSCHEDULABLE]
    assert found["late"].ended_at_ns == NOW + S + 1
    assert found["f"].waited_ns is None


def test_under_every_discipline_a_user_teaches_by_runs_with_a_limit():
    """How long a job without a limit is expected to run is learnt from all runs of its user, stated or not."""
    jobs = [
        SimulatedJob("stated", spec(time_limit_ns=3600 * S), NOW, 600 * S, "alice"),
        SimulatedJob("other", spec(time_limit_ns=3600 * S), NOW, 650 * S, "bob"),
        SimulatedJob("last", spec(), NOW + 700 * S, S, "bob"),
    ]
    for discipline in (SimulatedPolicy.EASY, SimulatedPolicy.LXF, SimulatedPolicy.SPOOL):
        steps = Simulation(jobs, machine(4), under(discipline, Policy())).steps()
        views = [step.view for step in steps if isinstance(step, Pass)]
        assert views[-1].past.run_times.guess("bob", "x", spec().request).ns == 650 * S


def ran(submit: int, start: int | None, end: int | None, cpus: int = 1, gpus: int = 0) -> Outcome:
    """Return a job's outcome, in seconds."""
    state = State.QUEUED if start is None else State.FINISHED
    grant = Grant(cpus, gpu_uuids=tuple(f"GPU-{index}" for index in range(gpus)))
    job = SimulatedJob(str(submit), spec(), submit * S, 0)
    return Outcome(job, start and start * S, end and end * S, state, grant)


def test_figures_of_a_schedule_of_three() -> None:
    """Waits 0, 90 and 40s; slowdowns 1, 100/10 (a second counts as ten) and 1.4; 320 of 4 x 150s are used.

    A job that never starts is counted, and in no mean. Two of four GPUs for half of the time are a quarter.
    """
    found = figures([ran(100, 100, 200, 2), ran(110, 200, 201, 20), ran(110, 150, 250), ran(110, None, None)], 4)
    assert (found.jobs, found.left) == (4, 1)
    assert (found.mean_wait_ns, found.median_wait_ns, found.wait_99_ns) == (130 * S // 3, 40 * S, 90 * S)
    assert found.mean_bounded_slowdown is not None
    assert abs(found.mean_bounded_slowdown - (1 + 9.1 + 1.4) / 3) < 1e-9
    assert found.makespan_ns == 150 * S
    assert (found.utilisation, found.gpu_utilisation) == ((2 * 100 + 20 * 1 + 100) / (4 * 150), None)
    assert figures([ran(1, 1, 51, 1, gpus=2), ran(1, 1, 101, 1)], 4, gpus=4).gpu_utilisation == 0.25


def test_percentiles_are_waits_that_somebody_had() -> None:
    """Nearest rank: of 1 to 100 seconds the 50th and the 99th; and the longest."""
    found = figures([ran(1, 1 + wait, 200) for wait in range(1, 101)], 1)
    assert (found.median_wait_ns, found.wait_99_ns) == (50 * S, 99 * S)
    assert found.longest_wait_ns == 100 * S


def test_groups_share_the_machine() -> None:
    """Each group has its own waits; what the groups used is measured against the machine and the makespan of all."""
    outcomes = [ran(0, 0, 100, 2), ran(0, 50, 100, 2), ran(50, 100, 200, 1), ran(60, None, None, 3)]
    found = grouped(outcomes, lambda each: each.job.submit_at_ns == 0, 4)
    assert list(found) == [True, False]
    assert (found[True].jobs, found[True].left, found[True].mean_wait_ns) == (2, 0, 25 * S)
    assert (found[False].jobs, found[False].left, found[False].longest_wait_ns) == (2, 1, 50 * S)
    assert (found[True].utilisation, found[False].utilisation) == (300 / 800, 100 / 800)
    assert figures(outcomes, 4).utilisation == 400 / 800


# Preemption, pools, kinds of GPUs, and what was foretold.


def simulated(*coming: SimulatedJob, **values) -> dict[str, Outcome]:
    """Return what became of each job on a machine with four processors."""
    return {each.job.name: each for each in simulate(coming, machine(cpus=4), Policy(), **values)}


def test_a_simulated_job_continues_from_its_last_checkpoint():
    """It waits again, repeats what it did since the last quarter of an hour, and needs a minute to begin.

    Other policies, which are compared with as they are known, preempt nothing.
    """
    victim = SimulatedJob("l", spec(cpus=4, time_limit_ns=24 * HOUR, preemptible=True), 0, 10 * HOUR)
    other = SimulatedJob("s", spec(cpus=2, time_limit_ns=HOUR), 4000 * S, 1800 * S)
    ends = simulated(victim, other)
    assert ends["s"].started_at_ns == 4000 * S
    assert ends["l"].pauses == ((4000 * S, 5800 * S),)
    assert ends["l"].repeated_ns == (4000 - 3600 + 60) * S
    assert (ends["l"].waited_ns, ends["l"].ran_ns) == (1800 * S, 10 * HOUR + 460 * S)
    found = figures(list(ends.values()), 4)
    assert (found.preemptions, found.mean_wait_ns) == (1, 900 * S)
    assert found.repeated == pytest.approx(4 * 460 / (4 * 36_460 + 2 * 1800))
    assert found.utilisation == pytest.approx((4 * 36_460 + 2 * 1800) / (4 * found.makespan_ns / S))
    for discipline in set(SimulatedPolicy) - {SimulatedPolicy.SPOOL}:
        assert simulated(victim, other, discipline=discipline)["l"].pauses == ()


def test_a_simulated_job_that_made_room_keeps_its_place():
    """It came before the job that waited all the time of its run, and goes on before that begins."""
    first = SimulatedJob("f", spec(cpus=4, time_limit_ns=1000 * S), 0, 1000 * S)
    victim = SimulatedJob("l", spec(cpus=4, time_limit_ns=24 * HOUR, preemptible=True), S, 10 * HOUR)
    waits = SimulatedJob("m", spec(cpus=4, time_limit_ns=24 * HOUR), 500 * S, HOUR)
    short = SimulatedJob("s", spec(cpus=2, time_limit_ns=HOUR, priority=255), 6000 * S, 1800 * S)
    ends = simulated(first, victim, waits, short)
    assert ends["l"].pauses == ((6000 * S, 7800 * S),)
    assert ends["m"].started_at_ns > 10 * HOUR


@pytest.mark.parametrize(
    ("policy", "small", "wide"),
    [(Policy(), (("licence", 1),), (("licence", 2),)), (Policy(max_running=2), (), ())],
    ids=["named", "max_running"],
)
def test_nobody_is_passed_for_ever_by_those_who_want_the_same(
    policy: Policy, small: tuple[tuple[str, int], ...], wide: tuple[tuple[str, int], ...]
) -> None:
    """Later arrivals may have the whole of it for 8 hours; then who waits for it goes first."""
    wants = [Spec("x", request=Request(1, resources=each), time_limit_ns=600 * S) for each in (small, wide)]
    stream = [SimulatedJob(f"s{at:03}", wants[0], at * 240 * S, 600 * S) for at in range(300)]
    last = SimulatedJob("wide", replace(wants[1], time_limit_ns=7200 * S), 300 * S, 600 * S)
    machine = Machine(50, 1 << 40, resources=(Pool("licence", 2),))
    ended = {each.job.name: each for each in simulate([*stream, last], machine, policy)}
    waited_ns = ended["wide"].waited_ns
    assert waited_ns is not None
    assert waited_ns <= 9 * 3600 * S
    assert max(each.ended_at_ns or 0 for each in ended.values()) > 20 * 3600 * S, "the stream goes on for long enough"


def test_a_wanted_gpu_is_free_when_it_is_asked_for():
    """In a simulated box of both, the jobs for an H100 no longer wait for jobs that would run on any GPU."""
    box = machine(cpus=64, gpus=mixed("H100", "RTX 4090"))
    coming = [
        SimulatedJob(f"{kind}{at}", spec(gpus=1, gpu_type=kind, time_limit_ns=3600 * S), at * 3600 * S + late, 3599 * S)
        for at in range(20)
        for kind, late in ((None, 0), ("H100", S))
    ]
    waits = {}
    for strategy in ("sequential", None):
        ended = list(simulate(coming, box, Policy(gpu_strategy=strategy)))
        waits[strategy] = max(each.waited_ns for each in ended if each.job.spec.request.gpu_types == ("H100",))
    assert waits["sequential"] > 3000 * S
    assert waits[None] <= S


@st.composite
def exact(draw: st.DrawFn) -> list[Any]:
    """Draw jobs that state how long they run, and run as long."""
    return [
        replace(each, spec=replace(each.spec, time_limit_ns=each.duration_ns))
        for each in draw(comings())
    ]  # fmt: skip


@given(exact(), POLICIES)
def test_the_plan_is_what_then_happens(jobs, policy):
    """With exact limits, from the moment when the last job has come every start is the one that was foretold."""
    foretold: list[dict[str, int]] = []
    came: dict[str, int] = {}
    last_ns = max(each.submit_at_ns for each in jobs)
    for step in Simulation(jobs, BOX, policy).steps():
        if isinstance(step, Pass) and step.now_ns >= last_ns:
            foretold.append({name: told.at_ns for name, told in forecast(step.plan).items() if told.at_ns is not None})
            assert not any(told.guessed for told in forecast(step.plan).values())
        elif isinstance(step, Outcome) and step.started_at_ns is not None:
            came[step.job.name] = step.started_at_ns
    waited = [{name: at_ns for name, at_ns in came.items() if name in each} for each in foretold]
    assert foretold == waited
    assert all(came.keys() - each.keys() <= came.keys() - foretold[-1].keys() for each in foretold)


# Whole days, against pages that were read and agreed with once.


PAGES = Path(__file__).parent / "golden"
MINUTE = 60 * S


def coming(name: str, clock: str, minutes: int, user: str = "alice", **asked: object) -> SimulatedJob:
    """Return a job that comes when the clock shows *clock* and would run for *minutes*."""
    return SimulatedJob(name, spec(**asked), at(clock), minutes * MINUTE, user)


DAYS = {
    # Room is kept free for the wide one from the moment at which it does not fit, and what ends in time fills the gap.
    # Then who has waited longest for its size goes first: a short one before those that came earlier.
    "a_wide_job_in_a_stream": (
        [
            coming("wide", "12:01", 10, cpus=4, time_limit_ns=15 * MINUTE),
            *(coming(f"small{n}", f"12:{4 * n:02}", 20, cpus=1, time_limit_ns=25 * MINUTE) for n in range(12)),
            *(
                coming(f"short{n}", clock, 2, cpus=1, time_limit_ns=3 * MINUTE)
                for n, clock in enumerate(["12:10", "12:41"])
            ),
        ],
        machine(cpus=4),
        Policy(fair_share=False),
        (),
    ),
    # Two of four GPUs are kept for bob by count from 13:00 to 14:00; alice's jobs come all the time.
    "a_reservation_by_count": (
        [
            *(coming(f"a{n}", "12:50", 30, gpus=1, cpus=0, time_limit_ns=40 * MINUTE) for n in range(3)),
            *(coming(f"b{n}", "13:10", 25, "bob", gpus=1, cpus=0) for n in range(2)),
            *(coming(f"late{n}", "13:25", 10, gpus=1, cpus=0, time_limit_ns=20 * MINUTE) for n in range(4)),
        ],
        machine(cpus=4, gpus=4),
        Policy(fair_share=False),
        (Reservation("demo", "bob", None, at("13:00"), at("14:00"), gpu_count=2),),
    ),
    # Sharing by memory, an exclusive job that has to wait for its end, a quota, a group and a dependency on two jobs.
    "sharing_quotas_and_groups": (
        [
            coming("s1", "12:00", 30, gpus=1, cpus=1, gpu_memory_bytes=30 * GIB),
            coming("s2", "12:01", 30, gpus=1, cpus=1, gpu_memory_bytes=30 * GIB),
            coming("s3", "12:02", 30, "carol", gpus=1, cpus=1, gpu_memory_bytes=30 * GIB),
            coming("alone", "12:03", 10, "carol", gpus=1, cpus=1),
            coming("g1", "12:04", 20, cpus=1, group="g", group_limit=1),
            coming("g2", "12:05", 20, cpus=1, group="g", group_limit=1),
            coming("third", "12:06", 5, "dave", cpus=1, depends_on=("s1", "g1")),
            coming("quota", "12:07", 5, cpus=1, priority=50),
        ],
        machine(cpus=8, gpus=1),
        Policy(fair_share=False, user_limits={"alice": Limits(max_running_jobs=3)}),
        (),
    ),
}


def replay(name: str) -> Iterator[str]:
    """Yield a line for every start, and one for every job that is left waiting with another reason than before."""
    jobs, box, policy, reservations = DAYS[name]
    said: dict[str, str] = {}
    for step in Simulation(jobs, box, policy, reservations=reservations).steps():
        if not isinstance(step, Pass):
            continue
        clock = datetime.fromtimestamp(step.now_ns // S, UTC).strftime("%H:%M:%S")
        for start in step.plan.starts:
            on = f" on GPU {', '.join(map(str, start.grant.gpu_indices))}" if start.grant.gpu_indices else ""
            yield f"{clock} {start.name} starts{on}"
        started = {start.name for start in step.plan.starts}
        for waits in sorted(set(step.view.queue) - started):
            reason = in_words(str(step.plan.reason(waits)), step.now_ns, UTC)
            if said.get(waits) != reason:
                said[waits] = reason
                yield f"{clock} {waits} waits: {reason}"


@pytest.mark.parametrize("name", DAYS)
def test_a_day_goes_as_it_went_when_it_was_read(name: str) -> None:
    """With a frozen clock every start, every grant and every reason of a day is the one on its page."""
    assert at("12:00") == NOW
    assert "\n".join(replay(name)) + "\n" == (PAGES / f"{name}.txt").read_text(encoding="utf-8")
