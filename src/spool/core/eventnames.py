"""The names of events, and the words that select them in `on` (docs/FORMAT.md)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from spool.core.model import OUTCOMES


class EventName(StrEnum):
    """Every kind of event; the word is also the name of its hook."""

    QUEUED = "queued"  # a new submission was found in queued/
    SUBMITTING = "submitting"  # about to start; a listener may veto it
    SUBMITTED = "submitted"  # its start is committed and the wrapper is launched
    HANDED_OVER = "handed_over"  # its engine has accepted it; it may wait there
    STARTED = "started"  # the wrapper has reported
    POLLING = "polling"  # its progress was checked while it runs
    GPU_IDLE = "gpu_idle"  # it has left its GPUs idle for too long
    FINISHED = "finished"
    FAILED = "failed"
    RETRYING = "retrying"  # a run was over, and the submission goes on with another
    CANCELLING = "cancelling"  # about to be cancelled; a listener may veto it
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

# A message at every check would be noise.
EVENT_WORDS = (*_GROUPS, *(name.value for name in EventName if name is not EventName.POLLING))
"""The allowed words in `on` of the configuration."""

JOB_WORDS = tuple(word for word in EVENT_WORDS if word not in OF_NO_JOB)
"""The allowed words in `on` of a job file."""


def concerns(on: Iterable[str], name: EventName) -> bool:
    """Whether one of the words of *on* selects this event."""
    return any(word == name or name in _GROUPS.get(word, ()) for word in on)
