"""What is known of one run that is not over: how it was started, and what has become of it since."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from spool.core.gpuuse import GpuWatch
from spool.core.layout import RUNNING
from spool.core.lifecycle import Proof, RunEnd, Verdict, handed_to
from spool.core.model import (
    NOT_SUSPENDED,
    Grant,
    Jid,
    Result,
    Running,
    Spec,
    Stop,
    StopKind,
    Suspension,
    in_force,
)
from spool.core.names import LOCAL_EXECUTORS, engine_title
from spool.executors import RunHandle, Usage
from spool.formats.config import Config
from spool.formats.journal import Started
from spool.formats.run_records import GrantRecord, WrittenUsage
from spool.machine.host import this_user
from spool.state.submission import NO_BACKOFF, Attempts, QueueTime, StartBackoff
from spool.store.spool import Spool

_MOST_FAILURES = 3  # of an engine to start a job, in a row


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
    started_boot_ns: int  # on the clock since boot, which cannot be set
    executor: str
    handle: RunHandle | None = None  # its executor's; None: nothing was started yet, or only its records are known
    registered: bool = False  # its jid was seen, even if nobody had to read it
    boot_id: str | None = None  # of the boot in which it was started, if that may not be this one
    unregistered_until_ns: int = 0  # monotonic: a missing jid proves nothing until then
    stop: Stop | None = None
    stop_recorded: bool = False  # the record `stop` says it
    unread: bool = False  # adopted, and its records could not be read yet: nothing is concluded of it
    file_missing_ns: int | None = None  # monotonic: since when its file is not in running/
    known_alive_ns: int | None = None  # by the dispatcher before this one
    exit_at_ns: int | None = None  # when its wrapper wrote the exit code down, as the file system says
    end: RunEnd | None = None  # when it ended, once that is known
    mtime_ns: int | None = None  # of the job file in running/, where it was seen
    claim_told: bool = False  # an event has told of the move of its file to running/, or a look has
    exit_code: int | None = None  # as the wrapper wrote it down
    failure: str | None = None  # why it could not be started
    refusal: str | None = None  # why the machine did not let it begin, so that its job waits on
    refused: StartBackoff = NO_BACKOFF  # how many times in a row it has refused this job
    cpu_time_ns: int | None = None
    peak_memory_bytes: int | None = None
    gpu_watch: GpuWatch | None = None  # what it does with its GPUs, once that was looked at
    proof: Proof | None = None  # set once it has ended
    result: Result | None = None  # set once that is recorded
    accounted: bool = False  # the history has its line
    leftovers: bool = False  # the wrapper is gone, processes of the run may not be
    outlived_at_ns: int | None = None  # since when, if that is known: their grace counts from then
    oom_killed: bool = False
    adopted: bool = False  # started by an earlier dispatcher
    met_alive: bool = False  # by this one, so that no other has written down its end
    processes_gone: bool = False  # verified: nothing outlived the wrapper
    gone: bool = False  # no process of it is left: its room is free, whether its end can be read and filed or not
    final: bool = False  # its job has ended with it
    begun_at_ns: int | None = None  # when its wrapper spoke, on another machine
    told: str = ""  # what kept it waiting there when that was last heard
    held_because: str = ""  # why its job must be held: its engine refuses it
    asking: bool = False  # somebody is asked whether it may be cancelled
    kept: str = ""  # why it was not cancelled, or not suspended
    suspension: Suspension = NOT_SUSPENDED
    suspended_by: str = ""  # who suspends it, and why, where that is said
    key: tuple[str, int] = ("", 0)  # what names this run

    def __post_init__(self) -> None:
        """Name it."""
        self.key = self.name, self.run

    @property
    def holds_room(self) -> bool:
        """Whether what it was granted is not free."""
        return not self.gone and self.proof is None

    @property
    def suspended(self) -> bool:
        """Whether it stands still."""
        return self.suspension.since_ns is not None

    @property
    def counts_from_boot_ns(self) -> int:
        """From when its time limit counts, on the clock since boot; of one that is suspended nothing is due."""
        return self.started_boot_ns + self.suspension.before_ns

    @property
    def stop_kind(self) -> StopKind | None:
        """Return why it is being stopped, None if it is not."""
        return self.stop.kind if self.stop is not None else None

    @property
    def elsewhere(self) -> str | None:
        """Return on which other machine it runs, None if on this one."""
        return None if self.executor in LOCAL_EXECUTORS else self.executor

    @property
    def submitted(self) -> str | None:
        """Return what keeps it waiting where it was handed to; None if it has begun, or runs on this machine."""
        if self.elsewhere is None or self.begun_at_ns is not None:
            return None
        return (self.handle.waits if self.handle is not None else None) or handed_to(self.elsewhere)

    @property
    def gives_up_boot_ns(self) -> int | None:
        """Return when it has waited there for too long, on the clock since boot; None: never, or it has begun.

        The time that it waited in the queue counts, too.
        """
        allowed_ns = self.spec.scheduling_timeout_ns
        if allowed_ns is None or self.submitted is None:
            return None
        return self.started_boot_ns + max(0, allowed_ns - self.wait.waited_ns(self.started_at_ns))

    def may_be(self, jid: Jid) -> bool:
        """Whether *jid*, as its record says, can be its wrapper's: one of this machine is of the boot of its start."""
        if self.elsewhere is not None:
            return True
        return jid.engine is None and self.boot_id in (None, jid.boot_id)

    def waits_on(self, now_ns: int) -> QueueTime:
        """Return the place in the queue of its job, which waits again since this run has never begun."""
        waited_ns = self.wait.waited_ns_before
        if self.elsewhere is not None:  # it has waited all along, for its engine in the end
            waited_ns = self.wait.waited_ns(self.started_at_ns) + max(0, now_ns - self.started_at_ns)
        return QueueTime(self.wait.arrived_at_ns, waited_ns, None)

    @property
    def ran_from_ns(self) -> int | None:
        """Return when it began to run; None if it has not: it waits on the machine that it was handed to."""
        return self.started_at_ns if self.elsewhere is None else self.begun_at_ns

    @property
    def jid(self) -> Jid | None:
        """Return its wrapper's identity, None until it is known."""
        return self.handle.jid if self.handle is not None else None

    @property
    def merely_runs(self) -> bool:
        """Whether it runs on this machine, and there is nothing else to say of it."""
        return (
            self.executor in LOCAL_EXECUTORS
            and (self.registered or self.jid is not None)
            and self.proof is None
            and self.stop is None
            and self.gpu_watch is None
            and not (self.gone or self.leftovers or self.kept or self.suspended_by)
            and self.suspension.since_ns is None
            and not self.suspension.before_ns
        )

    @property
    def exit_status(self) -> int | None:
        """Return what its wrapper, our own child, has ended with, as wait() reports it."""
        return self.handle.exit_status if self.handle is not None else None

    # Transitions: what becomes of it.

    def become(self, read: ActiveRun) -> None:
        """Learn that its records can be read now: it is *read*, and a stop that was ordered meanwhile stays ordered."""
        stop, recorded, handle = self.stop, self.stop_recorded, self.handle
        for name in ActiveRun.__struct_fields__:
            setattr(self, name, getattr(read, name))
        elsewhere = read.handle is not None and handle is not None and handle.engine is not read.handle.engine
        if handle is not None and not elsewhere:  # it knows what was done about it
            self.handle = handle
            if read.jid is not None:
                handle.identified(read.jid)
        if stop is not None and self.stop is None:
            self.stop, self.stop_recorded = stop, recorded

    def began(self, boot_ns: int) -> None:
        """Learn when it began, on the clock since boot."""
        self.started_boot_ns = boot_ns

    def heard(self) -> bool:
        """Take in what keeps it waiting where it was handed to; return whether that is news."""
        before, self.told = self.told, self.submitted or ""
        return self.told != before

    def began_elsewhere(self, at_ns: int, boot_ns: int) -> None:
        """Learn that its wrapper has spoken on another machine, and when."""
        self.begun_at_ns = at_ns
        self.began(boot_ns)

    def may_be_silent(self, until_ns: int) -> None:
        """Let a missing jid prove nothing until then, monotonic."""
        self.unregistered_until_ns = until_ns

    def file_seen(self, inode: int, mtime_ns: int) -> None:
        """Learn that its job file lies in `running/`."""
        self.inode, self.mtime_ns, self.file_missing_ns, self.claim_told = inode, mtime_ns, None, True

    def is_claim_told(self) -> bool:
        """Take note that an event has told of a file in `running/`; return whether that is the one of its claim."""
        before, self.claim_told = self.claim_told, True
        return not before

    def is_new_text(self, inode: int, mtime_ns: int) -> bool:
        """Whether the job file in `running/` that looks like this may say something new since it was last seen."""
        if inode != self.inode:
            return True
        return mtime_ns > self.started_at_ns if self.mtime_ns is None else mtime_ns != self.mtime_ns

    def edited(self, spec: Spec) -> bool:
        """Learn what its job file says now; return whether anything that counts for it has changed."""
        before, self.spec = self.spec, in_force(self.spec, spec)
        return self.spec != before

    def file_missing(self, at_ns: int) -> None:
        """Learn that its job file is not in `running/`, seen first at *at_ns*, monotonic."""
        self.file_missing_ns = at_ns

    def file_found(self) -> None:
        """Learn that its job file is where a retry would put it."""
        self.file_missing_ns = None

    def launched(self, handle: RunHandle) -> None:
        """Learn that its wrapper is on its way, or was started by an earlier dispatcher."""
        self.handle = handle

    def failed_to_launch(self, why: str) -> None:
        """Learn that it was not started, and never will be."""
        self.failure = why

    def taken_back(self, refusal: str | None = None) -> None:
        """Learn that it was not started: its missing jid proves that at once. *refusal* is what the machine says."""
        self.refusal = refusal or self.refusal
        self.unregistered_until_ns, self.processes_gone = 0, True

    def stop_ordered(self, stop: Stop) -> None:
        """Stop it from now on."""
        self.stop, self.asking = stop, False

    def stop_on_record(self, stop: Stop | None) -> None:
        """Learn that the record `stop` says so; *stop* is what stands there if somebody else was first."""
        self.stop = stop or self.stop
        self.stop_recorded = True

    def stop_asked(self) -> None:
        """Let it go on while somebody is asked whether it may be cancelled."""
        self.stop, self.asking = None, True

    def stop_answered(self, kept: str = "") -> None:
        """Learn that they have answered. *kept* says why it is not cancelled."""
        self.asking = False
        self.kept = kept or self.kept

    def note_registered(self, *, registered: bool) -> None:
        """Learn whether its jid is there, even if nobody has to read it."""
        self.registered = registered

    def was_alive(self, at_ns: int) -> None:
        """Take over that an earlier dispatcher, which watched it, was at work at *at_ns*."""
        self.known_alive_ns = at_ns

    def dated(self, end: RunEnd) -> None:
        """Set when it ended."""
        self.end = end

    def has_result(self, result: Result) -> None:
        """Learn that its result is recorded."""
        self.result = result

    def is_accounted(self, *, accounted: bool) -> None:
        """Learn whether the history has its line."""
        self.accounted = accounted

    def filed(self, *, final: bool) -> None:
        """Learn that its paperwork is done. *final*: its job has ended with it."""
        self.final = final

    def suspends(self, suspension: Suspension, by: str = "") -> None:
        """Learn how long it has been suspended, and whether it is now; *by* whom and why."""
        self.suspension, self.suspended_by = suspension, by

    def cannot_be_suspended(self) -> None:
        """Learn that somebody wants it suspended, and its engine lets nobody do that."""
        where = engine_title(self.executor)
        self.kept = f"not suspended: it is in {where}; `spool hold {self.name}` stops it and holds it"

    # Transitions: what the supervisor learns.

    def used_memory(self, memory_bytes: int) -> None:
        """Record a peak of memory use."""
        self.peak_memory_bytes = max(self.peak_memory_bytes or 0, memory_bytes)

    def gpus_watched(self, watch: GpuWatch) -> None:
        """Learn what it has done with its GPUs so far."""
        self.gpu_watch = watch

    def seen_alive(self) -> None:
        """Learn that its wrapper lives."""
        self.met_alive = True

    def outlived(self, at_ns: int | None) -> None:
        """Record that processes of it have outlived its wrapper, which ended *at_ns*, if that is known."""
        self.leftovers, self.outlived_at_ns = True, at_ns

    def nothing_left(self) -> None:
        """Learn that nothing of it is left, so that its room is free."""
        self.leftovers, self.processes_gone, self.gone = False, True, True

    def measured(self, usage: Usage) -> None:
        """Learn what it has used in all."""
        self.oom_killed = usage.oom_killed
        self.cpu_time_ns = usage.cpu_time_ns if usage.cpu_time_ns is not None else self.cpu_time_ns
        if usage.peak_memory_bytes is not None:
            self.peak_memory_bytes = usage.peak_memory_bytes

    def used(self, written: WrittenUsage) -> None:
        """Set what its wrapper says it has used, where that says more than what was measured.

        Each peak is one that was reached, so the largest counts.
        """
        if self.cpu_time_ns is None:
            self.cpu_time_ns = written.cpu_time_ns
        if written.peak_bytes is not None:
            self.peak_memory_bytes = max(self.peak_memory_bytes or 0, written.peak_bytes)

    def exited(self, code: int | None, at_ns: int | None) -> None:
        """Set which exit code its wrapper has written down, and when; None: none yet."""
        self.exit_code, self.exit_at_ns = code, at_ns

    def resolved(self, proof: Proof) -> None:
        """Learn that it is over, and how."""
        self.proof, self.gone = proof, True

    def refused_by_machine(self, why: str | None) -> None:
        """Learn that it is over without having begun; *why*: the reason the machine did not let it, if known."""
        self.refusal = self.refusal or why
        self.resolved(Proof(Verdict.VOID))

    def taken_back_by_engine(self, refusal: str | None) -> None:
        """Learn that its engine never had it; *refusal*: and refuses it, so its job must be held."""
        if refusal:
            self.held_because = f"{refusal}; `spool edit {self.name}`, then `spool release {self.name}`"
        self.resolved(Proof(Verdict.VOID))

    def not_begun_elsewhere(self, failure: str) -> None:
        """Learn that its engine had it and it never began; *failure* is what went wrong, where it was not by chance."""
        if failure and self.refused.times + 1 >= _MOST_FAILURES:
            again = f"`spool release {self.name}` tries again"
            self.held_because = f"it has failed {_MOST_FAILURES} times before it began: {failure}; {again}"
        self.refused_by_machine(failure or None)

    @property
    def running(self) -> Running:
        """Return the run as the planner sees it; what outlived its command is being stopped as well."""
        stopping = self.stop is not None or self.leftovers
        return Running(
            self.name,
            self.run,
            self.user,
            self.spec,
            self.grant,
            self.ran_from_ns or self.started_at_ns,
            self.attempts.attempt,
            stopping,
            elsewhere=self.elsewhere,
            submitted=self.submitted is not None,
            suspension=self.suspension,
            stop_at_ns=self.stop.at_ns if self.stop is not None else self.outlived_at_ns,
            arrived_at_ns=self.wait.arrived_at_ns,
        )

    @classmethod
    def of_records(
        cls,
        record: GrantRecord,
        spec: Spec,
        *,
        granted_at_ns: int,
        boot_ns: int,
        stop: Stop | None,
        inode: int,
    ) -> ActiveRun:
        """Return a run that another dispatcher has started, as its records show it."""
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
            started_boot_ns=boot_ns,
            executor=record.executor,
            boot_id=record.boot_id,
            stop=stop,
            adopted=True,
            claim_told=True,
        )

    @classmethod
    def of_journal(
        cls,
        spool: Spool,
        name: str,
        known: Mapping[tuple[str, int], Started],
        stopping: Mapping[tuple[str, int], Stop],
        config: Config,
    ) -> ActiveRun | None:
        """Return the newest run of that name that the journal knows, without its records; None if it knows none."""
        run = max((run for job, run in known if job == name), default=None)
        if run is None:
            return None
        started, spec = known[name, run], None
        with suppress(OSError):
            spec = spool.job_spec(RUNNING, name, config.defaults)
        spec = spec or Spec(command="true")
        record = GrantRecord(
            name,
            run,
            grant=Grant(spec.request.cpus, spec.request.memory_bytes, resources=spec.request.resources),
            executor=spec.executor or config.executor,
            boot_id=started.boot_id,
            submitted_at_ns=started.arrived_at_ns,
        )
        live = cls.of_records(
            record,
            spec,
            granted_at_ns=started.at_ns,
            boot_ns=0,
            stop=stopping.get((name, run)),
            inode=started.inode,
        )
        live.unread = True
        return live


def presumed_executor(spool: Spool, name: str, run: int, spec: Spec, default: str) -> str:
    """Return which executor is assumed to have started a run when no record of its grant is left. Raises OSError."""
    jid = spool.jid(name, run)
    if isinstance(jid, Jid):
        return jid.engine.partition(":")[0] if jid.engine is not None else LOCAL_EXECUTORS[0]
    known = spool.engine(name, run)
    return known[0] if known is not None else spec.executor or default


def presumed_grant(spec: Spec) -> Grant:
    """Return what a run is assumed to have when no record of its grant is left."""
    return Grant(cpus=spec.request.cpus, resources=spec.request.resources)
