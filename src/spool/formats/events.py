"""Events as text: the lines of `events.jsonl`, and the `SPOOL_*` variables that a hook finds (FORMAT 15).

A line has everything, also whom a job wants told; it is for the listeners of this program, in a file that only the
owner can read. What programs of others are given is made by `facts`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec

from spool.core.events import Event
from spool.formats.state import escaped
from spool.formats.wrapper import resource_variables


class _Base(msgspec.Struct, frozen=True):
    base: int


_base = msgspec.json.Decoder(_Base)
_decoder = msgspec.json.Decoder(Event)
_encoder = msgspec.json.Encoder()
_NAMES = tuple((field.name, field.default) for field in fields(Event))


def render_event(event: Event) -> bytes:
    """Return *event* as one line of JSON. What is unknown is absent."""
    found = {name: value for name, default in _NAMES if (value := getattr(event, name)) != default}
    try:
        return _encoder.encode(found) + b"\n"
    except UnicodeEncodeError:  # a file name in a reason
        return _encoder.encode(escaped(msgspec.to_builtins(found))) + b"\n"


def parse_event(line: bytes) -> Event | None:
    """Return the event of a line; None if it cannot be read (a power cut may leave half of one)."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def render_base(position: int) -> bytes:
    """Return the first line of the file: the position of the byte after it."""
    return _encoder.encode({"version": 1, "base": position}) + b"\n"


def parse_base(data: bytes) -> int | None:
    """Return the position that the first line of *data* says; None if it says none."""
    try:
        return _base.decode(data.partition(b"\n")[0]).base
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def render_cursor(position: int, tries: int) -> bytes:
    """Return how far a listener has come: all before *position* is done, what stands there was begun *tries* times."""
    return f"{position} {tries}\n".encode()


def parse_cursor(data: bytes | None) -> tuple[int, int] | None:
    """Return the position and the tries of a cursor; None if it cannot be read."""
    words = (data or b"").split()
    if not words or not all(word.isdigit() for word in words):
        return None
    return int(words[0]), int(words[1]) if len(words) > 1 else 0


def variables(event: Event) -> dict[str, str]:
    """Return what a hook finds in its environment. What is unknown is absent."""
    result, grant = event.result, event.grant
    found: dict[str, Any] = {
        "SPOOL_DIR": event.spool_dir,
        "SPOOL_EVENT": event.name.value,
        "SPOOL_EVENT_ID": event.id,
        "SPOOL_HOST": event.host,
        "SPOOL_REASON": event.reason or None,
        "SPOOL_JOB": event.job,
        "SPOOL_RUN": event.run,
        "SPOOL_ATTEMPT": event.attempt,
        "SPOOL_METADIR": event.metadir,
        "SPOOL_USER": event.user,
        "SPOOL_PROJECT": event.project,
        "SPOOL_GROUP": event.group,
        "SPOOL_RESERVATION": event.reservation,
        "SPOOL_GPU": event.gpu,
    }
    if grant is not None:
        found |= {"SPOOL_CPUS": grant.cpus, "SPOOL_GPUS": len(grant.gpu_uuids)}
        found |= resource_variables(grant)
    if result is not None:
        found |= {
            "SPOOL_OUTCOME": result.outcome.value,
            "SPOOL_EXIT_CODE": result.exit_code,
            "SPOOL_AGAIN": result.again,
        }
    return {name: str(value).replace("\0", "") for name, value in found.items() if value is not None}
