"""What is changed of a workload before it is simulated, and what is told of its schedule."""

from __future__ import annotations

import pytest

from spool.core.errors import UsageError
from spool.core.model import SECOND_NS as S
from spool.core.model import Machine, Policy, Request, Spec
from spool.extras.simulate.simulation import SimulatedJob, SimulatedPolicy
from spool.extras.simulate.whatif import (
    Scenario,
    Workload,
    imagined_gpus,
    load_of,
    prepare,
    simulate_policy,
    stating_limits,
)

BOX = Machine(4, 1 << 40)


def job(name: str, submit: int = 0, runs: int = 100, cpus: int = 1, user: str = "ann", gpus: int = 0) -> SimulatedJob:
    """Return a job with a limit, in seconds."""
    spec = Spec("true", request=Request(cpus, gpus=gpus), time_limit_ns=500 * S)
    return SimulatedJob(name, spec, submit * S, runs * S, user)


def stating(coming: tuple[SimulatedJob, ...]) -> list[str]:
    """Return the users of the jobs that state a limit."""
    return [each.user for each in coming if each.spec.time_limit_ns is not None]


def test_a_part_of_the_users_states_limits() -> None:
    """A user states the limits of all jobs or of none, the same users each time, and as many as were asked for."""
    jobs = [job(str(at), user=f"user{at % 10}") for at in range(100)]
    half = stating(stating_limits(jobs, 0.5))
    assert (len(half), len(set(half))) == (50, 5)
    assert stating(stating_limits(jobs, 0.5)) == half
    assert stating(stating_limits(jobs, 0.0)) == []
    assert len(stating(stating_limits(jobs, 1.0))) == 100


@pytest.mark.parametrize("user", ["ann", "user"])
def test_jobs_of_one_user_or_of_nobody_known_are_drawn_one_by_one(user: str) -> None:
    """Else half of the users would be all of the jobs, or none."""
    jobs = [job(str(at), user=user) for at in range(200)]
    assert 70 < len(stating(stating_limits(jobs, 0.5))) < 130


def test_what_is_changed_makes_no_shapes() -> None:
    """Jobs that differ in memory or limits alone share one spec once that does not count, and all of them fit."""
    asked = (Request(1, memory_bytes=size << 40) for size in (0, 1, 2))
    specs = [Spec("true", request=request, time_limit_ns=request.memory_bytes) for request in asked]
    jobs = tuple(SimulatedJob(str(at), spec, 0, S) for at, spec in enumerate(specs))
    found = prepare(Workload("t", jobs), BOX, Policy(), Scenario(limits=0.0))
    assert len({id(each.spec) for each in found.coming}) == 1
    assert prepare(Workload("t", jobs), BOX, Policy(), Scenario(count_memory=True)).never_fit == 1


def test_the_load_is_work_by_room() -> None:
    """Processors times run time over processors times the span of submissions; of GPUs where that is more."""
    jobs = [job("a", 0, 100, 2), job("b", 100, 300, 1, gpus=2)]
    assert load_of(jobs, BOX) == (2 * 100 + 300) / (4 * 100)
    assert load_of(jobs, Machine(4, 1 << 40, gpus=imagined_gpus("4", jobs))) == 2 * 300 / (4 * 100)
    assert load_of(jobs[:1], BOX) is None


def test_arrivals_are_stretched_to_the_load_that_is_wanted() -> None:
    """Only the times between submissions change, from the first on."""
    jobs = (job("a", 50, 100, 2), job("b", 100, 100, 2), job("c", 150, 200, 4))
    found = prepare(Workload("t", jobs), BOX, Policy(), Scenario(load=1.5))
    assert (found.load_of_source, found.load) == (3.0, 1.5)
    assert [each.submit_at_ns for each in found.coming] == [50 * S, 150 * S, 250 * S]
    assert [(each.spec, each.duration_ns) for each in found.coming] == [(each.spec, each.duration_ns) for each in jobs]


def test_jobs_that_come_at_once_have_no_load_to_scale() -> None:
    """There is no span to stretch."""
    with pytest.raises(UsageError, match="--scale-load"):
        prepare(Workload("t", (job("a"), job("b"))), BOX, Policy(), Scenario(load=0.85))


def test_sizes_users_and_longest_waits_are_told() -> None:
    """Sizes ascend, processors before GPUs; users come by what they had; the longest waits have names."""
    box = Machine(16, 1 << 40, gpus=imagined_gpus("4", []))
    jobs = (
        job("small", 0, 10, 1, "bob"),
        job("large", 0, 100, 16),
        job("four", 1, 100, 4),
        job("five", 2, 50, 5),
        job("card", 3, 50, 1, "cem", gpus=3),
    )
    told: list[tuple[int, int]] = []
    imagined = prepare(Workload("t", jobs), box, Policy(), Scenario())
    found = simulate_policy(imagined, Policy(), SimulatedPolicy.FIFO, lambda done, of: told.append((done, of)))
    assert list(found.sizes) == ["1 CPU", "2-4 CPUs", "5-16 CPUs", "3-4 GPUs"]
    assert list(found.users) == ["ann", "cem", "bob"]
    assert sum(each.jobs for each in found.users.values()) == found.figures.jobs == 5
    assert found.longest_waits[0].waited_ns == found.figures.longest_wait_ns
    longest = {each.job.name: each.job for each in found.longest_waits}
    assert (longest["five"].spec.request.cpus, longest["five"].user) == (5, "ann")
