"""Events of jobs, reservations and the spool (docs/FORMAT.md, "Events"): their recipients and their wording.

The words of `on` in the configuration's rules and in a job's own `notify` select the recipients.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from msgspec import Struct

from spool.core.eventnames import EventName, concerns
from spool.core.gpuuse import mean_part
from spool.core.model import SECOND_NS, Grant, Notify, Request, Result
from spool.core.names import engine_of, engine_title
from spool.core.pools import in_words
from spool.core.units import show_duration, show_percent, show_size


class Event(Struct, frozen=True, kw_only=True):
    """One event. After a crash it may be delivered twice, with the same `id`."""

    id: str  # derived from the event, not from the time of delivery
    name: EventName
    at_ns: int
    host: str
    version: str  # of spool
    spool_dir: str
    reason: str = ""
    job: str | None = None
    is_array: bool = False  # the event concerns an array as a whole, which has no runs of its own
    run: int | None = None
    attempt: int | None = None
    user: str | None = None
    project: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    executor: str | None = None
    engine_id: str | None = None  # of the run in its engine, such as Slurm's job id
    request: Request | None = None
    grant: Grant | None = None
    submitted_at_ns: int | None = None
    started_at_ns: int | None = None
    result: Result | None = None  # of a run that is over
    metadir: str | None = None
    notify: Notify | None = None  # of the job file; may hold secrets, and is shown to no hook
    reservation: str | None = None
    gpu: str | None = None  # UUID
    keys: dict[str, Any] | None = None  # of the job file, for a plugin that may add some; shown to no hook


class Answer(Struct, frozen=True):
    """The listeners' answer to a new job, or to a proposed start or cancellation."""

    no: str | None = None  # the reason for a veto, in the listener's words
    init: str = ""  # shell text for the wrapper: before anything else, just before the command, after it
    prep: str = ""
    end: str = ""
    env: tuple[tuple[str, str], ...] = ()  # variables for the run
    added: tuple[tuple[str, dict[str, Any]], ...] = ()  # for a new job: plugins, and the keys that each returned

    def joined(self, other: Answer) -> Answer:
        """Return an approval with the texts, the variables and the keys of both."""
        pairs = ((self.init, other.init), (self.prep, other.prep), (self.end, other.end))
        init, prep, end = ("\n".join(filter(None, pair)) for pair in pairs)
        return Answer(None, init, prep, end, (*self.env, *other.env), (*self.added, *other.added))


class NotifyRule(Struct, frozen=True):
    """Notifications about all jobs. Each filter is a list of patterns, one of which must match; empty matches all."""

    to: tuple[str, ...]
    on: tuple[str, ...] = ("ended",)
    users: tuple[str, ...] = ()
    projects: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # of jobs, and of reservations
    log_lines: int = 0

    def fits(self, event: Event) -> bool:
        """Whether the rule selects *event*."""
        return (
            concerns(self.on, event.name)
            and _one_fits(self.users, event.user)
            and _one_fits(self.projects, event.project)
            and _one_fits(self.names, event.job or event.reservation)
        )


def addressees(event: Event, rules: Iterable[NotifyRule]) -> dict[str, int]:
    """Return the recipients of *event*, and how many lines of the job's log each gets."""
    found: dict[str, int] = {}
    wish = event.notify
    if wish is not None and concerns(wish.on, event.name):
        found = dict.fromkeys(wish.to, wish.log_lines)
    for rule in rules:
        if rule.fits(event):
            for address in rule.to:
                found[address] = max(found.get(address, 0), rule.log_lines)
    return found


def _one_fits(patterns: tuple[str, ...], value: str | None) -> bool:
    return not patterns or (value is not None and any(fnmatchcase(value, pattern) for pattern in patterns))


_SAYS = {
    EventName.QUEUED: "is queued",
    EventName.SUBMITTING: "is about to start",
    EventName.SUBMITTED: "starts",
    EventName.HANDED_OVER: "was handed over",
    EventName.STARTED: "has started",
    EventName.POLLING: "runs",
    EventName.GPU_IDLE: "leaves its GPUs idle",
    EventName.FINISHED: "has finished",
    EventName.FAILED: "has failed",
    EventName.RETRYING: "continues with another run",
    EventName.CANCELLING: "is about to be cancelled",
    EventName.CANCELLED: "was cancelled",
    EventName.TIMEOUT: "was stopped at its time limit",
    EventName.OUT_OF_MEMORY: "ran out of memory",
    EventName.PREEMPTED: "was preempted",
    EventName.LOST: "was lost",
    EventName.UNSCHEDULABLE: "could not be scheduled",
    EventName.HELD: "is held",
    EventName.RELEASED: "is released",
    EventName.RESERVATION_STARTED: "has begun",
    EventName.RESERVATION_ENDED: "has ended",
    EventName.GPU_TAKEN: "is taken",
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
    if event.name is EventName.SUBMITTED and (engine := engine_of(event.executor)) is not None:
        said = f"{subject} is on its way to {engine_title(engine)}"  # which decides when it starts
    if event.name is EventName.CANCELLED and event.reason.startswith("cancelled "):
        return f"{subject} was {event.reason}"
    # "Finished" already means exit code 0.
    return f"{said}: {event.reason}" if event.reason and event.name is not EventName.FINISHED else said


def body(event: Event, log: str = "") -> str:
    """Return the details of *event*, one fact per line, and the last lines of its log."""
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
        lines.append(("ran", _span(result.started_at_ns + result.suspended_ns, result.ended_at_ns)))
        if result.suspended_ns:
            lines.append(("suspended", show_duration(result.suspended_ns)))
    lines.append(("waited", _span(result.submitted_at_ns, result.started_at_ns or result.ended_at_ns)))
    if result.peak_memory_bytes is not None:
        asked = result.grant.memory_bytes
        lines.append(("memory", show_size(result.peak_memory_bytes) + (f" of {show_size(asked)}" if asked else "")))
    if result.cpu_time_ns is not None:
        lines.append(("CPU time", show_duration(result.cpu_time_ns)))
    if (busy := mean_part(result.gpu_use)) is not None:
        lines.append(("GPUs busy", f"{show_percent(busy)} on average"))
    if result.again is not None:
        at = f", not before {_moment(result.again_at_ns)}" if result.again_at_ns is not None else ""
        lines.append(("goes on", f"{result.again}{at}"))
    return lines


def _span(since_ns: int | None, until_ns: int | None) -> str:
    return "" if since_ns is None or until_ns is None else show_duration(max(0, until_ns - since_ns))


def _moment(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns // SECOND_NS, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
