"""When waiting jobs start: the schedule carried forward, for whom room is left, and which run is stopped for whom."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import spool.core
from core.planning import GIB, NOW, S, code, gpus, job, machine, numbers, plan, run, started, view
from core.test_limits import THERE, far_job, far_run
from core.worlds import BOX, POLICIES, over_committed, waiting
from spool.core.constraints import as_run, earliest_start
from spool.core.forecast import SHORT_NS, Preemption, StartForecast, forecast, preempt, preemptible_at_ns
from spool.core.model import (
    Dependencies,
    ForeignProcess,
    Gpu,
    Grant,
    Holding,
    Limits,
    Machine,
    NoLeases,
    Policy,
    Pool,
    Reservation,
    Running,
    State,
    Suspension,
    Waiting,
)
from spool.core.reasons import REASONS
from spool.core.resources import FreeResources, Runs
from spool.core.scheduler import Plan, decide

HOUR = 3600 * S


def starts(found: Plan) -> dict[str, int | None]:
    """Return in how many seconds each waiting job starts; None: no time is told."""
    return {name: None if told.at_ns is None else (told.at_ns - NOW) // S for name, told in forecast(found).items()}


def told(found: Plan, name: str) -> StartForecast:
    """Return what is told of one job, asked for by its name."""
    return forecast(found, [name])[name]


def limited(name: str, seconds: int, **values: Any) -> Waiting:
    """Return a job that may run for so long."""
    return job(name, time_limit_ns=seconds * S, **values)


# One after the other.


def test_three_jobs_that_each_need_all_start_one_after_the_other():
    """The second of three starts when the first has ended, the third after the second.

    What ends before a protected job could start goes before it; what does not, after it.
    """
    jobs = [limited(name, 60, cpus=2, waited=waited) for name, waited in (("a", 30), ("b", 20), ("c", 10))]
    assert starts(plan(*jobs, on=machine(2))) == {"a": 0, "b": 60, "c": 120}
    running = [run("r", cpus=3, ran=0, time_limit_ns=100 * S)]
    jobs = [limited("wide", 50, cpus=4, waited=90), limited("short", 90, waited=20), limited("long", 200, waited=10)]
    assert starts(plan(*jobs, running=running)) == {"wide": 100, "short": 0, "long": 150}


def test_the_tasks_of_an_array_with_a_limit_start_one_after_the_other():
    """Of `%1` no two tasks start at once, whatever room there is."""
    tasks = [limited(f"ar_{n}", 5, task=("ar", n, 1), arrived=NOW + n) for n in range(4)]
    running = [run("ar_9", ran=3, time_limit_ns=5 * S, task=("ar", 9, 1))]
    assert starts(plan(*tasks, running=running)) == {"ar_0": 2, "ar_1": 7, "ar_2": 12, "ar_3": 17}


def test_who_waits_for_a_licence_starts_when_those_before_have_given_it_back():
    """With one licence in use, three jobs that need it start at 2, 4 and 6s; each is told after which job."""
    box = machine(resources=(Pool("licence", 1),))
    needs = {"resources": (("licence", 1),), "time_limit_ns": 2 * S}
    jobs = [job(name, waited=9 - n, **needs) for n, name in enumerate(("l2", "l3", "l4"))]
    first = replace(run("l1", ran=0, **needs), grant=Grant(1, resources=(("licence", 1),)))
    found = plan(*jobs, running=[first], on=box)
    assert starts(found) == {"l2": 2, "l3": 4, "l4": 6}
    assert [(told(found, name).must_end, told(found, name).starts_after) for name in ("l2", "l3", "l4")] == [
        (("l1",), ()),
        (("l1",), ("l2",)),
        (("l1",), ("l3",)),
    ]


def test_the_order_changes_as_users_use_more():
    """Fair share counts what is only foreseen: who has just run waits for the other."""
    jobs = [limited(f"{who}{n}", HOUR // S, cpus=4, user=who, waited=3600 - n) for n in range(3) for who in "ab"]
    order = sorted(starts(plan(*jobs)).items(), key=lambda each: each[1] or 0)
    assert [name[0] for name, _ in order] in (["a", "b"] * 3, ["a", "b", "b", "a", "a", "b"])


# What a start waits for.


def test_a_job_starts_after_what_it_depends_on_if_that_finishes():
    """The end of a run, of a waiting job, of an array: each is expected, assumed to be good, and said.

    What is held waits for a person, and a scheduling timeout may come before the room.
    """
    a, b = limited("a", 30), limited("b", 40, depends_on="a")
    c = limited("c", 10, depends_on=("b", "r", "over"))
    found = plan(a, b, c, running=[run("r", ran=0, time_limit_ns=300 * S)], ended={"over": State.FINISHED})
    assert starts(found) == {"a": 0, "b": 30, "c": 300}
    assert (told(found, "c").if_finished, told(found, "c").must_end) == (("b", "r"), ("r",))
    failing = replace(job("f"), spec=replace(job("f").spec, depends_on=Dependencies(failed=("r",))))
    late = limited("late", 60, cpus=4, scheduling_timeout_ns=50 * S)
    running = [run("r", ran=0, time_limit_ns=HOUR)]
    found = plan(failing, late, job("h", depends_on="parked"), held=[job("parked")], running=running)
    assert " cancelled: dependency: r " in told(found, "f").unknown
    assert told(found, "h").unknown.startswith("dependency: parked ")
    assert " unschedulable: " in told(found, "late").unknown


def test_what_a_run_has_taken_of_a_gpu_is_free_once_it_has_ended():
    """GPU memory that was measured beside a run that ends is there for those after it, once each."""
    (card,) = gpus(1, memory_free_bytes=10 * GIB)
    card = replace(card, taken_bytes=(("r", 70 * GIB),))
    running = [run("r", on=(0,), gpu_memory_bytes=70 * GIB, ran=0, time_limit_ns=100 * S)]
    shares = {"gpus": 1, "gpu_memory_bytes": 60 * GIB}
    jobs = [limited("one", 50, waited=9, **shares), limited("two", 50, waited=8, **shares)]
    jobs.append(limited("alone", 50, waited=7, gpus=1))
    assert starts(plan(*jobs, on=machine(gpus=(card,)), running=running)) == {"one": 100, "two": 150, "alone": 200}


# Where nobody knows.


def test_nothing_is_promised_behind_a_suspended_run():
    """What needs its room waits for it, by name; what does not is told its time; what comes after is told neither.

    One that is being stopped ends with its grace: then somebody has decided.
    """
    running = [run("ss", cpus=2, time_limit_ns=HOUR, suspended=(0, 5)), run("r", cpus=1, ran=0, time_limit_ns=100 * S)]
    jobs = [limited("wide", 9, cpus=3, waited=9), limited("two", 9, cpus=2), job("after", depends_on="wide")]
    found = plan(*jobs, running=running)
    assert starts(found) == {"wide": None, "two": 100, "after": None}
    assert told(found, "wide").unknown == "ss is suspended"
    assert told(found, "after").unknown.startswith("dependency: wide ")
    assert told(plan(job("dep", depends_on="ss"), running=running), "dep").unknown == "ss is suspended"
    stopped = replace(run("ss", cpus=4, stopping=True, suspended=(0, 5), kill_grace_ns=9 * S), stop_at_ns=NOW - 2 * S)
    assert starts(plan(job("j"), running=[stopped])) == {"j": 7}


def test_nothing_is_promised_behind_what_waits_in_an_engine():
    """Its engine alone knows when it begins, and so when it ends; a job for that engine is promised nothing either."""
    there = replace(far_run("far", cpus=1), submitted=True)
    found = plan(job("near"), far_job("too", cpus=1), running=[there], elsewhere=THERE, policy=Policy(max_running=1))
    assert starts(found) == {"near": None, "too": None}
    assert told(found, "near").unknown.startswith("far is in ")
    assert told(found, "too").unknown


@pytest.mark.parametrize(
    "late",
    [
        run("r", cpus=4, ran=500, time_limit_ns=100 * S),
        replace(run("r", cpus=4, stopping=True, kill_grace_ns=10 * S), stop_at_ns=NOW - 30 * S),
    ],
    ids=["limit", "grace"],
)
def test_a_run_that_should_have_ended_does_so_any_moment(late):
    """However late it is: the start after it is now, and does not recede."""
    for more in (0, 5, 50):
        now = NOW + more * S
        found = decide(view(job("j"), running=[late]), now, Policy())
        assert (started(found), told(found, "j").at_ns) == ([], now)


def test_a_guess_is_told_where_a_start_rests_on_it():
    """The guessed end of one that only waits makes a guess of all starts after it."""
    jobs = [job("guessed", cpus=4, priority=20), limited("after", 5, cpus=4)]
    found = plan(*jobs, running=[run("r", cpus=4, ran=0, time_limit_ns=60 * S)])
    assert [told(found, name).guessed for name in ("guessed", "after")] == [False, True]


def test_what_is_beyond_the_bound_is_later():
    """A forecast takes so many steps, and says of the rest only that it starts later than that."""
    jobs = [limited(f"j{n:02}", 10, cpus=4, arrived=NOW - 100 + n) for n in range(30)]
    found = forecast(plan(*jobs), enough=500)
    known = {name: each.at_ns for name, each in found.items() if each.at_ns is not None}
    assert 0 < len(known) < 30
    assert {each.later_than_ns for each in found.values() if each.at_ns is None} == {max(known.values())}
    assert len(found) == 30


# Every rule that can hold a start is asked.

LOW = machine(disk_free_bytes=1 << 20)
FULL = {"running": [run("r", cpus=4, ran=0, time_limit_ns=50 * S)]}
SITUATIONS: dict[str, tuple[Callable[[], Plan], int | None]] = {
    "held": (lambda: plan(job("j", task=("ar", 0, None)), held_arrays={"ar": State.HELD}), None),
    "paused": (lambda: plan(job("j"), paused=True), None),
    "scheduling_timeout": (lambda: plan(job("j", waited=9, scheduling_timeout_ns=S)), None),
    "refused": (lambda: plan(job("j"), on=machine(refusal="no processes")), None),
    "machine": (lambda: plan(job("j"), on=machine(no_leases=NoLeases("the arbiter has not answered", NOW))), None),
    "begins": (lambda: plan(job("j", start_after_ns=NOW + 40 * S)), 40),
    "retry": (lambda: plan(job("j", not_before_ns=NOW + 40 * S)), 40),
    "running": (lambda: plan(job("j"), running=[run("j", ran=0, time_limit_ns=50 * S)]), 50),
    "dependency": (lambda: plan(job("j", depends_on="x")), None),
    "group": (lambda: plan(job("j", group="g", group_limit=1),
                           running=[run("g", ran=0, group="g", time_limit_ns=50 * S)]), 50),
    "array": (lambda: plan(job("j", task=("ar", 0, 1)),
                           running=[run("ar_1", ran=0, task=("ar", 1, 1), time_limit_ns=50 * S)]), 50),
    "quota": (lambda: plan(job("j"), policy=Policy(default_user_limits=Limits(max_running_cpus=4)), on=machine(8),
                           **FULL), 50),
    "max_running": (lambda: plan(job("j", cpus=0), policy=Policy(max_running=1), **FULL), 50),
    "max_in_flight": (lambda: plan(far_job("j"), elsewhere=dict.fromkeys(THERE, Machine.of_an_engine(0))), None),
    "max_pending": (lambda: plan(far_job("j"), elsewhere=dict.fromkeys(THERE, Machine.of_an_engine(9, 0))), None),
    "never_fits": (lambda: plan(job("j", cpus=9)), None),
    "memory": (lambda: plan(job("j", memory_bytes=GIB), on=machine(memory_available_bytes=0)), None),
    "cpus": (lambda: plan(job("j"), **FULL), 50),
    "resources": (lambda: plan(job("j", resources=(("l", 1),)), on=machine(resources=(Pool("l", 1),)),
                               running=[replace(run("r", ran=0, time_limit_ns=50 * S),
                                                grant=Grant(1, resources=(("l", 1),)))]), 50),
    "gpus": (lambda: plan(job("j", gpus=1), on=machine(gpus=gpus(1, problem="lost"))), None),
    "reserved": (lambda: plan(job("j", gpus=1), on=machine(gpus=1), reservations=(
        Reservation("d", "carol", None, NOW, NOW + 60 * S, gpu_indices=(0,)),)), 60),
    "left": (lambda: plan(limited("wide", 20, cpus=4, waited=99), limited("j", 90),
                          running=[run("r", cpus=3, ran=0, time_limit_ns=50 * S)]), 70),
    "disk": (lambda: plan(job("j"), on=LOW), None),
    "executor": (lambda: plan(job("j", executor_problem="no tmux")), None),
}  # fmt: skip


@pytest.mark.parametrize("code", SITUATIONS)
def test_whatever_keeps_a_job_waiting_keeps_it_from_being_promised_a_start_now(code):
    """For each reason: the job does not start, and is told the instant at which the reason goes, or none."""
    made, at_s = SITUATIONS[code][0](), SITUATIONS[code][1]
    if code == "scheduling_timeout":
        assert [each.name for each in made.endings] == ["j"]
        assert "j" not in forecast(made)
        return
    reason = made.reason("j")
    assert reason.code == code
    found = told(made, "j")
    assert (found.at_ns, bool(found.unknown)) == ((None, True) if at_s is None else (NOW + at_s * S, False))
    if code not in ("max_in_flight", "max_pending"):
        assert found.unknown in ("", str(reason))


def test_no_reason_is_forgotten():
    """Every code that the planner gives, wherever it is in the source, has its row, and its situation above."""
    given = set()
    for module in pkgutil.iter_modules(spool.core.__path__, "spool.core."):
        tree = ast.parse(inspect.getsource(import_module(module.name)))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
        reasons = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Reason"]
        assert all(isinstance(code, ast.Constant) for code in reasons), module.name
        given |= {code.value for code in reasons}
    assert given == REASONS.keys() - {"hook", "submitted", "tasks", "unread", "invalid"} == set(SITUATIONS)
    assert all(meaning.count(". ") <= 1 for _, meaning in REASONS.values())


# Over random worlds.


@given(st.lists(waiting(), max_size=8, unique_by=lambda each: each.name), POLICIES, st.integers(0, 3))
def test_nothing_is_over_committed_in_the_plan(jobs, policy, cpus):
    """Whenever a job starts, the runs of that moment hold no more than there is; asked alone, it gets the same."""
    there = run("r", cpus=cpus, ran=0, time_limit_ns=300 * S)
    found = plan(*jobs, running=[there], policy=policy, on=replace(BOX, gpus=()))
    made = forecast(found)
    times = found.view.past.run_times
    lives = [(there, NOW, NOW + 300 * S)]
    for each in jobs:
        at_ns = made[each.name].at_ns if each.name in made else None
        if at_ns is not None:
            grant = Grant(each.spec.request.cpus, each.spec.request.memory_bytes)
            lives.append((as_run(each, grant, at_ns), at_ns, at_ns + times.of_job(each).ns))
    for _, moment, _ in lives:
        now = [one for one, start_ns, end_ns in lives if start_ns <= moment < end_ns]
        limits = [one.spec for one, start_ns, _ in lives if start_ns >= moment]
        assert over_committed(replace(BOX, gpus=()), now, policy, limits) in ([], ["array"], ["group"])
    for name, told_of_all in made.items():
        assert told(found, name) == told_of_all


@given(st.lists(waiting(), min_size=1, max_size=8, unique_by=lambda each: each.name), POLICIES)
def test_a_forecast_leaves_the_plan_as_it_was(jobs, policy):
    """Whoever asks, the reasons, the order and the starts are the same afterwards, and so is the next forecast."""
    running = [run("r", cpus=2, ran=0, time_limit_ns=300 * S), run("g", on=(0,))]
    found, fresh = (plan(*jobs, running=running, policy=policy, on=BOX) for _ in range(2))
    made = forecast(found)
    names = [each.name for each in jobs]
    assert [found.all_reasons(name) for name in names] == [fresh.all_reasons(name) for name in names]
    assert [each for _, each in found.in_order()] == [each for _, each in fresh.in_order()]
    assert (dict(found.view.queue), dict(found.view.running)) == (dict(fresh.view.queue), dict(fresh.view.running))
    assert forecast(found) == made


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
        assert (started(found), found.protected, found.protection.at_ns) == ([], "big", NOW + HOUR)
        assert (found.protection.guessed, found.holding) == (False, Holding())
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
    assert (found.protected, found.protection.at_ns) == ("short", NOW + HOUR)
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
    assert (started(found), found.protected, found.protection.at_ns) == ([], "big", None)
    assert code(found, "fits") == "left"


GUESSED = [run("r", cpus=3, ran=0)]  # nobody says how long it runs: an hour, for want of anything known


@pytest.mark.parametrize(("waited", "protected"), [(8999, None), (9000, "big")])
def test_a_guess_holds_back_no_more_than_a_tenth_of_the_wait(waited, protected):
    """One of 4 CPUs idle for an hour costs 15 min of the machine: worth it for who has waited for 150 min."""
    found = plan(job("big", cpus=4, waited=waited), SMALL, running=GUESSED)
    assert (found.protected, started(found)) == (protected, [] if protected else ["small"])
    if protected:
        assert found.protection.guessed
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


def test_where_the_first_is_too_dear_nobody_is_protected():
    """Only the first that does not fit is asked whether it is worth protecting; where none is foretold, the next."""
    runs = [run("known", cpus=1, time_limit_ns=HOUR // 2, ran=0), run("open", cpus=2, ran=0)]
    cheap = job("cheap", cpus=2, waited=3000)
    found = plan(job("dear", cpus=4, waited=3600), cheap, SMALL, running=runs)
    assert (found.protected, started(found)) == (None, ["small"])
    box = machine(gpus=gpus(4, foreign=(ForeignProcess(7, "python", 1),)))  # nobody knows until when
    for number, protected in ((2, "cheap"), (3, None)):
        unforeseen = [job(f"j{n}", cpus=0, gpus=n + 1, waited=10**6) for n in range(number)]
        found = plan(*unforeseen, cheap, SMALL, running=runs, on=box)
        assert found.protected == protected
        assert found.protection is None or not found.protection.guessed


def test_a_guess_that_has_passed_is_replaced():
    """A run that goes on after its guess is taken to last twice as long."""
    runs = [run("r", cpus=3, ran=7200)]
    fits = job("fits", time_limit_ns=2 * HOUR)
    found = plan(job("big", cpus=4, waited=100_000), fits, running=runs)
    assert (started(found), found.protection.at_ns) == (["fits"], NOW + 2 * HOUR)


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
    assert found.at_ns == NOW + (3600 - (running - 2)) * S
    assert asked.taken <= 4


HOUR_S = 3600
FOUR_CPUS = machine(cpus=4)


def long(name: str, **values) -> Running:
    """Return a preemptible run of a day that has run for an hour and holds the whole machine."""
    return run(name, **{"cpus": 4, "ran": HOUR_S, "time_limit_ns": 24 * HOUR_S * S, "preemptible": True, **values})


def short(name: str, **values) -> Waiting:
    """Return a job that states an hour."""
    return job(name, **{"user": "bob", "cpus": 2, "time_limit_ns": HOUR_S * S, **values})


def found(*jobs: Waiting, running, on=FOUR_CPUS, policy: Policy | None = None, **values) -> tuple[str, str] | None:
    """Return the victim and the winner."""
    plan = decide(view(*jobs, on=on, running=running, **values), NOW, policy or Policy())
    preemption = preempt(plan)
    return None if preemption is None else (preemption.victim, preemption.winner)


@pytest.mark.parametrize(
    "values",
    [
        {"preemptible": False},
        {"ran": 599},
        {"time_limit_ns": 8 * HOUR_S * S - 1},
        {"time_limit_ns": None, "ran": 8 * HOUR_S - 1},
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
        {"time_limit_ns": 2 * HOUR_S * S + 1},
        {"cpus": 5},
        {"start_after_ns": NOW + S},
        {"group": "g", "group_limit": 1},
    ],
)
def test_what_nothing_is_stopped_for(values):
    """A job that states no limit, though it is expected to be short, or a long one, never fits, or may not start."""
    runs = [long("l"), run("m", cpus=0, group="g", group_limit=1)]
    waiting = view(short("s", **values), on=FOUR_CPUS, running=runs)
    for _ in range(5):
        waiting.past.run_times.add("bob", "s", short("s").spec.request, 60 * S)
    assert preempt(decide(waiting, NOW, Policy())) is None


def test_a_long_run_makes_room_for_a_short_job():
    """The run that allows it is stopped for the job that states a short limit, also on a GPU.

    Without a limit it is long once it has lasted: the expected time may be a guess; after eight hours none is needed.
    """
    for one in (long("l"), long("l", time_limit_ns=None, ran=8 * HOUR_S)):
        assert found(short("s"), running=[one]) == ("l", "s")
    assert found(short("s", gpus=1), running=[long("l", on=(0,))], on=machine(cpus=8, gpus=gpus(1))) == ("l", "s")


def test_a_job_that_can_start_stops_nothing():
    """Room is taken where there is some, and the pause of the spool holds for all."""
    assert found(short("s"), running=[long("l", cpus=2)]) is None
    assert found(short("s"), running=[long("l")], paused=True) is None


def test_a_job_is_preempted_once_an_hour():
    """After a preemption its next run is left alone until an hour has passed since."""
    again = replace(long("l"), preempted_at_ns=NOW - HOUR_S * S + 1)
    assert found(short("s"), running=[again]) is None
    assert found(short("s"), running=[replace(again, preempted_at_ns=NOW - HOUR_S * S)]) == ("l", "s")


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


def test_the_job_that_it_was_stopped_for_goes_first():
    """The stopped job keeps its place, which may be before the short one; even so the short one gets the room."""
    victim = job("l", cpus=4, waited=30 * 24 * HOUR_S, time_limit_ns=24 * HOUR_S * S)
    other = short("s", cpus=4)
    assert started(decide(view(victim, other, on=FOUR_CPUS), NOW, Policy())) == ["l"]
    assert started(decide(view(replace(victim, yields_to="s"), other, on=FOUR_CPUS), NOW, Policy())) == ["s"]


@pytest.mark.parametrize("values", [{"start_after_ns": NOW + S}, {"cpus": 5}, {"group": "g", "group_limit": 0}])
def test_it_waits_for_no_job_that_cannot_start(values):
    """If the short job cannot start, or is gone, the stopped one runs on."""
    victim = replace(job("l", cpus=4, waited=HOUR_S), yields_to="s")
    assert started(decide(view(victim, short("s", **{"cpus": 4, **values}), on=FOUR_CPUS), NOW, Policy())) == ["l"]
    assert started(decide(view(victim, on=FOUR_CPUS), NOW, Policy())) == ["l"]


SOME_RUNS = st.lists(
    st.fixed_dictionaries(
        {
            "cpus": st.integers(0, 3),
            "ran": st.integers(0, 20 * HOUR_S),
            "time_limit_ns": st.sampled_from([None, *(hours * HOUR_S * S for hours in (1, 7, 9, 48))]),
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
            "waited": st.integers(0, 100 * HOUR_S),
            "time_limit_ns": st.sampled_from([None, *(minutes * 60 * S for minutes in (5, 60, 120, 121, 6000))]),
            "priority": st.sampled_from([10, 10, 0, 20]),
            "user": st.sampled_from("ab"),
        }
    ),
    max_size=6,
)


@given(SOME_RUNS, JOBS)
def test_what_is_stopped_is_needed_and_enough(runs, jobs):
    """The victim may be stopped; the winner states a short limit, waits, and has room once the victim has left.

    It starts then although the job of the victim waits again at its place, and others wait ahead of it.
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
    assert (winner.spec.time_limit_ns or 1 << 62) <= SHORT_NS
    from_ns = preemptible_at_ns(victim, before.running.run_times.of_job(victim).ns)
    assert from_ns is not None
    assert from_ns <= NOW
    assert victim.spec.priority <= winner.spec.priority
    back = replace(job(victim.name), spec=victim.spec, arrived_at_ns=victim.started_at_ns, yields_to=winner.name)
    left = [each for each in running if each is not victim]
    assert winner.name in started(decide(view(back, *waiting, on=machine(cpus=6), running=left), NOW, Policy()))


def test_a_look_changes_no_plan():
    """Whether a run is preempted is asked beside the plan, and the plan stays what it was."""
    seen = view(short("s"), job("after", depends_on="l"), on=FOUR_CPUS, running=[long("l")])
    before = decide(seen, NOW, Policy())
    assert preempt(before) == Preemption("l", "s")
    after = decide(seen, NOW, Policy())
    assert [str(after.reason(name)) for name in ("s", "after")] == [str(before.reason(name)) for name in ("s", "after")]
    assert after.endings == ()
    assert list(seen.running) == ["l"]
