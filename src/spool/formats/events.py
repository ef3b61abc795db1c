"""Events as text: lines of `events.jsonl`, the input of hooks (FORMAT 15), and messages to the listeners' process.

A line has everything, including the job's recipients; it is for spool's own listeners, in a file that only the owner
can read. Other programs get `facts`, one JSON object, and hooks get `SPOOL_*` variables. Unknown values are absent
there, and the names are those of `history.jsonl`. A job's recipients are left out, because addresses may hold secrets.

A message is one JSON object a line. The dispatcher sends `subscribe` (the listeners to run), `available` (there are
events) and `review` (may this be done?). The process sends `ready` (the events that it wants to receive or to review,
and its problems), `step_begun` (it is at work) and `reply`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec

from spool.core.model import Answer, Event, Grant, Request, Reservation
from spool.formats.run_records import HISTORY
from spool.formats.wire import Form, Table, decoded, json_line, render_instant
from spool.formats.wrapper import resource_variables

_OF_RESULT = (
    *("outcome", "ended_at", "ended_at_is", "exit_code", "signal", "peak_memory_bytes", "cpu_time_ms", "node"),
    *("gpu_use", "requeues", "again", "again_at", "started_at", "submitted_at"),
)


class _Base(msgspec.Struct, frozen=True):
    base: int


_base = msgspec.json.Decoder(_Base)
_decoder = msgspec.json.Decoder(Event)


render = render_event = render_facts = json_line
"""A message, an event, or its facts, as JSON on a line. Unknown values are absent."""


parse_event = partial(decoded, _decoder)
"""Return the event of a line; None if it cannot be read (a power cut may leave half of one)."""


def render_base(position: int) -> bytes:
    """Return the first line of the file: the position of the byte after it."""
    return json_line({"version": 1, "base": position})


def parse_base(data: bytes) -> int | None:
    """Return the position in the first line of *data*; None if it has none."""
    found = decoded(_base, data.partition(b"\n")[0])
    return None if found is None else found.base


def render_cursor(position: int, tries: int) -> bytes:
    """Return a listener's cursor: everything before *position* is done, and its event was tried *tries* times."""
    return f"{position} {tries}\n".encode()


def parse_cursor(data: bytes | None) -> tuple[int, int] | None:
    """Return the position and the tries of a cursor; None if it cannot be read."""
    words = (data or b"").split()
    if not words or not all(word.isdigit() for word in words):
        return None
    return int(words[0]), int(words[1]) if len(words) > 1 else 0


_VARIABLES = {"DIR": "spool_dir", "EVENT": "name", "EVENT_ID": "id"}
_VARIABLES |= {name.upper(): name for name in ("host", "job", "run", "attempt", "metadir", "engine_id", "user")}
_VARIABLES |= {name.upper(): name for name in ("project", "group", "reservation", "gpu")}
"""The variables of a hook, without SPOOL_, and the fields of the event that they have."""


def variables(event: Event) -> dict[str, str]:
    """Return the environment variables of a hook. Unknown values are absent."""
    result, grant = event.result, event.grant
    found: dict[str, Any] = {f"SPOOL_{name}": getattr(event, field) for name, field in _VARIABLES.items()}
    found["SPOOL_REASON"] = event.reason or None
    if grant is not None:
        found |= {"SPOOL_CPUS": grant.cpus, "SPOOL_GPUS": grant.gpu_count}
        found |= {"SPOOL_CPU_LIST": grant.cpu_list or None}
        found |= resource_variables(grant)
    if result is not None:
        found |= {
            "SPOOL_OUTCOME": result.outcome.value,
            "SPOOL_EXIT_CODE": result.exit_code,
            "SPOOL_AGAIN": result.again,
        }
    return {name: str(value).replace("\0", "") for name, value in found.items() if value is not None}


def facts(event: Event) -> dict[str, Any]:
    """Return the known facts of *event*, ready for JSON."""
    found = _FACTS.to_json(event)
    if event.result is not None:
        line = HISTORY.to_json(event.result)
        found |= {key: line[key] for key in _OF_RESULT if key in line and key not in found}
    return found


def _tables(value: Request | Grant | Reservation) -> dict[str, Any]:
    found: dict[str, Any]
    if isinstance(value, Reservation):
        times = {"start": render_instant(value.start_at_ns), "end": render_instant(value.end_at_ns)}
        found = {"gpus": value.gpu_count, "gpu_indices": value.gpu_indices, **times, "comment": value.comment}
    else:
        found = msgspec.structs.asdict(value)
    found.pop("gpus_elsewhere", None)  # the request has it
    found["cpu_list"] = found.get("cpu_list") or None
    for mark in found.keys() & {"memory_auto", "gpu_memory_auto"}:
        found[mark] = found[mark] or None
    if len(found.get("gpu_types", ())) == 1:
        (found["gpu_type"],) = found.pop("gpu_types")  # as in the history
    for key in found.keys() & {"resources", "resource_indices"}:
        found[key] = dict(found[key])
    return {key: value for key, value in found.items() if value is not None and value not in ((), {})}


_FACTS = Table(
    "the facts of an event",
    Event,
    """
    id event=name:word time=at_ns:instant host version spool_dir reason job array=is_array run attempt user project
    group tags executor engine_id metadir request:tables grant:tables submitted_at started_at reservation
    reserved:tables gpu keys:plain
    """,
    word=Form(str, attrgetter("value")),
    tables=Form(dict, _tables),
    plain=Form(dict, dict),
)


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


Message = Subscribe | Available | Review | Ready | StepBegun | Reply
_message: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def plain_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return *keys* of TOML as they arrive at the other side: dates and times as texts."""
    return msgspec.json.decode(json_line(keys), type=dict[str, Any])


read = partial(decoded, _message)
"""Return the message in a line; None if it cannot be read."""
