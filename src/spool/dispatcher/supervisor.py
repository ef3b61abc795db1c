"""Notice the ends of runs, and when one has begun elsewhere; conclude from the evidence left how a run has ended."""

from __future__ import annotations

import errno
import os
import re
import time
from contextlib import suppress

from msgspec.structs import replace

from spool.core import layout
from spool.core.lifecycle import (
    EPILOG_CUT,
    GONE,
    Active,
    Ended,
    EngineWord,
    Evidence,
    Exit,
    Gone,
    LastSigns,
    Liveness,
    Outlived,
    Proof,
    RunEnd,
    TakenBack,
    Unread,
    Unstartable,
    Verdict,
    Void,
    ends_unspoken,
    exit_words,
    prove,
    stop_words,
)
from spool.core.model import SECOND_NS, Jid, State, StopKind
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Component, Context
from spool.dispatcher.monitor import LimitEnforcer, Monitor
from spool.dispatcher.terminator import Terminator
from spool.dispatcher.wakeup import Wakeup, boot_clock
from spool.executors import RunHandle
from spool.formats.wire import peak_in
from spool.formats.wrapper import ALREADY_STARTED, NO_JID, REFUSED
from spool.state.run import ActiveRun
from spool.store.disk import status_of

_MOST_FAILURES = 3  # of an engine to start a job, in a row
_NOT_BY_CHANCE = frozenset({EngineWord.FAILED, EngineWord.FORGOTTEN, EngineWord.NOT_STARTED})  # before it begins
COULD_NOT_START = "could not start: "
_SHELL_SAYS = (  # exit codes of a shell, its last line then, and what that means
    # Of dash and busybox, and of bash after its tries. The command may have done anything before, so it has failed; its
    # `retry` decides whether it runs again.
    (
        frozenset({2, 254}),
        re.compile(rb": (?:Cannot fork|can't fork: [^\n]*|fork: Resource temporarily unavailable)\n\Z"),
        "its shell says that the machine refused it a process",
    ),
    (
        frozenset({2, 127}),
        re.compile(
            rb"(?:^|\n)/bin/sh: \d+: (?:Syntax error: (?:\"[(}]\" unexpected|redirection unexpected|Bad for loop)"
            rb"|set: Illegal option -o pipefail|(?:\S+: )?Bad substitution|\[: [^\n]*unexpected operator"
            rb"|(?:\[\[|source|declare|let|shopt|mapfile|pushd|popd): not found)[^\n]*\n\Z"
        ),
        "/bin/sh cannot run that; if it is for bash, submit it with --set shell=/bin/bash",
    ),
)


class Concluder(Component):
    """Looks at the evidence of runs. Unreadable evidence raises OSError, and nothing is concluded from it."""

    def conclude(self, live: ActiveRun, left: Exit | None = None) -> bool:
        """Look at the evidence of *live* and return whether it is over; its phase then says how, and when.

        *left* is its exit code, if that has been read.
        """
        if (found := self._conclude(live, left)) is None:
            return False
        live.see(found)
        if live.adopted or None in (live.usage.cpu_time_ns, live.usage.peak_memory_bytes):
            with suppress(OSError):  # nothing depends on it
                live.used(self._spool.usage(live.name, live.run))
        return True

    def lacks_metadir(self, live: ActiveRun) -> bool:
        """Whether the metadir of a run was removed, so that its wrapper can leave no record."""
        return status_of(self._spool.layout.metadir(*live.key)) is None

    def _ended(self, live: ActiveRun, proof: Proof, code: int | None = None, at_ns: int | None = None) -> Ended:
        """Return the end of a run with *proof*; its wrapper has recorded the exit code *code* at *at_ns*."""
        assert proof.outcome is not None
        has_no_rc = code is not None and at_ns is None and not self.lacks_metadir(live)
        cut = live.cut_short or (EPILOG_CUT if has_no_rc else "")
        doubt = "processes of it may be left" if live.handle is not None and live.handle.doubtful else ""
        reason = "; ".join(filter(None, (self._reason(live, proof, code), cut, doubt)))
        return Ended(proof.outcome, reason, self._end_of(live, at_ns), code)

    def _unstarted(self, live: ActiveRun, why: str) -> Ended:
        return Ended(State.FAILED, f"{COULD_NOT_START}{why}", self._end_of(live), unstarted=True)

    def _end_of(self, live: ActiveRun, exit_at_ns: int | None = None) -> RunEnd:
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

    def _conclude(self, live: ActiveRun, left: Exit | None = None) -> Ended | Void | None:
        if isinstance(live.phase, Unstartable):
            return self._unstarted(live, live.phase.why)
        if not live.adopted and live.exit_status is not None and live.stop is None:
            # A child of this process has ended and was not stopped: an exit code is the only evidence to read.
            left = left or self._spool.exit(live.name, live.run)
            stop = None if live.asking else self._spool.stop(live.name, live.run)
            if stop is not None:  # ordered by a user at this very moment
                live.stop_on_record(stop)
            if left is not None:
                ended = Evidence(Liveness.GONE, rc=left.code, stop=live.stop_kind, oom_killed=live.usage.oom_killed)
                return self._ended(live, prove(ended), left.code, left.at_ns)
        if live.elsewhere is not None and live.handle is not None:
            return self._conclude_elsewhere(live, live.handle)
        evidence = self._spool.evidence(live.name, live.run, self._prober)
        if evidence.liveness is Liveness.ABSENT:
            if self.lacks_metadir(live) and live.exit_status is not None:  # the wrapper ends with the command's code
                code = os.waitstatus_to_exitcode(live.exit_status)
                evidence = Evidence(Liveness.GONE, rc=code if code >= 0 else None, stop=live.stop_kind)
            elif self.lacks_metadir(live):
                found = live.handle.liveness() if live.handle is not None else Liveness.ABSENT
                evidence = Evidence(Liveness.GONE if found is Liveness.ABSENT else found, stop=live.stop_kind)
            elif live.exit_status is not None:
                # A child of this process, and it is gone without a jid: no other process can create one.
                code = os.waitstatus_to_exitcode(live.exit_status)
                why = f"the wrapper ended with {_words(code)} before it could identify itself"
                return self._never_spoke(live, why, refused=code in (NO_JID, REFUSED))
            elif not live.adopted and live.handle is not None and live.handle.liveness() is Liveness.GONE:
                return self._never_spoke(live, "the wrapper ended before it could identify itself")
        evidence = replace(
            evidence,
            stop=live.stopped_by(evidence.stop),
            grace=time.monotonic_ns() < live.unregistered_until_ns,
            leftovers=live.is_outlived,
            oom_killed=live.usage.oom_killed,
        )
        if live.jid is None and evidence.liveness not in (Liveness.ABSENT, Liveness.VOID):
            self.identify(live)
        proof = prove(evidence)
        if proof.verdict is Verdict.SILENT:
            if self._spool.take_jid(live.name, live.run):
                proof = Proof(Verdict.VOID)
            elif isinstance(self._spool.jid(live.name, live.run), Jid):
                return self._conclude(live)  # the wrapper has registered at this very moment
            else:
                # The record was removed, or is truncated and empty of meaning; its writer has had enough time.
                proof = prove(replace(evidence, liveness=Liveness.GONE, grace=False))
        if proof.verdict is Verdict.VOID:
            known = live.phase.refusal if isinstance(live.phase, TakenBack) else None
            return Void(self._end_of(live), known or self._spool.refusal(live.name, live.run))
        return self._ended(live, proof, evidence.rc, evidence.rc_at_ns) if proof.verdict is Verdict.ENDED else None

    def _conclude_elsewhere(self, live: ActiveRun, handle: RunHandle) -> Ended | Void | None:
        """Look at the evidence of a run whose processes only its engine sees: the engine's word stands for them."""
        if self.was_given_up(live):
            return Void(self._end_of(live))
        if handle.liveness() in (Liveness.ALIVE, Liveness.ELSEWHERE):  # elsewhere: its engine is not there to be asked
            return None
        end, evidence = handle.ending, self._spool.evidence(live.name, live.run, self._prober)
        word, said = (end.word, end.said) if end is not None and not live.cut_short else (None, "")
        stop = live.stopped_by(evidence.stop)
        spoke = evidence.liveness not in (Liveness.ABSENT, Liveness.VOID)
        if evidence.liveness is Liveness.ABSENT and evidence.recorded is None:
            # Taking the jid decides: the engine may start it again, or have it after all.
            spoke = not self._spool.take_jid(live.name, live.run)
            if spoke and self.jid(live) is not None:  # unseen before, so later records may be too
                self.identify(live)
                return self._conclude_elsewhere(live, handle)
            if spoke and word is None and stop is None:
                raise OSError(errno.ESTALE, "its jid is there and says nothing yet")
        if spoke:
            self.identify(live)
        elif evidence.recorded is None and stop is None and (word is None or handle.refusal is not None):
            edit = f"{handle.refusal}; `spool edit {live.name}`, then `spool release {live.name}`"
            return Void(self._end_of(live), held_because=edit if handle.refusal else "")
        if evidence.rc is None and (left := self._spool.command_exit(*live.key)) is not None:
            evidence = replace(evidence, rc=left.code)
        liveness = Liveness.GONE if spoke or word is None else Liveness.ABSENT
        proof = prove(
            replace(evidence, liveness=liveness, stop=stop, oom_killed=live.usage.oom_killed, engine=word, said=said)
        )
        if proof.verdict is Verdict.VOID:
            failure, held_because = said if word in _NOT_BY_CHANCE else "", ""
            if failure and live.refused.times + 1 >= _MOST_FAILURES:
                again = f"`spool release {live.name}` tries again"
                held_because = f"it has failed {_MOST_FAILURES} times before it began: {failure}; {again}"
            return Void(self._end_of(live), failure or None, held_because)
        if proof.outcome is State.OUT_OF_MEMORY and (peak := peak_in(said)) is not None:
            live.used_memory(peak)  # what was measured may be a sample from before
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
        return self._spool.jid(*live.key) is Liveness.VOID

    def _never_spoke(self, live: ActiveRun, why: str, *, refused: bool = False) -> Ended | Void:
        """Settle a run without a jid whose wrapper is gone: it was stopped, refused or could not start.

        *refused*: the wrapper's exit code says that the machine refused it something. A job that removes its own jid
        has begun all the same, and its jid is never taken: that would start the job again.
        """
        seen = live.handle is not None and live.handle.is_child and live.jid is not None
        left = seen or self._spool.has_begun(*live.key)  # it has had a jid, or has left traces
        if left or (not live.adopted and status_of(self._spool.layout.record(*live.key, layout.GRANT)) is None):
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

    def identify(self, live: ActiveRun) -> None:
        """Take the wrapper's identity from its record, if it has registered."""
        jid = self.jid(live)
        if jid is not None and live.handle is not None:
            live.handle.identified(jid)

    def _reason(self, live: ActiveRun, proof: Proof, code: int | None) -> str:
        """Return the reason of a run's end: that of *proof*, with details from its records and the order to stop it."""
        stop = live.stop
        if proof.outcome is State.FAILED:
            failure = self._spool.failure(live.name, live.run)
            if failure:
                return f"{COULD_NOT_START}{failure}"
            if any(code in codes for codes, _, _ in _SHELL_SAYS):
                said = self._spool.last_words(live.name, live.run)
                meant = (words for codes, line, words in _SHELL_SAYS if code in codes and line.search(said))
                return ": ".join((proof.reason, *meant))
        elif proof.outcome is State.LOST:
            if live.elsewhere is None and self._spool.record(live.name, live.run, layout.RC) is not None:
                return "its processes are gone, and rc does not contain an exit code"
        elif stop is not None:
            if stop.kind is StopKind.PREEMPT:
                return stop_words(stop)
            why = f": {stop.reason}" if stop.reason else ""
            by = f" by {stop.by}" if stop.kind in (StopKind.CANCEL, StopKind.REQUEUE, StopKind.HOLD) else ""
            return f"{proof.reason}{by}{why}"
        return proof.reason


def _words(code: int) -> str:
    known = {ALREADY_STARTED: "finding another wrapper's jid", NO_JID: "being unable to write its jid or read its text"}
    return known.get(code, f"signal {-code}" if code < 0 else exit_words(code))


POLL_NS = SECOND_NS  # where no event reports an end, or a change of the files
_FIND_OUT = "find out the end of"


class Supervisor(Component):
    """Finds the runs that have no processes left, and hears what engines tell of theirs."""

    def __init__(
        self, context: Context, terminator: Terminator, wakeup: Wakeup, monitor: Monitor, limits: LimitEnforcer
    ) -> None:
        super().__init__(context)
        self._terminator = terminator
        self._wakeup = wakeup
        self._monitor = monitor
        self._limits = limits
        self.concluder = Concluder(context)
        self._timer = context.timers.timer("ends", always=True)
        self.suspects: set[tuple[str, int]] = set()  # runs whose evidence the next `collect` looks at
        self._polled: dict[tuple[str, int], ActiveRun] = {}  # runs whose end no event reports
        self._ended: list[ActiveRun] = []  # found, and not returned yet
        self._poll_at_ns = 0

    def watch(self, live: ActiveRun) -> None:
        """Watch for the end of a run from now on; call it once events report that, or cannot."""
        if self._unwatched(live):
            self._polled[live.key] = live
            self._timer.set(self._poll_at_ns)

    def look_for_leftovers(self) -> None:
        """Look for runs whose commands have left processes behind, as if no wrapper had left a note of that."""
        for live in self._state.live.values():
            with suppress(OSError):
                if isinstance(live.phase, Active) and live.elsewhere is None and self._has_leftovers(live):
                    self.suspects.add(live.key)

    def collect(self) -> list[ActiveRun]:
        """Return the runs that are over, with known ends. The room of a run is free once no process is left."""
        now = time.monotonic_ns()
        self._suspect_told(now)
        if now >= self._poll_at_ns:
            self.suspects |= self._polled.keys()
            self._poll_at_ns = now + POLL_NS
        gone = list[ActiveRun]()
        with self._confinement.service("look at", "the processes of runs that are stopped"):
            for live in (run.live for run in self._terminator.runs.values()):
                if live.jid is None and live.elsewhere is None:
                    with suppress(OSError):  # a search may miss its children, which get their mark late
                        self.concluder.identify(live)
            gone += self._terminator.tick() if self._terminator.runs else ()
        for live in gone:
            self._terminator.forget(live)
            live.see(GONE)
            self._state.recount(live)  # its grant is free for the next run
            self.suspects.add(live.key)
        for key in list(self.suspects):
            if self._confinement.attempt(Thing.of_run(key), _FIND_OUT, self._look_at, key):  # else once more
                self.suspects.discard(key)
        self._timer.set(self._poll_at_ns if self._polled else None)
        if (reap_at_ns := self._executors.local.due_ns()) is not None:
            self._timer.advance(reap_at_ns)
        ended, self._ended = self._ended, []
        return ended

    def _suspect_told(self, now: int) -> None:
        """Suspect the runs that the kernel, a wrapper or an engine has told about."""
        reap_at_ns = self._executors.local.due_ns()
        if self._wakeup.children_ended() or (reap_at_ns is not None and now >= reap_at_ns):
            self.suspects |= {run.key for run in self._executors.local.reap()}
        self.suspects |= self._wakeup.ended_runs()  # first: nothing else tells of them
        for name in self._changes.leftovers.take():
            if (live := self._state.live_of(name)) is not None:
                self.suspects.add(live.key)
                if isinstance(live.phase, Active) and self.concluder.lacks_metadir(live):
                    self._confinement.attempt(Thing.of_run(live.key), _FIND_OUT, self._outlive, live)
        if self._executors.engines:
            with self._confinement.service("ask", "the engines of runs elsewhere"):
                self.suspects |= {run.key for run in self._executors.work()}

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

    def _over(self, live: ActiveRun) -> bool:
        """Whether nothing of the run is left; processes that outlived its wrapper receive the order to end."""
        handle, left = live.handle, None
        if handle is not None and isinstance(live.phase, Active | Outlived):
            found = handle.liveness()
            if found is Liveness.ABSENT:
                self.concluder.identify(live)
                found = handle.liveness()
            if live.elsewhere is not None:
                found = self._see_elsewhere(live, handle, found)
                if found is Liveness.ALIVE:
                    return self.concluder.was_recorded(live)  # however long it waits there before its wrapper registers
            elif found is Liveness.ALIVE:
                live.seen_alive()
                if self._has_leftovers(live):
                    self._outlive(live)
                    return False
            elif live.adopted and live.jid is None and (live in self._terminator or handle.left_behind()):
                return False  # its jid was removed: it is alive while any process of it is
            # The wrapper never registered: any process with the run's mark may be the wrapper.
            silent = found is Liveness.ABSENT and time.monotonic_ns() >= live.unregistered_until_ns
            if found is Liveness.GONE or silent:
                left = self._spool.exit(*live.key) if handle.is_child else None
                if handle.left_behind(left.code if left is not None else None):
                    self._outlive(live)
                    return False
                live.see(GONE)
        if isinstance(live.phase, Gone) and handle is not None:
            live.measured(handle.usage())
        over = self.concluder.conclude(live, left)
        is_late = not over and isinstance(live.phase, Gone) and live.stop is not None and live.elsewhere is None
        if is_late and handle is not None and handle.liveness() is Liveness.ALIVE:
            self._terminator.add(live)  # its wrapper has begun after the look that found nothing of it
        return over

    def _see_elsewhere(self, live: ActiveRun, handle: RunHandle, found: Liveness) -> Liveness:
        """Note what the engine of a run tells of it; return its liveness, which is only presumed there."""
        if live.accepted_as(handle.engine_id):
            self._monitor.handed_over(live)
        self._note_begin(live)
        if handle.halted is not None and handle.halted != (live.suspended_by if live.suspended else ""):
            self._changes.suspensions.add(live.name)
        if found is Liveness.ALIVE and self.concluder.was_given_up(live):
            found = Liveness.ABSENT  # its engine may have it, but it never begins
        if found is Liveness.ABSENT:
            live.see(GONE)  # its engine has answered that it does not know it
        return found

    def _has_leftovers(self, live: ActiveRun) -> bool:
        """Whether the command of a run has ended, and its wrapper waits for what that has left behind."""
        return self._spool.exit(*live.key) is not None and self._spool.has_leftovers(*live.key)

    def _outlive(self, live: ActiveRun) -> None:
        """End what a command has left behind, which has ended by now, or what a killed wrapper has."""
        if not live.is_outlived:
            left = self._spool.exit(*live.key)
            live.see(Outlived(left.at_ns if left is not None else self._clock()))
            self._state.recount(live)  # its end is known better now
        self._terminator.hurry(live)

    def _note_begin(self, live: ActiveRun) -> None:
        """Count the time of a run elsewhere from the start of its wrapper, as far as clocks agree."""
        if live.submitted is None:
            return
        if (spoke_ns := self._spool.spoke_at_ns(*live.key, live.started_at_ns)) is not None:
            now_ns = time.time_ns()
            at_ns = min(max(spoke_ns, live.started_at_ns), now_ns)
            live.began(boot_clock() - (now_ns - at_ns), at_ns)
            self._state.recount(live)
            self._limits.add(live)  # its time limit counts from now on
        if live.heard():
            self._state.recount(live)
