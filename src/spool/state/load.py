"""Runs and arrays in progress, from their files: as a dispatcher that begins finds them, and a command too.

`Spool.load` reads and proves a run. What its files lack comes from the journal, or is presumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from spool.core import phases
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import Grant, Jid, Spec
from spool.core.names import LOCAL_EXECUTORS
from spool.formats.journal import Memory, Started, Waits
from spool.formats.run_records import ArrayRecord, GrantRecord
from spool.state.array import Array, new_array
from spool.state.run import ActiveRun
from spool.state.submission import Attempts, attempts_so_far
from spool.state.table import JobEntry, SchedulerState
from spool.store.config import Settings
from spool.store.runfiles import RunFiles, why_copied
from spool.store.spool import Spool


class Loader:
    """Finds the runs that are not over. All of it raises OSError for records that cannot be read."""

    def __init__(
        self, spool: Spool, memory: Memory, settings: Settings, settle: Callable[[str, int], bool] | None = None
    ) -> None:
        """*settle* withdraws a run that was prepared and never claimed, as for `attempts_so_far`."""
        self._spool = spool
        self._memory = memory
        self._settings = settings
        self._settle = settle

    def run(self, files: RunFiles, known: Started | Waits | None) -> ActiveRun:
        """Return a run from its files; *known* is its line in the journal, or that of its job while it waited."""
        granted, key = files.grant, (files.name, files.run)
        started = known if isinstance(known, Started) else None
        inode = (granted.inode if granted else None) or (started.inode if started else 0)
        spec = self.spec(*key, inode)
        record = granted or self.presumed_grant(*key, spec, known)
        live = ActiveRun.of_records(
            record if started is None else replace(record, boot_id=started.boot_id),
            spec,
            granted_at_ns=record.granted_at_ns or (started.at_ns if started else time.time_ns()),
            stop=files.stop or self._memory.stopping.get(key),
            inode=inode,
        )
        if spec.preemptible and record.submitted_at_ns is not None:
            live.tried_before(self._attempts(key[0], record.submitted_at_ns, before=key[1]))
        live.began_before_copy(why_copied(self._spool.root, granted))
        live.suspends(files.suspension, self._spool.suspend_order(files.name) or "")
        return live

    def unread_run(self, name: str) -> ActiveRun | None:
        """Return the newest run of that name in the journal, without its records; None if there is none."""
        started = self._memory.newest(name)
        if started is None:
            return None
        config, spec = self._settings.config, None
        with suppress(OSError):
            spec = self._spool.job_spec(RUNNING, name, config.defaults)
        spec = spec or Spec(command="true")
        record = GrantRecord(
            name,
            started.run,
            grant=Grant(spec.request.cpus, spec.request.memory_bytes, resources=spec.request.resources),
            executor=spec.executor or config.executor,
            boot_id=started.boot_id,
            submitted_at_ns=started.arrived_at_ns,
        )
        stop = self._memory.stopping.get((name, started.run))
        live = ActiveRun.of_records(record, spec, granted_at_ns=started.at_ns, stop=stop, inode=started.inode)
        live.phase = phases.UNREAD
        return live

    def spec(self, name: str, run: int, inode: int) -> Spec:
        """Return the spec of a run: from its copy of the job file, or from the job file, wherever it is."""
        spool, defaults = self._spool, self._settings.config.defaults
        spec = spool.spec_in_force(name, run, kill_grace_ns=defaults.kill_grace_ns)
        for place in (RUNNING, QUEUED, HELD, DONE):
            if spec is None and (place == RUNNING or spool.holds(inode, name, place)):
                spec = spool.job_spec(place, name, defaults)
        # If a job file is no longer readable, only the run's stop and end remain to be handled.
        return spec or Spec(command="true")

    def presumed_grant(self, name: str, run: int, spec: Spec, known: Started | Waits | None) -> GrantRecord:
        """Return what is assumed in place of a `grant.toml` that a power cut took or emptied."""
        record = GrantRecord(
            name,
            run,
            executor=self._presumed_executor(name, run, spec),
            grant=Grant(cpus=spec.request.cpus, resources=spec.request.resources),
        )
        if known is None:
            return record
        so_far = self._attempts(name, known.arrived_at_ns, before=run)
        return replace(record, attempt=so_far.attempt, requeues=so_far.requeues, submitted_at_ns=known.arrived_at_ns)

    def _presumed_executor(self, name: str, run: int, spec: Spec) -> str:
        jid = self._spool.jid(name, run)
        if isinstance(jid, Jid):
            return jid.engine.partition(":")[0] if jid.engine is not None else LOCAL_EXECUTORS[0]
        known = self._spool.engine(name, run)
        return known[0] if known is not None else spec.executor or self._settings.config.executor

    def recall_series(self, table: SchedulerState, job: JobEntry, line: Waits) -> None:
        """Restore the attempts of the submission that waits by that *line* of the journal."""
        if job.live is None:
            table.recall_series(job, self._attempts(job.name, line.arrived_at_ns))
        elif job.live.wait.arrived_at_ns == line.arrived_at_ns:
            table.recall_series(job, job.live.attempts)

    def _attempts(self, name: str, arrived_at_ns: int, *, before: int | None = None) -> Attempts:
        return attempts_so_far(self._spool, name, arrived_at_ns, before=before, settle=self._settle)


def load_array(spool: Spool, record: ArrayRecord) -> Array | None:
    """Return an array without the states of its tasks; None if the job file that it was made from is lost."""
    spec = spool.spec(record.job, record.run)
    if spec is None or not spec.is_array:
        spec = spool.job_spec(RUNNING, record.job)
    return new_array(spec, record) if spec is not None and spec.is_array else None
