"""Sums of the work by which later arrivals have passed a job, against sums made anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.planning import NOW, S
from spool.core import fairness
from spool.core.fairness import PassedWork, Work

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
    before = fairness._RECENT, fairness._FOLD
    fairness._RECENT, fairness._FOLD = 5, 30
    yield
    fairness._RECENT, fairness._FOLD = before


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
    for number in range(20 * fairness._FOLD):
        kept.add(NOW + number, Work(1, 1, 1))
        if kept.is_long:
            lengths.append(len(kept))
            kept.fold([NOW, NOW + number // 2])
    assert len(lengths) > 5
    assert max(lengths) <= fairness._FOLD + fairness._RECENT + 10
