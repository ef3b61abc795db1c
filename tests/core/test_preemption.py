"""Which run is stopped for a short job, and that the short job then starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import NOW, S, gpus, job, machine, run, started, view
from spool.core.forecast import Preemption, preempt, preemptible_at_ns
from spool.core.model import Policy, Running, Waiting
from spool.core.scheduler import decide

HOUR = 3600
BOX = machine(cpus=4)


def long(name: str, **values) -> Running:
    """Return a preemptible run of a day that has run for an hour and holds the whole machine."""
    return run(name, **{"cpus": 4, "ran": HOUR, "time_limit_ns": 24 * HOUR * S, "preemptible": True, **values})


def short(name: str, **values) -> Waiting:
    """Return a job that states an hour."""
    return job(name, **{"user": "bob", "cpus": 2, "time_limit_ns": HOUR * S, **values})


def found(*jobs: Waiting, running, on=BOX, policy: Policy | None = None, **values) -> tuple[str, str] | None:
    """Return the victim and the winner."""
    plan = decide(view(*jobs, on=on, running=running, **values), NOW, policy or Policy())
    preemption = preempt(plan)
    return None if preemption is None else (preemption.victim, preemption.winner)


@pytest.mark.parametrize(
    "values",
    [
        {"preemptible": False},
        {"ran": 599},
        {"time_limit_ns": 8 * HOUR * S - 1},
        {"time_limit_ns": None, "ran": 8 * HOUR - 1},
        {"stopping": True},
        {"suspended": (0, 5)},
        {"priority": 11},
    ],
)
def test_what_is_never_stopped(values):
    """A run that does not allow it, is young, is not long, ends already, is suspended, or has a higher priority."""
    assert found(short("s"), running=[long("l", **values)]) is None


@pytest.mark.parametrize(
    "values",
    [
        {"time_limit_ns": None},
        {"time_limit_ns": 2 * HOUR * S + 1},
        {"cpus": 5},
        {"start_after_ns": NOW + S},
        {"group": "g", "group_limit": 1},
    ],
)
def test_what_nothing_is_stopped_for(values):
    """A job that states no limit, though it is expected to be short, or a long one, never fits, or may not start."""
    runs = [long("l"), run("m", cpus=0, group="g", group_limit=1)]
    waiting = view(short("s", **values), on=BOX, running=runs)
    for _ in range(5):
        waiting.past.run_times.add("bob", "s", short("s").spec.request, 60 * S)
    assert preempt(decide(waiting, NOW, Policy())) is None


def test_a_long_run_makes_room_for_a_short_job():
    """The run that allows it is stopped for the job that states a short limit, also on a GPU.

    Without a limit it is long once it has lasted: the expected time may be a guess; after eight hours none is needed.
    """
    for one in (long("l"), long("l", time_limit_ns=None, ran=8 * HOUR)):
        assert found(short("s"), running=[one]) == ("l", "s")
    assert found(short("s", gpus=1), running=[long("l", on=(0,))], on=machine(cpus=8, gpus=gpus(1))) == ("l", "s")


def test_a_job_that_can_start_stops_nothing():
    """Room is taken where there is some, and the pause of the spool holds for all."""
    assert found(short("s"), running=[long("l", cpus=2)]) is None
    assert found(short("s"), running=[long("l")], paused=True) is None


def test_a_job_is_preempted_once_an_hour():
    """After a preemption its next run is left alone until an hour has passed since."""
    again = replace(long("l"), preempted_at_ns=NOW - HOUR * S + 1)
    assert found(short("s"), running=[again]) is None
    assert found(short("s"), running=[replace(again, preempted_at_ns=NOW - HOUR * S)]) == ("l", "s")


def test_one_run_is_stopped_for_one_job():
    """While a run is being stopped for a job, nothing else is stopped for it; for another job it is."""
    leaving = replace(long("a", cpus=2, stopping=True), preempted_for="s")
    running = [leaving, long("b", cpus=2)]
    assert found(short("s"), running=running) is None
    assert found(short("s"), short("t", waited=-1), running=running) == ("b", "t")


def test_the_smallest_run_that_is_enough_is_stopped():
    """Of those whose room is enough: first the lowest priority, then the smallest, then the latest start."""
    runs = [long("wide", cpus=2, ran=600), long("old", cpus=1, ran=5000), long("new", cpus=1, ran=4000)]
    assert found(short("s", cpus=1), running=runs) == ("new", "s")
    assert found(short("s"), running=runs) == ("wide", "s")
    assert found(short("s", cpus=1), running=[*runs[:2], long("low", cpus=1, ran=9, priority=9)]) == ("old", "s")
    assert found(short("s", cpus=1), running=[*runs[:2], long("low", cpus=1, priority=9)]) == ("low", "s")


@pytest.mark.parametrize(
    ("run_gpus", "job_gpus", "cpus", "fits"),
    [(0, 0, 2, True), (0, 0, 1, False), (2, 1, 1, True), (3, 1, 4, False), (1, 0, 4, False)],
)
def test_a_large_run_is_not_stopped_for_a_small_job(run_gpus, job_gpus, cpus, fits):
    """It holds at most twice what the job asks for: in GPUs, and without any in CPUs. The rest of it would lie idle."""
    box = machine(cpus=4, gpus=gpus(3))
    others = [run("o", cpus=0, on=tuple(range(run_gpus, 3)))]
    runs = [long("l", on=tuple(range(run_gpus))), *others]
    assert (found(short("s", cpus=cpus, gpus=job_gpus), running=runs, on=box) is not None) == fits


def test_room_that_another_job_would_take_is_not_made():
    """A run is stopped only if its room goes to the short job, not to a job before it in the order."""
    first = job("first", user="eve", cpus=4, waited=30 * 24 * HOUR, time_limit_ns=24 * HOUR * S)
    assert found(first, short("s", cpus=4), running=[long("l")]) is None
    assert found(replace(first, arrived_at_ns=NOW), short("s", cpus=4, waited=60), running=[long("l")]) == ("l", "s")


def test_the_job_that_it_was_stopped_for_goes_first():
    """The stopped job keeps its place, which may be before the short one; even so the short one gets the room."""
    victim = job("l", cpus=4, waited=30 * 24 * HOUR, time_limit_ns=24 * HOUR * S)
    other = short("s", cpus=4)
    assert started(decide(view(victim, other, on=BOX), NOW, Policy())) == ["l"]
    assert started(decide(view(replace(victim, yields_to="s"), other, on=BOX), NOW, Policy())) == ["s"]


@pytest.mark.parametrize("values", [{"start_after_ns": NOW + S}, {"cpus": 5}, {"group": "g", "group_limit": 0}])
def test_it_waits_for_no_job_that_cannot_start(values):
    """If the short job cannot start, or is gone, the stopped one runs on."""
    victim = replace(job("l", cpus=4, waited=HOUR), yields_to="s")
    assert started(decide(view(victim, short("s", **{"cpus": 4, **values}), on=BOX), NOW, Policy())) == ["l"]
    assert started(decide(view(victim, on=BOX), NOW, Policy())) == ["l"]


RUNS = st.lists(
    st.fixed_dictionaries(
        {
            "cpus": st.integers(0, 3),
            "ran": st.integers(0, 20 * HOUR),
            "time_limit_ns": st.sampled_from([None, *(hours * HOUR * S for hours in (1, 7, 9, 48))]),
            "priority": st.sampled_from([10, 10, 0, 20]),
            "preemptible": st.booleans(),
        }
    ),
    max_size=4,
)
JOBS = st.lists(
    st.fixed_dictionaries(
        {
            "cpus": st.integers(0, 5),
            "waited": st.integers(0, 100 * HOUR),
            "time_limit_ns": st.sampled_from([None, *(minutes * 60 * S for minutes in (5, 60, 120, 121, 6000))]),
            "priority": st.sampled_from([10, 10, 0, 20]),
            "user": st.sampled_from("ab"),
        }
    ),
    max_size=6,
)


@given(RUNS, JOBS)
def test_what_is_stopped_is_needed_and_enough(runs, jobs):
    """The victim may be stopped; the winner states a short limit, waits, and starts in the pass after the victim left.

    It does so although the job of the victim waits again at its place by then.
    """
    running = [run(f"r{at}", **values) for at, values in enumerate(runs)]
    waiting = [job(f"j{at}", **values) for at, values in enumerate(jobs)]
    before = view(*waiting, on=machine(cpus=6), running=running)
    plan = decide(before, NOW, Policy())
    preemption = preempt(plan)
    assert [each.name for each in before.running.values()] == [each.name for each in running]
    if preemption is None:
        return
    winner = next(each for each in waiting if each.name == preemption.winner)
    victim = next(each for each in running if each.name == preemption.victim)
    assert preemption.winner not in started(plan)
    assert (winner.spec.time_limit_ns or 1 << 62) <= Policy().preempt_short_ns
    from_ns = preemptible_at_ns(victim, before.running.run_times.of_run(victim).ns, Policy())
    assert from_ns is not None
    assert from_ns <= NOW
    assert victim.spec.priority <= winner.spec.priority
    back = replace(job(victim.name), spec=victim.spec, arrived_at_ns=victim.started_at_ns, yields_to=winner.name)
    left = [each for each in running if each is not victim]
    assert winner.name in started(decide(view(back, *waiting, on=machine(cpus=6), running=left), NOW, Policy()))


def test_a_look_changes_no_plan():
    """Whether a run is preempted is asked beside the plan, and the plan stays what it was."""
    seen = view(short("s"), job("after", depends_on="l"), on=BOX, running=[long("l")])
    before = decide(seen, NOW, Policy())
    assert preempt(before) == Preemption("l", "s")
    after = decide(seen, NOW, Policy())
    assert [str(after.reason(name)) for name in ("s", "after")] == [str(before.reason(name)) for name in ("s", "after")]
    assert after.endings == ()
    assert list(seen.running) == ["l"]
