"""One submission: the version of its file, its place in the queue, its attempts so far."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from spool.core.lifecycle import Liveness
from spool.core.model import (
    SECOND_NS,
    Result,
    Spec,
    State,
    Stop,
    StopKind,
)
from spool.formats import journal
from spool.store.spool import Spool

UNFILLED = "plugins: asked which keys to add"
"""The problem of a new file to which plugins may still add keys."""


class JobFileVersion(Struct):
    """One version of a job file in `queued/` or `held/`, as last seen."""

    inode: int
    mtime_ns: int
    size: int
    changed_at_ns: int
    uid: int
    spec: Spec | None  # None: it must not start, and `problem` says why
    problem: str | None = None
    invalid: bool = False  # its problem is a mistake; the `.error` file says more
    unread: bool = False  # it could not be read, so the next look opens it again
    unfilled: Spec | None = None  # the spec without what plugins may add, with the problem `UNFILLED`
    text: bytes | None = None  # the parsed text, if kept: because several jobs share it, or its owner may change it

    @property
    def version(self) -> tuple[int, int, int, int]:
        """The identity of this version of the file."""
        return self.inode, self.mtime_ns, self.size, self.uid

    @property
    def content(self) -> tuple[int, int, int]:
        """The identity of its content, which a move of the file leaves as it is."""
        return self.inode, self.mtime_ns, self.size

    def is_same(self, other: JobFileVersion) -> bool:
        """Whether both are the same version of the same file."""
        return self.content == other.content


class QueueTime(Struct, frozen=True):
    """A job's place in the queue and its waiting clock; on disk in the journal."""

    arrived_at_ns: int
    waited_ns_before: int = 0
    clock_at_ns: int | None = None

    def lying(self, file: JobFileVersion, now_ns: int, *, queued: bool) -> QueueTime:
        """Return it for a job whose file is in `queued/`, or else in `held/`, since its last change at the latest."""
        since_ns = min(file.changed_at_ns, now_ns)
        if queued and self.clock_at_ns is None:
            return replace(self, clock_at_ns=since_ns)
        if not queued and self.clock_at_ns is not None:
            waited_ns = self.waited_ns_before + max(0, since_ns - self.clock_at_ns)
            return QueueTime(self.arrived_at_ns, waited_ns, None)
        return self

    def waited_ns(self, now_ns: int) -> int:
        """Return the waiting time until *now_ns*."""
        return self.waited_ns_before + (max(0, now_ns - self.clock_at_ns) if self.clock_at_ns is not None else 0)

    def line(self, name: str) -> journal.Waits:
        """Return the journal's line for it, of the job *name*."""
        return journal.Waits(name, self.arrived_at_ns, self.waited_ns_before, self.clock_at_ns)

    @classmethod
    def of_line(cls, line: journal.Waits) -> QueueTime:
        """Return the value of a line of the journal."""
        return cls(line.arrived_at_ns, line.waited_ns_before, line.clock_at_ns)

    def without(self, since_ns: int, now_ns: int) -> QueueTime:
        """Return it with the running time since *since_ns* excluded, because the job could not start."""
        if self.clock_at_ns is None:
            return self
        return replace(self, clock_at_ns=self.clock_at_ns + max(0, now_ns - max(since_ns, self.clock_at_ns)))


class Attempts(Struct, frozen=True):
    """Retries and requeues of a submission so far, and the earliest start of the next run."""

    attempt: int = 1
    requeues: int = 0
    not_before_ns: int | None = None
    preempted: Stop | None = None  # the order that stopped the last run to make room for another job


FIRST_ATTEMPT = Attempts()


LONGEST_PAUSE_NS = 60 * SECOND_NS


class StartBackoff(Struct, frozen=True):
    """The number of refusals of a start by the machine in a row, the reason, and the time of the next try."""

    times: int = 0
    why: str = ""
    until_ns: int = 0

    def again(self, why: str, now_ns: int) -> StartBackoff:
        """Return the state after one more refusal: the pauses grow from a second to a minute."""
        pause_ns = min(SECOND_NS << min(self.times, 10), LONGEST_PAUSE_NS)
        return StartBackoff(self.times + 1, why, now_ns + pause_ns)


NO_BACKOFF = StartBackoff()


def attempts_after(result: Result, stop: Stop | None) -> Attempts:
    """Return the attempts of a submission after a run that is not its last; *stop* is the order that stopped it."""
    requeued = result.again == "requeue" and stop is None and result.outcome is not State.PREEMPTED
    preempted = stop if stop is not None and stop.kind is StopKind.PREEMPT else None
    attempt, requeues = result.attempt + (result.again == "retry"), result.requeues + requeued
    return Attempts(attempt, requeues, result.again_at_ns, preempted)


def attempts_so_far(
    spool: Spool,
    name: str,
    arrived_at_ns: int,
    *,
    before: int | None = None,
    settle: Callable[[str, int], bool] | None = None,
) -> Attempts:
    """Return the attempts of the submission that came at *arrived_at_ns*, counting only the runs *before* one.

    Its newest result has them, if it is of the same submission; if a power cut destroyed that, the grant has the number
    of the attempt to repeat. A run that was prepared and never claimed is skipped; *settle* withdraws it, or returns
    that it has begun after all.
    """
    for run in reversed([run for run in spool.runs(name) if before is None or run < before]):
        result = spool.result(name, run)
        if result is not None:
            if result.again is None or result.submitted_at_ns != arrived_at_ns:
                return FIRST_ATTEMPT
            return attempts_after(result, spool.stop(name, run))
        if spool.array(name, run) is not None:
            return FIRST_ATTEMPT
        found = spool.jid(name, run)
        if found is Liveness.VOID:
            continue
        if found is not Liveness.ABSENT or (settle is not None and not settle(name, run)):
            granted = spool.grant(name, run)
            if granted is not None and granted.submitted_at_ns == arrived_at_ns:
                return Attempts(granted.attempt, granted.requeues)
            return FIRST_ATTEMPT
    return FIRST_ATTEMPT
