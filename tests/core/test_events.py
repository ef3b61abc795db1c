"""The words for events."""

from __future__ import annotations

from spool.core.model import ENDS, EVENT_WORDS, JOB_WORDS, EventName, concerns


def test_ended_means_every_outcome_and_nothing_else() -> None:
    """The word of the first version still means what it says, and `retried` is the event `retrying`."""
    assert {name for name in EventName if concerns(["ended"], name)} == ENDS
    assert {name for name in EventName if concerns(["retried"], name)} == {EventName.RETRYING}
    assert {name for name in EventName if concerns(["started", "held"], name)} == {EventName.STARTED, EventName.HELD}


def test_every_event_but_the_look_has_a_word() -> None:
    """All that happens can be asked for, in a job file all that happens to jobs; two are for hooks alone."""
    assert {name.value for name in EventName} - set(EVENT_WORDS) == {"polling", "queueing"}
    assert set(EVENT_WORDS) - set(JOB_WORDS) == {
        "reservation_created", "reservation_cancelled", "reservation_started", "reservation_ended",
        "gpu_taken", "gpu_free", "dispatcher_started", "dispatcher_stopped",
    }  # fmt: skip
