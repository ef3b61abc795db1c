"""The decayed sums of fair share, kept by a number for each start and end, against the integral that they stand for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.planning import NOW, S
from spool.core.fairness import LEAST, Shares

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


@settings(max_examples=200, deadline=None)
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


def test_what_is_kept_does_not_grow_with_the_number_of_runs():
    """Run after run of one user, whom nobody asks about, leaves no trace but the sums."""
    shares = Shares(HALF_LIFE)
    for number in range(1000):
        shares.begin("a", 1.0, NOW + 2 * number * S)
        shares.end("a", 1.0, NOW + (2 * number + 1) * S)
    assert len(shares._heap) == 1
