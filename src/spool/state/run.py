"""A submission, and one run of it until its paperwork is done.

Of the submission: the version of its file, its place in the queue, its attempts so far. Of the run: the facts fixed at
its start, its phase, and facts independent of the phase.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from spool.core import lifecycle
from spool.core.gpuuse import GpuWatch
from spool.core.layout import LOCAL_EXECUTORS, QUEUED
from spool.core.lifecycle import EPILOG_CUT, EPILOG_NS, Liveness, RunEnd, handed_to, suspended_words
from spool.core.model import (
    NOT_SUSPENDED,
    SECOND_NS,
    Grant,
    Jid,
    Request,
    Result,
    Running,
    Spec,
    State,
    Stop,
    StopKind,
    Suspension,
    granted_request,
    in_force,
)
from spool.core.units import format_duration
from spool.formats import journal
from spool.formats.capabilities import capabilities, engine_title
from spool.formats.run_records import GrantRecord, Usage
from spool.formats.state import GpuUseView, of_spec, running_words
from spool.store.ownership import name_of, this_user
from spool.store.spool import Spool

if TYPE_CHECKING:
    from spool.executors import RunHandle  # a list of waiting jobs starts nothing

UNREVIEWED = "hook queueing: asked"
"""The problem of a new file in which hooks may still set keys."""


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
    unreviewed: Spec | None = None  # the spec without what hooks may set, with the problem `UNREVIEWED`
    text: bytes | None = None  # the parsed text, if kept: because several jobs share it, or its owner may change it

    @property
    def version(self) -> tuple[int, int, int, int]:
        """The identity of this version of the file."""
        return self.inode, self.mtime_ns, self.size, self.uid

    @property
    def content(self) -> tuple[int, int, int]:
        """The identity of its content, which a move of the file leaves as it is."""
        return self.inode, self.mtime_ns, self.size


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


class Adopted(Struct, frozen=True):
    """An earlier dispatcher started the run."""

    boot_id: str | None  # of its start, if known
    served_until_ns: int | None = None  # the last sign of work of a dispatcher that watched it
    met_alive: bool = False  # by this dispatcher, so that no other one has recorded its end


class StopAsked(Struct, frozen=True):
    """A hook reviews whether the run may be cancelled; until its answer no order on record counts."""


class StopOrdered(Struct, frozen=True):
    """The run must stop: the reason, the user, and the time of the order."""

    stop: Stop
    recorded: bool = False  # the record `stop` has it


class ActiveRun(Struct, eq=False):
    """A run that is not over: from its start until its paperwork is done."""

    name: str
    run: int
    spec: Spec
    grant: Grant
    user: str
    wait: QueueTime
    attempts: Attempts
    inode: int  # of the job file in running/
    started_at_ns: int
    executor: str
    started_boot_ns: int = 0  # on the clock since boot, which cannot be set
    phase: lifecycle.Phase = lifecycle.CLAIMED
    handle: RunHandle | None = None  # None: no process was started yet, or only its records are known
    unregistered_until_ns: int = 0  # monotonic: a missing jid proves nothing until then
    order: StopAsked | StopOrdered | None = None  # to stop it
    file_missing_ns: int | None = None  # monotonic: since when its file is not in running/
    mtime_ns: int | None = None  # of the job file in running/, as seen last
    refused: StartBackoff = NO_BACKOFF  # how many times in a row the machine has refused this job
    usage: Usage = Usage()
    gpu_watch: GpuWatch | None = None  # its GPU use, once looked at
    origin: Adopted | None = None  # None: this dispatcher started it
    begun_at_ns: int | None = None  # when its wrapper registered, on another machine; here, when its command began
    engine_id: str | None = None  # of its job there, once its engine has accepted it
    told: str = ""  # the reason for its wait there, as last heard
    cut_short: str = ""  # why its epilog was stopped
    kept: str = ""  # why it was not cancelled, or not suspended
    suspension: Suspension = NOT_SUSPENDED
    suspended_by: str = ""  # the user who suspends it, and the reason, if known
    copied: str = ""  # why it is not this spool's, which is a copy
    lease: int | None = None  # of the arbiter of a shared machine
    key: tuple[str, int] = ("", 0)  # its identity

    def __post_init__(self) -> None:
        """Set its key."""
        self.key = self.name, self.run

    @property
    def requested(self) -> Spec:
        """Its spec with the sizes that it was granted, for an engine."""
        spec = self.spec
        return replace(spec, request=granted_request(spec, self.grant)) if spec.is_sized else spec

    @property
    def holds_room(self) -> bool:
        """Whether its grant is still in use."""
        return lifecycle.holds_room(self.phase)

    @property
    def is_over(self) -> bool:
        """Whether its end is known, or that it never began."""
        return lifecycle.is_over(self.phase)

    @property
    def ended(self) -> lifecycle.Ended | None:
        """Return its end; None: not known yet, or it never began."""
        return lifecycle.known_end(self.phase)

    @property
    def end(self) -> RunEnd | None:
        """Return when it ended, or was found never to begin; None: not known yet."""
        over = self.phase if isinstance(self.phase, lifecycle.Void) else self.ended
        return over.end if over is not None else None

    @property
    def result(self) -> Result | None:
        """Return its result once recorded."""
        return self.phase.result if isinstance(self.phase, lifecycle.Recorded | lifecycle.Filed) else None

    @property
    def adopted(self) -> bool:
        """Whether an earlier dispatcher started it."""
        return self.origin is not None

    @property
    def may_be_recorded(self) -> bool:
        """Whether an earlier dispatcher may have recorded its end: this one has not seen its wrapper alive."""
        return self.origin is not None and not self.origin.met_alive

    @property
    def is_outlived(self) -> bool:
        """Whether its command has ended, or its wrapper was killed, and other processes of it may be left."""
        return isinstance(self.phase, lifecycle.Outlived)

    @property
    def suspended(self) -> bool:
        """Whether it is suspended."""
        return self.suspension.since_ns is not None

    @property
    def counts_from_boot_ns(self) -> int:
        """The start of its time limit, on the clock since boot; a suspended run has no deadline."""
        return self.started_boot_ns + self.suspension.before_ns

    @property
    def asking(self) -> bool:
        """Whether a hook reviews its cancellation."""
        return isinstance(self.order, StopAsked)

    @property
    def stop(self) -> Stop | None:
        """Return the order to stop it; None if it is not being stopped."""
        return self.order.stop if isinstance(self.order, StopOrdered) else None

    @property
    def stop_kind(self) -> StopKind | None:
        """Return why it is being stopped, None if it is not."""
        return self.stop.kind if self.stop is not None else None

    def stopped_by(self, recorded: StopKind | None) -> StopKind | None:
        """Return why it was stopped, if its record `stop` has *recorded*.

        After a full disk only this value knows of a stop; a cancellation under review is on record only.
        """
        return None if self.asking else recorded or self.stop_kind

    @property
    def elsewhere(self) -> str | None:
        """Return the other machine on which it runs, None if it is this one."""
        return None if self.executor in LOCAL_EXECUTORS else self.executor

    @property
    def node(self) -> str | None:
        """Return the node of its engine where it runs; None: unknown, or it is on this machine."""
        return self.jid.node if self.elsewhere is not None and self.jid is not None else None

    @property
    def submitted(self) -> str | None:
        """Return the reason for its wait at its engine; None if it has begun, or runs on this machine."""
        if self.elsewhere is None or self.begun_at_ns is not None:
            return None
        return (self.handle.waits if self.handle is not None else None) or handed_to(engine_title(self.elsewhere))

    @property
    def gives_up_boot_ns(self) -> int | None:
        """Return when its wait there becomes too long, on the clock since boot; None: never, or it has begun.

        The time in the queue counts, too.
        """
        allowed_ns = self.spec.scheduling_timeout_ns
        if allowed_ns is None or self.submitted is None:
            return None
        return self.started_boot_ns + max(0, allowed_ns - self.wait.waited_ns(self.started_at_ns))

    def may_be(self, jid: Jid) -> bool:
        """Whether *jid*, from its record, can be its wrapper's: on this machine it must be of the boot of its start."""
        if self.elsewhere is not None:
            return True
        boot_id = self.origin.boot_id if self.origin is not None else None
        return jid.engine is None and boot_id in (None, jid.boot_id)

    def waits_on(self, now_ns: int) -> QueueTime:
        """Return the place in the queue of its job, which waits again because this run has never begun."""
        waited_ns = self.wait.waited_ns_before
        if self.elsewhere is not None:  # it has waited all along, at last for its engine
            waited_ns = self.wait.waited_ns(self.started_at_ns) + max(0, now_ns - self.started_at_ns)
        return QueueTime(self.wait.arrived_at_ns, waited_ns, None)

    @property
    def ran_from_ns(self) -> int | None:
        """Return when it began to run; None if it has not: it waits at its engine."""
        return self.started_at_ns if self.elsewhere is None else self.begun_at_ns

    @property
    def jid(self) -> Jid | None:
        """Return its wrapper's identity, None until it is known."""
        return self.handle.jid if self.handle is not None else None

    @property
    def exit_status(self) -> int | None:
        """Return the exit status of its wrapper, a child of this process, as wait() returns it."""
        return self.handle.exit_status if self.handle is not None else None

    # Transitions of its life.

    def see(self, phase: lifecycle.Phase) -> None:
        """Enter *phase*, as seen, if that follows from the current one."""
        self.phase = lifecycle.after(self.phase, phase)

    def become(self, read: ActiveRun) -> None:
        """Replace its records by those of *read*, which are readable now; an order to stop it remains."""
        if not isinstance(self.phase, lifecycle.Unread):
            return
        order, handle = self.order, self.handle
        for name in ActiveRun.__struct_fields__:
            setattr(self, name, getattr(read, name))
        elsewhere = read.handle is not None and handle is not None and handle.engine is not read.handle.engine
        if handle is not None and not elsewhere:  # the handle knows the signals sent so far
            self.handle = handle
            if read.jid is not None:
                handle.identified(read.jid)
        if isinstance(order, StopOrdered) and self.order is None:
            self.order = order

    def began(self, boot_ns: int, at_ns: int | None = None) -> None:
        """Set its begin on the clock since boot, and when its wrapper elsewhere, or its command here, began."""
        self.started_boot_ns, self.begun_at_ns = boot_ns, at_ns or self.begun_at_ns

    def heard(self) -> bool:
        """Record the reason for its wait at its engine; return whether that is news."""
        before, self.told = self.told, self.submitted or ""
        return self.told != before

    def accepted_as(self, engine_id: str | None) -> bool:
        """Set the id of its job at its engine; return whether that has accepted it just now."""
        before, self.engine_id = self.engine_id, engine_id or self.engine_id
        return before is None and self.engine_id is not None

    def may_be_silent(self, until_ns: int, served_until_ns: int | None) -> None:
        """Let a missing jid prove nothing until then, monotonic; an earlier dispatcher watched it *served_until_ns*."""
        self.unregistered_until_ns = until_ns
        if self.origin is not None:
            self.origin = replace(self.origin, served_until_ns=served_until_ns)

    def leased(self, lease: int | None) -> None:
        """Set its lease; None: the arbiter of the machine knows none."""
        self.lease = lease

    def file_seen(self, inode: int, mtime_ns: int) -> None:
        """Set the identity and time of its job file in `running/`."""
        self.inode, self.mtime_ns, self.file_missing_ns = inode, mtime_ns, None

    def is_new_text(self, inode: int, mtime_ns: int) -> bool:
        """Whether the job file in `running/`, with these values, may have a new content since it was last seen."""
        if inode != self.inode:
            return True
        return mtime_ns > self.started_at_ns if self.mtime_ns is None else mtime_ns != self.mtime_ns

    def edited(self, spec: Spec) -> bool:
        """Apply the new content of its job file; return whether that changes anything."""
        before, self.spec = self.spec, in_force(self.spec, spec)
        return self.spec != before

    def file_missing(self, at_ns: int | None) -> None:
        """Mark its job file as missing in `running/` since *at_ns*, monotonic; None: it is in the place for a retry."""
        self.file_missing_ns = at_ns

    def launched(self, handle: RunHandle) -> None:
        """Set *handle*: its wrapper is on its way."""
        self.adopted_as(handle)
        self.see(lifecycle.ACTIVE)

    def adopted_as(self, handle: RunHandle) -> None:
        """Set *handle*: an earlier dispatcher has started it."""
        self.handle = handle
        handle.by_others = bool(self.spec.parts) and any(
            each.by_others and self.spec.part(each.name) is not None for each in capabilities()
        )

    def taken_back(self, refusal: str | None = None) -> None:
        """Let its missing jid prove at once that it was not started. *refusal* is the machine's reason."""
        self.unregistered_until_ns = 0
        self.see(lifecycle.TakenBack(refusal))

    def stop_ordered(self, stop: Stop) -> None:
        """Set the order to stop it."""
        self.order = StopOrdered(stop)

    def epilog_stopped(self, stop: Stop, at_ns: int) -> None:
        """Let *stop* end its epilog, from *at_ns* on: its command had ended before."""
        why = stop.reason if stop.by == "spool" else f"{stop.kind} {stop.by_whom}"
        if stop.kind is StopKind.TIMEOUT:
            why = f"{format_duration(EPILOG_NS)} after the time limit"
        self.cut_short = f"{EPILOG_CUT}: {why}"
        self.see(lifecycle.Outlived(at_ns))

    def stop_on_record(self, stop: Stop | None) -> None:
        """Mark the order as recorded; *stop* is the content of the record `stop` if another was written there first."""
        if (stands := stop or self.stop) is not None:
            self.order = StopOrdered(stands, recorded=True)

    def stop_asked(self) -> None:
        """Let it continue while a hook reviews its cancellation."""
        self.order = StopAsked()

    def stop_answered(self, kept: str = "") -> None:
        """Apply the answer of the hook. *kept* is the reason against the cancellation."""
        if self.asking:
            self.order = None
        self.kept = kept or self.kept

    def suspends(self, suspension: Suspension, by: str = "") -> None:
        """Set its suspensions so far, and the current one; *by*: the user and the reason."""
        self.suspension, self.suspended_by = suspension, by

    def cannot_be_suspended(self) -> None:
        """Record why a user cannot suspend it: its engine does not allow that."""
        where = engine_title(self.executor)
        self.kept = f"not suspended: it is in {where}; `spool hold {self.name}` stops it and holds it"

    # Transitions by the supervisor's findings.

    def used_memory(self, memory_bytes: int) -> None:
        """Record a peak of memory use."""
        self.usage = replace(self.usage, peak_memory_bytes=max(self.usage.peak_memory_bytes or 0, memory_bytes))

    def gpus_watched(self, watch: GpuWatch) -> None:
        """Set its GPU use so far."""
        self.gpu_watch = watch

    def seen_alive(self) -> None:
        """Record that its wrapper was alive under this dispatcher."""
        if self.origin is not None and not self.origin.met_alive:
            self.origin = replace(self.origin, met_alive=True)

    def measured(self, usage: Usage) -> None:
        """Set its total use of resources, as far as measured."""
        known = self.usage
        self.usage = Usage(
            usage.cpu_time_ns if usage.cpu_time_ns is not None else known.cpu_time_ns,
            usage.peak_memory_bytes if usage.peak_memory_bytes is not None else known.peak_memory_bytes,
            usage.oom_killed,
        )

    def used(self, written: Usage) -> None:
        """Apply the use that its wrapper has recorded, if that is more than was measured."""
        if self.usage.cpu_time_ns is None:
            self.usage = replace(self.usage, cpu_time_ns=written.cpu_time_ns)
        if written.peak_memory_bytes is not None:
            self.used_memory(written.peak_memory_bytes)

    @property
    def running(self) -> Running:
        """Return the run for the planner; a run that has outlived its command is being stopped as well."""
        outlived_at_ns = self.phase.since_ns if isinstance(self.phase, lifecycle.Outlived) else None
        return Running(
            self.name,
            self.run,
            self.user,
            self.spec,
            self.grant,
            self.ran_from_ns or self.started_at_ns,
            self.attempts.attempt,
            stopping=self.stop is not None or self.is_outlived,
            elsewhere=self.elsewhere,
            submitted=self.submitted is not None,
            blocked=self.handle is not None and self.submitted is not None and self.handle.blocked,
            suspension=self.suspension,
            stop_at_ns=self.stop.at_ns if self.stop is not None else outlived_at_ns,
            arrived_at_ns=self.wait.arrived_at_ns,
            preempted_at_ns=self.attempts.preempted.at_ns if self.attempts.preempted is not None else None,
            preempted_for=self.stop.reason if self.stop_kind is StopKind.PREEMPT and self.stop is not None else None,
        )

    def row(self, state: State, reason: str, *, problem: str = "") -> dict[str, Any]:
        """Return its row in every view, in that *state*."""
        watch, spec = self.gpu_watch, self.requested
        reason = self.cut_short or reason or suspended_words(self.suspension, self.suspended_by) or self.kept
        return {
            "state": state,
            "reason": reason or running_words(spec, watch, state),
            "problem": problem,
            "run": self.run,
            "attempt": self.attempts.attempt,
            "gpu_use": GpuUseView.of(watch) if watch is not None else (),
            "gpu_idle_ns": watch.idle_ns if watch is not None else 0,
            "user": self.user,
            "submitted_at_ns": self.wait.arrived_at_ns,
            "started_at_ns": self.ran_from_ns,
            "engine": self.elsewhere,
            "node": self.node,
            "suspended_ns": self.suspension.before_ns,
            "suspended_at_ns": self.suspension.since_ns,
            **of_spec(spec, grant=self.grant),
        }

    @classmethod
    def of_records(
        cls,
        record: GrantRecord,
        spec: Spec,
        *,
        granted_at_ns: int,
        stop: Stop | None,
        inode: int,
    ) -> ActiveRun:
        """Return a run that another dispatcher has started, from its records."""
        grant = record.grant
        if record.executor not in LOCAL_EXECUTORS:
            grant = replace(grant, gpus_elsewhere=spec.request.gpus)
        return cls(
            name=record.job,
            run=record.run,
            spec=spec,
            grant=grant,
            user=record.user or this_user(),
            wait=QueueTime(record.submitted_at_ns or granted_at_ns, record.waited_ns),
            attempts=Attempts(record.attempt, record.requeues),
            inode=inode,
            started_at_ns=granted_at_ns,
            executor=record.executor,
            phase=lifecycle.ACTIVE,
            order=StopOrdered(stop) if stop is not None else None,
            origin=Adopted(record.boot_id),
            lease=record.lease,
        )


class JobEntry(Struct, eq=False):
    """The state of one name."""

    name: str
    queued: JobFileVersion | None = None
    held: JobFileVersion | None = None
    live: ActiveRun | None = None
    wait: QueueTime | None = None
    attempts: Attempts = FIRST_ATTEMPT
    refused: StartBackoff = NO_BACKOFF  # of the machine, since the last run that began
    last_inode: int | None = None  # of the last file that waited
    blocked: str | None = None  # why the last start failed
    asked: str = ""  # what its start waits for, during a review
    parked: bool = False  # whether it was held when last seen
    hold_reason: str = ""  # why spool itself has held it
    told_run: int | None = None  # the run whose end was reported, until it is filed

    def file(self, place: str) -> JobFileVersion | None:
        """Return its file in `queued/` or `held/`."""
        return self.queued if place == QUEUED else self.held

    def see_file(self, place: str, file: JobFileVersion | None) -> None:
        """Set its file in `queued/` or `held/` as seen; None: it is not there."""
        if place == QUEUED:
            self.queued = file
        else:
            self.held = file
        if (seen := self.queued or self.held) is not None:
            self.last_inode = seen.inode

    def see_why_held(self, why: str) -> None:
        """Set why spool itself holds it; "": it does not."""
        self.hold_reason = why

    def row(
        self, file: JobFileVersion, reason: object = "", *, problem: str = "", request: Request | None = None
    ) -> dict[str, Any]:
        """Return its row in every view while it waits or is held with that *file*; its next run gets *request*."""
        state = State.QUEUED if file is self.queued else State.HELD
        since_ns = self.wait.arrived_at_ns if self.wait is not None else None
        known = {"problem": problem, "user": name_of(file.uid), "submitted_at_ns": since_ns}
        known["attempt"] = self.attempts.attempt
        if file.spec is None:
            return {"state": State.INVALID if file.invalid else state, "reason": file.problem or "", **known}
        return {"state": state, "reason": str(reason), **known, **of_spec(file.spec, request)}

    def recall_place(self, line: journal.Waits, inode: int | None = None) -> None:
        """Restore its place from the journal, and the *inode* of the file that waited, if known."""
        self.wait = QueueTime(line.arrived_at_ns, line.waited_ns_before, line.clock_at_ns)
        self.parked, self.last_inode = line.clock_at_ns is None, inode or self.last_inode

    def takes_place(self, now_ns: int) -> bool:
        """Take its place in the queue, and let its clock run, as its file was seen; return whether it is a new one.

        A job that a user moved out of `running/` keeps the place of its run.
        """
        file, queued = self.queued or self.held, self.queued is not None
        assert file is not None
        new = False
        if self.wait is None:
            live = self.live
            if live is not None and live.inode == file.inode and live.mtime_ns in (None, file.mtime_ns):
                self.wait, self.attempts = QueueTime(live.wait.arrived_at_ns), live.attempts
            else:
                self.wait, self.attempts, new = QueueTime(min(file.changed_at_ns, now_ns)), FIRST_ATTEMPT, True
        self.wait = self.wait.lying(file, now_ns, queued=queued)
        return new
