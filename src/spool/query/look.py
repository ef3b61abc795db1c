"""One look at the files without the lock: what a dispatcher would make of each job if it began now."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from spool.core import layout
from spool.core.errors import InvalidJob
from spool.core.layout import HELD, QUEUED, RUNNING
from spool.core.lifecycle import Outlived, Verdict
from spool.core.model import JobDefaults
from spool.formats import jobfile, journal
from spool.formats.config import Config
from spool.formats.run_records import RunFiles
from spool.state.run import ActiveRun, JobEntry, JobFileVersion
from spool.store.disk import status_of
from spool.store.edited import ReadFailure, is_open_in_editor, read_stable
from spool.store.reading import read_bytes
from spool.store.spool import Spool
from spool.store.tolerant import unreadable

if TYPE_CHECKING:
    from spool.machine.processes import MachineProber
    from spool.state.load import Loader
    from spool.state.table import SchedulerState

_OVER = frozenset({Verdict.ENDED, Verdict.VOID})
_MOST_SAID = 1 << 20


class Look:
    """What the files of a spool say of each job, with the journal's memory of it."""

    def __init__(self, spool: Spool, config: Config | None, now_ns: int, *, served: bool = False) -> None:
        """Read nothing yet. *served*: a dispatcher keeps the journal, and knows the jobs that it has seen."""
        self._spool = spool
        self._config = Config() if config is None else config
        self._now_ns = now_ns
        self._served = served
        self._others: dict[str, set[str]] = {}
        self._wrong: dict[str, str] = {}  # all that is wrong with the file of a job

    @cached_property
    def memory(self) -> journal.Memory:
        """What the journal remembers; nothing if only the owner of the spool can read it."""
        text = b""
        if not self._served:
            with suppress(OSError):
                text = self._spool.file(layout.JOURNAL) or b""
        return journal.recall(list(journal.parse(text)))

    @cached_property
    def loader(self) -> Loader:
        """What makes a run of its records."""
        from spool.state.load import Loader  # a list of jobs that wait needs none of it

        return Loader(self._spool.strict, self.memory, lambda: self._config)

    @cached_property
    def ran_before(self) -> Set[str]:
        """The jobs that may have runs."""
        return set(self._spool.jobs_with_runs())

    # One job.

    def waiting(self, job: JobEntry, place: str) -> JobFileVersion | None:
        """See the file of a job in `queued/` or `held/`, and its place in the queue; None if there is no such file.

        Raises OSError: without the file for that alone, else for the records of its runs.
        """
        file = self._file(place, job.name)
        if file is None:
            return None
        job.see_file(place, file)
        if place == HELD:
            job.see_why_held(self._spool.hold_reason(job.name, file.mtime_ns))
        line = self.memory.waits.get(job.name) if job.wait is None else None
        if line is not None:
            job.recall_place(line)
        job.takes_place(self._now_ns)
        if line is not None and job.name in self.ran_before:
            self.loader.recall_series(job, line)
        return file

    def defaults(self, place: str, name: str) -> JobDefaults:
        """Return what completes the file of a job in `queued/` or `held/`: the configuration, and what hooks set."""
        with suppress(OSError):
            status = os.stat(self._spool.layout.job_file(place, name))
            version = status.st_ino, status.st_mtime_ns, status.st_size
            return self.memory.completed(name, version, self._config.defaults)
        return self._config.defaults

    def run(self, files: RunFiles) -> ActiveRun:
        """Return a run that goes on, by its files."""
        name, run = files.name, files.run
        live = self.loader.run(files, self.memory.open.get((name, run)) or self.memory.waits.get(name))
        if live.elsewhere is not None and files.began_ns is not None:
            live.began(0, files.began_ns)
        if files.proof.verdict is Verdict.STOPPING:
            live.see(Outlived(files.left.at_ns if files.left is not None else None))
        return live

    def _file(self, place: str, name: str) -> JobFileVersion | None:
        path = self._spool.layout.job_file(place, name)
        seen = read_stable(path)
        if isinstance(seen, ReadFailure):
            status = status_of(path) if seen not in (ReadFailure.GONE, ReadFailure.NOT_OURS) else None
            if status is None:
                return None
            whose = self._spool.why_not(status, place, name)
            invalid = seen is not ReadFailure.WRITING or bool(whose)
            problem = whose or (f"the file is {seen.value}" if invalid else seen.value)
            identity = (status.st_ino, status.st_mtime_ns, status.st_size, status.st_ctime_ns, status.st_uid)
            return JobFileVersion(*identity, None, problem, invalid)
        identity = (*seen.version, seen.status.st_ctime_ns, seen.status.st_uid)
        others = self._beside(place)
        if is_open_in_editor("", name, others):
            return JobFileVersion(*identity, None, "open in an editor")
        wrong = self._spool.why_not(seen.status, place, name)
        if not wrong and layout.file_of(name) + layout.ERROR_SUFFIX in others:
            wrong = self._said(place, name, seen.status.st_ctime_ns)
        defaults = self.memory.completed(name, seen.version, self._config.defaults)
        spec = None
        if not wrong:
            try:
                spec = jobfile.parse(seen.data, name=name, defaults=defaults, why_no_path=_why_no_path)
            except InvalidJob as error:
                wrong = jobfile.render_errors(name, error.problems)
        if wrong:
            self._wrong[name] = wrong
        return JobFileVersion(*identity, spec, jobfile.gist_of(wrong) or None, bool(wrong))

    def _beside(self, place: str) -> set[str]:
        """Return the names of the other files in a place: of editors, and of what was wrong with jobs."""
        if place not in self._others:
            self._others[place] = set(self._spool.names_and_others(place)[1])
        return self._others[place]

    def _said(self, place: str, name: str, since_ns: int) -> str:
        """Return what a dispatcher has said of this version of a file; "" if that was about another one."""
        path = self._spool.layout.error_file(place, name)
        with suppress(OSError):
            if os.stat(path).st_mtime_ns >= since_ns:
                return (read_bytes(path, _MOST_SAID) or b"").decode("utf-8", "replace")
        return ""

    # All of them.

    def fill(self, table: SchedulerState, prober: MachineProber) -> dict[str, str]:
        """Add every job, run and array to *table*; return why some cannot be planned."""
        self._arrays(table)
        self._runs(table, prober)
        left_out = dict[str, str]()
        for place in (QUEUED, HELD):
            for name in self._spool.names(place):
                if name in table.arrays:
                    continue
                job = table.job(name)
                try:
                    self.waiting(job, place)
                except OSError as error:
                    if job.file(place) is None:
                        where = self._spool.layout.job_file(place, name)
                        self._spool.note(error, where)
                        left_out[name] = unreadable(error, where)
                    else:
                        self._unsettled(table, name, error)
                table.settle(job)
                if (file := job.file(place)) is not None and file.spec is None:
                    problems = [line[2:] for line in self._wrong.get(name, "").splitlines() if line.startswith("- ")]
                    left_out[name] = "; ".join(problems) or file.problem or ""
        return left_out | table.unsettled

    def _arrays(self, table: SchedulerState) -> None:
        from spool.state.load import load_array

        spool = self._spool
        running, held = set(spool.names(RUNNING)), set(spool.names(HELD))
        for name in running | held | {name for name, _ in self.memory.open}:
            array = None
            try:
                record = spool.strict.newest_array(name)
                if record is not None and spool.strict.result(name, record.run) is None:
                    array = load_array(spool.strict, record)
            except OSError as error:
                self._unsettled(table, name, error)
            if array is not None:
                from spool.store.arrays import still_to_issue  # few spools have arrays in progress

                with suppress(OSError):
                    array.resume(still_to_issue(spool, name, array.run))
                array.edited(spool.job_spec(RUNNING if name in running else HELD, name), (0, 0))
                if name in held and name not in running:
                    array.hold(self._now_ns)
                if name not in running | held:
                    array.withdrawn()  # and its tasks have not all ended
                table.add_array(array)

    def _runs(self, table: SchedulerState, prober: MachineProber) -> None:
        """Add every run that is not known to be gone; an unreadable one as the journal has it."""
        spool = self._spool.strict
        names = {*self._spool.names(RUNNING), *(name for name, _ in self.memory.open)}
        for name in names - table.arrays.keys():
            live = None
            try:
                run = spool.latest_run(name)
                files = spool.load(name, run, prober) if run is not None else None
                if files is not None and files.proof.verdict not in _OVER:
                    live = self.run(files)
            except OSError as error:
                self._unsettled(table, name, error)
                live = self.loader.unread_run(name)
            if live is not None:
                table.add_run(table.job(name), live)

    def _unsettled(self, table: SchedulerState, name: str, error: OSError) -> None:
        """Leave out a job whose records cannot be read, since nothing may be concluded about it."""
        where = self._spool.layout.runs(name)
        table.unsettle(name, unreadable(error, where))
        self._spool.note(error, where)


def _why_no_path(path: str, env: Mapping[str, str]) -> str | None:
    """Return why a path cannot be expanded; most have nothing to expand."""
    if "$" not in path and not path.startswith("~"):
        return None
    from spool.machine.host import why_not_expanded

    return why_not_expanded(path, env)
