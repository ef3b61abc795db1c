"""Expanding an array's file: its tasks are written, all of them appear at once, and the file is claimed.

Ten thousand tasks are not written in one pass. What is written so far lies in the staging directory and is thrown
away if the array's file changes meanwhile, for edits of a file that waits count.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from spool.core import layout
from spool.core.errors import InvalidFile, InvalidJob, Problem
from spool.core.layout import QUEUED, RUNNING
from spool.core.model import SECOND_NS, Spec
from spool.core.units import show_size
from spool.dispatcher.confinement import Confinement, Thing
from spool.dispatcher.look import Look
from spool.formats import jobfile, journal
from spool.formats.tasks import ArrayRecord, TaskFiles, render_array
from spool.machine import identity
from spool.machine.host import user_name, why_not_expanded
from spool.state.array import new_array
from spool.state.table import FRESH, Job, JobFile, Table
from spool.store.arrays import ArrayStore
from spool.store.locked_spool import LockedSpool
from spool.store.logs import Logs
from spool.store.spool import read_record

log = logging.getLogger(__name__)

_EXPAND = "expand"
MOST_BYTES = 1 << 30
"""The files of an array's tasks together are no larger: one file is not to fill the disk for everybody."""

_TRY_AGAIN_NS = 5 * SECOND_NS


@dataclass(slots=True)
class _Staged:
    file: JobFile
    data: bytes
    texts: TaskFiles
    path: str
    position: int = 0


class Expander:
    """Turns waiting array files into arrays in progress. *flush* writes what a look found to the journal.

    *why_no_room* says why the disk is too short for new tasks, "" if it is not.
    """

    def __init__(
        self,
        spool: LockedSpool,
        table: Table,
        store: ArrayStore,
        look: Look,
        logs: Logs,
        flush: Callable[[], None],
        why_no_room: Callable[[], str],
        confinement: Confinement,
    ) -> None:
        self._confinement = confinement
        self._spool = spool
        self._table = table
        self._store = store
        self._look = look
        self._logs = logs
        self._flush = flush
        self._why_no_room = why_no_room
        self._staged: dict[str, _Staged] = {}
        self._no_room: dict[str, tuple[str, int]] = {}  # why there is none for its tasks, and when that is asked again

    def reason(self, name: str, *, paused: bool) -> str:
        """Return why an array's file still waits."""
        staged = self._staged.get(name)
        if name in self._no_room:
            return self._no_room[name][0]
        if trouble := self._confinement.why(name):
            return trouble
        if paused:
            return "spool paused"
        if staged is not None:
            return f"being expanded: {staged.position} of {staged.texts.tasks.count} tasks written"
        return "another run of this name is running" if self._blocked(name) else ""

    def next_due_ns(self) -> int | None:
        """Return when what failed is to be tried again, on the monotonic clock."""
        return min((at_ns for _, at_ns in self._no_room.values()), default=None)

    def work(self, until_ns: int, now_ns: int) -> bool:
        """Go on until *until_ns*, monotonic; return whether there is more to do at once."""
        for name in [name for name in self._staged if name not in self._table.array_files]:
            self._abandon(name)
        for name in [name for name, (_, at_ns) in self._no_room.items() if at_ns <= time.monotonic_ns()]:
            del self._no_room[name]
        waiting = [name for name in self._table.array_files if name not in self._no_room and not self._blocked(name)]
        waiting.sort(key=lambda name: (name not in self._staged, self._arrived(name), name))
        for name in waiting:
            if time.monotonic_ns() >= until_ns:
                return True
            if name not in self._staged and (why := self._why_no_room()):
                self._no_room[name] = (why, time.monotonic_ns() + _TRY_AGAIN_NS)
                continue
            thing, done = Thing("array", name), True
            if self._confinement.pauses(thing, _EXPAND):
                continue
            with self._confinement.of(thing, _EXPAND) as piece:
                done = self._step(self._table.job(name), until_ns, now_ns)
            if piece.failed:
                self._abandon(name)
            elif not done:
                return True
        return False

    def _arrived(self, name: str) -> int:
        wait = self._table.jobs[name].wait
        return wait.arrived_at_ns if wait is not None else 0

    def _blocked(self, name: str) -> bool:
        job = self._table.jobs.get(name)
        if job is None or job.live is not None:
            return True
        return os.path.lexists(self._spool.layout.job_file(RUNNING, name))  # where nobody can tell, the claim fails

    def _step(self, job: Job, until_ns: int, now_ns: int) -> bool:
        """Write some more tasks of an array; return False if time is up and not all are written."""
        file = job.queued
        assert file is not None
        assert file.spec is not None
        staged = self._staged.get(job.name)
        if staged is not None and staged.file is not file:
            self._abandon(job.name)
            staged = None
        if staged is None:
            staged = self._begin(job.name, file, file.spec)
            if staged is None:
                return True
        tasks = staged.texts.tasks
        while staged.position < tasks.count:
            if time.monotonic_ns() >= until_ns:
                return False
            task, text = tasks.task_name(staged.position), staged.texts.text(staged.position)
            if staged.position == 0 and len(text) * tasks.count > MOST_BYTES:
                self._refuse(job, [Problem(None, None, _too_much(len(text), tasks.count))])
                return True
            try:
                jobfile.parse(text, name=task, why_no_path=why_not_expanded)
            except InvalidJob as error:
                why = [Problem(each.key, None, f"task {task}: {each.message}") for each in error.problems[:5]]
                self._refuse(job, why)
                return True
            self._store.add(staged.path, task, text)
            staged.position += 1
        del self._staged[job.name]
        self._publish(job, file, file.spec, staged, now_ns)
        return True

    def _begin(self, name: str, file: JobFile, spec: Spec) -> _Staged | None:
        data = read_record(self._spool.layout.job_file(QUEUED, name))
        if data is None:
            return None  # the next look sees that it is gone
        try:
            texts = TaskFiles(name, data, spec)
        except InvalidFile:
            return None  # it is being changed
        staged = self._staged[name] = _Staged(file, data, texts, self._store.begin())
        return staged

    def _refuse(self, job: Job, problems: list[Problem]) -> None:
        """Refuse the whole file, as for any other mistake: it makes a task that cannot be, or too much."""
        self._abandon(job.name)
        self._look.refuse(QUEUED, job, jobfile.render_errors(job.name, problems))

    def _publish(self, job: Job, file: JobFile, spec: Spec, staged: _Staged, now_ns: int) -> None:
        assert job.wait is not None
        spool, name = self._spool, job.name
        arrived = job.wait.arrived_at_ns
        run = spool.next_run(name)
        user = user_name(file.uid)
        record = ArrayRecord(
            job=name,
            run=run,
            tasks=staged.texts.tasks.count,
            inode=file.inode,
            user=user,
            host=identity.host(),
            boot_id=identity.boot_id(),
            submitted_at_ns=arrived,
            expanded_at_ns=now_ns,
        )
        files = {layout.SPEC_COPY: staged.data, layout.ARRAY: render_array(record)}
        try:
            self._store.publish(staged.path, name, run, files)
        except OSError:
            self._store.abandon(staged.path)
            raise
        try:
            claimed = spool.claim(name, file.inode, file.mtime_ns, file.size)
            if claimed:
                self._flush()
                self._logs.remember([journal.Started(name, run, identity.boot_id(), file.inode, arrived, now_ns)])
        except OSError:  # a file that was claimed is found in running/, and queued again
            self._store.withdraw(name, run)
            raise
        if not claimed:
            self._store.withdraw(name, run)
            return
        array = new_array(spec, record, file.inode, user)
        array.unissued = set(array.names)
        array.to_issue = deque(range(len(array.names)))
        self._table.arrays[name] = array
        job.queued, job.held, job.wait, job.series = None, None, None, FRESH
        self._table.settle(job)
        self._table.queue.changed(name)
        log.info("array %s run %d: expanded into %d tasks", name, run, len(array.names))

    def _abandon(self, name: str) -> None:
        staged = self._staged.pop(name, None)
        if staged is not None:
            self._store.abandon(staged.path)


def _too_much(size: int, count: int) -> str:
    taken, most = show_size(size * count), show_size(MOST_BYTES)
    return (
        f"each of its {count:,} tasks is a file of {show_size(size)}, which is {taken} together, and may be {most}; "
        "put long texts into a script, and run that"
    )
