"""The places of the waiting jobs in the queue, and their waiting clocks: given, stopped, remembered, told of."""

from __future__ import annotations

from spool.core.events import EventName
from spool.dispatcher.telling import Telling
from spool.formats import journal
from spool.state.table import FRESH, Job, Table


class Clocks:
    """Keeps `Job.wait` of every job whose file waits or is held. `lines` is what the journal is to be told."""

    def __init__(self, table: Table, telling: Telling) -> None:
        self._table = table
        self._telling = telling
        self.lines: list[journal.Line] = []

    def see(self, job: Job, now: int) -> None:
        """Give a job that is seen for the first time its place, and let its clock run while it is in `queued/`."""
        file = job.queued or job.held
        assert file is not None
        runs = job.queued is not None
        was_parked, job.parked = job.parked, not runs
        before = job.wait
        new = self._table.place(job, now)
        if new and runs:
            self._telling.file(EventName.QUEUED, job, file, now)
        if job.wait == before and (runs or was_parked):
            return
        if not runs:
            self._telling.file(EventName.HELD, job, file, now, job.why_held)
        elif was_parked:
            self._telling.file(EventName.RELEASED, job, file, now)
        self.remember(job)

    def remember(self, job: Job) -> None:
        """Note the job's place and clock for the journal."""
        wait = job.wait
        if wait is not None:
            self.lines.append(journal.Waits(job.name, wait.arrived_at_ns, wait.waited_ns_before, wait.clock_at_ns))

    def forget(self, name: str) -> None:
        """Forget the place of a job that is in no directory any more: it will not come back as the same submission."""
        job = self._table.jobs.get(name)
        if job is not None and job.queued is None and job.held is None and job.wait is not None:
            job.wait, job.series, job.parked = None, FRESH, False
            self.lines.append(journal.Left(name))
            self._table.settle(job)
