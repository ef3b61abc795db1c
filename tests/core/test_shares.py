"""The sums of fair share, own service and passed work, kept step by step, against sums and integrals made anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.planning import NOW, S
from spool.core import priority
from spool.core.priority import LEAST, PassedWork, Served, Shares, Work

HALF_LIFE = 1000 * S
KEYS = ("a", "b", "c", "d")
SPANS = st.lists(
    st.tuples(
        st.sampled_from(KEYS),
        st.sampled_from([0.05, 1.0, 1.25, 8.0]),
        st.integers(0, 20_000),  # begins, in seconds
        st.sampled_from([1, 10, 500, 3000]),  # lasts
    ),
    max_size=14,
)


def used(spans: list[tuple[str, float, int, int]], at: int) -> dict[str, float]:
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
    shares = Shares(HALF_LIFE)
    events = [(begins, 1, key, rate, True) for key, rate, begins, _ in spans]
    events += [(begins + lasts, 0, key, rate, False) for key, rate, begins, lasts in spans]
    events += [(at, 2, "", 0.0, False) for at in asked]
    for at, kind, key, rate, starts in sorted(events):
        if kind < 2:
            (shares.begin if starts else shares.end)(key, rate, NOW + at * S)
            continue
        amounts = used(spans, at)
        active = waiting | {key for key, _, begins, lasts in spans if begins <= at < begins + lasts}
        total = sum(amounts.values())
        found = shares.factors(NOW + at * S, active)
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
    shares = Shares(HALF_LIFE)
    for key, rate in (("a", 1.0), ("b", 1e-5)):
        shares.begin(key, rate, NOW)
        shares.end(key, rate, NOW + 10 * S)
    assert shares.factors(NOW + 20 * S, ["a"]) == {"a": pytest.approx(1.0, rel=1e-4)}
    year = NOW + 365 * 86400 * S
    shares.begin("c", 1.0, year)
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


HOUR = 3600 * S
WHOLE = Work(4, 100, 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 60), st.builds(Work, *[st.integers(0, 400).map(lambda n: n * HOUR)] * 3)),
        st.tuples(st.integers(0, 60), st.sampled_from([(0,), (1,), (2,), (0, 2), ()])),
    ),
    max_size=60,
)


@pytest.fixture(scope="module", autouse=True)
def few_are_kept() -> Iterator[None]:
    """Let little be recent, so that what comes is put in order often, and little be remembered."""
    before = priority._RECENT, priority._FOLD
    priority._RECENT, priority._FOLD = 5, 30
    yield
    priority._RECENT, priority._FOLD = before


@given(STEPS)
def test_the_kept_sums_are_those_made_anew(steps):
    """Whatever ends in whatever order: the later work, and whether it is too much, are those of a plain sum."""
    kept, works = PassedWork(), []
    for number, (hour, what) in enumerate(steps):
        arrived_at_ns = NOW + hour * HOUR
        if isinstance(what, Work):
            kept.add(arrived_at_ns, what)
            works.append((arrived_at_ns, what))
            continue
        later = [sum(work[pool] for at, work in works if at > arrived_at_ns) for pool in range(3)]
        assert kept.later(arrived_at_ns) == Work(*later)
        now_ns = NOW + 60 * HOUR + number * 2 * HOUR  # time goes on, and with it how much is too much
        waited_ns = now_ns - arrived_at_ns
        enough = max(8 * HOUR, 0.15 * waited_ns)
        too_much = waited_ns > 8 * HOUR and any(later[pool] > enough * WHOLE[pool] for pool in what)
        assert kept.is_passed(arrived_at_ns, now_ns, WHOLE, what) == too_much


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 400)), max_size=200),
    st.lists(st.integers(0, 60), max_size=8),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 400)), max_size=40),
)
def test_what_is_folded_makes_no_difference_to_whoever_may_ask(before, asked, after):
    """Folded for the jobs that there are, the later work of each of them stays exact, also with what ends after that.

    For a job that arrives later it is exact too, and for any other instant never too much; and of what was folded no
    more is kept than a sum between each two of them.
    """
    kept = PassedWork()
    for arrived_at_ns, cpus in before:
        kept.add(arrived_at_ns, Work(cpus, 2 * cpus, 1))
    kept.fold(iter(asked))
    assert len(kept) <= len(set(asked)) + 1
    for arrived_at_ns, cpus in after:
        kept.add(arrived_at_ns, Work(cpus, 2 * cpus, 1))
    for instant in range(-1, 63):
        works = [Work(cpus, 2 * cpus, 1) for at, cpus in before + after if at > instant]
        exact = Work(*(sum(work[pool] for work in works) for pool in range(3)))
        if instant in asked or instant > 60 or instant == -1:
            assert kept.later(instant) == exact
        assert all(known <= right for known, right in zip(kept.later(instant), exact, strict=True))


def test_memory_follows_the_jobs_that_there_are():
    """Folded whenever it is long, what is kept does not grow with the runs that have ended."""
    kept, lengths = PassedWork(), []
    for number in range(20 * priority._FOLD):
        kept.add(NOW + number, Work(1, 1, 1))
        if kept.is_long:
            lengths.append(len(kept))
            kept.fold([NOW, NOW + number // 2])
    assert len(lengths) > 5
    assert max(lengths) <= priority._FOLD + priority._RECENT + 10
