"""What may keep a job waiting before anybody asks for room, and that it keeps nobody else waiting."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from core.planning import NOW, S, at, code, job, later, machine, numbers, plan, run, started, view, why
from spool.core.model import Dependencies, Policy, State
from spool.core.reasons import REASONS
from spool.core.scheduler import decide

HOUR = 3600 * S


def names_ended(found):
    """Return who ends, and as what."""
    return {each.name: str(each.outcome) for each in found.endings}


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        ({"start_after_ns": at("14:00")}, "begins at 14:00"),
        ({"start_after_ns": at("12:00") + 86400 * S}, "begins at 2026-01-02 12:00"),
        ({"start_delay_ns": 90 * S}, "begins at 12:01:30"),
        ({"not_before_ns": NOW + 5 * S}, "retry in 5s"),
        ({"depends_on": "other"}, "dependency: other has not been seen yet (0 of 1 done)"),
        ({}, "another run of this name is running"),
    ],
)
def test_a_closed_gate_blocks_nobody_of_the_same_shape(gate, reason):
    """A job that waits for something of its own does not keep its like behind it waiting."""
    runs = [] if gate else [run("shut", cpus=0)]
    found = plan(job("shut", **gate), later(job("open"), 1), on=machine(cpus=1), running=runs)
    assert started(found) == ["open"]
    assert why(found, "shut") == reason


def test_all_instants_must_have_come():
    """Of a beginning, a delay and a retry, the last counts, to the nanosecond; the one that is to come is told."""
    both = job("j", start_after_ns=at("13:00"), start_delay_ns=5400 * S, not_before_ns=at("14:00"))
    found = plan(both)
    told = ["begins at 2026-01-01T13:30:00Z", "retry due 2026-01-01T14:00:00Z"]
    assert [str(each) for each in found.all_reasons("j")] == told
    assert found.next_at_ns == at("14:00")
    begins = job("j", start_after_ns=at("15:00"), start_delay_ns=60 * S, not_before_ns=at("14:00"))
    assert code(plan(begins, now=at("14:59")), "j") == "begins"
    for last, when in ((both, "14:00"), (begins, "15:00")):
        assert started(plan(last, now=at(when) - 1)) == []
        assert started(plan(last, now=at(when))) == ["j"]


def test_the_plan_says_when_to_look_again():
    """The next instant is the first of begins, retries, timeouts and used-up budgets that is still to come."""
    assert plan().next_at_ns is None
    assert plan(job("j")).next_at_ns is None
    assert plan(job("j", start_after_ns=at("13:00")), job("k", not_before_ns=at("12:30"))).next_at_ns == at("12:30")
    timed = job("t", waited=5, scheduling_timeout_ns=10 * S)
    full = {"running": [run("r", cpus=4)]}
    assert plan(timed, **full).next_at_ns == NOW + 5 * S + 1
    assert plan(timed, paused=True, **full).next_at_ns is None
    big, small = job("big", cpus=4, waited=9 * 3600), job("small", cpus=1, waited=5)
    guessed = plan(big, small, running=[run("r", cpus=2)])
    # A tenth of 9h of the whole machine; one of 4 CPUs is held back, and a tenth of the time is added.
    assert (guessed.next_at_ns, guessed.protected) == (NOW + (3240 * 100 // 15 + 1) * S, "big")
    limited = plan(big, small, running=[run("r", cpus=2, time_limit_ns=HOUR)])
    assert (limited.next_at_ns, limited.protected) == (None, "big")


def test_a_timeout_ends_strictly_after_its_time():
    """Waited exactly as long as allowed is allowed; the clock stands while a job is held or the spool paused."""
    assert names_ended(plan(job("j", waited=5, scheduling_timeout_ns=5 * S))) == {}
    assert names_ended(plan(job("j", waited=5, scheduling_timeout_ns=5 * S - 1))) == {"j": "unschedulable"}
    old = {"waited": 100, "scheduling_timeout_ns": 10 * S}
    assert names_ended(plan(job("j", **old), paused=True)) == {}
    assert names_ended(plan(job("j", clock_at_ns=None, **old))) == {}
    assert names_ended(plan(job("j", clock_at_ns=NOW, waited_ns_before=10 * S, **old))) == {}
    assert names_ended(plan(job("j", clock_at_ns=NOW - 1, waited_ns_before=10 * S, **old))) == {"j": "unschedulable"}


def test_what_kept_a_job_waiting_is_said_when_its_timeout_ends_it():
    """It ends also where it would fit, and then no reason beside the timeout is there; 0 is no timeout."""
    late = job("late", waited=2, cpus=2, scheduling_timeout_ns=S)
    for runs, said in (([run("r", cpus=3)], True), ([], False)):
        found = plan(late, running=runs)
        assert (started(found), names_ended(found)) == ([], {"late": "unschedulable"})
        assert ("cpus: needs 2" in found.endings[0].reason) is said
    assert started(plan(job("old", waited=10**6, scheduling_timeout_ns=0))) == ["old"]


def depends(name="j", /, **clauses):
    """Return a job with these clauses."""
    return job(name, depends_on=Dependencies(**{key: tuple(names) for key, names in clauses.items()}))


F, X, Q = State.FINISHED, State.FAILED, None  # Q: waits in the queue


@pytest.mark.parametrize(
    ("clauses", "world", "verdict"),
    [
        ({"all": "ab"}, {"a": F, "b": F}, "starts"),
        ({"all": "ab"}, {"a": F, "b": Q}, "b is queued (1 of 2 done)"),
        ({"all": "ab"}, {"a": F}, "b has not been seen yet (1 of 2 done)"),
        ({"all": "ab"}, {"a": Q, "b": X}, "b ended as failed"),
        ({"all": "a"}, {"a": State.CANCELLED}, "a ended as cancelled"),
        ({"any": "ab"}, {"a": X, "b": F}, "starts"),
        ({"any": "ab"}, {"a": X, "b": Q}, "b is queued (0 of 2 done, 1 is enough)"),
        ({"any": "ab"}, {"a": X}, "b has not been seen yet (0 of 2 done, 1 is enough)"),
        ({"any": "ab"}, {"a": X, "b": State.LOST}, "a ended as failed, and 1 more did not finish"),
        ({"ended": "ab"}, {"a": X, "b": F}, "starts"),
        ({"ended": "ab"}, {"a": X, "b": Q}, "b is queued (1 of 2 done)"),
        ({"failed": "ab"}, {"a": X, "b": State.TIMEOUT}, "starts"),
        ({"failed": "ab"}, {"a": X, "b": Q}, "b is queued (1 of 2 done)"),
        ({"failed": "ab"}, {"a": Q, "b": F}, "b finished, but should have failed"),
        ({"all": "a", "ended": "b"}, {"a": F, "b": Q}, "b is queued (0 of 1 done)"),
        ({"all": "a", "ended": "b"}, {"a": X, "b": Q}, "a ended as failed"),
        ({"all": "a", "any": "bc"}, {"a": F, "b": X, "c": F}, "starts"),
    ],
)
def test_the_clauses(clauses, world, verdict):
    """Each clause is satisfied, awaited or impossible as its definition says; all clauses of a job must be met."""
    others = [job(name, cpus=9) for name, state in world.items() if state is None]
    ended = {name: state for name, state in world.items() if state is not None}
    found = plan(depends(**clauses), *others, ended=ended)
    if verdict == "starts":
        assert started(found) == ["j"]
        return
    assert why(found, "j") == f"dependency: {verdict}"
    impossible = "ended" in verdict or "should have" in verdict
    assert names_ended(found) == ({"j": "cancelled"} if impossible else {})


@pytest.mark.parametrize("again", ["queue", "held", "running"])
def test_what_a_name_does_now_counts(again):
    """Of a name that both has ended and waits or runs again, the newer counts."""
    world = {"held": [job("a")]} if again == "held" else {"running": [run("a")]} if again == "running" else {}
    more = [job("a", cpus=9)] if again == "queue" else []
    state = {"queue": "queued", "held": "held", "running": "running"}[again]
    for outcome in (F, X):
        found = plan(job("j", depends_on="a"), *more, ended={"a": outcome}, **world)
        assert (why(found, "j"), found.endings) == (f"dependency: a is {state} (0 of 1 done)", ())


ARRAY = {"sweep": ("sweep_0", "sweep_1", "sweep_2")}


@pytest.mark.parametrize(
    ("clauses", "ended", "verdict"),
    [
        ({"all": ["sweep"]}, {"sweep_0": F, "sweep_1": F, "sweep_2": F}, "starts"),
        ({"all": ["sweep"]}, {"sweep_0": F, "sweep_2": F}, "dependency: sweep_1 has not been seen yet (2 of 3 done)"),
        ({"all": ["sweep"]}, {"sweep_0": F, "sweep_2": X}, "dependency: sweep_2 ended as failed"),
        ({"all": ["sweep_0"]}, {"sweep_0": F}, "starts"),
        ({"ended": ["sweep"]}, {"sweep_0": F, "sweep_1": X, "sweep_2": F}, "starts"),
        ({"failed": ["sweep"]}, {"sweep_0": F, "sweep_1": X, "sweep_2": F}, "starts"),
        ({"failed": ["sweep"]}, dict.fromkeys(ARRAY["sweep"], F), "dependency: sweep finished, but should have failed"),
        ({"any": ["sweep", "b"]}, {"sweep_0": X, "b": F}, "starts"),
    ],
)
def test_an_arrays_name_means_all_its_tasks(clauses, ended, verdict):
    """Depending on an array is depending on all its tasks; the name of a task means that one."""
    found = plan(depends(**clauses), ended=ended, arrays=ARRAY)
    assert started(found) == ["j"] if verdict == "starts" else why(found, "j") == verdict


def test_each_pairs_the_tasks_of_two_arrays():
    """With `each`, task i waits for task i of the other array only."""
    tasks = [job(f"eval_{n}", task=("eval", n), depends_on=Dependencies(each="sweep"), cpus=1) for n in range(3)]
    found = plan(*tasks, ended={"sweep_1": F, "sweep_2": X}, arrays=ARRAY)
    assert started(found) == ["eval_1"]
    assert why(found, "eval_0").startswith("dependency: sweep_0 ")
    assert names_ended(found) == {"eval_2": "cancelled"}


def test_an_unschedulable_job_takes_its_dependents_with_it():
    """What ends in a pass counts at once for those that depend on it, held ones too, and unless they can do without."""
    found = plan(
        job("a", waited=9, scheduling_timeout_ns=S),
        job("b", depends_on="a"),
        job("after", depends_on=Dependencies(ended=("a",))),
        held=[job("h", depends_on="b")],
    )
    assert names_ended(found) == {"a": "unschedulable", "b": "cancelled", "h": "cancelled"}
    assert started(found) == ["after"]


def test_who_was_not_judged_because_he_ended_anyway_is_judged_when_that_was_not_done():
    """A job whose time is over and whose dependency has failed ends as the one, and in a paused spool as the other."""
    late = job("b", depends_on="a", scheduling_timeout_ns=S)
    seen = view(late, ended={"a": X})
    assert names_ended(decide(seen, NOW + 2 * S, Policy())) == {"b": "unschedulable"}
    assert names_ended(decide(replace(seen, paused=True), NOW + 2 * S, Policy())) == {"b": "cancelled"}


def test_a_dependency_that_waits_again_closes_the_gate():
    """A job whose dependency had finished waits again when that is queued again before it starts."""
    seen = view(job("j", depends_on="a"), ended={"a": F})
    assert started(decide(seen, NOW, Policy())) == ["j"]
    seen.queue.put(job("a", cpus=9))
    waits = decide(seen, NOW, Policy())
    assert (started(waits), code(waits, "j")) == ([], "dependency")
    seen.queue.remove("a")
    assert started(decide(seen, NOW, Policy())) == ["j"]


def test_an_impossible_job_may_prefer_to_wait():
    """With `on_dependency_failure = "wait"` a job waits on, and starts if its dependency finishes after all."""
    for again in (False, True):
        seen = view(job("j", depends_on="a", cancel_on_dependency_failure=False), ended={"a": X})
        found = decide(seen, NOW, Policy())
        assert (found.endings, code(found, "j")) == ((), "dependency")
        if again:  # a queue that finds the outcome of a job it held back judges again whoever waits for it
            seen.queue.put(job("a", cpus=9))
            decide(seen, NOW, Policy())
            seen.queue.put(job("a", cpus=8))
            seen.queue.remove("a")
        seen.ended["a"] = F
        if not again:
            seen.queue.changed("a")
        assert started(decide(seen, NOW, Policy())) == ["j"]


def test_a_circle_with_a_way_out_is_none():
    """`any` with one alternative outside is no circle; with all of them inside it is."""
    b = job("b", depends_on="a")
    out = plan(job("a", depends_on=Dependencies(any=("b", "x"))), b)
    assert (numbers(out, "a"), numbers(out, "b")) == ([0, 2, 1], [0, 1])
    shut = plan(job("a", depends_on=Dependencies(any=("b", "x"))), b, ended={"x": X})
    assert "cycle" in why(shut, "a")


@pytest.mark.parametrize(
    ("jobs", "held", "told"),
    [
        ({"a": {"all": "b"}, "b": {"all": "a"}, "c": {"all": "a"}, "d": {"all": "d"}}, {},
         {"a": "a cycle, a waits for b waits for a", "b": "a cycle, b waits for a waits for b",
          "c": "a is queued (0 of 1 done)", "d": "a cycle, d waits for d"}),
        # Of a job whose alternatives both will end, the other clauses still count.
        ({"a": {"all": "a", "any": "pq"}, "p": {"all": "z"}, "q": {"all": "z"}}, {},
         {"a": "a cycle, a waits for a"}),
        ({"s_0": {"all": "h"}, "s_1": {}}, {"h": {"all": "s"}}, {"s_0": "a cycle, s_0 waits for h waits for s_0"}),
    ],
)  # fmt: skip
def test_every_member_of_a_circle_is_told_and_nobody_else(jobs, held, told):
    """A circle, through arrays and held jobs too, is told to its members; who waits for one of them, for whom."""
    found = plan(*(depends(name, **of) for name, of in jobs.items()), arrays={"s": ("s_0", "s_1")},
                 held=[depends(name, **of) for name, of in held.items()])  # fmt: skip
    assert {name: why(found, name) for name in told} == {name: f"dependency: {text}" for name, text in told.items()}
    assert found.endings == ()


def test_a_long_chain_is_no_circle_and_no_recursion():
    """A chain of 3,000 jobs is judged, and its last is told for whom it waits."""
    chain = [job(f"j{n}", depends_on=f"j{n - 1}") for n in range(1, 3000)]
    found = plan(*chain, running=[run("j0")])
    assert why(found, "j2999").startswith("dependency: j2998 ")
    assert names_ended(plan(*chain, ended={"j0": X})) == dict.fromkeys((f"j{n}" for n in range(1, 3000)), "cancelled")


def test_held_is_the_only_reason_of_a_held_job():
    """A held job is told that it is held first, and then what else would keep it."""
    found = plan(held=[job("h", cpus=9)])
    assert why(found, "h") == "held"
    assert [each.code for each in found.all_reasons("h")] == ["held", "never_fits", "cpus"]
    assert found.reason("nobody") is None
    assert found.all_reasons("nobody") == []


def test_every_no_is_told_in_the_order_of_the_rules():
    """`all_reasons` gives every reason, in the one order, and `reason` is the first."""
    asked = {"cpus": 99, "memory_bytes": 1 << 50, "gpus": 1, "group": "g", "group_limit": 1, "depends_on": "a"}
    times = {"waited": 9, "start_after_ns": at("13:00"), "scheduling_timeout_ns": S, "not_before_ns": NOW + S}
    bad = job("j", executor_problem="tmux is not installed", **asked, **times)
    found = plan(bad, on=machine(disk_free_bytes=1 << 29), running=[run("j", group="g")], paused=True)
    codes = [each.code for each in found.all_reasons("j")]
    assert codes == [
        "paused", "begins", "retry", "running", "dependency", "group", "never_fits", "memory", "cpus", "gpus", "disk",
        "executor",
    ]  # fmt: skip
    assert codes == sorted(codes, key=list(REASONS).index)
    assert str(found.reason("j")) == "spool paused"


@pytest.mark.parametrize(("free", "starts"), [((1 << 30) - 1, []), (1 << 30, ["j"])])
def test_nothing_starts_below_the_floor_of_the_disk(free, starts):
    """The floor itself is enough."""
    assert started(plan(job("j"), on=machine(disk_free_bytes=free))) == starts


def test_nothing_starts_without_its_executor():
    """Others do."""
    found = plan(job("j", executor_problem="tmux is not installed"), job("k"))
    assert (code(found, "j"), started(found)) == ("executor", ["k"])
