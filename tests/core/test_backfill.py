"""Who is protected from being passed over, from whom, and for how long."""

from __future__ import annotations

from dataclasses import replace

from core.planning import NOW, S, gpus, job, machine, plan, run, started, why
from spool.core.model import ForeignProcess, Gpu, Policy

AT_ONCE = Policy(starvation_after_ns=0)
HOUR = 3600 * S

BIG = job("big", cpus=4, waited=3720)
RUNS = [run("r", cpus=3, time_limit_ns=HOUR, ran=0)]  # of 4 CPUs one is free, and all of them in an hour


def test_what_ends_in_time_may_start():
    """Beside a protected job, others start that have ended by the time it could start, and no others."""
    fits = job("fits", time_limit_ns=HOUR)
    late = job("late", time_limit_ns=HOUR + 1)
    assert started(plan(BIG, fits, running=RUNS)) == ["fits"]
    found = plan(BIG, late, job("open"), running=RUNS)
    assert (started(found), found.protected, found.protected_until_ns) == ([], "big", NOW + HOUR)
    assert why(found, "late") == why(found, "open") == "left for big (waiting 1 h 02 m)"
    assert why(found, "big") == "cpus: needs 4, 1 free (1 run holds 3)"


def test_what_leaves_enough_may_start():
    """Others start too if they leave what the protected job will need, all of them together."""
    big = job("big", cpus=5, waited=3720)
    found = plan(big, job("a"), job("b"), on=machine(cpus=6), running=RUNS)
    assert started(found) == ["a"]
    assert why(found, "b").startswith("left for big")


def test_nobody_is_protected_before_its_time():
    """A job that has not waited for `starvation_after` is passed over; at 0 it is protected at once."""
    young = job("big", cpus=4, waited=1799)
    assert started(plan(young, job("small"), running=RUNS)) == ["small"]
    old = job("big", cpus=4, waited=1800)
    assert started(plan(old, job("small"), running=RUNS)) == []
    new = job("big", cpus=4, waited=0, arrived=NOW - 1)
    assert started(plan(new, job("small"), running=RUNS, policy=AT_ONCE)) == []


def test_time_before_its_instant_is_not_time_passed_over():
    """Who could not have started is not passed over: the wait counts from the beginning that the file asks for."""
    began = job("big", cpus=4, waited=9000, start_after_ns=NOW - 60 * S)
    assert started(plan(began, job("small"), running=RUNS)) == ["small"]


def test_only_the_first_is_protected():
    """Of two starved jobs the one that is first in the order is protected."""
    second = job("second", cpus=2, waited=3700, priority=9)
    found = plan(BIG, second, job("small", time_limit_ns=60 * S), running=RUNS)
    assert (started(found), found.protected) == (["small"], "big")


def test_who_never_fits_is_not_protected():
    """Nothing is left for a job that the machine cannot run, or that somebody outside spool keeps waiting."""
    never = job("never", cpus=9, waited=9000)
    assert started(plan(never, job("small"), running=RUNS)) == ["small"]
    assert started(plan(job("limited", cpus=3, waited=9000, group="g", group_limit=0), job("small"))) == ["small"]


def test_higher_priority_is_told_nothing_of_it():
    """A job of higher priority is not held back, whatever else keeps it."""
    high = job("high", priority=11, start_after_ns=NOW + S)
    found = plan(BIG, job("open"), high, running=RUNS)
    assert found.protected == "big"
    assert [each.code for each in found.all_noes("high")] == ["begins"]
    same = job("same", start_after_ns=NOW + S)
    assert [each.code for each in plan(BIG, job("open"), same, running=RUNS).all_noes("same")] == ["begins", "left"]


def test_other_gpus_are_given_where_there_are_some():
    """Beside a protected job, a job takes the GPUs that the other could not use."""
    cards = (*gpus(2), Gpu("GPU-2", 2, "NVIDIA T4", 16 << 30, 16 << 30))
    wide = job("wide", gpus=2, gpu_type="A100", waited=9000)
    busy = [run("r", on=(1,), time_limit_ns=HOUR, ran=0)]
    found = plan(wide, job("any", gpus=1), on=machine(gpus=cards), running=busy)
    assert [(start.name, start.grant.gpu_indices) for start in found.starts] == [("any", (2,))]
    ends = plan(wide, job("any", gpus=1, time_limit_ns=HOUR), on=machine(gpus=cards), running=busy)
    assert ends.starts[0].grant.gpu_indices == (0,)


def test_a_quota_is_left_too():
    """Others do not use up the quota or the group that the protected job needs when its room is there."""
    big = replace(BIG, spec=replace(BIG.spec, group="g", group_limit=1))
    assert started(plan(big, job("a", cpus=0, group="g"), job("b", cpus=0), running=RUNS)) == ["b"]


def test_protection_outlasts_a_full_group():
    """A job that is protected stays so while its group is full for a time that was reckoned with."""
    big = job("big", cpus=4, waited=9000, group="g", group_limit=1)
    runs = [run("r", cpus=1, group="g", time_limit_ns=HOUR, ran=0)]
    assert started(plan(big, job("open", cpus=3), running=runs)) == ["open"]
    found = plan(big, job("open", cpus=3), running=runs, protected="big")
    assert (started(found), found.protected) == ([], "big")
    assert why(found, "big") == "group g is full: 1 of 1 run"


def test_protection_outlasts_a_full_group_beside_free_room():
    """Nor do others take the room that is there already, while only its group keeps it waiting."""
    big = job("big", cpus=4, waited=9000, group="g", group_limit=1)
    runs = [run("r", cpus=0, group="g", time_limit_ns=HOUR, ran=0)]
    assert started(plan(big, job("open"), running=runs, protected="big")) == []
    assert started(plan(big, job("open"), running=runs)) == ["open"]


def test_memory_that_the_kernel_could_not_give_is_left_too():
    """A starved job that waits for memory which is not really free is protected until a run ends."""
    box = machine(memory_available_bytes=10 << 30)
    big = job("big", memory_bytes=60 << 30, waited=9000)
    assert started(plan(big, job("j", memory_bytes=8 << 30), on=box, running=RUNS)) == []


def test_protection_outlasts_a_pass_in_which_nobody_fits():
    """The protected job stays protected though for the moment there is nobody to protect it from."""
    assert plan(BIG, running=RUNS, protected="big").protected == "big"
    assert plan(BIG, running=RUNS).protected is None
    assert plan(BIG, running=RUNS, protected="big", paused=True).protected == "big"
    assert plan(BIG, running=RUNS, protected="gone").protected is None
    assert plan(BIG, protected="big").protected is None  # it starts


def test_who_was_protected_comes_first_in_its_priority():
    """When its room is there, the protected job takes it, before jobs of a better order, not of higher priority."""
    better = job("better", time_limit_ns=60 * S)
    assert started(plan(BIG, better)) == ["better"]
    assert started(plan(BIG, better, protected="big")) == ["big"]
    assert started(plan(BIG, job("high", priority=11), protected="big")) == ["high"]


def test_a_better_order_is_no_way_around():
    """A starved job for which there is no room is protected from later ones that a better order puts before it."""
    better = job("better", time_limit_ns=60 * S, waited=5)
    found = plan(BIG, better, running=RUNS)
    assert (started(found), found.protected) == (["better"], "big")
    assert started(plan(BIG, job("better", time_limit_ns=2 * HOUR), running=RUNS)) == []
    assert started(plan(BIG, job("better", time_limit_ns=2 * HOUR), running=RUNS, protected="big")) == []
    earlier = job("better", time_limit_ns=60 * S, waited=9000)
    assert plan(BIG, earlier, running=RUNS).protected is None
    assert started(plan(BIG, earlier, running=RUNS)) == ["better"]
    higher = job("better", priority=11, waited=5)
    assert plan(BIG, higher, running=RUNS).protected is None


def test_lower_priority_is_not_protected_in_anothers_place():
    """Where the starved job of the same priority cannot be helped, one of lower priority holds nobody back."""
    foreign = gpus(1, foreign=(ForeignProcess(7, "python", 1),))
    stuck = job("stuck", gpus=1, waited=9000)
    low = job("low", cpus=4, waited=9000, priority=9)
    found = plan(stuck, low, job("j"), on=machine(gpus=foreign), running=RUNS)
    assert (started(found), found.protected) == (["j"], None)


def test_whose_turn_is_taken_by_a_better_share_is_not_passed_over():
    """A job for which there was room, and which lost it to the order, is not protected: the order is meant so."""
    turns = [job("mine", waited=9000), job("theirs", user="bob")]
    found = plan(*turns, on=machine(cpus=1), usage={"alice": 9.0, "bob": 1.0})
    assert (started(found), found.protected) == (["theirs"], None)


def test_runs_without_a_limit_are_guessed():
    """While nobody knows when a run ends, it is taken to last as long again."""
    runs = [run("r", cpus=3, ran=7200)]
    found = plan(BIG, job("fits", time_limit_ns=2 * HOUR), job("open"), running=runs)
    assert (started(found), found.protected_until_ns) == (["fits"], NOW + 2 * HOUR)
