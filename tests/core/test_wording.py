"""Events in words."""

from __future__ import annotations

from dataclasses import replace

from spool.core.events import Event, EventName
from spool.core.model import SECOND_NS, Grant, Result, State
from spool.core.wording import body, headline

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
        "ran: 1 h 25 m\n"
        "waited: 10 m 00 s\n"
        "memory: 3 GiB of 4 GiB\n"
        "CPU time: 2 h 50 m\n"
        "GPUs: 0, 2\n"
        "resources: licence 1, tpu 2 (0, 3)\n"
        "metadir: /s/jobs/train/3\n"
        "\nThe end of its log:\n\nKilled\n"
    )
