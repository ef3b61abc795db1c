"""When waiting jobs start: the schedule carried forward, by the rules of the dispatcher."""

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
from core.planning import GIB, NOW, S, gpus, job, machine, plan, run, started, view
from core.test_limits import THERE, far_job, far_run
from core.worlds import BOX, POLICIES, over_committed, waiting
from spool.core.constraints import as_run
from spool.core.forecast import StartForecast, forecast
from spool.core.model import Dependencies, Grant, Limits, Machine, NoLeases, Policy, Pool, Reservation, State, Waiting
from spool.core.reasons import CODES
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
    running = [
        run("ss", cpus=2, time_limit_ns=HOUR, suspended=(0, 5)),
        run("r", cpus=1, ran=0, time_limit_ns=100 * S),
    ]
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
    assert reason is not None
    assert reason.code == code
    found = told(made, "j")
    assert (found.at_ns, bool(found.unknown)) == ((None, True) if at_s is None else (NOW + at_s * S, False))
    if code not in ("max_in_flight", "max_pending"):
        assert found.unknown in ("", str(reason))


def test_no_reason_is_forgotten():
    """Every code that the planner gives, wherever it is in the source, has its situation above."""
    given = set()
    for module in pkgutil.iter_modules(spool.core.__path__, "spool.core."):
        tree = ast.parse(inspect.getsource(import_module(module.name)))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
        reasons = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Reason"]
        assert all(isinstance(code, ast.Constant) for code in reasons), module.name
        given |= {code.value for code in reasons}
    assert given == set(CODES) == set(SITUATIONS)


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
