"""How a run ended: from the evidence that is read once its wrapper is gone to a proof with a reason."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from spool.core.lifecycle import Evidence, Liveness, Proof, Verdict, exit_words, prove
from spool.core.model import Jid, State, StopKind
from spool.dispatcher.table import Live
from spool.formats.wrapper import ALREADY_STARTED, NO_JID
from spool.store.locked import LockedSpool
from spool.store.spool import Prober

COULD_NOT_START = "could not start: "


class Concluder:
    """Looks at the evidence of runs."""

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
        if evidence.liveness is Liveness.ABSENT and not os.path.lexists(self._spool.layout.metadir(*live.key)):
            evidence = self._without_metadir(live)
        if evidence.liveness is Liveness.ABSENT and live.exit_status is not None:
            # Our own child, and it is gone without a jid: no other process can come to create one.
            code = os.waitstatus_to_exitcode(live.exit_status)
            return self._never_spoke(live, f"the wrapper ended with {_words(code)} before it could say who it is")
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
            # The record exists and says nothing: it was cut short, and whoever wrote it has had time enough.
            liveness = Liveness.GONE if evidence.liveness is Liveness.ABSENT else evidence.liveness
            proof = prove(replace(evidence, liveness=liveness, grace=False, remains=live.remains))
        elif proof.verdict is Verdict.SILENT:
            proof = Proof(Verdict.VOID)
        if proof.verdict is Verdict.VOID:
            live.proof = proof
            return True
        if proof.verdict is not Verdict.ENDED:
            return False
        live.proof = self._explained(live, proof)
        return True

    def _never_spoke(self, live: Live, why: str) -> bool:
        """Settle that no wrapper will ever speak for the run, and then that it was stopped or could not start."""
        self._spool.take_jid(live.name, live.run)
        if live.stop is not None and not live.asking:
            live.proof = self._explained(live, prove(Evidence(Liveness.GONE, stop=live.stop_kind)))
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
        elif stop is not None and proof.outcome is not State.LOST:
            why = f": {stop.reason}" if stop.reason else ""
            by = f" by {stop.by}" if stop.kind in (StopKind.CANCEL, StopKind.REQUEUE, StopKind.HOLD) else ""
            return replace(proof, reason=f"{proof.reason}{by}{why}")
        return proof


def _words(code: int) -> str:
    known = {ALREADY_STARTED: "finding another wrapper's jid", NO_JID: "being unable to write its jid"}
    return known.get(code, f"signal {-code}" if code < 0 else exit_words(code))
