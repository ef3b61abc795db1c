"""The messages between the dispatcher and the process of the listeners: one JSON object a line.

The dispatcher sends `subscribe` (the listeners to run), `available` (there are events) and `review` (may this be
done?). The process sends `ready` (the events that it wants to receive or to review, and its problems), `step_begun` (it
is at work) and `reply`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from spool.core.events import Answer, Event
from spool.formats.state import decoded

_encoder = msgspec.json.Encoder()

AT_ONCE = 8
"""The most reviews in progress: no more are sent before one is done, and the process begins each at once."""


class Subscribe(msgspec.Struct, frozen=True, tag="subscribe", tag_field="is"):
    """The listeners to run."""

    kinds: tuple[str, ...]


class Available(msgspec.Struct, frozen=True, tag="available", tag_field="is"):
    """There are events to read, up to that position; they are completely on the disk."""

    position: int


class Review(msgspec.Struct, frozen=True, tag="review", tag_field="is"):
    """A question whether the action of the event may be done.

    Before the question, the listeners get all events about the same job from *after* on.
    """

    number: int
    event: Event
    after: int = 0


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="is"):
    """The process is ready for reviews."""

    wants: tuple[str, ...]  # events that listeners other than the hooks receive
    problems: tuple[str, ...] = ()


class StepBegun(msgspec.Struct, frozen=True, tag="step_begun", tag_field="is"):
    """The process begins a step of a review: each hook is one.

    The next step, or the end, comes within that time plus the overhead of a step.
    """

    within_ns: int
    number: int  # of the review


class Reply(msgspec.Struct, frozen=True, tag="reply", tag_field="is"):
    """The answer to a review."""

    number: int
    answer: Answer = Answer()


ToListeners = Subscribe | Available | Review
ToDispatcher = Ready | StepBegun | Reply
_to_listeners: msgspec.json.Decoder[ToListeners] = msgspec.json.Decoder(ToListeners)
_to_dispatcher: msgspec.json.Decoder[ToDispatcher] = msgspec.json.Decoder(ToDispatcher)


def plain_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return *keys* of TOML as they arrive at the other side: dates and times as texts."""
    return msgspec.json.decode(_encoder.encode(keys), type=dict[str, Any])


def render(message: ToListeners | ToDispatcher) -> bytes:
    """Return a message as a line."""
    return _encoder.encode(message) + b"\n"


def read_by_listeners(line: bytes) -> ToListeners | None:
    """Return the message of the dispatcher; None if it cannot be read."""
    return decoded(_to_listeners, line)


def read_by_dispatcher(line: bytes) -> ToDispatcher | None:
    """Return the message of the process; None if it cannot be read."""
    return decoded(_to_dispatcher, line)
