"""The first look of a new dispatcher: find every run that is not over, and finish what was cut off.

What the files prove counts. The journal adds what they cannot say: the places in the queue, and after a power cut
the starts and ends whose file moves did not reach the disk.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from spool.core import layout
from spool.core.errors import SpoolUnusable, cannot
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.lifecycle import Liveness, Verdict
from spool.core.model import Grant, Jid, Result, Running, Spec
from spool.dispatcher.finish import series_after
from spool.dispatcher.memory import Memory
from spool.dispatcher.start import SILENT_NS, spec_of_text
from spool.dispatcher.table import FRESH, Live, Series, Table, Wait, this_user
from spool.formats import journal, records
from spool.formats.records import GrantRecord
from spool.machine import identity
from spool.store.locked import LockedSpool
from spool.store.spool import Prober

log = logging.getLogger(__name__)

_TAKEN_BACK = "job %s had ended before the power cut; its file goes to done/"
_Known = journal.Started | journal.Waits | None


class Recovery:
    """Fills an empty table from a spool."""

    def __init__(self, spool: LockedSpool, table: Table, prober: Prober) -> None:
        self._spool = spool
        self._table = table
        self._prober = prober
        self.arrays: dict[str, int] = {}  # the newest runs of names that are arrays, of which something is to be done

    def runs(self, memory: Memory) -> None:
        """Put every run that is not known to be over into the table.

        Raises SpoolUnusable if runs of another host may be alive.
        """
        self._spool.complete_moves()
        in_running = set(self._spool.names(RUNNING))
        for name in sorted(in_running | {name for name, _ in memory.open}):
            if self._is_array(name, memory, in_running=name in in_running):
                continue
            live = self._unfinished_run(name, memory, in_running=name in in_running)
            if live is not None:
                self._refuse_other_hosts(live)
                self._table.add_run(self._table.job(name), live)

    def places(self, memory: Memory) -> None:
        """Give the waiting jobs their places in the queue back, before the first look finds their files."""
        waiting = set(self._spool.names(QUEUED)) | set(self._spool.names(HELD))
        ran_before = waiting & set(self._spool.jobs_with_runs())
        for name, line in memory.waits.items():
            job = self._table.job(name)
            job.wait = Wait(line.arrived_at_ns, line.waited_ns_before, line.clock_at_ns)
            job.parked = line.clock_at_ns is None
            if name in ran_before and job.live is None:
                job.series = self._series(name, line.arrived_at_ns)

    def unfinished_moves(self, memory: Memory) -> None:
        """File away what had ended for good before a power cut that took the move back."""
        for name, started in memory.closed.items():
            if self._taken_back(name, started):
                log.warning(_TAKEN_BACK, name)
                self._spool.file_away(name, QUEUED, None)

    # One name.

    def _is_array(self, name: str, memory: Memory, *, in_running: bool) -> bool:
        """Whether the name is an array's: its metadir is no run's, and nobody will ever write a `jid` there."""
        spool = self._spool
        run = spool.latest_run(name)
        if run is not None and spool.array(name, run) is not None:
            self.arrays[name] = run
            return True
        remembered = any(job == name for job, _ in memory.open)
        if run is not None or not remembered:
            return False
        spec = spec_of_text(spool.job_text(RUNNING, name) or spool.job_text(QUEUED, name), name)
        if spec is None or not spec.is_array:
            return False
        # A power cut took back the metadir, and with it all that was made of the file: it is expanded anew.
        if in_running:
            spool.put_back(name, QUEUED)
        return True

    def _unfinished_run(self, name: str, memory: Memory, *, in_running: bool) -> Live | None:
        spool = self._spool
        remembered = max((run for job, run in memory.open if job == name), default=None)
        if remembered is not None:
            started = memory.open[name, remembered]
            if self._taken_back(name, started):
                # The claim is made again, so that the end finds the file in its place.
                spool.put_forward(name, QUEUED)
            elif self._end_lost(name, started):
                log.warning("job %s had ended, and the power cut took away how", name)
                spool.put_forward(name, DONE)
            if spool.grant(name, remembered) is None:
                self._restore_metadir(name, remembered, started)
            return self._adopt(name, remembered, started)
        run = self._claimed_run(name)
        if run is not None:
            return self._adopt(name, run, None)
        run = spool.latest_run(name)
        if run is not None and spool.result(name, run) is None:
            return self._adopt(name, run, memory.waits.get(name))
        if in_running:
            self._without_run(name, run or 0, memory)
        return None

    def _without_run(self, name: str, newest: int, memory: Memory) -> None:
        """See to a file in `running/` that belongs to no run: claimed and not started, put there by hand, or over."""
        over = memory.closed.get(name)
        if (
            over is not None
            and over.boot_id != self._prober.boot_id()
            and over.run >= newest
            and self._spool.holds(over.inode, name, RUNNING)
        ):
            log.warning(_TAKEN_BACK, name)
            self._spool.file_away(name, RUNNING, None)
        elif self._spool.put_back(name, QUEUED):
            log.warning("job %s lay in running/ without a run; it is queued", name)

    def _claimed_run(self, name: str) -> int | None:
        """Return the newest run that was granted anything, if the file in `running/` was claimed for it."""
        for run in reversed(self._spool.runs(name)):
            grant = self._spool.grant(name, run)
            if grant is not None:
                held = grant.inode is not None and self._spool.holds(grant.inode, name, RUNNING)
                return run if held else None
            if self._spool.result(name, run) is None and self._spool.jid(name, run) is not Liveness.VOID:
                return None  # a power cut emptied it
        return None

    def _taken_back(self, name: str, started: journal.Started) -> bool:
        """Whether a power cut took back the claim of a started job: nobody has touched its file in `queued/` since."""
        if started.boot_id == self._prober.boot_id():
            return False
        return self._spool.untouched(started.inode, name, QUEUED, started.at_ns)

    def _end_lost(self, name: str, started: journal.Started) -> bool:
        """Whether a run was filed away whose end a power cut has emptied: nobody cancelled it, it is lost."""
        spool, run = self._spool, started.run
        return (
            started.boot_id != self._prober.boot_id()
            and spool.exit_code(name, run) is None
            and spool.record(name, run, layout.RESULT) is not None
            and spool.result(name, run) is None
            and spool.stop(name, run) is None
            and spool.holds(started.inode, name, DONE)
        )

    def _restore_metadir(self, name: str, run: int, started: journal.Started) -> None:
        """Make what the journal remembers of a run whose metadir a power cut took back into evidence again."""
        spool = self._spool
        series = self._series(name, started.arrived_at_ns, before=run)
        record = GrantRecord(
            job=name,
            run=run,
            attempt=series.attempt,
            requeues=series.requeues,
            submitted_at_ns=started.arrived_at_ns,
            granted_at_ns=started.at_ns,
            boot_id=started.boot_id,
            inode=started.inode,
        )
        if run in spool.runs(name):
            spool.put_record(name, run, layout.GRANT, records.render_grant(record))
            return
        text = spool.job_text(RUNNING, name) or spool.job_text(QUEUED, name) or b""
        spool.disk.ensure_directory(spool.layout.runs(name))
        spool.publish_metadir(name, run, {layout.SPEC_COPY: text, layout.GRANT: records.render_grant(record)})

    def _adopt(self, name: str, run: int, known: _Known) -> Live:
        """Take a run in; *known* is what the journal has of it, or of the job as it waited."""
        spool = self._spool
        started = known if isinstance(known, journal.Started) else None
        granted = spool.grant(name, run)
        inode = (granted.inode if granted else None) or (started.inode if started else 0)
        spec = self._spec(name, run, inode)
        record = granted or self._grant_lost(name, run, spec, known)
        at_ns = record.granted_at_ns or (started.at_ns if started else time.time_ns())
        if spool.prove(name, run, self._prober).verdict in (Verdict.STARTING, Verdict.SILENT):
            spool.take_jid(name, run)
        found = spool.jid(name, run)
        jid = found if isinstance(found, Jid) else None
        # A jid that is there and says nothing may be in the middle of being written.
        grace_ns = SILENT_NS if found is Liveness.ABSENT else 0
        user = record.user or this_user()
        return Live(
            name=name,
            run=run,
            spec=spec,
            grant=record.grant,
            user=user,
            wait=Wait(record.submitted_at_ns or at_ns),
            series=Series(record.attempt, record.requeues),
            inode=inode,
            started_at_ns=at_ns,
            started_boot_ns=_started_boot_ns(jid, at_ns),
            executor=record.executor,
            view=Running(name, run, user, spec, record.grant, at_ns, record.attempt),
            jid=jid,
            boot_id=record.boot_id,
            silent_until_ns=time.monotonic_ns() + grace_ns,
            stop=spool.stop(name, run),
            adopted=True,
        )

    def _spec(self, name: str, run: int, inode: int) -> Spec:
        """Return what the run was to do: its copy of the job file says so, or the file, wherever it is."""
        spool = self._spool
        spec = spec_of_text(spool.record(name, run, layout.SPEC_COPY), name)
        for place in (RUNNING, QUEUED, HELD, DONE):
            if spec is None and (place == RUNNING or spool.holds(inode, name, place)):
                spec = spec_of_text(spool.job_text(place, name), name)
        # Of a job file that cannot be read any more, nothing but its stop and its end are left to see to.
        return spec or Spec(command="true")

    def _grant_lost(self, name: str, run: int, spec: Spec, known: _Known) -> GrantRecord:
        """Return what can be said in place of a `grant.toml` that a power cut emptied."""
        record = GrantRecord(job=name, run=run, grant=Grant(cpus=spec.request.cpus))
        if known is None:
            return record
        series = self._series(name, known.arrived_at_ns, before=run)
        return replace(record, attempt=series.attempt, requeues=series.requeues, submitted_at_ns=known.arrived_at_ns)

    def _series(self, name: str, arrived_at_ns: int, *, before: int | None = None) -> Series:
        """Return how far a submission has come: its newest result, *before* a run, says so if it is of the same one."""
        result = self._newest_result(name, before)
        if result is None or result.again is None or result.submitted_at_ns != arrived_at_ns:
            return FRESH
        stop = self._spool.stop(name, result.run)
        return series_after(result, stop.kind if stop is not None else None)

    def _newest_result(self, name: str, before: int | None) -> Result | None:
        """Return how the newest run of a job ended; one that was prepared and never claimed is taken back."""
        spool = self._spool
        for run in reversed([run for run in spool.runs(name) if before is None or run < before]):
            result = spool.result(name, run)
            if result is not None:
                return result
            if spool.array(name, run) is not None:
                return None
            found = spool.jid(name, run)
            if found is not Liveness.VOID and not (found is Liveness.ABSENT and spool.take_jid(name, run)):
                return None
        return None

    def _refuse_other_hosts(self, live: Live) -> None:
        jid = live.jid
        if jid is None or jid.host == identity.host() or self._prober.liveness(jid) is not Liveness.ELSEWHERE:
            return
        raise SpoolUnusable(
            cannot(
                "start the dispatcher",
                "for this spool",
                f"run {live.run} of job {live.name} was started on host {jid.host} and may be alive there",
                where=self._spool.root,
                remedy=f'stop the jobs there; if that host is no more, set other_hosts_gone = ["{jid.host}"] '
                "in config.toml",
            )
        )


def _started_boot_ns(jid: Jid | None, at_ns: int) -> int:
    """Return when the run started, on the clock that counts since boot and that nobody sets."""
    if jid is not None:
        return jid.start_ticks * identity.TICK_NS
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - max(0, time.time_ns() - at_ns)
