"""The lines of `.journal`: what the dispatcher has to remember that no job file says (FORMAT 1.10).

A job's place in the queue and its waiting clock; which runs were started and are not over. One JSON array a
line, the word first. A line that cannot be read (a power cut may leave half of one) is passed over: the journal
holds memories, and each of them has a safe default.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec


class Waits(msgspec.Struct, frozen=True, array_like=True, tag="waits", gc=False):
    """A job waits or is parked: its place, and its clock."""

    job: str
    arrived_at_ns: int
    waited_ns_before: int  # on the clock before `clock_at_ns`
    clock_at_ns: int | None  # None: the clock stands (held)


class Left(msgspec.Struct, frozen=True, array_like=True, tag="left", gc=False):
    """A job waits no longer and nothing of it is to be remembered."""

    job: str


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started", gc=False):
    """A run was started (or is about to be: the line comes before the launch)."""

    job: str
    run: int
    boot_id: str
    inode: int  # of the job file
    arrived_at_ns: int
    at_ns: int


class Stopping(msgspec.Struct, frozen=True, array_like=True, tag="stopping", gc=False):
    """A run is being stopped, and the record `stop` of its metadir cannot be written."""

    job: str
    run: int
    kind: str
    by: str
    at_ns: int
    reason: str = ""


class Over(msgspec.Struct, frozen=True, array_like=True, tag="over", gc=False):
    """A run is over and its paperwork is done."""

    job: str
    run: int
    final: bool  # the job's file belongs in done/; False: the job goes on
    outcome: str = ""  # empty: it never started, or it was no run


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told", gc=False):
    """Listeners were told of something that lasts and that no file says, or it is over and nothing to remember."""

    id: str
    over: bool = False


Line = Waits | Left | Started | Stopping | Over | Told
_decoder = msgspec.json.Decoder(Line)
_encoder = msgspec.json.Encoder()


def render(lines: Iterable[Line]) -> bytes:
    """Return *lines* as text, each ended by a newline."""
    return _encoder.encode_lines(lines)


def parse(data: bytes) -> Iterator[Line]:
    """Yield the lines of *data* in their order, without those that cannot be read."""
    for text in data.split(b"\n"):
        if text:
            try:
                yield _decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
