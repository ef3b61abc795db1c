"""What events add up to."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spool.core.model import SECOND_NS, Event, EventName, Grant, Result, State
from spool.extras.metrics.listener import BOUNDS_NS, Histogram, Sums

RESULT = Result(
    job="train",
    run=1,
    attempt=1,
    outcome=State.FAILED,
    reason="exit code 3",
    submitted_at_ns=0,
    started_at_ns=30 * SECOND_NS,
    ended_at_ns=90 * SECOND_NS,
    cpu_time_ns=100 * SECOND_NS,
    grant=Grant(2, None, ("GPU-a", "GPU-b"), (0, 1)),
)
EVENT = Event(id="0", name=EventName.QUEUED, at_ns=0, host="box", version="1", spool_dir="/s", job="train")
STARTED = replace(
    EVENT, id="1", name=EventName.STARTED, run=1, attempt=1, submitted_at_ns=0, started_at_ns=30 * SECOND_NS
)
RETRYING = replace(EVENT, id="2", name=EventName.RETRYING, run=1, attempt=1, result=replace(RESULT, again="retry"))
FAILED = replace(EVENT, id="3", name=EventName.FAILED, run=2, attempt=2, result=replace(RESULT, run=2, attempt=2))


def sums(*events: Event) -> Sums:
    """Return what *events* add up to."""
    made = Sums()
    for event in events:
        made.take(event)
    return made


def test_a_life_of_a_job_is_counted() -> None:
    """One submission, one wait, two runs, one retry, one outcome; CPU and GPU time of both runs."""
    told = sums(EVENT, STARTED, RETRYING, FAILED)
    assert told.submissions == 1
    assert told.outcomes == {"failed": 1}
    assert told.again == {"retry": 1}
    assert (sum(told.waits.counts), told.waits.sum_ns) == (1, 30 * SECOND_NS)
    assert {word: (sum(runs.counts), runs.sum_ns) for word, runs in told.runs.items()} == {
        "failed": (2, 120 * SECOND_NS)
    }
    assert (told.cpu_ns, told.gpu_ns) == (200 * SECOND_NS, 240 * SECOND_NS)


def test_gpus_of_an_engine_count_as_many_as_were_asked_for() -> None:
    """Only the engine knows which they were."""
    assert sums(replace(FAILED, result=replace(RESULT, grant=Grant(1, gpus_elsewhere=3)))).gpu_ns == 3 * 60 * SECOND_NS


def test_what_is_told_again_counts_once() -> None:
    """At least once is how events are told; once is how they are counted."""
    once, often = sums(EVENT, STARTED, RETRYING, FAILED), sums(*[EVENT, STARTED, RETRYING, FAILED] * 3)
    for name in ("submissions", "outcomes", "again", "cpu_ns", "gpu_ns"):
        assert getattr(once, name) == getattr(often, name)
    assert once.waits.counts == often.waits.counts


def test_a_run_too_short_to_be_seen_to_start_has_waited_too() -> None:
    """Its wait is known when it ends; one that was told of before is not counted again."""
    ended = replace(FAILED, id="9", run=1, attempt=1, result=RESULT)
    assert sums(ended).waits.sum_ns == 30 * SECOND_NS
    assert sum(sums(STARTED, ended).waits.counts) == 1


def test_a_job_that_never_started_has_an_outcome_and_no_run() -> None:
    """Cancelled while it waited: it is in no histogram."""
    result = replace(RESULT, outcome=State.CANCELLED, started_at_ns=None, cpu_time_ns=None)
    told = sums(replace(EVENT, id="8", name=EventName.CANCELLED, result=result))
    assert told.outcomes == {"cancelled": 1}
    assert not told.runs
    assert not sum(told.waits.counts)


def test_a_histogram_puts_a_bound_into_its_own_bucket() -> None:
    """At most so long, as Prometheus counts; a clock that was set back gives nothing below zero."""
    histogram = Histogram()
    for duration in (-5, BOUNDS_NS[0], BOUNDS_NS[0] + 1, BOUNDS_NS[-1] + 1):
        histogram.add(duration)
    assert histogram.counts == [2, 1, *[0] * (len(BOUNDS_NS) - 2), 1]
    assert histogram.sum_ns == 2 * BOUNDS_NS[0] + 1 + BOUNDS_NS[-1] + 1


def test_what_was_seen_is_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of repeats is bounded."""
    monkeypatch.setattr("spool.extras.metrics.listener._REMEMBERED", 2)
    assert sums(*(replace(EVENT, id=key) for key in "12131")).submissions == 4
