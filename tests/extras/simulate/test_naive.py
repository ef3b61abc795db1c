"""The planner against the same rules written a second time, start by start."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.planning import NOW, S, machine
from extras.simulate.naive import HOUR, Job, Naive
from spool.core.model import Policy
from spool.extras.simulate.simulation import SimulatedPolicy, simulate

JOBS = st.lists(
    st.builds(
        Job,
        name=st.just(""),
        user=st.sampled_from(["alice", "bob"]),
        cpus=st.sampled_from([1, 1, 1, 2, 3, 7, 8]),
        at=st.integers(0, 40).map(lambda n: NOW + n * 600 * S),
        runs=st.sampled_from([1, 59, 60, 600, 900, 3600, 7000, 40_000, 400_000]).map(lambda n: n * S),
        limit=st.sampled_from([None, None, 60 * S, HOUR, 5 * HOUR, 100 * HOUR]),
    ),
    min_size=2,
    max_size=14,
)


def named(jobs: list[Job], stems: str = "abc") -> list[Job]:
    """Return the jobs with names, some of them alike."""
    return [Job(f"{stems[n % len(stems)]}{n:03}", j.user, j.cpus, j.at, j.runs, j.limit) for n, j in enumerate(jobs)]


def planned(jobs: list[Job], cpus: int, rule: str, *, fair: bool = False) -> dict[str, int | None]:
    """Return when the planner starts each."""
    policy = Policy(fair_share=fair)
    found = simulate([job.coming() for job in jobs], machine(cpus), policy, SimulatedPolicy(rule))
    return {each.job.name: each.started_at_ns for each in found}


@pytest.mark.parametrize("rule", ["fifo", "easy", "spool"])
@given(JOBS, st.sampled_from(["abc", "a"]), st.booleans())
def test_every_start_is_that_of_the_rules(rule, drawn, stems, fair):
    """On small traces, limits stated or not, each job starts when the rules written plainly have it start."""
    jobs = named(drawn, stems)
    fair = fair and rule == "spool"
    assert planned(jobs, 8, rule, fair=fair) == Naive(jobs, 8, rule, fair=fair).run()


@pytest.mark.parametrize(("rule", "other"), [("spool", ("x2", "alice")), ("easy", ("w2", "bob"))])
def test_of_equal_jobs_one_is_tried_for_protection(rule, other):
    """Jobs that state the same limit are equal whatever their names, and not equal if they are of two users."""
    jobs = [
        Job("guessed", "alice", 1, NOW, HOUR),
        Job("short", "alice", 1, NOW, 100 * S, 100 * S),
        Job("w1", "alice", 8, NOW + S, S, 60 * S),
        Job(*other, 8, NOW + S, S, 60 * S),
        Job("w3", "alice", 8, NOW + S, S, 120 * S),
        Job("next", "alice", 7, NOW + 2 * S, S, 600 * S),  # the third kind, or the fourth: one too many
        Job("late", "alice", 1, NOW + 3 * S, HOUR, HOUR),
    ]
    starts = planned(jobs, 8, rule)
    assert starts["late"] == (NOW + 101 * S if rule == "spool" else NOW + 3 * S)
    assert starts == Naive(jobs, 8, rule).run()


def trace(seed: int, part: float, number: int) -> list[Job]:
    """Return jobs of four users that keep 16 CPUs more than busy for days; *part* of them state a limit."""
    dice = random.Random(seed)
    jobs, at = [], NOW
    for n in range(number):
        user = dice.choices("uvwx", [8, 3, 2, 1])[0]
        runs = int(10 ** dice.uniform(1.5, 5) * S) + dice.randrange(S)
        limit = int(runs * dice.choice([0.9, 1, 1.5, 10])) if dice.random() < part else None
        jobs.append(Job(f"{dice.choice('pqr')}{n}", user, dice.choice([1, 1, 1, 2, 4, 8, 16]), at, runs, limit))
        at += int(dice.expovariate(1 / 4000) * S) + dice.randrange(S)
    return jobs


@pytest.mark.parametrize(("part", "fair"), [(1.0, True), (0.5, True), (0.0, False)])
def test_every_start_of_days_under_load_is_that_of_the_rules(part, fair):
    """On long traces with promotions, fair share and guesses that fail the same."""
    jobs = trace(7, part, 220)
    assert planned(jobs, 16, "spool", fair=fair) == Naive(jobs, 16, "spool", fair=fair).run()
