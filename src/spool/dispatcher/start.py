"""Start what the plan says: metadir, claim, memory, launch, in the order of docs/FORMAT.md 5.

All starts of a pass are prepared and remembered before the first is launched, so that one line of the journal,
and where durability asks for it one sync, serves them all.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass

from spool.core import layout
from spool.core.errors import SpoolError
from spool.core.events import EventName
from spool.core.model import Grant, Running, Spec
from spool.core.plan import Start
from spool.dispatcher.ahead import Ahead
from spool.dispatcher.scripts import Scripts
from spool.dispatcher.settings import Settings
from spool.dispatcher.table import FRESH, Job, JobFile, Live, Table, user_name
from spool.dispatcher.telling import Telling
from spool.executors import Executor, Launch, by_name, problem_with
from spool.formats import journal, records
from spool.formats.listening import Reply
from spool.machine import identity
from spool.machine.run_groups import RunGroups
from spool.store.disk import disk_is_full
from spool.store.locked import LockedSpool
from spool.store.logs import Logs
from spool.store.spool import read_bytes

log = logging.getLogger(__name__)

IN_THE_WAY = "a file of its name that belongs to no run lies in running/: move that away"
SILENT_NS = 30_000_000_000  # how long a launched wrapper may take to write its jid


@dataclass(frozen=True, slots=True)
class Blocked:
    """A job that cannot be started for a reason that no plan can know."""

    name: str
    why: str


class Starter:
    """Turns the starts of a plan into live runs."""

    def __init__(
        self,
        spool: LockedSpool,
        table: Table,
        logs: Logs,
        settings: Settings,
        groups: RunGroups | None,
        telling: Telling,
    ) -> None:
        self.texts: dict[str, Reply] = {}  # for the wrappers of jobs that somebody was asked about
        self._telling = telling
        self._spool = spool
        self._table = table
        self._logs = logs
        self._settings = settings
        self._groups = groups
        self._executors: dict[str, Executor] = {}
        self._problems: dict[str, str | None] = {}
        self._scripts = Scripts(spool, settings)
        self._ahead = Ahead(spool, settings, self._scripts)

    def executor(self, name: str) -> Executor:
        """Return the executor of that name."""
        if name not in self._executors:
            self._executors[name] = by_name(name)
        return self._executors[name]

    def close(self) -> None:
        """Let go of what was made ready."""
        self._ahead.drop()
        for executor in self._executors.values():
            executor.close()

    def problem(self, name: str | None) -> str | None:
        """Return why the executor *name* (None: the configured one) cannot start anything, None if it can."""
        name = name or self._settings.executor
        if name not in self._problems:
            self._problems[name] = problem_with(name, self.executor)
        return self._problems[name]

    def ask_executors_again(self) -> None:
        """Have the next question of an executor answered anew, and tell the table what was waiting for that."""
        before = dict(self._problems)
        self._problems.clear()
        if any(self.problem(name) != problem for name, problem in before.items()):
            self.tell_executors_problems()

    def tell_executors_problems(self) -> None:
        """Have every waiting job know what keeps its executor from starting it: the configured one may be another."""
        waiting = [self._table.queue[name] for name in self._table.queue]
        for job in waiting:
            if job.executor_problem != self.problem(job.spec.executor):
                self._table.settle(self._table.job(job.name))

    def start(self, starts: tuple[Start, ...], now_ns: int) -> tuple[list[Live], list[Blocked]]:
        """Start each of *starts*; return the runs (one with `failure` set was not launched) and what stays behind.

        A job whose file was changed, moved or deleted since it was looked at is passed over: the next look sees why.
        """
        prepared: dict[Live, bytes] = {}  # and what their wrappers say
        blocked: list[Blocked] = []
        for start in starts:
            job = self._startable(start.name)
            if job is None or job.queued is None:
                continue
            if os.path.lexists(self._spool.layout.job_file(layout.RUNNING, start.name)):
                blocked.append(Blocked(start.name, IN_THE_WAY))
                continue
            if self._spool.is_between(start.name):
                blocked.append(Blocked(start.name, "its file has a name in held/ as well: remove one of the two"))
                continue
            self._telling.file(EventName.SUBMITTING, job, job.queued, now_ns)
            try:
                prepared.update(self._prepare(job, job.queued, start.grant, now_ns))
            except OSError as error:
                full = " (the disk is full)" if disk_is_full(error) else ""
                blocked.append(Blocked(start.name, f"cannot make its metadir: {error.strerror}{full}"))
        if prepared:
            for live in prepared:
                self._telling.run(EventName.SUBMITTED, live, now_ns)
            self._telling.flush()
            self._logs.remember(
                [
                    journal.Started(
                        live.name, live.run, identity.boot_id(), live.inode, live.wait.arrived_at_ns, now_ns
                    )
                    for live in prepared
                ]
            )
            if not self._logs.strict and not all(live.spec.requeue for live in prepared):
                self._logs.sync()
            for live, script in prepared.items():
                self._launch(live, script)
            if any(live.pid is None and live.jid is None and live.failure is None for live in prepared):
                self.ask_executors_again()  # one of them has started nothing, or could not tell whether it has
        return list(prepared), blocked

    def foresee(self, start: Start | None, now_ns: int) -> list[int]:
        """Make the next starts shorter, and that of *start* most of all; return the pids of what waits for that."""
        chosen, text = None, None
        with suppress(OSError, SpoolError, ImportError):  # the start itself will say what is wrong
            if start is not None and (job := self._startable(start.name)) is not None and job.queued is not None:
                live = self._imagined(job, job.queued, start.grant, now_ns)
                if live is not None:
                    chosen = self.executor(live.executor)
                    text = self._ahead.prepare(live, job.queued, chosen)
        if text is None:
            self._ahead.drop()
        ready = [executor.get_ready(text if executor is chosen else None) for executor in self._executors.values()]
        return [pid for pid in ready if pid is not None]

    def _imagined(self, job: Job, file: JobFile, grant: Grant, now_ns: int) -> Live | None:
        """Return the run that would begin; None if its script names a control group, which is made when the run is."""
        if self._groups is not None and grant.memory_bytes is not None:
            return None
        run = self._spool.following_run(job.name, self._spool.runs(job.name))
        return self._live(job, file, run, grant, now_ns)

    def _startable(self, name: str) -> Job | None:
        job = self._table.jobs.get(name)
        if job is None or job.queued is None or job.queued.spec is None or job.live is not None:
            return None
        return job

    def _prepare(self, job: Job, file: JobFile, grant: Grant, now_ns: int) -> dict[Live, bytes]:
        spool, name = self._spool, job.name
        run = spool.next_run(name)
        live = self._live(job, file, run, grant, now_ns)
        texts = self.texts.pop(name, None)
        ready = self._ahead.take(live, file) if texts is None else None
        record = records.GrantRecord(
            job=name,
            run=run,
            grant=grant,
            attempt=live.series.attempt,
            requeues=live.series.requeues,
            executor=live.executor,
            boot_id=identity.boot_id(),
            inode=live.inode,
            user=live.user,
            submitted_at_ns=live.wait.arrived_at_ns,
            granted_at_ns=now_ns,
            host=identity.host(),
        )
        files = {layout.GRANT: records.render_grant(record)}
        if ready is not None:
            staged, script = ready.staged, ready.script
        else:
            text = read_bytes(spool.layout.job_file(layout.QUEUED, name))
            if text is None:
                return {}
            if self._groups is not None and grant.memory_bytes is not None:
                live.group = self._groups.create(name, run, grant.memory_bytes)
            try:
                script = self._scripts.render(live, self.executor(live.executor), texts)
            except SpoolError as error:
                live.failure, script = str(error), b"#!/bin/sh\n"
            staged = None
            files |= {layout.SPEC_COPY: text, layout.WRAPPER: script}
        spool.publish_metadir(name, run, files, staged)
        try:
            claimed = spool.claim(name, file.inode, file.mtime_ns, file.size)
        except OSError:
            spool.withdraw(name, run)
            raise
        if not claimed:
            spool.withdraw(name, run)
            return {}
        job.queued, job.wait, job.series = None, None, FRESH
        self._table.add_run(job, live)
        self._table.settle(job)
        return {live: script}

    def _live(self, job: Job, file: JobFile, run: int, grant: Grant, now_ns: int) -> Live:
        assert file.spec is not None
        assert job.wait is not None
        user = user_name(file.uid)
        return Live(
            name=job.name,
            run=run,
            spec=file.spec,
            grant=grant,
            user=user,
            wait=job.wait,
            series=job.series,
            inode=file.inode,
            mtime_ns=file.mtime_ns,
            started_at_ns=now_ns,
            started_boot_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            executor=file.spec.executor or self._settings.executor,
            view=Running(job.name, run, user, file.spec, grant, now_ns, job.series.attempt),
            silent_until_ns=time.monotonic_ns() + SILENT_NS,
        )

    def _launch(self, live: Live, script: bytes) -> None:
        if live.failure is not None:
            return
        metadir = self._spool.layout.metadir(live.name, live.run)
        launch = Launch(
            job=live.name,
            run=live.run,
            spool_dir=self._spool.root,
            metadir=metadir,
            script=f"{metadir}/{layout.WRAPPER}",
            text=script,
            keep=self._settings.config.keep_session if live.spec.keep_session is None else live.spec.keep_session,
        )
        try:
            started = self.executor(live.executor).start(launch)
        except SpoolError as error:
            live.failure = str(error)
            return
        if started is None:  # a missing jid proves it at once: the job goes back, and waits for its executor
            live.silent_until_ns, live.cleared = 0, True
            return
        live.pid, live.jid = started.pid, started.identity


def spec_of_text(text: bytes | None, name: str) -> Spec | None:
    """Return what a run's copy of its job file says; None if it was lost or cannot be read."""
    from spool.core.errors import InvalidJob
    from spool.formats import jobfile

    try:
        return jobfile.parse(text, name=name) if text else None
    except InvalidJob:
        return None
