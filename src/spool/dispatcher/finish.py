"""The end of a run: what became of it, whether the job goes on, and the paperwork.

Three steps, so that nothing waits for paper: `conclude` says how the run ended, the caller then gives its
resources to the next, and `file` writes the records: result.toml, history, the move of the job file. Each can be
cut off anywhere and done again by the next dispatcher.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace

from spool.core import layout
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.lifecycle import Evidence, Liveness, Proof, Verdict, exit_words, prove
from spool.core.model import Grant, Jid, Result, State, StopKind
from spool.core.retries import again
from spool.dispatcher.settings import Settings
from spool.dispatcher.table import FRESH, Job, Live, Series, Table, Wait
from spool.formats import ends, journal, records
from spool.formats.wrapper import ALREADY_STARTED, NO_JID
from spool.machine import identity
from spool.store.locked import LockedSpool
from spool.store.spool import Prober

log = logging.getLogger(__name__)

COULD_NOT_START = "could not start: "


class Finisher:
    """Ends runs. `lines` gathers what the journal is to be told.

    *revisit* has a job's files looked at anew, *outcome* is told of every job that has ended for good.
    """

    def __init__(
        self,
        spool: LockedSpool,
        table: Table,
        prober: Prober,
        revisit: Callable[[Job], None],
        outcome: Callable[[str, State], None],
        settings: Settings,
    ) -> None:
        self._spool = spool
        self._table = table
        self._prober = prober
        self._revisit = revisit
        self._outcome = outcome
        self._settings = settings
        self.lines: list[journal.Line] = []

    def conclude(self, live: Live) -> bool:
        """Look at the evidence of *live* and return whether it is over; `live.proof` then says how."""
        if live.failure is not None:
            live.proof = Proof(Verdict.ENDED, State.FAILED, f"{COULD_NOT_START}{live.failure}")
            return True
        if not live.adopted and live.exit_status is not None and live.stop is None:
            # Our own child has ended and nobody stopped it: an exit code is all the evidence there is to read.
            code = self._spool.exit_code(live.name, live.run)
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
            live.failure = f"the wrapper ended with {_words(code)} before it could say who it is"
            self._spool.take_jid(live.name, live.run)
            return self.conclude(live)
        live.exit_code = evidence.rc
        if live.jid is None and evidence.liveness not in (Liveness.ABSENT, Liveness.VOID):
            found = self._spool.jid(live.name, live.run)
            live.jid = found if isinstance(found, Jid) else None
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

    def file(self, ended: list[Live], account: Callable[[bytes], None], now_ns: int) -> None:
        """Do the paperwork of runs that are over: every result, then the history, then every move.

        *account* appends to the history. In this order a crash can leave something to be done again, which the
        next dispatcher sees, and never something that is left out. So can an error (the disk is full): called again
        with the same runs it goes on where it was.
        """
        results: list[tuple[Live, Result]] = []
        lines: list[bytes] = []
        for live in ended:
            proof = live.proof
            assert proof is not None
            if proof.outcome is None:
                continue
            if live.result is not None:
                results.append((live, live.result))
                continue
            recorded = self._spool.result(live.name, live.run) if live.adopted else None
            known = recorded
            if live.adopted and recorded is None:
                # A power cut may have emptied the result and spared the line of the history, which is synced.
                known = self._spool.account_of(live.name, live.run, live.started_at_ns)
            result = known or self._result(self._table.job(live.name), live, proof.outcome, proof.reason, now_ns)
            if recorded is None:
                self._write(live, result)
            if known is None or (recorded is not None and not self._spool.accounted(result)):
                lines.append(ends.render_history(result))
            results.append((live, result))
        account(b"".join(lines))
        for live, result in results:
            live.result = result
        for live, result in results:
            if live.key in self._table.live:
                self._move(self._table.job(live.name), live, result)
        for live in ended:
            if live.proof is not None and live.proof.verdict is Verdict.VOID and live.key in self._table.live:
                self._void(self._table.job(live.name), live, account, now_ns)

    def _write(self, live: Live, result: Result) -> None:
        self._spool.put_record(live.name, live.run, layout.RESULT, ends.render_result(result))
        if result.outcome not in (State.FINISHED, State.FAILED) or live.failure is not None:
            # In all other cases the wrapper has written the word.
            self._spool.put_record(live.name, live.run, layout.STATUS, records.render_status(result.outcome))

    def _move(self, job: Job, live: Live, result: Result) -> None:
        """Put the job's file where it belongs after *result*, and the job where it stands."""
        spool, name = self._spool, live.name
        final = result.again is None
        if result.again in ("retry", "requeue") and live.stop_kind not in (StopKind.REQUEUE, StopKind.HOLD):
            final = not (spool.put_back(name, QUEUED) or spool.holds(live.inode, name, QUEUED))
        # A second name of the same file (`ln running/x.toml queued/x.toml`) is a submission of its own.
        if final and (spool.holds(live.inode, name, RUNNING) or not self._moved_away(live)):
            text = spool.record(name, live.run, layout.SPEC_COPY)
            spool.file_away(name, RUNNING, text)
        self.lines.append(journal.Over(name, live.run, final))
        live.final = final
        if final:
            job.series = FRESH if job.queued is None or job.queued.inode == live.inode else job.series
            self._outcome(name, result.outcome)
        self._table.end_run(live)
        job.live = None
        if not final:
            job.series = series_after(result, live.stop_kind)
            if job.wait is None:
                job.wait = Wait(live.wait.arrived_at_ns, 0, None)
        self._revisit(job)

    def _moved_away(self, live: Live) -> bool:
        """Whether the file of a run was moved to another directory by a person."""
        holds = self._spool.holds
        return holds(live.inode, live.name, QUEUED, HELD, mtime_ns=live.mtime_ns) or holds(live.inode, live.name, DONE)

    def _void(self, job: Job, live: Live, account: Callable[[bytes], None], now_ns: int) -> None:
        """Put the job of a run that never started and never will back; nothing is counted."""
        self._table.end_run(live)
        job.live = None
        self.lines.append(journal.Over(live.name, live.run, False))
        if self._spool.put_back(live.name, QUEUED):
            job.series = live.series
            job.wait = Wait(live.wait.arrived_at_ns, live.wait.waited_ns_before, None)
        elif self._spool.holds(live.inode, live.name, RUNNING) or not self._moved_away(live):
            self._end_taken_back(job, live, account, now_ns)
        self._revisit(job)

    def _end_taken_back(self, job: Job, live: Live, account: Callable[[bytes], None], now_ns: int) -> None:
        """End a job whose start was taken back and which cannot wait on: deleted, or a newer one of its name waits."""
        spool, name = self._spool, live.name
        text = spool.record(name, live.run, layout.SPEC_COPY)
        result = self._cut_off(name, live.wait)
        if result is None:
            newer = spool.holds(live.inode, name, RUNNING)
            reason = "a newer file of its name came before it could start" if newer else "deleted before it could start"
            result = replace(
                self._result(job, live, State.CANCELLED, reason, now_ns),
                run=spool.next_run(name),
                started_at_ns=None,
                grant=Grant(),
                executor=None,
                again=None,
                again_at_ns=None,
            )
        self._put_unstarted(result, text, account)
        spool.file_away(name, RUNNING, text)
        self._outcome(name, result.outcome)

    def _put_unstarted(self, result: Result, text: bytes | None, account: Callable[[bytes], None]) -> None:
        """Write down the end of a job that never started, as far as that is not done."""
        spool = self._spool
        if spool.result(result.job, result.run) is None:
            files = {layout.RESULT: ends.render_result(result), layout.STATUS: records.render_status(result.outcome)}
            if text is not None:
                files[layout.SPEC_COPY] = text
            spool.publish_metadir(result.job, result.run, files)
            account(ends.render_history(result))
        elif not spool.accounted(result):
            account(ends.render_history(result))

    def _result(self, job: Job, live: Live, outcome: State, reason: str, now_ns: int) -> Result:
        ended = live.ended_at_ns or now_ns
        result = Result(
            job=live.name,
            run=live.run,
            attempt=live.series.attempt,
            outcome=outcome,
            reason=reason,
            submitted_at_ns=live.wait.arrived_at_ns,
            started_at_ns=live.started_at_ns,
            ended_at_ns=max(ended, live.started_at_ns),
            exit_code=live.exit_code,
            peak_memory_bytes=live.peak_memory_bytes,
            cpu_time_ns=live.cpu_time_ns,
            requeues=live.series.requeues,
            user=live.user,
            project=live.spec.project,
            group=live.spec.group,
            tags=live.spec.tags,
            request=live.spec.request,
            grant=live.grant,
            executor=live.executor,
            host=identity.host(),
        )
        kind = live.stop_kind
        if kind not in (StopKind.REQUEUE, StopKind.HOLD) and self._superseded(job, live):
            return result
        goes_on = again(
            live.spec,
            outcome,
            exit_code=result.exit_code,
            attempt=result.attempt,
            requeues=result.requeues,
            ended_at_ns=now_ns,
            stopped_by=kind,
            could_not_start=reason.startswith(COULD_NOT_START),
            max_requeues=self._settings.config.max_requeues,
        )
        return result if goes_on is None else replace(result, again=goes_on.kind, again_at_ns=goes_on.at_ns)

    def _superseded(self, job: Job, live: Live) -> bool:
        """Whether this submission does not go on: its file was taken away, or a newer one of its name waits."""
        newer = job.queued is not None and (
            job.queued.inode != live.inode or live.mtime_ns not in (None, job.queued.mtime_ns)
        )
        return newer or live.file_missing_ns is not None

    def end_unstarted(
        self, job: Job, place: str, outcome: State, reason: str, account: Callable[[bytes], None], now_ns: int
    ) -> None:
        """End a job that never started (given up, or cancelled while it waited): records, history, `done/`."""
        spool, name = self._spool, job.name
        text = spool.job_text(place, name)
        result = self._cut_off(name, job.wait) or self._unstarted(job, outcome, reason, now_ns)
        self._put_unstarted(result, text, account)
        if place != DONE:
            spool.file_away(name, place, text)
        self._outcome(name, result.outcome)
        self.lines.append(journal.Left(name))
        job.queued = job.held = job.wait = None
        job.series = FRESH
        self._table.settle(job)

    def _cut_off(self, name: str, wait: Wait | None) -> Result | None:
        """Return how this submission has ended already, if an earlier dispatcher was cut off while it said so."""
        run = self._spool.latest_run(name)
        result = self._spool.result(name, run) if run is not None else None
        if result is None or wait is None or result.started_at_ns is not None:
            return None
        return result if result.submitted_at_ns == wait.arrived_at_ns else None

    def _unstarted(self, job: Job, outcome: State, reason: str, now_ns: int) -> Result:
        file = job.queued or job.held
        result = Result(
            job=job.name,
            run=self._spool.next_run(job.name),
            attempt=job.series.attempt,
            outcome=outcome,
            reason=reason,
            submitted_at_ns=job.wait.arrived_at_ns if job.wait else None,
            ended_at_ns=now_ns,
            requeues=job.series.requeues,
            user=self._table.user_of(job),
            host=identity.host(),
        )
        spec = file.spec if file is not None else None
        if spec is None:
            return result
        return replace(result, project=spec.project, group=spec.group, tags=spec.tags, request=spec.request)


def series_after(result: Result, stopped_by: StopKind | None) -> Series:
    """Return how far a submission has come after a run that is not its last."""
    requeued = result.again == "requeue" and stopped_by is None
    return Series(result.attempt + (result.again == "retry"), result.requeues + requeued, result.again_at_ns)


def _words(code: int) -> str:
    known = {ALREADY_STARTED: "finding another wrapper's jid", NO_JID: "being unable to write its jid"}
    return known.get(code, f"signal {-code}" if code < 0 else exit_words(code))
