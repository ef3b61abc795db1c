"""Which ends are followed by another run, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.planning import NOW, S, spec
from spool.core.model import OUTCOMES, Retry, State, StopKind
from spool.core.retries import MAX_REQUEUES, Again, again, delay_ns


def after(outcome: State, retry: Retry | None = None, *, code=None, attempt=1, requeues=0, requeue=True, **values):
    """Ask what follows."""
    return again(
        spec(retry=retry or Retry(), requeue=requeue),
        outcome,
        exit_code=code,
        attempt=attempt,
        requeues=requeues,
        ended_at_ns=NOW,
        **values,
    )


def test_without_retry_nothing_but_a_loss_is_repeated():
    """By default only what was lost runs again."""
    assert {outcome for outcome in OUTCOMES if after(outcome)} == {State.LOST}


@pytest.mark.parametrize(("most", "runs"), [(0, 1), (1, 2), (3, 4)])
def test_as_many_tries_as_allowed(most, runs):
    """`max = n` makes n + 1 tries."""
    count, attempt = 1, 1
    while (next_one := after(State.FAILED, Retry(max=most), code=1, attempt=attempt)) is not None:
        count, attempt = count + 1, next_one.attempt
    assert count == runs


def test_on_names_outcomes_and_exit_codes():
    """A run is retried if `on` holds its outcome, or, having failed, its exit code."""
    assert after(State.FAILED, Retry(max=1, on=frozenset({75})), code=75)
    assert not after(State.FAILED, Retry(max=1, on=frozenset({75})), code=1)
    assert not after(State.TIMEOUT, Retry(max=1, on=frozenset({143})), code=143)
    assert after(State.TIMEOUT, Retry(max=1, on=frozenset({"timeout"})), code=143)
    assert not after(State.TIMEOUT, Retry(max=1), code=1)
    assert after(State.OUT_OF_MEMORY, Retry(max=1, on=frozenset({"out_of_memory"})), code=137)
    assert not after(State.CANCELLED, Retry(max=9, on=frozenset({"cancelled", "failed", 1})), code=1)


def test_losses_are_counted_apart():
    """A lost run is repeated at most three times, whatever was retried before, and keeps its attempt."""
    assert after(State.LOST, attempt=7, requeues=2) == Again("requeue", None, 7, 3)
    assert after(State.LOST, requeues=MAX_REQUEUES) is None
    assert after(State.LOST, requeue=False) is None
    retry = Retry(max=1, on=frozenset({"lost"}))
    assert after(State.LOST, retry, requeues=3) == Again("retry", None, 2, 3)
    assert after(State.FAILED, Retry(max=1), requeues=3) == Again("retry", None, 2, 3)


def test_the_delay_grows_up_to_its_limit():
    """Before try n of the repetition: min(delay * backoff^(n-1), max_delay)."""
    retry = Retry(max=9, delay_ns=10 * S, backoff=3.0, max_delay_ns=200 * S)
    assert [delay_ns(retry, number) // S for number in (1, 2, 3, 4, 5, 10**6)] == [10, 30, 90, 200, 200, 200]
    assert after(State.FAILED, retry, attempt=2) == Again("retry", NOW + 30 * S, 3, 0)


def test_what_could_not_start_is_never_tried_at_once():
    """An executor that cannot start is tried again after 1 s, 2 s, 4 s … or the job's own delay if that is longer."""

    def wait(attempt: int, **values: object) -> int:
        found = after(State.FAILED, Retry(max=99, **values), attempt=attempt, could_not_start=True)
        return (found.at_ns - NOW) // S

    assert [wait(n) for n in (1, 2, 3, 60)] == [1, 2, 4, 3600]
    assert wait(1, delay_ns=30 * S) == 30
    assert wait(5, max_delay_ns=0) == 1
    assert after(State.FAILED, could_not_start=True) is None


def test_what_a_person_moved_goes_where_it_was_moved():
    """A running job moved to `queued/` or `held/` goes on there, uncounted."""
    assert after(State.CANCELLED, stopped_by=StopKind.REQUEUE, requeues=3) == Again("requeue", None, 1, 3)
    assert after(State.FAILED, stopped_by=StopKind.HOLD) == Again("hold", None, 1, 0)
    assert after(State.CANCELLED, stopped_by=StopKind.CANCEL) is None


@given(st.integers(0, 10**13), st.floats(0.5, 1e6), st.integers(0, 10**16), st.integers(1, 10**5))
def test_a_delay_is_never_above_its_limit(delay, backoff, most, number):
    """Whatever the numbers, a delay is between nothing and `max_delay`."""
    assert 0 <= delay_ns(Retry(delay_ns=delay, backoff=backoff, max_delay_ns=most), number) <= most
