"""Events of jobs, reservations and the spool (docs/FORMAT.md, "Events"), their names, and what listeners answer."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from msgspec import Struct

from spool.core.model import OUTCOMES, Grant, Request, Result


class EventName(StrEnum):
    """Every kind of event; the word is also the name of its hook."""

    QUEUEING = "queueing"  # new in queued/; a hook may veto it or set keys
    QUEUED = "queued"  # a new submission was found in queued/
    SUBMITTING = "submitting"  # about to start; a hook may veto it
    SUBMITTED = "submitted"  # its start is committed and the wrapper is launched
    HANDED_OVER = "handed_over"  # its engine has accepted it; it may wait there
    STARTED = "started"  # the wrapper has reported
    POLLING = "polling"  # its progress was checked while it runs
    GPU_IDLE = "gpu_idle"  # it has left its GPUs idle for too long
    FINISHED = "finished"
    FAILED = "failed"
    RETRYING = "retrying"  # a run was over, and the submission goes on with another
    CANCELLING = "cancelling"  # about to be cancelled; a hook may veto it
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    LOST = "lost"
    UNSCHEDULABLE = "unschedulable"
    HELD = "held"
    RELEASED = "released"
    RESERVATION_STARTED = "reservation_started"
    RESERVATION_ENDED = "reservation_ended"
    GPU_TAKEN = "gpu_taken"  # a usable GPU was granted, or is used outside spool
    GPU_FREE = "gpu_free"  # a GPU that was taken can be given again
    DISPATCHER_STARTED = "dispatcher_started"
    DISPATCHER_STOPPED = "dispatcher_stopped"


ENDS = frozenset(EventName(outcome) for outcome in OUTCOMES)
"""The events that end a job."""

OF_NO_JOB = frozenset(
    {
        EventName.RESERVATION_STARTED,
        EventName.RESERVATION_ENDED,
        EventName.GPU_TAKEN,
        EventName.GPU_FREE,
        EventName.DISPATCHER_STARTED,
        EventName.DISPATCHER_STOPPED,
    }
)

_GROUPS = {"ended": ENDS, "retried": frozenset({EventName.RETRYING})}

# A message at every check would be noise, and a question to the hooks about a new file is no event.
EVENT_WORDS = (*_GROUPS, *(name.value for name in EventName if name not in (EventName.POLLING, EventName.QUEUEING)))
"""The allowed words in `on` of the configuration."""

JOB_WORDS = tuple(word for word in EVENT_WORDS if word not in OF_NO_JOB)
"""The allowed words in `on` of a job file."""


def concerns(on: Iterable[str], name: EventName) -> bool:
    """Whether one of the words of *on* selects this event."""
    return any(word == name or name in _GROUPS.get(word, ()) for word in on)


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
    engine_id: str | None = None  # of the run in its engine
    request: Request | None = None
    grant: Grant | None = None
    submitted_at_ns: int | None = None
    started_at_ns: int | None = None
    result: Result | None = None  # of a run that is over
    metadir: str | None = None
    wishes: dict[str, Any] = {}  # of the job file, by the capability whose listener it asks for; shown to no hook
    reservation: str | None = None
    gpu: str | None = None  # UUID
    keys: dict[str, Any] | None = None  # of the job file, for a hook that may set some


class Answer(Struct, frozen=True):
    """The hooks' answer to a new job, or to a proposed start or cancellation."""

    no: str | None = None  # the reason for a veto, in a hook's words
    env: tuple[tuple[str, str], ...] = ()  # variables for the run
    keys: tuple[tuple[str, dict[str, Any]], ...] = ()  # for a new job: the hooks, and the keys that each sets
