"""The life of a run: from evidence to its state, its phases until its paperwork is done, and what follows its end.

The state follows from one table (docs/FORMAT.md, 19.3, numbers the same rows). It is proved, never stored. Evidence
must be read in the order `jid`, process, `rc`: the reverse of the order in which it appears. Any other order reports a
live or a finished run as lost.

Each phase is a value with only the facts that are known in it. A fact of several phases, such as an order to stop the
run or its suspension, is not a phase and is kept beside it. docs/ARCHITECTURE.md has the same table.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol, TypeAlias, assert_never

from msgspec import Struct
from msgspec.structs import replace

from spool.core.model import MAX_REQUEUES, SECOND_NS, Jid, Result, Retry, Spec, State, Stop, StopKind, Suspension

_START_AGAIN_NS = SECOND_NS
"""The delay before a failed start is tried again; it doubles each time."""


class Liveness(StrEnum):
    """The state of the process that a `jid` names."""

    ABSENT = "absent"  # no jid, or an incomplete one
    VOID = "void"  # the dispatcher took the jid: the run never started and never will
    ALIVE = "alive"  # that pid, that start time, this boot, and not a zombie
    GONE = "gone"  # this boot, and no such process
    REBOOTED = "rebooted"  # this host, another boot
    ELSEWHERE = "elsewhere"  # another host or pid namespace: cannot be checked from here


class Prober(Protocol):
    """The questions about the machine that a look at a run needs; `spool.machine.processes` answers them."""

    def boot_id(self) -> str:
        """Return the id of this boot."""

    def liveness(self, jid: Jid) -> Liveness:
        """Return the state of the process *jid*."""

    def is_wrapper(self, jid: Jid, root: str, name: str, run: int) -> bool:
        """Whether the living process *jid* is the wrapper of that run of the spool at *root*."""

    def has_left_processes(self, root: str, name: str, run: int) -> bool:
        """Whether a run of the spool at *root* still has processes after its wrapper was killed."""


class EngineWord(StrEnum):
    """The ways in which an engine reports the end of a run elsewhere, whatever its own words are."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_LOST = "node_lost"  # the node went away, and nothing runs there any more
    PREEMPTED = "preempted"
    NOT_STARTED = "not_started"  # the node could not be made ready
    FORGOTTEN = "forgotten"  # the engine has answered, and does not know the run


class Verdict(StrEnum):
    """The verdict on the evidence of one run."""

    STARTING = "starting"  # launched, and the wrapper has not reported yet
    SILENT = "silent"  # the same for too long: to be settled by taking the jid
    VOID = "void"
    RUNNING = "running"
    STOPPING = "stopping"
    UNREACHABLE = "unreachable"  # presumably runs elsewhere: left alone
    ENDED = "ended"


class Evidence(Struct, frozen=True):
    """The observations of one run."""

    liveness: Liveness
    rc: int | None = None
    stop: StopKind | None = None
    recorded: State | None = None  # the outcome in result.toml
    leftovers: bool = False  # the command has ended, or the wrapper was killed, and processes of the run are left
    grace: bool = False  # launched so recently that a missing jid proves nothing
    oom_killed: bool = False  # the kernel's out-of-memory killer took one of its processes
    refused: bool = False  # the wrapper reported that the machine did not let the command begin
    engine: EngineWord | None = None  # for a run elsewhere: how its engine reports the end
    said: str = ""  # the engine's own words for that; here, why its command may not have ended
    rc_at_ns: int | None = None  # when `rc` was written, by the clock of the file system


class Exit(Struct, frozen=True):
    """The last record of a wrapper."""

    code: int  # 128+n for signal n
    at_ns: int  # when it was written, by the clock of the file system


class RunEnd(Struct, frozen=True):
    """When a run ended. `is_bound`: it left no exit code; it was last known alive then, and ended then or later."""

    at_ns: int
    is_bound: bool = False


class LastSigns(Struct, frozen=True):
    """The evidence about when a run ended. Instants are by the wall clock, except for `exit_at_ns`."""

    granted_at_ns: int
    began_ns: int | None  # None: it never began on the engine that it was handed to
    exit_at_ns: int | None = None  # when its exit code was written, by the clock of the file system
    outlived_ns: int | None = None  # a look found processes of it then
    served_ns: int | None = None  # its engine reported it running then, or a dispatcher watched it then
    watched: bool = False  # its end was seen as it happened


def end_of(signs: LastSigns, now_ns: int, *, exit_ns: int | None, wrote_ns: int | None) -> RunEnd:
    """Return when a run ended, which is known to be over at *now_ns*.

    *exit_ns* and *wrote_ns*, the times of its exit code and of its last other output, are by the wall clock. The exit
    code is the end, unless processes of the run were alive later. Without an exit code, a watched run ends now, as it
    is seen to end; any other run ends at the last proof of life. No clock and no `touch` moves the end before the begin
    of the run, or into the future.
    """
    if signs.began_ns is None:
        return RunEnd(max(signs.granted_at_ns, now_ns))
    if exit_ns is None and signs.watched:
        return RunEnd(max(signs.began_ns, now_ns))
    proofs = (exit_ns, signs.outlived_ns) if exit_ns is not None else (signs.outlived_ns, signs.served_ns, wrote_ns)
    last_ns = max((at_ns for at_ns in proofs if at_ns is not None), default=signs.began_ns)
    return RunEnd(max(signs.began_ns, min(last_ns, now_ns)), is_bound=exit_ns is None)


class Proof(Struct, frozen=True):
    """A verdict; with ENDED also the outcome and why."""

    verdict: Verdict
    outcome: State | None = None
    reason: str = ""


_LEFTOVERS = "its command has ended, but processes that it started are still running"
WITHOUT_JID = "its jid is missing or unreadable, but processes of it are still running"

EPILOG_NS = 300 * SECOND_NS
"""How long an epilog may go on beyond the time limit, which is the command's."""

EPILOG_CUT = "its epilog was cut short"

_STOPPED_AS = {
    StopKind.CANCEL: (State.CANCELLED, "cancelled"),
    StopKind.REQUEUE: (State.CANCELLED, "stopped for requeueing"),
    StopKind.HOLD: (State.CANCELLED, "stopped for holding"),
    StopKind.TIMEOUT: (State.TIMEOUT, "exceeded its time limit"),
    StopKind.MEMORY: (State.OUT_OF_MEMORY, "exceeded its memory limit"),
    StopKind.UNSCHEDULABLE: (State.UNSCHEDULABLE, "scheduling timeout"),
    StopKind.PREEMPT: (State.PREEMPTED, "preempted"),
}


def prove(evidence: Evidence) -> Proof:
    """Return what *evidence* proves. Total: every combination has a row, and the first matching row counts."""
    if evidence.recorded is not None:  # row 1
        return Proof(Verdict.ENDED, evidence.recorded, "recorded")
    match evidence.liveness:
        case Liveness.VOID:  # row 2
            return Proof(Verdict.VOID)
        case Liveness.ELSEWHERE:  # row 3; with an rc, the last thing a wrapper writes, the rows from 9 on
            return Proof(Verdict.UNREACHABLE) if evidence.rc is None else _ended(evidence)
        case Liveness.ALIVE:  # rows 4 to 6
            return Proof(Verdict.STOPPING if evidence.stop or evidence.leftovers else Verdict.RUNNING)
        case Liveness.ABSENT if evidence.engine is None:  # rows 7 and 8
            return Proof(Verdict.STARTING if evidence.grace else Verdict.SILENT)
        case Liveness.ABSENT | Liveness.GONE | Liveness.REBOOTED:
            if evidence.leftovers and evidence.liveness is Liveness.GONE:  # row 5
                return Proof(Verdict.STOPPING, reason=evidence.said)
            return _ended(evidence)
        case _:  # pragma: no cover
            assert_never(evidence.liveness)


class Remains(Struct, frozen=True):
    """The findings of one look at a run on this machine that must end."""

    others: bool  # processes besides its wrapper
    wrapper: bool
    certain: bool  # no process of the run can have been missed: its wrapper has outlasted them
    grace_over: bool = False
    frozen: bool = False  # the others are those of the previous look, and were stopped in both: none can fork any more
    tired: bool = False  # they should be stopped by now, and are not
    wrapper_grace_over: bool = False  # the time for the wrapper's last records


class EndStep(StrEnum):
    """The next action on a run that must end."""

    OVER = "nothing: it is gone"
    LOOK = "another search: its wrapper was killed, and something may be left"
    ASK = "TERM, to what has not had it"
    FREEZE = "STOP, to all but the wrapper, and another look: what stands still cannot fork, and keeps its children"
    KILL = "KILL, to all but the wrapper, which then writes the exit code"
    KILL_ALL = "KILL, to the wrapper as well"


def ending(remains: Remains) -> EndStep:
    """Return the next step for a run with these remains: the first case that matches (docs/FORMAT.md, 6.2)."""
    if not remains.others and not remains.wrapper:
        return EndStep.OVER if remains.certain else EndStep.LOOK
    if not remains.grace_over:
        return EndStep.ASK
    if remains.wrapper_grace_over:
        return EndStep.KILL_ALL
    if not remains.others:  # the wrapper is writing the exit code
        return EndStep.ASK
    return EndStep.KILL if remains.frozen or remains.tired else EndStep.FREEZE


_VOID_IF_UNSPOKEN = frozenset(EngineWord) - {
    EngineWord.COMPLETED,  # it has run, on a machine whose records cannot be seen from here
    EngineWord.CANCELLED,
    EngineWord.TIMEOUT,
    EngineWord.OUT_OF_MEMORY,
}


def ends_unspoken(word: EngineWord) -> bool:
    """Whether such an end before the wrapper reported ends the run for good; else its job waits again."""
    return word not in _VOID_IF_UNSPOKEN


def _ended(evidence: Evidence) -> Proof:
    """Return the proof for a run whose processes are all gone (rows 9 to 25)."""
    if evidence.stop is None and evidence.rc is None:
        if evidence.liveness is Liveness.ABSENT:  # row 14
            if evidence.engine is not None and not ends_unspoken(evidence.engine):
                return Proof(Verdict.VOID)
        elif evidence.refused:  # row 15
            return Proof(Verdict.VOID)
    return Proof(Verdict.ENDED, *_outcome(evidence))


_CUT_SHORT = {
    EngineWord.OUT_OF_MEMORY: (State.OUT_OF_MEMORY, "over its memory limit"),
    EngineWord.TIMEOUT: (State.TIMEOUT, "over its time limit"),
    EngineWord.CANCELLED: (State.CANCELLED, "cancelled, and not by spool"),
    EngineWord.PREEMPTED: (State.PREEMPTED, "preempted"),
    EngineWord.NODE_LOST: (State.LOST, "its node went away"),
    EngineWord.NOT_STARTED: (State.LOST, "its node could not be made ready"),
}
"""Ways in which an engine ends a run; the exit code that its signals leave proves nothing."""


def _outcome(evidence: Evidence) -> tuple[State, str]:
    """Return the outcome of a run that had begun, and the reason."""
    said = f": {evidence.said}" if evidence.said else ""
    if evidence.stop is not None:  # rows 9 to 13: a run that spool stopped never counts as finished, whatever its code
        return _STOPPED_AS[evidence.stop]
    if evidence.rc == 0:  # row 16
        return State.FINISHED, "exit code 0"
    if evidence.oom_killed:  # row 17
        return State.OUT_OF_MEMORY, "killed by the kernel: out of memory"
    if evidence.engine in _CUT_SHORT and evidence.liveness is not Liveness.ELSEWHERE:  # rows 18 to 22
        outcome, why = _CUT_SHORT[evidence.engine]
        return outcome, f"{why}{said}"
    if evidence.rc is not None:  # row 23
        return State.FAILED, exit_words(evidence.rc)
    if evidence.liveness is Liveness.REBOOTED:  # row 24
        return State.LOST, "the machine was restarted while it ran"
    if evidence.engine is EngineWord.COMPLETED:  # row 25, as everything below
        return State.LOST, f"it left no exit code; is the spool on a file system that its node shares?{said}"
    if evidence.engine is not None:
        return State.LOST, f"it left no exit code{said}"
    return State.LOST, "its processes are gone and left no exit code"


def shown(
    proof: Proof,
    *,
    filed: bool,
    stop: Stop | None = None,
    submitted: str | None = None,
    elsewhere: str | None = None,
) -> tuple[State | None, str]:
    """Return the state of a run for every view, and the reason; None for a run that was taken back.

    *filed* says whether its end is recorded: until then the run holds its job, and is `stopping`. *submitted* is why it
    waits on its engine; None if it has begun, or was started here. *elsewhere* describes a run on an engine;
    None for a run on this machine.
    """
    ordered = stop_words(stop) if stop is not None else ""
    match proof.verdict:
        case Verdict.VOID:
            return None, "withdrawn before it started"
        case Verdict.ENDED:
            if filed:
                return proof.outcome, proof.reason
            # Its engine may have caused an exit code other than 0, and the record will have its word.
            is_known = elsewhere is None or stop is not None or proof.outcome is State.FINISHED
            return State.STOPPING, f"has ended{f' ({proof.outcome})' if is_known else ''}, being recorded"
        case Verdict.UNREACHABLE if elsewhere is None or stop is None:
            return State.RUNNING, "on another host, not visible from here" if elsewhere is None else elsewhere
        case Verdict.STOPPING if stop is None:
            return State.RUNNING if proof.reason else State.STOPPING, proof.reason or _LEFTOVERS
        case Verdict.UNREACHABLE | Verdict.STOPPING:
            return State.STOPPING, ordered
        case Verdict.STARTING | Verdict.SILENT | Verdict.RUNNING if submitted is not None:
            return (State.STOPPING, ordered) if ordered else (State.SUBMITTED, submitted)
        case Verdict.STARTING | Verdict.SILENT:
            return State.STARTING, ordered
        case Verdict.RUNNING:
            return State.RUNNING, ordered
        case _:  # pragma: no cover
            assert_never(proof.verdict)


def stop_words(stop: Stop) -> str:
    """Describe an order to stop a run."""
    if stop.kind is StopKind.PREEMPT:
        return f"preempted for {stop.reason}" if stop.reason else "preempted"
    return f"{stop.kind} by {stop.by}"


def handed_to(title: str) -> str:
    """Return the reason of a `submitted` run whose engine has not given one; it may not have the run yet."""
    return f"on its way to {title}"


def suspended_words(suspension: Suspension, by: str) -> str:
    """Describe the suspension of a run, *by* a user if known; "" if it is not suspended."""
    return "" if suspension.since_ns is None else f"suspended by {by}" if by else "suspended"


def exit_words(code: int) -> str:
    """Return an exit code in words; 128+n is what a shell reports for signal n."""
    return f"signal {code - 128} (exit code {code})" if 128 < code < 128 + 65 else f"exit code {code}"


def delay_ns(retry: Retry, number: int) -> int:
    """Return how long to wait before retry *number* (1, 2, 3 …): `min(delay * backoff**(number-1), max_delay)`."""
    try:
        delay = retry.delay_ns * retry.backoff ** (number - 1)
    except OverflowError:
        return retry.max_delay_ns if retry.delay_ns else 0
    return int(min(delay, retry.max_delay_ns))


def continued(
    spec: Spec,
    result: Result,
    stopped_by: StopKind | None,
    *,
    could_not_start: bool = False,
    max_requeues: int = MAX_REQUEUES,
) -> Result:
    """Return *result* with `again` and `again_at_ns` if its submission goes on.

    Finished, cancelled and unschedulable are final, unless a user moved the job to `queued/` or `held/` while it ran. A
    run that spool preempted is repeated. So is one that its engine preempted, and a lost one at most *max_requeues*
    times, if the job allows it. Every other run, and one without requeues left, is retried as `retry` says: its `on`
    holds outcomes, and for `failed` exit codes too.
    """
    outcome = result.outcome
    if stopped_by in (StopKind.REQUEUE, StopKind.HOLD):
        return replace(result, again="requeue" if stopped_by is StopKind.REQUEUE else "hold")
    if outcome in (State.FINISHED, State.CANCELLED, State.UNSCHEDULABLE):
        return result
    repeated = outcome is State.PREEMPTED or (outcome is State.LOST and result.requeues < max_requeues)
    if stopped_by is StopKind.PREEMPT or (repeated and spec.requeue):
        return replace(result, again="requeue")
    retry = spec.retry
    meant = outcome.value in retry.on or (outcome is State.FAILED and result.exit_code in retry.on)
    if not meant or result.attempt > retry.max:
        return result
    wait_ns = delay_ns(retry, result.attempt)
    if could_not_start:
        doubling_ns = min(_START_AGAIN_NS << min(result.attempt - 1, 40), max(retry.max_delay_ns, _START_AGAIN_NS))
        wait_ns = max(wait_ns, doubling_ns)
    at_ns = result.ended_at_ns + wait_ns if wait_ns and result.ended_at_ns is not None else None
    return replace(result, again="retry", again_at_ns=at_ns)


class Unread(Struct, frozen=True):
    """An earlier dispatcher started it, and its records cannot be read yet: nothing is concluded from them."""

    empty: bool = False  # no process of it is left


class Claimed(Struct, frozen=True):
    """Its job file was claimed for it, and no process was started yet."""


class Unstartable(Struct, frozen=True):
    """It could not be started, and never will be."""

    why: str


class TakenBack(Struct, frozen=True):
    """It was not started this time, so its job keeps waiting."""

    refusal: str | None = None  # the machine's reason


class Active(Struct, frozen=True):
    """Its wrapper is being started or at work, here or on another machine, where it may wait."""


class Outlived(Struct, frozen=True):
    """Its command has ended, or its wrapper was killed, and other processes of the run may be left."""

    since_ns: int | None = None  # the start of their grace, if known


class Gone(Struct, frozen=True):
    """No process of it is left, and its end is not known yet."""


class Void(Struct, frozen=True):
    """Its command has not begun and never will; nothing counts."""

    end: RunEnd
    refusal: str | None = None  # why the machine did not let it begin, so that its job keeps waiting
    held_because: str = ""  # why its job must be held: its engine refuses it


class Ended(Struct, frozen=True):
    """It is over, with a known end."""

    outcome: State
    reason: str
    end: RunEnd
    exit_code: int | None = None  # as recorded by its wrapper
    unstarted: bool = False  # there was no wrapper to record anything


class Recorded(Struct, frozen=True):
    """Its result is written."""

    ended: Ended
    result: Result
    accounted: bool = False  # the history has its line


class Filed(Struct, frozen=True):
    """Its job file is in its place after the result."""

    ended: Ended
    result: Result
    final: bool  # its job has ended with it


Phase: TypeAlias = (
    Unread | Claimed | Unstartable | TakenBack | Active | Outlived | Gone | Void | Ended | Recorded | Filed
)

UNREAD, CLAIMED, ACTIVE, GONE = Unread(), Claimed(), Active(), Gone()


_LEADS_TO: dict[type[Phase], frozenset[type[Phase]]] = {
    Unread: frozenset({Active}),
    Claimed: frozenset({Unstartable, TakenBack, Active, Void, Ended}),
    Unstartable: frozenset({Ended}),
    TakenBack: frozenset({Void, Ended}),
    Active: frozenset({Outlived, Gone, Void, Ended}),
    Outlived: frozenset({Gone, Void, Ended}),
    Gone: frozenset({Void, Ended}),
    Void: frozenset(),
    Ended: frozenset({Recorded}),
    Recorded: frozenset({Recorded, Filed}),  # again when the history has its line
    Filed: frozenset({Filed}),  # after an error the file is moved again
}
_OVER = frozenset({Void, Ended, Recorded, Filed})
_HOLDS_ROOM = frozenset({Claimed, Unstartable, TakenBack, Active, Outlived})


def after(phase: Phase, seen: Phase) -> Phase:
    """Return the phase of a run that was in *phase* and was seen to be in *seen*.

    Total: an observation that does not follow from *phase*, because it comes late or twice, leaves the phase unchanged.
    """
    if isinstance(phase, Unread) and isinstance(seen, Gone):
        return Unread(empty=True)
    return seen if type(seen) in _LEADS_TO[type(phase)] else phase


def is_over(phase: Phase) -> bool:
    """Whether the end of a run is known, or that it never began."""
    return type(phase) in _OVER


def holds_room(phase: Phase) -> bool:
    """Whether a run's grant is still in use: a process of it may be left."""
    return type(phase) in _HOLDS_ROOM or phase == UNREAD


def known_end(phase: Phase) -> Ended | None:
    """Return the end of a run; None: not known yet, or it never began."""
    if isinstance(phase, Recorded | Filed):
        return phase.ended
    return phase if isinstance(phase, Ended) else None
