"""For whom room is left, against whom, and for how long."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from core.planning import NOW, S, code, gpus, job, machine, numbers, plan, run, started
from spool.core.constraints import Holding, earliest_start
from spool.core.model import ForeignProcess, Gpu, Policy, Suspension
from spool.core.resources import FreeResources, Runs

HOUR = 3600 * S

BIG = job("big", cpus=4, waited=3720)
RUNS = [run("r", cpus=3, time_limit_ns=HOUR, ran=0)]  # of 4 CPUs one is free, and all of them in an hour
SMALL = job("small", time_limit_ns=2 * HOUR)


def test_what_ends_in_time_may_start():
    """Beside a protected job, others start that have ended by the time it could start, and no others.

    It is protected as soon as it has come, whatever that costs, as long as that rests on stated limits.
    """
    fits = job("fits", time_limit_ns=HOUR)
    late = job("late", time_limit_ns=HOUR + 1)
    for big in (BIG, job("big", cpus=4, waited=1)):
        assert started(plan(big, fits, running=RUNS)) == ["fits"]
        found = plan(big, late, running=RUNS)
        assert (started(found), found.protected, found.protected_until_ns) == ([], "big", NOW + HOUR)
        assert (found.protected_by_guess, found.holding) == (False, Holding())
        assert (code(found, "late"), numbers(found, "big")) == ("left", [4, 1, 1, 3])


def test_what_leaves_enough_may_start():
    """Others start too if they leave what the protected job will need, all of them together."""
    found = plan(job("big", cpus=5, waited=3720), SMALL, replace(SMALL, name="b"), on=machine(cpus=6), running=RUNS)
    assert started(found) == ["b"]
    assert code(found, "small") == "left"


def test_of_two_that_do_not_fit_the_first_in_the_order_is_protected():
    """The one that has waited longest for its size, not the one that came first; who stands before it passes it."""
    long = job("long", cpus=4, waited=7200, time_limit_ns=20 * HOUR)
    short = job("short", cpus=2, waited=3600, time_limit_ns=HOUR)
    found = plan(long, short, SMALL, running=RUNS)
    assert (found.protected, found.protected_until_ns) == ("short", NOW + HOUR)
    assert started(found) == ["small"]  # it leaves 2 of 4, and for the other it need not
    before = job("before", waited=3600, time_limit_ns=2 * HOUR)
    assert started(plan(job("big", cpus=4, waited=60, time_limit_ns=10 * HOUR), before, running=RUNS)) == ["before"]


def test_priority_decides_who_is_protected():
    """Of two that do not fit the one of higher priority is protected, however long the other has waited."""
    high = job("high", cpus=4, priority=11)
    assert plan(BIG, high, SMALL, running=RUNS).protected == "high"


@pytest.mark.parametrize(
    "waits", [{"cpus": 9}, {"group": "g", "group_limit": 1}, {"start_after_ns": NOW + S}, {"depends_on": "r"}]
)
def test_who_waits_for_something_of_its_own_is_not_protected(waits):
    """Nothing is kept free for a job that never fits, or that no room helps: its group, its instant keeps it."""
    runs = [run("r", cpus=3, group="g", time_limit_ns=HOUR)]
    found = plan(job("big", **{"cpus": 4, "waited": 9000, **waits}), SMALL, running=runs)
    assert (started(found), found.protected) == (["small"], None)


def test_a_protected_job_whose_group_fills_gives_its_room_back():
    """As soon as a rule of its own holds the protected job, the room that was kept free for it is everybody's."""
    big = job("big", cpus=4, waited=9000, group="g", group_limit=1)
    before = plan(big, SMALL, running=RUNS)
    assert (started(before), before.protected) == ([], "big")
    filled = [*RUNS, run("member", cpus=0, group="g", time_limit_ns=HOUR, ran=0)]
    after = plan(big, SMALL, running=filled, holding=before.holding)
    assert (started(after), after.protected, code(after, "big")) == (["small"], None, "group")


def test_the_next_is_protected_where_the_first_cannot_be_helped():
    """Where nothing that spool could do makes room for the first, the next that does not fit is protected."""
    foreign = gpus(1, foreign=(ForeignProcess(7, "python", 1),))
    stuck, next_one = job("stuck", gpus=1, waited=9000), job("next", cpus=4, waited=60)
    found = plan(stuck, next_one, SMALL, on=machine(gpus=foreign), running=RUNS)
    assert (started(found), found.protected) == ([], "next")


@pytest.mark.parametrize(("priority", "told"), [(11, ["begins"]), (10, ["begins", "left"])])
def test_higher_priority_is_told_nothing_of_it(priority, told):
    """A job of higher priority is not held back, whatever else keeps it."""
    other = job("other", priority=priority, start_after_ns=NOW + S, time_limit_ns=2 * HOUR)
    found = plan(BIG, SMALL, other, running=RUNS)
    assert (found.protected, [each.code for each in found.all_reasons("other")]) == ("big", told)


def test_other_gpus_are_given_where_there_are_some():
    """Beside a protected job, a job takes the GPUs that the other could not use."""
    cards = (*gpus(2), Gpu("GPU-2", 2, "NVIDIA T4", 16 << 30, 16 << 30))
    wide = job("wide", gpus=2, gpu_type="A100", waited=9000)
    busy = [run("r", on=(1,), time_limit_ns=HOUR, ran=0)]
    values = {"on": machine(gpus=cards), "running": busy, "policy": Policy(gpu_strategy="sequential")}
    found = plan(wide, job("any", gpus=1, time_limit_ns=2 * HOUR), **values)
    assert [(start.name, start.grant.gpu_indices) for start in found.starts] == [("any", (2,))]
    ends = plan(wide, job("any", gpus=1, time_limit_ns=HOUR), **values)
    assert ends.starts[0].grant.gpu_indices == (0,)


def test_a_quota_is_left_too():
    """Others do not use up the quota or the group that the protected job needs when its room is there."""
    big = replace(BIG, spec=replace(BIG.spec, group="g", group_limit=1))
    long = {"cpus": 0, "time_limit_ns": 2 * HOUR}
    assert started(plan(big, job("a", group="g", **long), job("b", **long), running=RUNS)) == ["b"]


def test_memory_that_the_kernel_could_not_give_is_left_too():
    """A job that waits for memory which is not really free is protected until a run ends."""
    box = machine(memory_available_bytes=10 << 30)
    big = job("big", memory_bytes=60 << 30, waited=9000)
    small = job("j", memory_bytes=8 << 30, time_limit_ns=2 * HOUR)
    assert started(plan(big, small, on=box, running=RUNS)) == []


def test_a_strict_order_lets_nobody_overtake():
    """Under a strict order nothing starts behind the first that does not fit, not even what ends in time."""
    strict = Policy(strict_order=True, order="arrival")
    found = plan(BIG, job("fits", time_limit_ns=S), running=RUNS, policy=strict)
    assert (started(found), found.protected, found.protected_until_ns) == ([], "big", None)
    assert code(found, "fits") == "left"


GUESSED = [run("r", cpus=3, ran=0)]  # nobody says how long it runs: an hour, for want of anything known


@pytest.mark.parametrize(("waited", "protected"), [(8999, None), (9000, "big")])
def test_a_guess_holds_back_no_more_than_a_tenth_of_the_wait(waited, protected):
    """One of 4 CPUs idle for an hour costs 15 min of the machine: worth it for who has waited for 150 min."""
    found = plan(job("big", cpus=4, waited=waited), SMALL, running=GUESSED)
    assert (found.protected, started(found)) == (protected, [] if protected else ["small"])
    if protected:
        assert found.protected_by_guess
        assert found.holding.rate == 1 / 4


def test_what_was_held_back_before_counts():
    """What guesses have held back already for a job is taken off what they may."""
    big = job("big", cpus=4, waited=9000)
    kept = Holding({"big": 1.0})
    assert plan(big, SMALL, running=GUESSED, holding=kept).protected is None
    other = Holding({"other": 1.0})
    found = plan(big, SMALL, running=GUESSED, holding=other)
    assert (found.protected, found.holding.amounts) == ("big", {})  # of who waits no more nothing is remembered
    going_on = Holding({}, "big", 1 / 4, NOW - 3 * S)
    found = plan(big, SMALL, running=GUESSED, holding=going_on)
    assert (found.protected, found.holding.amounts) == (None, {"big": 0.75})


@pytest.mark.parametrize(("dear", "protected"), [(1, "cheap"), (2, "cheap"), (3, None)])
def test_where_the_first_is_too_dear_the_next_is_protected(dear, protected):
    """Three jobs are asked whether they are worth protecting, and no more: a pass stays short."""
    runs = [run("known", cpus=1, time_limit_ns=HOUR // 2, ran=0), run("open", cpus=2, ran=0)]
    jobs = [job(f"dear{n}", cpus=4, memory_bytes=n + 1, waited=3600) for n in range(dear)]
    found = plan(*jobs, job("cheap", cpus=2, waited=3000), SMALL, running=runs)
    assert (found.protected, found.protected_by_guess) == (protected, False)
    assert not protected or started(found) == []


def test_a_guess_that_has_passed_is_replaced():
    """A run that goes on after its guess is taken to last twice as long."""
    runs = [run("r", cpus=3, ran=7200)]
    fits = job("fits", time_limit_ns=2 * HOUR)
    found = plan(job("big", cpus=4, waited=100_000), fits, running=runs)
    assert (started(found), found.protected_until_ns) == (["fits"], NOW + 2 * HOUR)


def test_the_budget_has_an_end():
    """The plan says when guesses have held back enough; then the room is everybody's."""
    big = job("big", cpus=4, waited=9000)
    found = plan(big, SMALL, running=GUESSED)
    assert found.next_at_ns == NOW + (900 * 100 // 15 + 1) * S
    assert found.holding.at(found.next_at_ns)["big"] == pytest.approx(6001 / 4)
    slow = [run("r", cpus=3, ran=5400)]  # has overrun once already
    still = plan(job("big", cpus=4, waited=30_000), SMALL, running=slow)
    assert still.protected == "big"
    again = plan(
        job("big", cpus=4, waited=30_000), SMALL, running=slow, holding=Holding({"big": 2999.0}), now=NOW + 100 * S
    )
    assert (again.protected, started(again)) == (None, ["small"])


def test_all_that_is_held_back_counts():
    """Of many jobs alike that are held back each one counts: what lies idle is what all of them could have."""
    box, big = machine(cpus=10), job("big", cpus=10, waited=9 * 3600)
    busy = [run("r", cpus=4, ran=0)]
    for number, rate in ((1, 0.1), (4, 0.4), (99, 0.6)):
        small = [job(f"small{n}", time_limit_ns=2 * HOUR) for n in range(number)]
        found = plan(big, *small, on=box, running=busy)
        assert (found.protected, found.holding.rate) == ("big", rate)


class Asked(Runs):
    """Counts the ends that are taken of it."""

    taken = 0

    def ends(self, now_ns):
        for end in super().ends(now_ns):
            self.taken += 1
            yield end


@pytest.mark.parametrize("running", [10, 1000])
def test_no_more_ends_are_looked_at_than_it_takes(running):
    """To know when there is room for one more, the first end of a thousand is enough."""
    runs = [run(f"run{number}", ran=number, time_limit_ns=3600 * S, cpus=1) for number in range(running)]
    runs[1] = replace(runs[1], suspension=Suspension(0, NOW, NOW))
    asked = Asked(runs)
    room = FreeResources(machine(cpus=running), Policy(), NOW, asked)
    room.start(run("begins", ran=0, time_limit_ns=3600 * S))
    found = earliest_start(job("new", cpus=1, time_limit_ns=60 * S), room)
    assert found is not None
    assert found.at_ns == NOW + (3600 - (running - 2)) * S
    assert asked.taken <= 4
