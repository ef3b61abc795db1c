"""Whether a run that has ended is followed by another of the same submission, and when."""

from __future__ import annotations

from dataclasses import dataclass

from spool.core.model import SECOND_NS, Retry, Spec, State, StopKind

MAX_REQUEUES = 3
"""So often a submission is run again because a run of it was lost. Counted apart from its retries."""

_START_AGAIN_NS = SECOND_NS
"""What could not be started is tried again after this at the earliest, then after twice, four times as long."""


@dataclass(frozen=True, slots=True)
class Again:
    """That a submission goes on, and with what counts."""

    kind: str  # "retry", "requeue" or "hold": as in Result.again
    at_ns: int | None  # not before; None: as soon as there is room
    attempt: int  # of the run that follows
    requeues: int


def delay_ns(retry: Retry, number: int) -> int:
    """Return how long to wait before retry *number* (1, 2, 3 …): `min(delay * backoff**(number-1), max_delay)`."""
    try:
        delay = retry.delay_ns * retry.backoff ** (number - 1)
    except OverflowError:
        return retry.max_delay_ns if retry.delay_ns else 0
    return int(min(delay, retry.max_delay_ns))


def again(
    spec: Spec,
    outcome: State,
    *,
    exit_code: int | None,
    attempt: int,
    requeues: int,
    ended_at_ns: int,
    stopped_by: StopKind | None = None,
    could_not_start: bool = False,
    max_requeues: int = MAX_REQUEUES,
) -> Again | None:
    """Return what follows a run, or None if its outcome is final.

    Finished, cancelled and unschedulable are final, unless a person moved the job to `queued/` or `held/` while it
    ran. What was lost is run again where the job allows it, at most *max_requeues* times. All else, and what may be
    requeued no more, is tried again as `retry` says: its `on` holds outcomes, and for `failed` exit codes too.
    """
    if stopped_by is StopKind.REQUEUE:
        return Again("requeue", None, attempt, requeues)
    if stopped_by is StopKind.HOLD:
        return Again("hold", None, attempt, requeues)
    if outcome in (State.FINISHED, State.CANCELLED, State.UNSCHEDULABLE):
        return None
    if outcome is State.LOST and spec.requeue and requeues < max_requeues:
        return Again("requeue", None, attempt, requeues + 1)
    retry = spec.retry
    meant = outcome.value in retry.on or (outcome is State.FAILED and exit_code is not None and exit_code in retry.on)
    if not meant or attempt > retry.max:
        return None
    wait_ns = delay_ns(retry, attempt)
    if could_not_start:
        doubling_ns = min(_START_AGAIN_NS << min(attempt - 1, 40), max(retry.max_delay_ns, _START_AGAIN_NS))
        wait_ns = max(wait_ns, doubling_ns)
    return Again("retry", ended_at_ns + wait_ns if wait_ns else None, attempt + 1, requeues)
