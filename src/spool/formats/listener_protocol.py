"""What the dispatcher and the process of the listeners say to each other: one JSON object a line.

The dispatcher: `kinds` (who is to listen), `more` (there are events), `ask` (may this be done?). The process: `hello`
(what it wants to hear of and to be asked about, and what is wrong), `busy` (it is at work), `answer`.
"""

from __future__ import annotations

import msgspec

from spool.core.events import Event

_encoder = msgspec.json.Encoder()

AT_ONCE = 8
"""Questions that may be open: no more are asked before one is answered, and the process begins each at once."""


class Kinds(msgspec.Struct, frozen=True, tag="kinds", tag_field="is"):
    """Who is to listen."""

    kinds: tuple[str, ...]


class More(msgspec.Struct, frozen=True, tag="more", tag_field="is"):
    """There are events to be read, up to that position: what they tell of has come to its end on the disk."""

    position: int


class Ask(msgspec.Struct, frozen=True, tag="ask", tag_field="is"):
    """Whether what the event says may be done.

    Who is asked has been told before of all about the same job that stands before *after* among the events.
    """

    number: int
    event: Event
    after: int = 0


class Hello(msgspec.Struct, frozen=True, tag="hello", tag_field="is"):
    """Who the process is."""

    wants: tuple[str, ...]  # events that somebody else than the hooks wants to hear of
    asks: tuple[str, ...]  # events that somebody else than the hooks is to be asked about
    problems: tuple[str, ...] = ()


class Busy(msgspec.Struct, frozen=True, tag="busy", tag_field="is"):
    """The process begins a step of its work on a question, or of getting ready: each hook and each plugin is one.

    The next step, or the end, comes within that time and what it takes to begin and to end one.
    """

    within_ns: int
    number: int = 0  # of the question; 0: it is getting ready


class Reply(msgspec.Struct, frozen=True, tag="answer", tag_field="is"):
    """What was said to a question. `no` is why not, in the words of whoever objects."""

    number: int
    no: str | None = None
    init: str = ""
    prep: str = ""
    end: str = ""


Told = Kinds | More | Ask
Said = Hello | Busy | Reply
_told: msgspec.json.Decoder[Told] = msgspec.json.Decoder(Told)
_said: msgspec.json.Decoder[Said] = msgspec.json.Decoder(Said)


def render(message: Told | Said) -> bytes:
    """Return a message as a line."""
    return _encoder.encode(message) + b"\n"


def read_told(line: bytes) -> Told | None:
    """Return what the dispatcher says; None if it cannot be read."""
    try:
        return _told.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_said(line: bytes) -> Said | None:
    """Return what the process says; None if it cannot be read."""
    try:
        return _said.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
