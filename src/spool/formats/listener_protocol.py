"""What the dispatcher and the process of the listeners say to each other: one JSON object a line.

The dispatcher: `subscribe` (who is to listen), `available` (there are events), `review` (may this be done?). The
process: `ready` (what it wants to hear of and to be asked about, and what is wrong), `step_begun` (it is at work) and
`reply`.
"""

from __future__ import annotations

import msgspec

from spool.core.events import Answer, Event

_encoder = msgspec.json.Encoder()

AT_ONCE = 8
"""Reviews that may be open: no more are asked for before one is done, and the process begins each at once."""


class Subscribe(msgspec.Struct, frozen=True, tag="subscribe", tag_field="is"):
    """Who is to listen."""

    kinds: tuple[str, ...]


class Available(msgspec.Struct, frozen=True, tag="available", tag_field="is"):
    """There are events to be read, up to that position: what they tell of has come to its end on the disk."""

    position: int


class Review(msgspec.Struct, frozen=True, tag="review", tag_field="is"):
    """Whether what the event says may be done.

    Who is asked has been told before of all about the same job that stands before *after* among the events.
    """

    number: int
    event: Event
    after: int = 0


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="is"):
    """The process can be asked."""

    wants: tuple[str, ...]  # events that listeners other than the hooks want to hear
    asks: tuple[str, ...]  # events that need an answer from listeners other than the hooks
    problems: tuple[str, ...] = ()


class StepBegun(msgspec.Struct, frozen=True, tag="step_begun", tag_field="is"):
    """The process begins a step of its work on a review, or of getting ready: each hook and each plugin is one.

    The next step, or the end, comes within that time and what it takes to begin and to end one.
    """

    within_ns: int
    number: int = 0  # of the review; 0: it is getting ready


class Reply(msgspec.Struct, frozen=True, tag="reply", tag_field="is"):
    """What was said in a review."""

    number: int
    answer: Answer = Answer()


ToListeners = Subscribe | Available | Review
ToDispatcher = Ready | StepBegun | Reply
_to_listeners: msgspec.json.Decoder[ToListeners] = msgspec.json.Decoder(ToListeners)
_to_dispatcher: msgspec.json.Decoder[ToDispatcher] = msgspec.json.Decoder(ToDispatcher)


def render(message: ToListeners | ToDispatcher) -> bytes:
    """Return a message as a line."""
    return _encoder.encode(message) + b"\n"


def read_by_listeners(line: bytes) -> ToListeners | None:
    """Return what the dispatcher says; None if it cannot be read."""
    try:
        return _to_listeners.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_by_dispatcher(line: bytes) -> ToDispatcher | None:
    """Return what the process says; None if it cannot be read."""
    try:
        return _to_dispatcher.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
