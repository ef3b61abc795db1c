"""The order in which waiting jobs are considered."""

from __future__ import annotations

from functools import cmp_to_key

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.planning import NOW, S, job, machine, plan, run, started
from spool.core.model import Grant, Policy, Waiting
from spool.core.order import FULL_SHARE, UsageLedger, order_key, shares, time_bonus, weigh

HOUR = 3600 * S
ONE = machine(cpus=1)


def first(*jobs: Waiting, **values: object) -> str:
    """Return which of the jobs gets the only processor."""
    return started(plan(*jobs, on=ONE, **values))[0]


def test_higher_priority_first_whatever_else():
    """Priority is above fair share, time bonus and arrival."""
    low = job("low", priority=10, waited=10**6, time_limit_ns=60 * S)
    high = job("high", priority=11, user="bob")
    assert first(low, high, usage={"bob": 1e9, "alice": 1.0}) == "high"


def test_who_has_used_less_goes_first():
    """Within a priority, fair share is above time bonus and arrival."""
    heavy = job("heavy", user="alice", waited=100, time_limit_ns=60 * S)
    light = job("light", user="bob")
    assert first(heavy, light, usage={"alice": 1000.0, "bob": 10.0}) == "light"
    assert first(heavy, light, usage={"alice": 1000.0, "bob": 10.0}, policy=Policy(fair_share=False)) == "heavy"


def test_who_has_used_nothing_has_the_full_share():
    """The factor is 2^-level, and 1 for whoever has used nothing."""
    found = shares({"a": 300.0, "b": 100.0, "c": 0.0}, (), NOW, Policy())
    assert found == {"a": int(2**-1.5 * FULL_SHARE), "b": int(2**-0.5 * FULL_SHARE)}
    assert shares(dict.fromkeys("abc", 7.0), (), NOW, Policy()) == dict.fromkeys("abc", FULL_SHARE // 2)


def test_what_runs_now_counts_as_used():
    """Usage includes the runs that have not ended: GPU-seconds, and CPU-seconds at a twentieth."""
    runs = [run("r", user="alice", ran=100, on=(0,), cpus=4), run("s", user="bob", ran=100, cpus=4)]
    found = shares({}, runs, NOW, Policy())
    level = 120 / 140 * 2
    assert found["alice"] == pytest.approx(2**-level * FULL_SHARE, abs=2)
    assert weigh(Grant(cpus=4, gpu_uuids=("x",)), 100 * S, Policy()) == pytest.approx(120)


def test_projects_share_where_so_configured():
    """With `fair_share_by = "project"` users of one project share its usage."""
    policy = Policy(fair_share_by="project")
    used = {"vision": 100.0, "speech": 1.0}
    a = job("a", user="x", project="vision", waited=9)
    assert first(a, job("b", user="x", project="speech"), usage=used, policy=policy) == "b"
    assert first(a, job("c", user="y"), usage=used, policy=policy) == "c"  # no project has used nothing
    assert first(a, job("c", user="y"), usage={"": 100.0, "vision": 1.0}, policy=policy) == "a"
    assert first(job("p", user="x", project="p", waited=9), job("q", user="z"), usage={"x": 9.0}) == "q"


def test_the_short_go_first():
    """Among equals the time bonus orders, and can be turned off."""
    long, short = job("long", waited=9, time_limit_ns=HOUR), job("short", time_limit_ns=60 * S)
    none = job("none", waited=99)
    assert first(long, short, none) == "short"
    assert first(long, none) == "long"
    assert first(long, short, none, policy=Policy(time_bonus=False)) == "none"


@pytest.mark.parametrize(
    ("limit", "bonus"),
    [(None, 100), (60 * S, 299), (24 * HOUR, 200), (240 * HOUR, 200), (12 * HOUR, 250), (0, 300), (S, 299)],
)
def test_the_time_bonus(limit, bonus):
    """No limit 100, a minute 299, a day and more 200."""
    assert time_bonus(limit) == bonus


def test_first_queued_first_then_the_name():
    """The last two keys are the arrival and the name."""
    assert first(job("b", waited=2), job("a", waited=1)) == "b"
    assert first(job("b", waited=2), job("a", waited=2)) == "a"


def test_usage_halves_with_every_half_life():
    """A ledger forgets half of what it holds in each half life, whatever the order in which runs are added."""
    one, other = UsageLedger(100), UsageLedger(100)
    for ledger, runs in ((one, [(8.0, 0), (4.0, 100)]), (other, [(4.0, 100), (8.0, 0)])):
        for amount, ended in runs:
            ledger.add("a", amount, ended)
    assert one.at(200)["a"] == other.at(200)["a"] == pytest.approx(8 / 4 + 4 / 2)
    assert UsageLedger(0).at(5) == {}


USERS = ("u", "v", "w")
JOBS = st.lists(
    st.tuples(
        st.sampled_from(USERS),
        st.integers(0, 3),
        st.sampled_from([None, 60 * S, HOUR, 24 * HOUR]),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=8,
)


def oracle(one: Waiting, other: Waiting, usage: dict[str, float], policy: Policy) -> int:
    """Compare as the rules are written: rule by rule, the first that differs decides."""

    def factor(each: Waiting) -> float:
        used = {user: amount for user, amount in usage.items() if amount}
        if not policy.fair_share or each.user not in used:
            return 1.0
        return 2 ** -(used[each.user] / sum(used.values()) * len(used))

    def bonus(each: Waiting) -> int:
        limit = each.spec.time_limit_ns
        if not policy.time_bonus:
            return 0
        return 100 if limit is None else 200 + int((1 - min(limit / S / 86400, 1)) * 100)

    if one.spec.priority != other.spec.priority:
        return other.spec.priority - one.spec.priority
    if abs(factor(one) - factor(other)) > 1e-8:
        return -1 if factor(one) > factor(other) else 1
    if bonus(one) != bonus(other):
        return bonus(other) - bonus(one)
    if one.arrived_at_ns != other.arrived_at_ns:
        return -1 if one.arrived_at_ns < other.arrived_at_ns else 1
    return -1 if one.name < other.name else 1


@settings(max_examples=150, deadline=None)
@given(
    JOBS,
    st.dictionaries(st.sampled_from(USERS), st.sampled_from([0.0, 1.0, 10.0, 500.0])),
    st.booleans(),
    st.booleans(),
)
def test_jobs_start_in_the_order_of_the_rules(drawn, usage, fair, bonus):
    """With room for all, jobs start in the order that a plain comparison of the rules gives."""
    policy = Policy(fair_share=fair, time_bonus=bonus)
    jobs = [
        job(f"j{n}", user=user, priority=priority, time_limit_ns=limit, waited=waited)
        for n, (user, priority, limit, waited) in enumerate(drawn)
    ]
    expected = sorted(jobs, key=cmp_to_key(lambda a, b: oracle(a, b, usage, policy)))
    names = [each.name for each in expected]
    assert started(plan(*jobs, on=machine(cpus=99), usage=usage, policy=policy)) == names
    by_user = shares(usage, (), NOW, policy)
    assert [each.name for each in sorted(jobs, key=lambda each: order_key(each, by_user, policy))] == names
