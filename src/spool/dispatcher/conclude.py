"""How a run ended: from the evidence that is read once its wrapper is gone to a proof with a reason."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from spool.core import layout
from spool.core.lifecycle import Evidence, Liveness, Proof, Verdict, exit_words, prove
from spool.core.model import Jid, State, StopKind
from spool.formats.wrapper import ALREADY_STARTED, NO_JID, REFUSED
from spool.state.table import Live
from spool.store.disk import status_of
from spool.store.locked_spool import LockedSpool
from spool.store.spool import Prober

COULD_NOT_START = "could not start: "


class Concluder:
    """Looks at the evidence of runs. What cannot be read raises OSError, and nothing is concluded from it."""

    def __init__(self, spool: LockedSpool, prober: Prober) -> None:
        self._spool = spool
        self._prober = prober

    def conclude(self, live: Live) -> bool:
        """Look at the evidence of *live* and return whether it is over; `live.proof` then says how."""
        if live.failure is not None:
            live.proof = Proof(Verdict.ENDED, State.FAILED, f"{COULD_NOT_START}{live.failure}")
            return True
        if not live.adopted and live.exit_status is not None and live.stop is None:
            # Our own child has ended and nobody stopped it: an exit code is all the evidence there is to read.
            code = self._spool.exit_code(live.name, live.run)
            if not live.asking:
                live.stop = self._spool.stop(live.name, live.run)  # ordered by a person this very moment
            if code is not None:
                live.exit_code = code
                ended = Evidence(Liveness.GONE, rc=code, stop=live.stop_kind, oom_killed=live.oom_killed)
                live.proof = self._explained(live, prove(ended))
                return True
        evidence = self._spool.evidence(live.name, live.run, self._prober)
        if evidence.liveness is Liveness.ABSENT and status_of(self._spool.layout.metadir(*live.key)) is None:
            evidence = self._without_metadir(live)
        if evidence.liveness is Liveness.ABSENT and live.exit_status is not None:
            # Our own child, and it is gone without a jid: no other process can come to create one.
            code = os.waitstatus_to_exitcode(live.exit_status)
            why = f"the wrapper ended with {_words(code)} before it could say who it is"
            return self._never_spoke(live, why, refused=code in (NO_JID, REFUSED))
        if evidence.liveness is Liveness.ABSENT and not live.adopted and self._known_and_gone(live):
            return self._never_spoke(live, "the wrapper ended before it could say who it is")
        # Where the disk was full a stop is on record here alone; a cancel that is asked about is on record there alone.
        evidence = replace(evidence, stop=None if live.asking else evidence.stop or live.stop_kind)
        live.exit_code = evidence.rc
        if live.jid is None and evidence.liveness not in (Liveness.ABSENT, Liveness.VOID):
            live.jid = self.jid(live)
        proof = prove(
            replace(
                evidence,
                grace=time.monotonic_ns() < live.silent_until_ns,
                remains=live.remains,
                oom_killed=live.oom_killed,
            )
        )
        if proof.verdict is Verdict.SILENT and not self._spool.take_jid(live.name, live.run):
            if isinstance(self._spool.jid(live.name, live.run), Jid):
                return self.conclude(live)  # the wrapper has spoken in this very moment
            # The record was removed, or it was cut short and says nothing; whoever wrote it has had time enough.
            liveness = Liveness.GONE if evidence.liveness is Liveness.ABSENT else evidence.liveness
            proof = prove(replace(evidence, liveness=liveness, grace=False, remains=live.remains))
        elif proof.verdict is Verdict.SILENT:
            proof = Proof(Verdict.VOID)
        if proof.verdict is Verdict.VOID:
            live.refusal = live.refusal or self._spool.refusal(live.name, live.run)
            live.proof = proof
            return True
        if proof.verdict is not Verdict.ENDED:
            return False
        live.proof = self._explained(live, proof)
        return True

    def _never_spoke(self, live: Live, why: str, *, refused: bool = False) -> bool:
        """Settle a run without a jid whose wrapper is gone: it was stopped, refused or could not start.

        *refused*: the wrapper says by its exit code that the machine refused it something. A job that removes its own
        jid has begun all the same, and its jid is never taken: that would start the job again.
        """
        if self._has_begun(live):
            stop = None if live.asking else live.stop_kind
            live.proof = self._explained(live, prove(Evidence(Liveness.GONE, stop=stop, oom_killed=live.oom_killed)))
            return True
        self._spool.take_jid(live.name, live.run)
        if live.stop is not None and not live.asking:
            live.proof = self._explained(live, prove(Evidence(Liveness.GONE, stop=live.stop_kind)))
            return True
        live.refusal = self._spool.refusal(live.name, live.run) or (why if refused else None)
        if live.refusal is not None:
            live.proof = Proof(Verdict.VOID)
            return True
        live.failure = why
        return self.conclude(live)

    def jid(self, live: Live) -> Jid | None:
        """Return who the wrapper says it is; None while it has not."""
        found = self._spool.jid(live.name, live.run)
        return found if isinstance(found, Jid) else None

    def _known_and_gone(self, live: Live) -> bool:
        """Whether the one process that could be the wrapper, as its executor said, has ended."""
        return live.jid is not None and self._prober.liveness(live.jid) is Liveness.GONE

    def _has_begun(self, live: Live) -> bool:
        """Whether a run without a jid has had one: it was seen, or there are traces, or our own records are gone."""
        if self._spool.has_begun(live.name, live.run) or (live.pid is not None and live.jid is not None):
            return True
        return not live.adopted and status_of(self._spool.layout.record(*live.key, layout.GRANT)) is None

    def _without_metadir(self, live: Live) -> Evidence:
        """Return what is known of a run whose metadir somebody removed; the wrapper ends with the command's code."""
        if live.exit_status is not None:
            code = os.waitstatus_to_exitcode(live.exit_status)
            return Evidence(Liveness.GONE, rc=code if code >= 0 else None, stop=live.stop_kind)
        if live.jid is not None:
            return Evidence(self._prober.liveness(live.jid), stop=live.stop_kind)
        return Evidence(Liveness.GONE if live.pid is None else Liveness.ALIVE, stop=live.stop_kind)

    def _explained(self, live: Live, proof: Proof) -> Proof:
        stop = live.stop
        if proof.outcome is State.FAILED:
            failure = self._spool.failure(live.name, live.run)
            if failure:
                return replace(proof, reason=f"{COULD_NOT_START}{failure}")
        elif proof.outcome is State.LOST:
            if self._spool.record(live.name, live.run, layout.RC) is not None:
                return replace(proof, reason="its processes are gone, and what lies in rc is no exit code")
        elif stop is not None:
            why = f": {stop.reason}" if stop.reason else ""
            by = f" by {stop.by}" if stop.kind in (StopKind.CANCEL, StopKind.REQUEUE, StopKind.HOLD) else ""
            return replace(proof, reason=f"{proof.reason}{by}{why}")
        return proof


def _words(code: int) -> str:
    known = {ALREADY_STARTED: "finding another wrapper's jid", NO_JID: "being unable to write its jid"}
    return known.get(code, f"signal {-code}" if code < 0 else exit_words(code))
