"""Who is told of which event."""

from __future__ import annotations

import pytest

from spool.core.events import Event, EventName
from spool.core.model import Notify
from spool.core.notices import ENDS, EVENT_WORDS, JOB_WORDS, NotifyRule, addressees, concerns


def event(name: EventName = EventName.FAILED, **facts: object) -> Event:
    """Return an event of the job `train-1` of bob's."""
    known = {"job": "train-1", "run": 1, "user": "bob", "project": "vision"} | facts
    return Event(id="x", name=name, at_ns=0, host="box", version="1", spool_dir="/s", **known)  # type: ignore[arg-type]


def test_ended_means_every_outcome_and_nothing_else() -> None:
    """The word of the first version still means what it says, and `retried` is the event `retrying`."""
    assert {name for name in EventName if concerns(["ended"], name)} == ENDS
    assert {name for name in EventName if concerns(["retried"], name)} == {EventName.RETRYING}
    assert {name for name in EventName if concerns(["started", "held"], name)} == {EventName.STARTED, EventName.HELD}


def test_every_event_but_the_look_has_a_word() -> None:
    """All that happens can be asked for, in a job file all that happens to jobs; `polling` is for hooks alone."""
    assert {name.value for name in EventName} - set(EVENT_WORDS) == {"polling"}
    assert set(EVENT_WORDS) - set(JOB_WORDS) == {
        "reservation_started", "reservation_ended", "gpu_free", "dispatcher_started", "dispatcher_stopped",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "fits"),
    [
        (NotifyRule(("a",)), True),
        (NotifyRule(("a",), on=("finished",)), False),
        (NotifyRule(("a",), users=("alice", "b*")), True),
        (NotifyRule(("a",), users=("Bob",)), False),
        (NotifyRule(("a",), projects=("vis?on",)), True),
        (NotifyRule(("a",), names=("train-*",), projects=("nlp",)), False),
        (NotifyRule(("a",), names=("train",)), False),
    ],
)
def test_a_rule_fits_where_every_filter_does(rule: NotifyRule, fits: bool) -> None:
    """One pattern of each filter has to fit; a filter that is not there lets all through."""
    assert rule.fits(event()) is fits


def test_what_has_no_user_fits_no_filter_by_user() -> None:
    """Who asks for bob's events is not told that a GPU is free."""
    free = event(EventName.GPU_FREE, job=None, user=None, project=None)
    assert NotifyRule(("a",), on=("gpu_free",)).fits(free)
    assert not NotifyRule(("a",), on=("gpu_free",), users=("*",)).fits(free)
    booked = event(EventName.RESERVATION_STARTED, job=None, reservation="demo")
    assert NotifyRule(("a",), on=("reservation_started",), names=("demo",)).fits(booked)


def test_each_address_is_told_once() -> None:
    """A job's own wish and the rules come together, with the most lines of log that anybody asked for."""
    wish = Notify(("me", "team"), ("ended",), log_lines=5)
    rules = [NotifyRule(("team", "ops"), on=("failed",), log_lines=9), NotifyRule(("never",), users=("alice",))]
    assert addressees(event(notify=wish), rules) == {"me": 5, "team": 9, "ops": 9}
    assert addressees(event(EventName.STARTED, notify=wish), rules) == {}
