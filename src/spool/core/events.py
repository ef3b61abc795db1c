"""What happens to jobs, reservations and the spool, told to whoever listens (docs/FORMAT.md, "Events")."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from spool.core.model import Grant, Notify, Request, Result


class EventName(StrEnum):
    """Every kind of event; the word is also the name of its hook."""

    QUEUED = "queued"  # a new submission was found in queued/
    SUBMITTING = "submitting"  # about to be started; a listener may say no
    SUBMITTED = "submitted"  # its start is committed and the wrapper is launched
    STARTED = "started"  # the wrapper has spoken: it is there
    POLLING = "polling"  # it was looked at, and runs
    FINISHED = "finished"
    FAILED = "failed"
    RETRYING = "retrying"  # a run was over, and the submission goes on with another
    CANCELLING = "cancelling"  # about to be cancelled; a listener may say no
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    LOST = "lost"
    UNSCHEDULABLE = "unschedulable"
    HELD = "held"
    RELEASED = "released"
    RESERVATION_STARTED = "reservation_started"
    RESERVATION_ENDED = "reservation_ended"
    GPU_FREE = "gpu_free"  # a GPU that was taken can be given again
    DISPATCHER_STARTED = "dispatcher_started"
    DISPATCHER_STOPPED = "dispatcher_stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event. It may be told twice, after a crash; its `id` is the same then."""

    id: str  # made of what happened, not of when it was told
    name: EventName
    at_ns: int
    host: str
    version: str  # of spool
    spool_dir: str
    reason: str = ""
    job: str | None = None
    is_array: bool = False  # the job is an array, and this is of it as a whole: it has no runs of its own
    run: int | None = None
    attempt: int | None = None
    user: str | None = None
    project: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    executor: str | None = None
    request: Request | None = None
    grant: Grant | None = None
    submitted_at_ns: int | None = None
    started_at_ns: int | None = None
    result: Result | None = None  # of a run that is over
    metadir: str | None = None
    notify: Notify | None = None  # of the job file; may hold secrets, and is shown to no hook
    reservation: str | None = None
    gpu: str | None = None  # UUID
