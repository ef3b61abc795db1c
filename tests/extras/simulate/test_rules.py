"""The rules of the scheduler over simulated time: preemption, pools, kinds of GPUs, and what was foretold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import NOW, S, job, machine, spec
from core.test_gpus import mixed
from core.worlds import BOX as SHARED
from core.worlds import POLICIES
from extras.simulate.comings import comings
from spool.core.forecast import forecast
from spool.core.model import Machine, Policy, Pool, Request, Spec
from spool.extras.simulate.simulation import Outcome, Pass, SimulatedJob, SimulatedPolicy, Simulation, figures, simulate

HOUR = 3600
BOX = machine(cpus=4)


def simulated(*coming: SimulatedJob, **values) -> dict[str, Outcome]:
    """Return what became of each job on a machine with four processors."""
    return {each.job.name: each for each in simulate(coming, BOX, Policy(), **values)}


def test_a_simulated_job_continues_from_its_last_checkpoint():
    """It waits again, repeats what it did since the last quarter of an hour, and needs a minute to begin."""
    victim = SimulatedJob("l", spec(cpus=4, time_limit_ns=24 * HOUR * S, preemptible=True), 0, 10 * HOUR * S)
    other = SimulatedJob("s", spec(cpus=2, time_limit_ns=HOUR * S), 4000 * S, 1800 * S)
    ends = simulated(victim, other)
    assert ends["s"].started_at_ns == 4000 * S
    assert ends["l"].pauses == ((4000 * S, 5800 * S),)
    assert ends["l"].repeated_ns == (4000 - 3600 + 60) * S
    assert (ends["l"].waited_ns, ends["l"].ran_ns) == (1800 * S, (10 * HOUR + 460) * S)
    found = figures(list(ends.values()), 4)
    assert (found.preemptions, found.mean_wait_ns) == (1, 900 * S)
    assert found.repeated == pytest.approx(4 * 460 / (4 * (10 * HOUR + 460) + 2 * 1800))
    assert found.utilisation == pytest.approx((4 * (10 * HOUR + 460) + 2 * 1800) / (4 * found.makespan_ns / S))
    assert found.max_queue == 1


def test_other_policies_preempt_nothing():
    """They are compared with as they are known."""
    victim = SimulatedJob("l", spec(cpus=4, time_limit_ns=24 * HOUR * S, preemptible=True), 0, 10 * HOUR * S)
    other = SimulatedJob("s", spec(cpus=2, time_limit_ns=HOUR * S), 4000 * S, 1800 * S)
    for discipline in set(SimulatedPolicy) - {SimulatedPolicy.SPOOL}:
        assert simulated(victim, other, discipline=discipline)["l"].pauses == ()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), min_size=1, max_size=12), st.integers(1, 3))
def test_a_full_spool_starves_nobody(asked, most):
    """With finite jobs every one of them starts, and never more than the limit run."""
    coming = [
        SimulatedJob(f"j{at}", job("x", cpus=cpus).spec, NOW, seconds * S) for at, (cpus, seconds) in enumerate(asked)
    ]
    for step in Simulation(coming, machine(cpus=4), Policy(max_running=most)).steps():
        if isinstance(step, Pass):
            assert len(step.view.running) + len(step.plan.starts) <= most
    done = list(simulate(coming, machine(cpus=4), Policy(max_running=most)))
    assert all(each.started_at_ns is not None for each in done)


@pytest.mark.parametrize(
    ("policy", "small", "wide"),
    [
        (Policy(), (("licence", 1),), (("licence", 2),)),
        (Policy(max_running=2), (), ()),
    ],
    ids=["named", "max_running"],
)
def test_nobody_is_passed_for_ever_by_those_who_want_the_same(
    policy: Policy, small: tuple[tuple[str, int], ...], wide: tuple[tuple[str, int], ...]
) -> None:
    """Later arrivals may have the whole of it for 8 hours; then who waits for it goes first."""

    def coming(name: str, wants: tuple[tuple[str, int], ...], limit_s: int, at_s: int) -> SimulatedJob:
        spec = Spec(command="x", request=Request(cpus=1, resources=wants), time_limit_ns=limit_s * S)
        return SimulatedJob(name, spec, at_s * S, 600 * S)

    stream = [coming(f"s{at:03}", small, 600, at * 240) for at in range(300)]
    machine = Machine(50, 1 << 40, resources=(Pool("licence", 2),))
    ended = {each.job.name: each for each in simulate([*stream, coming("wide", wide, 7200, 300)], machine, policy)}
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
    for step in Simulation(jobs, SHARED, policy).steps():
        if isinstance(step, Pass) and step.now_ns >= last_ns:
            foretold.append({name: told.at_ns for name, told in forecast(step.plan).items() if told.at_ns is not None})
            assert not any(told.guessed for told in forecast(step.plan).values())
        elif isinstance(step, Outcome) and step.started_at_ns is not None:
            came[step.job.name] = step.started_at_ns
    waited = [{name: at_ns for name, at_ns in came.items() if name in each} for each in foretold]
    assert foretold == waited
    assert all(came.keys() - each.keys() <= came.keys() - foretold[-1].keys() for each in foretold)
