"""An event as the JSON object that programs are given: hooks on their standard input, web hooks as the body.

What is unknown is absent. The names are those of `history.jsonl`. What a job says of whom to tell is in none of it,
for addresses may hold secrets.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from msgspec import json

from spool.core.events import Event
from spool.core.model import Grant, Request
from spool.formats.timestamps import render_instant

_NS_PER_MS = 1_000_000
_SIGNALLED = 128


def facts(event: Event) -> dict[str, Any]:
    """Return what is known of *event*, ready to be made JSON."""
    result = event.result
    found: dict[str, Any] = {
        "id": event.id,
        "event": event.name.value,
        "time": render_instant(event.at_ns),
        "host": event.host,
        "version": event.version,
        "spool_dir": event.spool_dir,
        "reason": event.reason or None,
        "job": event.job,
        "array": event.is_array or None,
        "run": event.run,
        "attempt": event.attempt,
        "user": event.user,
        "project": event.project,
        "group": event.group,
        "tags": list(event.tags) or None,
        "executor": event.executor,
        "metadir": event.metadir,
        "request": _tables(event.request),
        "grant": _tables(event.grant),
        "submitted_at": _instant(event.submitted_at_ns),
        "started_at": _instant(event.started_at_ns),
        "reservation": event.reservation,
        "gpu": event.gpu,
    }
    if result is not None:
        code = result.exit_code
        found |= {
            "outcome": result.outcome.value,
            "ended_at": _instant(result.ended_at_ns),
            "exit_code": code,
            "signal": code - _SIGNALLED if code is not None and code > _SIGNALLED else None,
            "peak_memory_bytes": result.peak_memory_bytes,
            "cpu_time_ms": result.cpu_time_ns // _NS_PER_MS if result.cpu_time_ns is not None else None,
            "requeues": result.requeues or None,
            "again": result.again,
            "again_at": _instant(result.again_at_ns),
        }
        found["started_at"] = found["started_at"] or _instant(result.started_at_ns)
        found["submitted_at"] = found["submitted_at"] or _instant(result.submitted_at_ns)
    return _known(found)


def render_facts(found: dict[str, Any]) -> bytes:
    """Return facts as JSON, one object on one line."""
    return json.encode(found) + b"\n"


def _tables(value: Request | Grant | None) -> dict[str, Any] | None:
    if value is None:
        return None
    found = asdict(value)
    for key in found.keys() & {"resources", "resource_indices"}:
        found[key] = dict(found[key])
    return _known(found)


def _known(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if value is not None and value not in ((), {})}


def _instant(at_ns: int | None) -> str | None:
    return None if at_ns is None else render_instant(at_ns)
