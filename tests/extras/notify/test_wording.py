"""Who is told of an event, and in which words."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spool.core.events import Event, EventName
from spool.core.model import SECOND_NS, Grant, Result, State
from spool.extras.notify.listener import body, headline
from spool.extras.notify.settings import Notify, NotifyRule, addressees


def event(name: EventName = EventName.FAILED, **facts: object) -> Event:
    """Return an event of the job `train-1` of bob's."""
    known = {"job": "train-1", "run": 1, "user": "bob", "project": "vision"} | facts
    return Event(id="x", name=name, at_ns=0, host="box", version="1", spool_dir="/s", **known)  # type: ignore[arg-type]


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
    assert addressees(event(wishes={"notify": wish}), rules) == {"me": 5, "team": 9, "ops": 9}
    assert addressees(event(EventName.STARTED, wishes={"notify": wish}), rules) == {}


MINUTE = 60 * SECOND_NS
RESULT = Result(
    job="train",
    run=3,
    attempt=2,
    outcome=State.FAILED,
    reason="exit code 137",
    submitted_at_ns=0,
    started_at_ns=10 * MINUTE,
    ended_at_ns=95 * MINUTE,
    exit_code=137,
    peak_memory_bytes=3 << 30,
    cpu_time_ns=170 * MINUTE,
    grant=Grant(
        4,
        4 << 30,
        ("GPU-a", "GPU-b"),
        (0, 2),
        resources=(("licence", 1), ("tpu", 2)),
        resource_indices=(("tpu", (0, 3)),),
    ),
)
FAILED = Event(
    id="1",
    name=EventName.FAILED,
    at_ns=95 * MINUTE,
    host="box",
    version="1",
    spool_dir="/s",
    reason="exit code 137",
    job="train",
    run=3,
    attempt=2,
    user="bob",
    project="vision",
    result=RESULT,
    metadir="/s/jobs/train/3",
)


def test_the_headline_says_what_happened_to_what() -> None:
    """One line is enough on a telephone: the job, what became of it, and why."""
    assert headline(FAILED) == "train has failed: exit code 137"
    cancelled = replace(FAILED, name=EventName.CANCELLED, reason="cancelled by bob: no more room")
    assert headline(cancelled) == "train was cancelled by bob: no more room"
    assert headline(replace(FAILED, name=EventName.FINISHED, reason="exit code 0")) == "train has finished"
    there = replace(FAILED, name=EventName.SUBMITTED, reason="", executor="far", result=None)
    assert headline(there) == "train is on its way to far"
    there = replace(there, name=EventName.HANDED_OVER, reason="far has it as job 4711")
    assert headline(there) == "train was handed over: far has it as job 4711"


def test_every_event_has_its_words() -> None:
    """No event is told by its bare name, whatever it is about."""
    for name in EventName:
        for about in ({"job": "j"}, {"reservation": "r"}, {"gpu": "GPU-a"}, {}):
            event = Event(id="1", name=name, at_ns=0, host="box", version="1", spool_dir="/s", **about)  # type: ignore[arg-type]
            assert len(headline(event).split()) >= 2
            assert "None" not in headline(event) + body(event)


def test_the_body_has_the_facts_a_line_each() -> None:
    """What a person would look up next: which run, how long, with how much, where, and the end of its log."""
    assert body(FAILED, "Killed") == (
        "run: 3 (attempt 2)\n"
        "user: bob, project vision\n"
        "host: box\n"
        "time: 1970-01-01 01:35:00 UTC\n"
        "exit code: 137 (signal 9)\n"
        "ran: 1h25m\n"
        "waited: 10m00s\n"
        "memory: 3 GiB of 4 GiB\n"
        "CPU time: 2h50m\n"
        "GPUs: 0, 2\n"
        "resources: licence 1, tpu 2 (0, 3)\n"
        "metadir: /s/jobs/train/3\n"
        "\nThe end of its log:\n\nKilled\n"
    )
