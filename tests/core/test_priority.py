"""The order in which waiting jobs are considered, and the sums of fair share, own service and passed work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import GIB, NOW, S, gpus, grant_of, job, machine, plan, run, started, used
from spool.core.forecast import forecast
from spool.core.model import ForeignProcess, Grant, Policy, Request, Result, State, Waiting
from spool.core.priority import HALF_LIFE_NS, LEAST, PassedWork, Past, Served, Shares, show_score, weigh
from spool.core.resources import CPUS, MEMORY, PoolName

HOUR = 3600 * S
MINUTE = 60 * S
ONE = machine(cpus=1)
ALONE = Policy(fair_share=False)


def first(*jobs: Waiting, **values: object) -> str:
    """Return which of the jobs gets the only processor."""
    return started(plan(*jobs, on=ONE, **values))[0]


def standing(found, name):
    """Return why that job stands where it does."""
    return next(each for job, each in found.in_order() if job.name == name)


def test_higher_priority_first_whatever_else():
    """Priority is above slowdown, fair share and promotion."""
    low = job("low", priority=10, waited=10**6, time_limit_ns=60 * S)
    high = job("high", priority=11, user="bob")
    assert first(low, high, past=used(bob=1e9, alice=1.0)) == "high"
    assert first(low, high, past=passing("low", low, 10**6)) == "high"


def test_who_has_waited_longest_for_its_size_goes_first():
    """The order is that of (waited + expected) / expected: an hour is long for a minute, and little for a day."""
    day, minute = job("day", waited=3600, time_limit_ns=24 * HOUR), job("minute", waited=120, time_limit_ns=MINUTE)
    assert first(day, minute) == "minute"
    found = plan(day, minute, running=[run("r", cpus=4)])
    assert standing(found, "day").score == pytest.approx(25 / 24)
    assert standing(found, "minute").score == pytest.approx(3.0)
    assert first(job("day", waited=200 * 3600, time_limit_ns=24 * HOUR), minute) == "day"


def test_a_score_has_the_digits_that_tell_it_from_another():
    """One decimal, more where another score differs later, and one where six are not enough."""
    found = plan(*(job(name, waited=3600, time_limit_ns=hours * HOUR) for name, hours in (("a", 100), ("b", 101))))
    a, b = standing(found, "a"), standing(found, "b")
    assert (b.words(a.score), b.words_behind(a)) == (
        "score 1.0099 (waited 1h00m, expected run time 4d05h)",
        "score 1.0100",
    )
    assert "score 1" not in b.words_behind(b)
    assert [show_score(1.0, 1.0), show_score(12.34, 1.0), show_score(1.03, 1.04)] == ["1.0", "12.3", "1.03"]


def test_without_a_limit_the_expected_run_time_is_learnt():
    """Who states nothing stands where its like have run so long: here 90s and 120s."""
    past = Past(Policy())
    for seconds in (90, 120):
        ended = Result("train_3", 1, 1, State.FINISHED, "", None, NOW - seconds * S, NOW, request=Request())
        past.learn("alice", ended)
    found = plan(job("train_9", waited=120), job("other", waited=120), running=[run("r", cpus=4)], past=past)
    assert standing(found, "train_9").score == pytest.approx(2.0)
    assert "2.0 (waited 2m00s," in standing(found, "train_9").words()


def test_who_has_used_less_goes_first():
    """Of two that have waited as long for their size, the one whose user has used less; not where one waits alone."""
    heavy, light = job("heavy", user="alice", waited=100), job("light", user="bob", waited=90)
    past = used(alice=1000.0, bob=10.0)
    assert first(heavy, light, past=past) == "light"
    assert first(heavy, light, past=past, policy=ALONE) == "heavy"
    found = plan(heavy, running=[run("r", cpus=4, user="bob")], past=past)
    assert standing(found, "heavy").factor == 1.0


def test_fair_share_is_a_bounded_factor():
    """Who has used by far the most stands as if he had waited two thirds as long, and no worse."""
    past = used(alice=10**9, bob=1.0, carol=1.0)
    for heavy_waited, light_waited, who in ((5400, 1800, "light"), (9000, 0, "heavy")):
        heavy = job("heavy", user="alice", waited=heavy_waited, time_limit_ns=HOUR)
        assert first(heavy, job("light", user="bob", waited=light_waited, time_limit_ns=HOUR), past=past) == who
    others = (job("light", user="bob"), job("light2", user="carol"))
    found = plan(heavy, *others, past=past, running=[run("r", cpus=4)])
    assert standing(found, "heavy").factor == pytest.approx(LEAST)
    assert standing(found, "light").factor == pytest.approx(2**0.5, rel=1e-4)
    assert "fair share \N{MULTIPLICATION SIGN}0.67" in standing(found, "heavy").words()


def test_projects_share_where_so_configured():
    """With `fair_share_by = "project"` users of one project share its usage."""
    policy = Policy(fair_share_by="project")
    past = used(policy, vision=100.0, speech=1.0)
    a = job("a", user="x", project="vision", waited=9)
    assert first(a, job("b", user="x", project="speech"), past=past, policy=policy) == "b"
    assert first(a, job("c", user="y"), past=past, policy=policy) == "c"  # no project has used nothing
    past = used(policy, vision=1.0)
    past.shares.change("", 100.0, NOW - S)
    past.shares.change("", -100.0, NOW)
    assert first(a, job("c", user="y"), past=past, policy=policy) == "a"
    assert first(job("p", user="x", project="p", waited=9), job("q", user="z"), past=used(x=9.0)) == "q"


def test_what_runs_now_counts_as_used():
    """Usage includes the runs that have not ended: GPU-seconds, and CPU-seconds at a twentieth."""
    past = Past(Policy())
    for user, cards in (("alice", (0,)), ("bob", ())):
        past.begin(user, None, grant_of(Request(cpus=4), cards), NOW - 100 * S)
    factors = past.shares.factors(NOW, ["alice", "bob"])
    assert factors["alice"] == pytest.approx(max(2 ** (0.5 * (1 - 120 / 140 * 2)), LEAST), rel=1e-4)
    assert factors["bob"] == pytest.approx(2 ** (0.5 * (1 - 20 / 140 * 2)), rel=1e-4)
    assert weigh(Grant(cpus=4, gpu_uuids=("x",))) == pytest.approx(1.2)


def served(past: Past, key: str, amount: int, *, began: int, lasted: int, pool: PoolName = CPUS) -> Past:
    """Let *key* have been served that much of *pool*, from so many seconds ago on, without any other usage."""
    line = past.served.setdefault((key, pool), Served())
    line.turn(amount, NOW - began * S)
    line.turn(-amount, NOW - (began - lasted) * S)
    return past


def test_own_service_counts_as_size():
    """Half of the machine for 20 minutes since a job arrived is 10 minutes more of size, while others wait too.

    Where it is so configured a job is as large as what its project was served since, whoever of it was.
    """
    mine, other = (
        job(name, user=name, project=f"p-{name}", waited=1200, time_limit_ns=600 * S) for name in ("alice", "bob")
    )
    for key, policy in (("alice", Policy()), ("p-alice", Policy(fair_share_by="project"))):
        past = served(Past(policy), key, 2, began=1200, lasted=1200)
        found = plan(mine, other, past=past, running=[run("r", cpus=4)], policy=policy)
        assert standing(found, "alice").own_ns == 600 * S
        assert standing(found, "alice").score == pytest.approx((1200 + 600 + 600) / (600 + 600))
        assert standing(found, "bob").score == pytest.approx((1200 + 600) / 600)
        assert standing(found, "alice").words().endswith("own service 10m00s)")
    past = served(Past(Policy()), "alice", 2, began=1200, lasted=1200)
    for jobs, policy in (((mine,), Policy()), ((mine, other), ALONE)):
        assert standing(plan(*jobs, past=past, running=[run("r", cpus=4)], policy=policy), "alice").own_ns == 0


def test_a_clock_that_was_set_back_takes_no_service_away():
    """A run that ends before its start, by the clock, was served nothing: nobody's size falls to nothing."""
    past, asked = Past(Policy()), {"cpus": 2, "time_limit_ns": MINUTE}
    runs = [
        run("early", ran=-3600, stopping=True, kill_grace_ns=0),
        run("other", user="bob", ran=0, time_limit_ns=2 * MINUTE),
    ]
    for each in runs:
        past.begin(each.user, None, each.grant, each.started_at_ns)
    jobs = (job("a", waited=100, **asked), job("b", user="bob", waited=90, **asked))
    found = forecast(plan(*jobs, on=machine(2), running=runs, past=past))
    assert [found[name].at_ns for name in "ab"] == [NOW + 2 * MINUTE, NOW + 3 * MINUTE]


def test_of_equal_jobs_the_first_to_arrive_goes_first():
    """A job of which its user was served much stays ahead of its like that came later and would have a higher score."""
    past = served(Past(Policy()), "alice", 4, began=36_000, lasted=3600)
    jobs = [job(f"a{number}", waited=waited, time_limit_ns=MINUTE) for number, waited in ((1, 36_000), (2, 32_000))]
    between = job("b", user="bob", waited=1800, time_limit_ns=MINUTE)
    found = plan(*jobs, between, past=past, running=[run("r", cpus=4)])
    assert standing(found, "a2").score > standing(found, "b").score > standing(found, "a1").score
    assert [each.name for each, _ in found.in_order()] == ["b", "a1", "a2"]
    assert standing(found, "a1").words_behind(standing(found, "b")) == "score 31.0"
    assert standing(found, "a2").words_behind(standing(found, "b")) == (
        "score 31.0, since a job like this one arrived before it"
    )
    assert started(plan(*jobs, between, past=past)) == ["b", "a1", "a2"]


def test_the_order_of_arrival_and_the_shortest_first():
    """The other orders ask neither for the slowdown nor for who was passed."""
    old, short = job("old", waited=10, time_limit_ns=HOUR), job("short", time_limit_ns=MINUTE)
    assert first(old, short, policy=Policy(order="arrival")) == "old"
    shortest = Policy(order="shortest")
    assert first(job("old", waited=10**6, time_limit_ns=HOUR), short, policy=shortest) == "short"
    found = plan(old, short, policy=shortest, running=[run("r", cpus=4)])
    assert (standing(found, "old").score, standing(found, "old").words()) == (None, "waited 10s")


def test_the_order_of_a_multifactor_plugin():
    """The least usage goes first, whatever the size; between users alike it is the age, until a job is a week old."""
    multifactor = Policy(order="multifactor", fair_share=False)
    heavy, light = job("heavy", waited=9 * 86400, time_limit_ns=MINUTE), job("light", user="bob", time_limit_ns=HOUR)
    for past, who in ((used(alice=3.0, bob=1.0), "light"), (used(alice=1.0, bob=1.0), "heavy"), (None, "heavy")):
        assert first(heavy, light, policy=multifactor, past=past or Past(multifactor)) == who
    older = job("older", user="bob", waited=30 * 86400, time_limit_ns=HOUR)
    assert first(heavy, older, policy=multifactor, past=used(alice=1.0, bob=1.01)) == "heavy"
    names = [each.name for each, _ in plan(light, heavy, older, policy=multifactor).in_order()]
    assert names == ["older", "heavy", "light"]


# Promotion of who was passed by too much work.


def passing(name: str, passed: Waiting, work_s: int, *, earlier: bool = False, **asked: int) -> Past:
    """Return a past in which a job of one CPU that came after *passed* (or before) has run for so long."""
    past = Past(Policy())
    arrived = passed.arrived_at_ns + (-S if earlier else S)
    grant = grant_of(Request(**asked))
    ends = arrived + work_s * S
    past.learn("zoe", Result("w", 1, 1, State.FAILED, "", arrived, arrived, ends, grant=grant))
    return past


LONG = job("long", waited=10 * 3600, time_limit_ns=1000 * HOUR)
KEEN = job("keen", waited=3600, time_limit_ns=MINUTE)


@pytest.mark.parametrize(("waited", "hours"), [(10, 8), (100, 15)])
def test_who_was_passed_by_too_much_work_goes_first(waited, hours):
    """Once later arrivals have used the whole pool for more than eight hours; from 53h on, 15 % of the wait."""
    long = job("long", waited=waited * 3600, time_limit_ns=100_000 * HOUR)
    for seconds, who in ((hours * 3600, "keen"), (hours * 3600 + 1, "long")):
        assert first(long, KEEN, past=passing("w", long, seconds)) == who
    assert first(long, KEEN, past=passing("w", long, 99 * 3600), policy=Policy(promotes=False)) == "keen"


def test_the_pool_that_is_lacking_counts():
    """A job that lacks memory is passed by those who used memory, and not by those who used processors."""
    box = machine(cpus=2, memory=4 * GIB)
    long = job("long", waited=10 * 3600, time_limit_ns=1000 * HOUR, memory_bytes=3 * GIB)
    keen = job("keen", waited=3600, time_limit_ns=MINUTE, memory_bytes=3 * GIB)
    runs = [run("r", cpus=1, memory_bytes=2 * GIB, time_limit_ns=HOUR)]
    for asked, who in (({"cpus": 2}, "keen"), ({"cpus": 0, "memory_bytes": 4 * GIB}, "long")):
        found = plan(long, keen, on=box, running=runs, past=passing("w", long, 9 * 3600, **asked))
        assert found.in_order()[0][0].name == who
        assert standing(found, who).was_passed == (who == "long")


def test_of_those_passed_the_first_to_arrive_goes_first():
    """One at a time goes first: the one that came first, whatever its size; the others keep their order.

    Who has waited longer needs more to be passed; it goes first all the same where its like behind it would.
    """
    earlier = job("earlier", waited=11 * 3600, time_limit_ns=5000 * HOUR)
    found = plan(LONG, earlier, KEEN, past=passing("w", LONG, 9 * 3600), running=[run("r")], on=ONE)
    assert [each.name for each, _ in found.in_order()] == ["earlier", "keen", "long"]
    assert standing(found, "earlier").was_passed
    older, newer = (
        job(name, waited=hours * 3600, time_limit_ns=1000 * HOUR) for name, hours in (("a", 100), ("b", 40))
    )
    assert first(older, newer, KEEN, past=passing("w", newer, 9 * 3600)) == "a"


@pytest.mark.parametrize(
    ("pool", "hours", "later", "who"),
    [
        (CPUS, 8, 8 * 3600 + 1, "long"),  # as much own service as passes a job anyway changes nothing
        (CPUS, 9, 10 * 3600, "keen"),
        (CPUS, 9, 10 * 3600 + 1, "long"),
        (MEMORY, 9, 8 * 3600 + 1, "long"),  # what was served of another pool is nothing to those who wait for this
    ],
)
def test_what_a_user_was_served_beyond_that_passes_his_jobs_later(pool, hours, later, who):
    """A job of whom the machine served nine hours meanwhile is passed after ten, while others wait; alone, after eight.

    So not each job of a flood goes first once others have used eight hours.
    """
    keen, runs = replace(KEEN, user="bob"), [run("r")]
    for policy, first_of_all in ((Policy(), who), (ALONE, "long")):
        past = served(passing("w", LONG, later), "alice", 1, began=10 * 3600, lasted=hours * 3600, pool=pool)
        found = plan(LONG, keen, past=past, policy=policy, running=runs, on=ONE)
        assert found.in_order()[0][0].name == first_of_all
        assert standing(found, "long").served_more == (first_of_all == "keen")
    past = served(passing("w", LONG, later), "alice", 1, began=10 * 3600, lasted=hours * 3600, pool=pool)
    assert plan(LONG, KEEN, past=past, running=runs, on=ONE).in_order()[0][0].name == "long"


@pytest.mark.parametrize(
    "stuck", [{"cpus": 2}, {"group": "g", "group_limit": 1}, {"gpus": 1}, {"executor_problem": "tmux is not installed"}]
)
def test_who_cannot_be_helped_keeps_nobody_from_going_first(stuck):
    """A job that never fits, or waits for more than room, does not stand in the place of one that was passed."""
    box = machine(cpus=1, gpus=gpus(1, foreign=(ForeignProcess(7, "python", 1),)))
    busy = [run("member", cpus=0, group="g")]
    waits = job("waits", waited=2000 * 3600, time_limit_ns=1000 * HOUR, **stuck)
    past = passing("w", LONG, 500 * 3600)
    came = LONG.arrived_at_ns + S
    on_gpu = grant_of(Request(cpus=0), (0,))
    past.learn("zoe", Result("x", 1, 1, State.FAILED, "", came, came, came + 500 * HOUR, grant=on_gpu))
    found = plan(waits, LONG, KEEN, on=box, running=busy, past=past)
    assert started(found) == ["long"]


TICK = HALF_LIFE_NS // 1000
KEYS = ("a", "b", "c", "d")
SPANS = st.lists(
    st.tuples(
        st.sampled_from(KEYS),
        st.sampled_from([0.05, 1.0, 1.25, 8.0]),
        st.integers(0, 20_000),  # begins, in ticks
        st.sampled_from([1, 10, 500, 3000]),  # lasts
    ),
    max_size=14,
)


def spent(spans: list[tuple[str, float, int, int]], at: int) -> dict[str, float]:
    """Return what each key has used until *at*, decayed: the integral of its rate, worked out span by span."""
    amounts: dict[str, float] = {}
    for key, rate, begins, lasts in spans:
        if begins <= at:
            ends = min(begins + lasts, at)
            amount = rate * (2.0 ** ((ends - at) / 1000) - 2.0 ** ((begins - at) / 1000))
            amounts[key] = amounts.get(key, 0.0) + amount
    return amounts


@given(SPANS, st.lists(st.integers(0, 30_000), max_size=4), st.sets(st.sampled_from(KEYS), min_size=1))
def test_the_kept_sums_are_the_integral(spans, asked, waiting):
    """Whenever it is asked for, a factor is that of the decayed integral of what ran, also long after a reference."""
    shares = Shares()
    events = [(begins, 1, key, rate, True) for key, rate, begins, _ in spans]
    events += [(begins + lasts, 0, key, rate, False) for key, rate, begins, lasts in spans]
    events += [(at, 2, "", 0.0, False) for at in asked]
    for at, kind, key, rate, starts in sorted(events):
        if kind < 2:
            shares.change(key, rate if starts else -rate, NOW + at * TICK)
            continue
        amounts = spent(spans, at)
        active = waiting | {key for key, _, begins, lasts in spans if begins <= at < begins + lasts}
        total = sum(amounts.values())
        found = shares.factors(NOW + at * TICK, active)
        if not total:
            assert found == dict.fromkeys(active, 1.0)
            continue
        near = any(0.999 < amount / total * 1000 < 1.001 for amount in amounts.values())
        counted = active | {key for key, amount in amounts.items() if amount > total / 1000}
        for key in active:
            level = amounts.get(key, 0.0) / total * len(counted)
            assert near or found[key] == pytest.approx(max(2 ** (0.5 * (1 - level)), LEAST), rel=1e-6)


def test_what_is_long_past_counts_no_more():
    """Who has used next to nothing in comparison is nobody to be fair to, and a year later everybody begins anew."""
    shares = Shares()
    for key, rate in (("a", 1.0), ("b", 1e-5)):
        shares.change(key, rate, NOW)
        shares.change(key, -rate, NOW + 10 * S)
    assert shares.factors(NOW + 20 * S, ["a"]) == {"a": pytest.approx(1.0, rel=1e-4)}
    year = NOW + 365 * 86400 * S
    shares.change("c", 1.0, year)
    assert shares.factors(year + S, ["a", "c"])["a"] == pytest.approx(2**0.5)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 500), st.integers(0, 300)), max_size=10),
    st.lists(st.integers(0, 900), min_size=1, max_size=9),
    st.randoms(use_true_random=False),
)
def test_own_service_is_the_sum_over_the_runs(spans, asked, dice):
    """In whatever order the starts and ends come, the amount until an instant is what the runs had until then."""
    served, events = Served(), []
    for units, begins, lasts in spans:
        events += [(units, begins), (-units, begins + lasts)]
    dice.shuffle(events)
    for units, at in events:
        served.turn(units, NOW + at)
    for at in asked:
        amount = sum(units * (min(begins + lasts, at) - begins) for units, begins, lasts in spans if begins < at)
        assert served.until(NOW + at) == served.copy().until(NOW + at) == amount


def test_own_service_takes_little_memory_and_stays_right_to_a_hundredth_of_an_age():
    """Of 60,000 runs a few thousand points stay; what is long past is off by a hundredth of its age at most."""
    served = Served()
    runs = 60_000
    for number in range(runs):
        served.turn(1, NOW + 100 * number)
        served.turn(-1, NOW + 100 * number + 50)
    assert len(served._times) < 10_000
    now = NOW + 100 * runs
    assert served.until(now) == 50 * runs
    for number in (0, 7, 1000, 30_000, runs - 1):
        at = NOW + 100 * number
        assert abs(served.until(at) - 50 * number) <= (now - at) / 100


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 400)), max_size=60))
def test_later_work_is_a_plain_sum(works):
    """Whatever ends in whatever order, the work that passed a job is that of all that arrived after it."""
    passed = PassedWork()
    for number, (arrived_at_ns, work) in enumerate(works, 1):
        passed.add(arrived_at_ns, work)
        assert passed.later(arrived_at_ns) == sum(each for at, each in works[:number] if at > arrived_at_ns)


def test_passed_work_takes_little_memory_and_is_never_too_much():
    """Of 60,000 runs a few thousand sums stay; work that arrived within a fortieth of its age may be left out."""
    passed, runs = PassedWork(), 60_000
    for number in range(runs):
        passed.add(NOW + 100 * number, 1)
    assert len(passed) < 10_000
    for number in (0, 7, 1000, 30_000, runs - 1):
        exact = runs - 1 - number
        assert 0 <= exact - passed.later(NOW + 100 * number) <= (runs - number) / 40
