"""An event in words for people: a line that says it all, and some more."""

from __future__ import annotations

from datetime import UTC, datetime

from spool.core.events import Event, EventName
from spool.core.model import SECOND_NS, Result
from spool.core.pools import in_words
from spool.core.units import show_duration, show_size

_SAYS = {
    EventName.QUEUED: "is queued",
    EventName.SUBMITTING: "is about to start",
    EventName.SUBMITTED: "starts",
    EventName.STARTED: "has started",
    EventName.POLLING: "runs",
    EventName.FINISHED: "has finished",
    EventName.FAILED: "has failed",
    EventName.RETRYING: "goes on with another run",
    EventName.CANCELLING: "is about to be cancelled",
    EventName.CANCELLED: "was cancelled",
    EventName.TIMEOUT: "was stopped at its time limit",
    EventName.OUT_OF_MEMORY: "ran out of memory",
    EventName.LOST: "was lost",
    EventName.UNSCHEDULABLE: "could not be scheduled",
    EventName.HELD: "is held",
    EventName.RELEASED: "is released",
    EventName.RESERVATION_STARTED: "has begun",
    EventName.RESERVATION_ENDED: "is over",
    EventName.GPU_FREE: "is free",
    EventName.DISPATCHER_STARTED: "has started",
    EventName.DISPATCHER_STOPPED: "has stopped",
}


def headline(event: Event) -> str:
    """Return *event* as one line: "train has failed: exit code 3"."""
    if event.job is not None:
        subject = event.job
    elif event.reservation is not None:
        subject = f"reservation {event.reservation}"
    elif event.gpu is not None:
        subject = f"GPU {event.gpu}"
    else:
        subject = f"the dispatcher of {event.spool_dir}"
    said = f"{subject} {_SAYS[event.name]}"
    if event.name is EventName.CANCELLED and event.reason.startswith("cancelled "):
        return f"{subject} was {event.reason}"
    # That a run has exit code 0 is what finished means.
    return f"{said}: {event.reason}" if event.reason and event.name is not EventName.FINISHED else said


def body(event: Event, log: str = "") -> str:
    """Return what else there is to say of *event*, a line for each fact, and the last lines of its log."""
    result = event.result
    lines = [("host", event.host), ("time", _moment(event.at_ns))]
    if event.job is not None:
        who = ", ".join(filter(None, [event.user, event.project and f"project {event.project}"]))
        lines = [("run", _run(event)), ("user", who), *lines]
    if result is not None:
        lines += _result(result)
    elif event.started_at_ns is not None and event.submitted_at_ns is not None:
        lines.append(("waited", _span(event.submitted_at_ns, event.started_at_ns)))
    grant = event.grant or (result.grant if result is not None else None)
    if grant is not None and grant.gpu_indices:
        lines.append(("GPUs", ", ".join(map(str, grant.gpu_indices))))
    if grant is not None and grant.resources:
        lines.append(("resources", in_words(grant.resources, grant.resource_indices)))
    lines.append(("metadir", event.metadir or ""))
    text = "".join(f"{key}: {value}\n" for key, value in lines if value)
    return f"{text}\nThe end of its log:\n\n{log}\n" if log else text


def _run(event: Event) -> str:
    if event.run is None:
        return ""
    return (
        f"{event.run} (attempt {event.attempt})" if event.attempt is not None and event.attempt > 1 else f"{event.run}"
    )


def _result(result: Result) -> list[tuple[str, str]]:
    lines = []
    if result.exit_code is not None:
        signal = f" (signal {result.exit_code - 128})" if result.exit_code > 128 else ""
        lines.append(("exit code", f"{result.exit_code}{signal}"))
    if result.started_at_ns is not None:
        lines.append(("ran", _span(result.started_at_ns, result.ended_at_ns)))
    lines.append(("waited", _span(result.submitted_at_ns, result.started_at_ns or result.ended_at_ns)))
    if result.peak_memory_bytes is not None:
        asked = result.grant.memory_bytes
        lines.append(("memory", show_size(result.peak_memory_bytes) + (f" of {show_size(asked)}" if asked else "")))
    if result.cpu_time_ns is not None:
        lines.append(("CPU time", show_duration(result.cpu_time_ns)))
    if result.again is not None:
        at = f", not before {_moment(result.again_at_ns)}" if result.again_at_ns is not None else ""
        lines.append(("goes on", f"{result.again}{at}"))
    return lines


def _span(since_ns: int | None, until_ns: int | None) -> str:
    return "" if since_ns is None or until_ns is None else show_duration(max(0, until_ns - since_ns))


def _moment(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns // SECOND_NS, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
