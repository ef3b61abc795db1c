"""Supervise the runs: notice their ends and how they ended, measure their use, enforce their limits."""

from __future__ import annotations

import errno
import heapq
import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from spool.core import layout
from spool.core.eventnames import EventName
from spool.core.gpuuse import GpuWatch
from spool.core.lifecycle import (
    EngineWord,
    Evidence,
    LastSigns,
    Liveness,
    Proof,
    RunEnd,
    Verdict,
    ends_unspoken,
    exit_words,
    prove,
)
from spool.core.model import SECOND_NS, GpuWork, Jid, Machine, State, Stop, StopKind
from spool.core.phases import GONE, Active, Ended, Gone, Outlived, TakenBack, Unread, Unstartable, Void
from spool.core.units import format_duration, show_duration, show_size
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Context
from spool.dispatcher.terminator import Terminator
from spool.dispatcher.timers import Clock, Pace, boot_clock
from spool.dispatcher.wakeup import Wakeup
from spool.executors import RunHandle
from spool.formats.run_records import render_gpus
from spool.formats.wrapper import ALREADY_STARTED, NO_JID, REFUSED
from spool.state.run import ActiveRun
from spool.state.world import MachineMonitor
from spool.store.disk import status_of
from spool.store.locked_spool import LockedSpool
from spool.store.spool import Prober

POLL_NS = SECOND_NS  # where no event reports an end, or a change of the files


_MOST_FAILURES = 3  # of an engine to start a job, in a row
_FIND_OUT = "find out the end of"
_NOT_BY_CHANCE = frozenset({EngineWord.FAILED, EngineWord.FORGOTTEN})  # of a run that ends before it begins
COULD_NOT_START = "could not start: "
_NO_FORK = frozenset({2, 254})  # exit codes of dash and busybox, and of bash after its tries, if they cannot fork
_CANNOT_FORK = re.compile(rb": (?:Cannot fork|can't fork: [^\n]*|fork: Resource temporarily unavailable)\n\Z")
log = logging.getLogger(__name__)

MEMORY_EVERY_NS = SECOND_NS
_SHARE = 50  # and it may use one part in N of a processor
_AGAIN_NS = SECOND_NS // 4  # after an error

_WRITE_GPUS_EVERY_NS = 15 * SECOND_NS
_READ_GPUS, _WRITE_GPUS, _JUDGE_GPUS = "read the GPU use of", "write the GPU use of", "warn of the idle GPUs of"
_MOST_LOOKS = 2  # a look counts for at most the time of this many intervals between looks


class Supervisor:
    """Finds the runs that have no processes left."""

    def __init__(self, context: Context, prober: Prober, terminator: Terminator, wakeup: Wakeup) -> None:
        self._state = context.state
        self._changes = context.changes
        self._confinement = context.confinement
        self._executors = context.executors
        self._terminator = terminator
        self._wakeup = wakeup
        self.concluder = Concluder(context.spool, prober, context.clock)
        self._timer = context.timers.timer("ends", always=True)
        self.suspects: set[tuple[str, int]] = set()  # runs whose end must be checked
        self._polled: dict[tuple[str, int], ActiveRun] = {}  # runs whose end no event reports
        self._ended: list[ActiveRun] = []  # found, and not returned yet
        self._begun: list[ActiveRun] = []  # elsewhere, and not returned yet
        self._news = False  # an engine has news of a run that waits there
        self._poll_at_ns = 0

    def watch(self, live: ActiveRun) -> None:
        """Watch for the end of a run from now on; call it once events report that, or cannot."""
        if self._unwatched(live):
            self._polled[live.key] = live
            self._timer.set(self._poll_at_ns)

    def suspect(self, live: ActiveRun) -> None:
        """Let the next call of :meth:`collect` look at the evidence of *live*."""
        self.suspects.add(live.key)

    def collect(self) -> list[ActiveRun]:
        """Return the runs that are over, with known ends. The room of a run is free once no process is left."""
        now = time.monotonic_ns()
        reap_at_ns = self._executors.local.due_ns()
        if self._wakeup.children_ended() or (reap_at_ns is not None and now >= reap_at_ns):
            self.suspects |= {run.key for run in self._executors.local.reap()}
        self._take_ended(self._wakeup.ended_runs())
        if self._executors.engines:
            with self._confinement.service("ask", "the engines of runs elsewhere"):
                self.suspects |= {run.key for run in self._executors.work()}
        if now >= self._poll_at_ns:
            self.suspects |= self._polled.keys()
            self._poll_at_ns = now + POLL_NS
        gone: list[ActiveRun] = []
        if self._terminator.runs:
            with self._confinement.service("look at", "the processes of runs that are stopped"):
                gone = self._terminator.tick()
        for live in gone:
            self._terminator.forget(live)
            self._nothing_left(live)
            self.suspects.add(live.key)
        for key in list(self.suspects):
            if self._confinement.pauses(Thing.of_run(key), _FIND_OUT):
                continue
            with self._confinement.of(Thing.of_run(key), _FIND_OUT) as piece:
                self._look_at(key)
            if not piece.failed:  # else it is looked at again
                self.suspects.discard(key)
        self._timer.set(self._poll_at_ns if self._polled else None)
        if (reap_at_ns := self._executors.local.due_ns()) is not None:
            self._timer.advance(reap_at_ns)
        ended, self._ended = self._ended, []
        return ended

    def _take_ended(self, keys: set[tuple[str, int]]) -> None:
        """Look at runs whose wrappers have ended; all are recorded before the leftovers of the first are sought."""
        for key in keys:
            live = self._state.live.get(key)
            if live is not None and live.handle is not None:
                live.handle.has_ended()
        self.suspects |= keys

    def begun(self) -> list[ActiveRun]:
        """Return the runs that have begun elsewhere since the last call: their time limits count from then."""
        begun, self._begun = self._begun, []
        return begun

    def heard(self) -> bool:
        """Return whether an engine has news of a run that waits there, since the last call."""
        news, self._news = self._news, False
        return news

    def _look_at(self, key: tuple[str, int]) -> None:
        run = self._state.live.get(key)
        if run is None or run.is_over:
            self._polled.pop(key, None)
            return
        if isinstance(run.phase, Unread):
            return
        held_room, over = run.holds_room, False
        try:
            over = self._over(run)
        finally:  # its room is free, even if its end cannot be read
            if over or (held_room and not run.holds_room):
                self._state.recount(run)
        if over:
            self._ended.append(run)
            self._wakeup.forget(run)
            self._terminator.forget(run)
            if run.handle is not None:
                run.handle.close()
        elif self._unwatched(run):
            self._wakeup.watch_run(run)  # its jid may be known by now
        if not self._unwatched(run):
            self._polled.pop(key, None)

    def _unwatched(self, live: ActiveRun) -> bool:
        """Whether no event reports the end of a run."""
        return not live.is_over and not self._wakeup.watches(live)

    def _nothing_left(self, live: ActiveRun) -> None:
        """Free the grant of a run that has no processes left, for the next run."""
        live.see(GONE)
        self._state.recount(live)

    def _over(self, live: ActiveRun) -> bool:
        """Whether nothing of the run is left; processes that outlived its wrapper receive the order to end."""
        handle = live.handle
        if handle is not None and isinstance(live.phase, Active | Outlived):
            found = self._liveness(live, handle)
            if found is Liveness.ALIVE and live.elsewhere is None:  # elsewhere it is only presumed
                live.seen_alive()
            if live.elsewhere is not None:
                self._note_begin(live)
                if handle.halted is not None and handle.halted != (live.suspended_by if live.suspended else ""):
                    self._changes.suspensions.add(live.name)
                if found is Liveness.ALIVE and self.concluder.was_given_up(live):
                    found = Liveness.ABSENT  # its engine may have it, but it never begins
                if found is Liveness.ALIVE:
                    return self.concluder.was_recorded(live)  # however long it waits there before its wrapper registers
                if found is Liveness.ABSENT:
                    live.see(GONE)  # its engine has answered that it does not know it
            if live.adopted and live.jid is None and live not in self._terminator and handle.left_behind():
                return False  # its jid was removed: it is alive while any process of it is
            # The wrapper never registered: any process with the run's mark may be the wrapper.
            silent = found is Liveness.ABSENT and time.monotonic_ns() >= live.unregistered_until_ns
            if found is Liveness.GONE or silent:
                if live in self._terminator or handle.left_behind():
                    if not live.is_outlived:
                        live.see(Outlived(self.concluder.wrapper_end_ns(live)))
                        self._state.recount(live)  # its end is known better now
                    self._terminator.hurry(live)
                    return False
                live.see(GONE)
        if isinstance(live.phase, Gone) and handle is not None:
            live.measured(handle.usage())
        return self.concluder.conclude(live)

    def _note_begin(self, live: ActiveRun) -> None:
        """Count the time of a run elsewhere from the start of its wrapper, as far as clocks agree."""
        if live.submitted is None:
            return
        if (spoke_ns := self.concluder.spoke_at_ns(live)) is not None:
            now_ns = time.time_ns()
            at_ns = min(max(spoke_ns, live.started_at_ns), now_ns)
            live.began_elsewhere(at_ns, boot_clock() - (now_ns - at_ns))
            self._state.recount(live)
            self._begun.append(live)
        self._news |= live.heard()

    def _liveness(self, live: ActiveRun, handle: RunHandle) -> Liveness:
        found = handle.liveness()
        if found is Liveness.ABSENT and (jid := self.concluder.jid(live)) is not None:
            handle.identified(jid)
            found = handle.liveness()
        return found


class Concluder:
    """Looks at the evidence of runs. Unreadable evidence raises OSError, and nothing is concluded from it."""

    def __init__(self, spool: LockedSpool, prober: Prober, clock: Clock) -> None:
        self._spool = spool
        self._prober = prober
        self._clock = clock

    def conclude(self, live: ActiveRun) -> bool:
        """Look at the evidence of *live* and return whether it is over; its phase then says how, and when."""
        if (found := self._conclude(live)) is None:
            return False
        live.see(found)
        if live.adopted or None in (live.usage.cpu_time_ns, live.usage.peak_memory_bytes):
            with suppress(OSError):  # nothing depends on it
                live.used(self._spool.usage(live.name, live.run))
        return True

    def wrapper_end_ns(self, live: ActiveRun) -> int:
        """Return when the wrapper of a run ended: now if it left no exit code."""
        left = self._spool.exit(live.name, live.run)
        return left.at_ns if left is not None else self._clock()

    def _ended(self, live: ActiveRun, proof: Proof, code: int | None = None, at_ns: int | None = None) -> Ended:
        """Return the end of a run with *proof*; its wrapper has recorded the exit code *code* at *at_ns*."""
        assert proof.outcome is not None
        return Ended(proof.outcome, self._reason(live, proof, code), self._end_of(live, at_ns), code)

    def _unstarted(self, live: ActiveRun, why: str) -> Ended:
        """Return the end of a run that could not be started."""
        return Ended(State.FAILED, f"{COULD_NOT_START}{why}", self._end_of(live), unstarted=True)

    def _end_of(self, live: ActiveRun, exit_at_ns: int | None = None) -> RunEnd:
        """Return when a run ended."""
        here, seen_ns = live.elsewhere is None, live.handle.alive_at_ns if live.handle is not None else None
        served_ns = live.origin.served_until_ns if live.origin is not None else None
        signs = LastSigns(
            live.started_at_ns,
            live.ran_from_ns,
            exit_at_ns=exit_at_ns,
            outlived_ns=seen_ns if here else None,
            served_ns=served_ns if here else seen_ns,
            watched=here and not live.may_be_recorded,
        )
        return self._spool.end(live.name, live.run, signs, self._clock())

    def _conclude(self, live: ActiveRun) -> Ended | Void | None:
        if isinstance(live.phase, Unstartable):
            return self._unstarted(live, live.phase.why)
        if not live.adopted and live.exit_status is not None and live.stop is None:
            # A child of this process has ended and was not stopped: an exit code is the only evidence to read.
            left = self._spool.exit(live.name, live.run)
            stop = None if live.asking else self._spool.stop(live.name, live.run)
            if stop is not None:  # ordered by a user at this very moment
                live.stop_on_record(stop)
            if left is not None:
                ended = Evidence(Liveness.GONE, rc=left.code, stop=live.stop_kind, oom_killed=live.usage.oom_killed)
                return self._ended(live, prove(ended), left.code, left.at_ns)
        if live.elsewhere is not None and live.handle is not None:
            return self._conclude_elsewhere(live, live.handle)
        evidence = self._spool.evidence(live.name, live.run, self._prober)
        if evidence.liveness is Liveness.ABSENT and status_of(self._spool.layout.metadir(*live.key)) is None:
            evidence = self._without_metadir(live)
        if evidence.liveness is Liveness.ABSENT and live.exit_status is not None:
            # A child of this process, and it is gone without a jid: no other process can create one.
            code = os.waitstatus_to_exitcode(live.exit_status)
            why = f"the wrapper ended with {_words(code)} before it could identify itself"
            return self._never_spoke(live, why, refused=code in (NO_JID, REFUSED))
        if evidence.liveness is Liveness.ABSENT and not live.adopted and self._known_and_gone(live):
            return self._never_spoke(live, "the wrapper ended before it could identify itself")
        evidence = replace(evidence, stop=live.stopped_by(evidence.stop))
        if live.jid is None and evidence.liveness not in (Liveness.ABSENT, Liveness.VOID):
            self._identify(live)
        proof = prove(
            replace(
                evidence,
                grace=time.monotonic_ns() < live.unregistered_until_ns,
                leftovers=live.is_outlived,
                oom_killed=live.usage.oom_killed,
            )
        )
        if proof.verdict is Verdict.SILENT and not self._spool.take_jid(live.name, live.run):
            if isinstance(self._spool.jid(live.name, live.run), Jid):
                return self._conclude(live)  # the wrapper has registered at this very moment
            # The record was removed, or is truncated and empty of meaning; its writer has had enough time.
            liveness = Liveness.GONE if evidence.liveness is Liveness.ABSENT else evidence.liveness
            proof = prove(replace(evidence, liveness=liveness, grace=False, leftovers=live.is_outlived))
        elif proof.verdict is Verdict.SILENT:
            proof = Proof(Verdict.VOID)
        if proof.verdict is Verdict.VOID:
            known = live.phase.refusal if isinstance(live.phase, TakenBack) else None
            return Void(self._end_of(live), known or self._spool.refusal(live.name, live.run))
        if proof.verdict is not Verdict.ENDED:
            return None
        return self._ended(live, proof, evidence.rc, evidence.rc_at_ns)

    def _conclude_elsewhere(self, live: ActiveRun, handle: RunHandle) -> Ended | Void | None:
        """Look at the evidence of a run whose processes only its engine sees: the engine's word stands for them."""
        if self.was_given_up(live):
            return Void(self._end_of(live))
        if handle.liveness() is Liveness.ALIVE:
            return None
        end, evidence = handle.ending, self._spool.evidence(live.name, live.run, self._prober)
        stop = live.stopped_by(evidence.stop)
        spoke = evidence.liveness not in (Liveness.ABSENT, Liveness.VOID)
        if evidence.liveness is Liveness.ABSENT and evidence.recorded is None:
            # Taking the jid decides: the engine may start it again, or have it after all.
            spoke = not self._spool.take_jid(live.name, live.run)
            if spoke and self.jid(live) is not None:  # unseen before, so later records may be too
                self._identify(live)
                return self._conclude_elsewhere(live, handle)
            if spoke and end is None and stop is None:
                raise OSError(errno.ESTALE, "its jid is there and says nothing yet")
        if spoke:
            self._identify(live)
        if not spoke and evidence.recorded is None and (end is None or handle.refusal is not None) and stop is None:
            return Void(self._end_of(live), held_because=_refused_for_good(live, handle.refusal))
        proof = prove(
            replace(
                evidence,
                liveness=Liveness.GONE if spoke or end is None else Liveness.ABSENT,
                stop=stop,
                oom_killed=live.usage.oom_killed,
                engine=end.word if end is not None else None,
                said=end.said if end is not None else "",
            )
        )
        if proof.verdict is Verdict.VOID:
            failure = end.said if end is not None and end.word in _NOT_BY_CHANCE else ""
            return Void(self._end_of(live), failure or None, _failed_too_often(live, failure))
        return self._ended(live, proof, evidence.rc, evidence.rc_at_ns)

    def was_recorded(self, live: ActiveRun) -> bool:
        """Whether an earlier dispatcher has recorded how a run ended, and was killed before its file was moved."""
        result = self._spool.result(live.name, live.run) if live.adopted else None
        if result is not None:
            proof = prove(Evidence(Liveness.GONE, recorded=result.outcome))
            live.see(Ended(result.outcome, proof.reason, RunEnd(self._clock()), result.exit_code))
        return result is not None

    def was_given_up(self, live: ActiveRun) -> bool:
        """Whether an earlier dispatcher took the jid of a run, and was killed before recording that.

        Its job waits again, and its file was not moved for that; unless its engine had ended it.
        """
        end = live.handle.ending if live.handle is not None else None
        if not live.adopted or live.stop is not None or (end is not None and ends_unspoken(end.word)):
            return False
        return self._spool.is_void(*live.key)

    def spoke_at_ns(self, live: ActiveRun) -> int | None:
        """Return when the wrapper of a run registered; None if it has not."""
        return self._spool.spoke_at_ns(live.name, live.run, live.started_at_ns)

    def _never_spoke(self, live: ActiveRun, why: str, *, refused: bool = False) -> Ended | Void:
        """Settle a run without a jid whose wrapper is gone: it was stopped, refused or could not start.

        *refused*: the wrapper's exit code says that the machine refused it something. A job that removes its own jid
        has begun all the same, and its jid is never taken: that would start the job again.
        """
        if self._has_begun(live):
            ended = Evidence(Liveness.GONE, stop=live.stop_kind, oom_killed=live.usage.oom_killed)
            return self._ended(live, prove(ended))
        self._spool.take_jid(live.name, live.run)
        if live.stop is not None:
            return self._ended(live, prove(Evidence(Liveness.GONE, stop=live.stop_kind)))
        refusal = self._spool.refusal(live.name, live.run) or (why if refused else None)
        if refusal is not None:
            return Void(self._end_of(live), refusal)
        return self._unstarted(live, why)

    def jid(self, live: ActiveRun) -> Jid | None:
        """Return the wrapper's identity from its record; None if it has not registered, or that is another process."""
        found = self._spool.jid(live.name, live.run)
        return found if isinstance(found, Jid) and live.may_be(found) else None

    def _identify(self, live: ActiveRun) -> None:
        jid = self.jid(live)
        if jid is not None and live.handle is not None:
            live.handle.identified(jid)

    def _known_and_gone(self, live: ActiveRun) -> bool:
        """Whether the one process that can be the wrapper, according to its executor, has ended."""
        return live.handle is not None and live.handle.liveness() is Liveness.GONE

    def _has_begun(self, live: ActiveRun) -> bool:
        """Whether a run without a jid has had one: it was seen, or has left traces, or spool's records are gone."""
        seen = live.handle is not None and live.handle.is_child and live.jid is not None
        if seen or self._spool.has_begun(live.name, live.run):
            return True
        return not live.adopted and status_of(self._spool.layout.record(*live.key, layout.GRANT)) is None

    def _without_metadir(self, live: ActiveRun) -> Evidence:
        """Return the evidence of a run whose metadir was removed; the wrapper ends with the command's code."""
        if live.exit_status is not None:
            code = os.waitstatus_to_exitcode(live.exit_status)
            return Evidence(Liveness.GONE, rc=code if code >= 0 else None, stop=live.stop_kind)
        found = live.handle.liveness() if live.handle is not None else Liveness.ABSENT
        return Evidence(Liveness.GONE if found is Liveness.ABSENT else found, stop=live.stop_kind)

    def _reason(self, live: ActiveRun, proof: Proof, code: int | None) -> str:
        """Return the reason of a run's end: that of *proof*, with details from its records and the order to stop it."""
        stop = live.stop
        if proof.outcome is State.FAILED:
            failure = self._spool.failure(live.name, live.run)
            if failure:
                return f"{COULD_NOT_START}{failure}"
            if code in _NO_FORK and _CANNOT_FORK.search(self._spool.last_words(live.name, live.run)):
                # The command may have done anything before, so it has failed; its `retry` decides whether it runs
                # again.
                return f"{proof.reason}: its shell says that the machine refused it a process"
        elif proof.outcome is State.LOST:
            if live.elsewhere is None and self._spool.record(live.name, live.run, layout.RC) is not None:
                return "its processes are gone, and rc does not contain an exit code"
        elif stop is not None:
            why = f": {stop.reason}" if stop.reason else ""
            by = f" by {stop.by}" if stop.kind in (StopKind.CANCEL, StopKind.REQUEUE, StopKind.HOLD) else ""
            return f"{proof.reason}{by}{why}"
        return proof.reason


def _refused_for_good(live: ActiveRun, refusal: str | None) -> str:
    """Return why a job must be held that its engine has refused for good; "" if it has not."""
    return f"{refusal}; `spool edit {live.name}`, then `spool release {live.name}`" if refusal else ""


def _failed_too_often(live: ActiveRun, failure: str) -> str:
    """Return why a job must be held that never began at its engine; *failure* is "" if that was by chance."""
    if not failure or live.refused.times + 1 < _MOST_FAILURES:
        return ""
    again = f"`spool release {live.name}` tries again"
    return f"it has failed {_MOST_FAILURES} times before it began: {failure}; {again}"


def _words(code: int) -> str:
    known = {ALREADY_STARTED: "finding another wrapper's jid", NO_JID: "being unable to write its jid"}
    return known.get(code, f"signal {-code}" if code < 0 else exit_words(code))


class _Moment(Struct, frozen=True, order=True):
    at_ns: int  # on the clock since boot
    key: tuple[str, int]
    warning: bool


def _is_due(live: ActiveRun, now_ns: int, moment: _Moment) -> bool:
    """Whether that moment of a run has come; its limit may have changed since it was set."""
    if live.submitted is not None:
        return live.gives_up_boot_ns is not None and live.gives_up_boot_ns <= now_ns
    limit, signal = live.spec.time_limit_ns, live.spec.signal
    if limit is None:
        return False
    before_ns = signal.before_ns if moment.warning and signal is not None else 0
    return not live.suspended and live.counts_from_boot_ns + limit - before_ns <= now_ns


class LimitEnforcer:
    """Enforces the limits of live runs. *order* orders a run to be stopped."""

    def __init__(self, context: Context, order: Callable[[ActiveRun, Stop], None]) -> None:
        self._confinement = context.confinement
        self._state = context.state
        self._executors = context.executors
        self._order = order
        self._timer = context.timers.timer("limits", boot_clock, always=True)
        self._memory_timer = context.timers.timer("limits", always=True)
        self.moments: list[_Moment] = []
        self.with_memory: set[tuple[str, int]] = set()
        self._pace = Pace(_SHARE)
        self._memory_at_ns = 0

    def add(self, live: ActiveRun) -> None:
        """Watch a run that was started, adopted or continued, or whose limit has changed."""
        limit = live.spec.time_limit_ns
        if limit is not None and live.submitted is None:
            end = live.counts_from_boot_ns + limit
            heapq.heappush(self.moments, _Moment(end, live.key, False))
            signal = live.spec.signal
            if signal is not None:
                # For an adopted run that may be late, which is better than never.
                heapq.heappush(self.moments, _Moment(end - signal.before_ns, live.key, True))
        if live.gives_up_boot_ns is not None:
            heapq.heappush(self.moments, _Moment(live.gives_up_boot_ns, live.key, False))
        if live.grant.memory_bytes is not None:
            self.with_memory.add(live.key)
            self._memory_timer.set(self._memory_at_ns)
        self._timer.set(self.moments[0].at_ns if self.moments else None)

    def check(self) -> None:
        """Warn and stop runs that exceed a limit."""
        now = boot_clock()
        while self.moments and self.moments[0].at_ns <= now:
            moment = heapq.heappop(self.moments)
            live = self._state.live.get(moment.key)
            if live is None or not live.holds_room or live.stop is not None or not _is_due(live, now, moment):
                continue
            with self._confinement.of(Thing.of_run(live.key), "limit") as piece:
                self._enforce(live, warning=moment.warning)
            if piece.failed:
                heapq.heappush(self.moments, replace(moment, at_ns=now + _AGAIN_NS))
        self._timer.set(self.moments[0].at_ns if self.moments else None)
        if self.with_memory and time.monotonic_ns() >= self._memory_at_ns:
            with self._confinement.service("watch", "the memory of runs"), self._pace:
                self._check_memory()
            self._memory_at_ns = time.monotonic_ns() + max(MEMORY_EVERY_NS, self._pace.pause_ns)
            self._memory_timer.set(self._memory_at_ns if self.with_memory else None)

    def _enforce(self, live: ActiveRun, *, warning: bool) -> None:
        """Warn a run of its time limit, or stop it."""
        signal = live.spec.signal
        if live.submitted is not None:
            allowed = show_duration(live.spec.scheduling_timeout_ns or 0)
            words = f"it has waited longer than {allowed} ({live.submitted})"
            self._order(live, Stop(StopKind.UNSCHEDULABLE, "spool", time.time_ns(), words))
        elif warning and signal is not None:
            log.info("job %s: %s before its time limit", live.name, signal.name)
            if live.handle is not None:
                live.handle.signal(signal.name, spare_shell=isinstance(live.spec.command, str))
        elif not warning:
            limit = live.spec.time_limit_ns or 0
            self._order(live, Stop(StopKind.TIMEOUT, "spool", time.time_ns(), f"limit {format_duration(limit)}"))

    def _check_memory(self) -> None:
        """Stop runs that exceed their memory limit."""
        runs: dict[Any, ActiveRun] = {}  # all of this machine: elsewhere the engine enforces the limit
        for key in self.with_memory:
            live = self._state.live.get(key)
            if live is not None and live.holds_room and live.handle is not None and not live.handle.holds_memory:
                runs[live.handle] = live
        self.with_memory = {live.key for live in runs.values()}
        if not runs:
            return  # a walk over all processes would be useless
        limits = {handle: live.grant.memory_bytes or 0 for handle, live in runs.items()}
        for handle, used in self._executors.local.memory_bytes(limits).items():
            live, limit = runs[handle], limits[handle]
            live.used_memory(used)
            if used > limit and live.stop is None:
                words = f"used {show_size(used)} of {show_size(limit)}"
                self._order(live, Stop(StopKind.MEMORY, "spool", time.time_ns(), words))


class GpuUseRecorder:
    """Sums up the GPU use of runs, and notices runs that leave their GPUs idle. *order* orders a run to be stopped.

    It uses the looks that the planner takes anyway while jobs with GPUs run (`gpu.poll`), and asks NVML nothing itself.
    Its sums are in the metadir (`gpus.toml`), written once in a while, so that the mean of a run is right across a
    restart of the dispatcher.
    """

    def __init__(self, context: Context, world: MachineMonitor, order: Callable[[ActiveRun, Stop], None]) -> None:
        self._context = context
        self._world = world
        self._order = order
        self._seen_at_ns: int | None = None  # the time of the last processed look of NVML
        self._written_ns: dict[tuple[str, int], int] = {}  # monotonic: when the record of each run was written

    def watch_run(self, live: ActiveRun) -> None:
        """Read the sums of a run that an earlier dispatcher has begun."""
        if not live.grant.gpu_uuids:
            return
        with self._context.confinement.of(Thing.of_run(live.key), _READ_GPUS):
            watch = self._context.spool.gpu_watch(live.name, live.run)
            if watch is not None and len(watch.gpus) == len(live.grant.gpu_uuids):
                live.gpus_watched(watch)
                self._written_ns[live.key] = time.monotonic_ns()

    def turn(self, machine: Machine | None) -> None:
        """Process a new look at the GPUs, if there is one."""
        at_ns = self._world.gpus_at_ns
        if machine is None or at_ns is None or at_ns == self._seen_at_ns:
            return
        self._seen_at_ns = at_ns
        state = self._context.state
        work = {gpu.uuid: {done.job: done for done in gpu.work} for gpu in machine.gpus}
        for name in list(state.runs.with_gpus):
            job = state.jobs.get(name)
            live = job.live if job is not None else None
            if live is None or live.started_at_ns > at_ns or not live.holds_room:
                continue
            self._take_in(live, at_ns, [work.get(uuid, {}).get(name) for uuid in live.grant.gpu_uuids])
        self._written_ns = {key: at for key, at in self._written_ns.items() if key in state.live}

    def leave(self) -> None:
        """Write the sums since the last writing."""
        for live in list(self._context.state.live.values()):
            if live.gpu_watch is not None and live.result is None:
                self._write(live)

    def _take_in(self, live: ActiveRun, at_ns: int, work: list[GpuWork | None]) -> None:
        before = live.gpu_watch or GpuWatch.since(live.started_at_ns, len(live.grant.gpu_uuids))
        if live.stop is not None or live.is_outlived:
            return  # its use while it is being ended is not typical of it
        if live.suspension.since_ns is not None:
            live.gpus_watched(before.passed_over(at_ns))
            return
        watch = before.looked(at_ns, work, _MOST_LOOKS * self._context.settings.config.gpu.poll_ns)
        live.gpus_watched(watch)
        if watch.is_due(live.spec) and not live.asking:
            with self._context.confinement.of(Thing.of_run(live.key), _JUDGE_GPUS):
                self._judge(live, watch, at_ns)
        elif before.is_told != watch.is_told or self._is_old(live):
            self._write(live)

    def _judge(self, live: ActiveRun, watch: GpuWatch, at_ns: int) -> None:
        """Report that a run leaves its GPUs idle, and stop it if its job file says so."""
        words, stops = watch.words(live.spec), live.spec.gpu_idle_action == "stop"
        log.warning("job %s run %d: %s%s", live.name, live.run, words, "; stopping it" if stops else "")
        self._context.events.run(EventName.GPU_IDLE, live, at_ns, words, part=str(watch.told + 1))
        # If a hook prevents the stop, it is asked again after the same time, not at every look.
        live.gpus_watched(watch.telling(again=stops))
        flushed = False
        with suppress(OSError):  # on a full disk it is stopped all the same
            self._context.events.flush()
            flushed = True
        if stops:
            self._order(live, Stop(StopKind.CANCEL, "spool", self._context.clock(), words))
        if flushed:  # else the next dispatcher repeats the report: the record of it comes last
            self._write(live)

    def _is_old(self, live: ActiveRun) -> bool:
        """Whether the record is due: after the first look at once, so that short runs have one, later rarely."""
        written_ns = self._written_ns.get(live.key)
        return written_ns is None or time.monotonic_ns() - written_ns >= _WRITE_GPUS_EVERY_NS

    def _write(self, live: ActiveRun) -> None:
        watch, confinement = live.gpu_watch, self._context.confinement
        if watch is None or confinement.pauses(Thing.of_run(live.key), _WRITE_GPUS):
            return
        self._written_ns[live.key] = time.monotonic_ns()
        with confinement.of(Thing.of_run(live.key), _WRITE_GPUS):
            self._context.spool.put_note(live.name, live.run, layout.GPUS, render_gpus(watch))
