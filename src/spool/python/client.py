"""Spool for Python programs: the functions of the command line, with values in and values out. Nothing is printed."""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from spool.client.draft import Draft, exports, fresh_name, job_keys, plain, stem_of
from spool.client.requests import Change
from spool.client.submit import check_submitter, default_root, ensure_spool, submit, where_taken
from spool.client.waiting import End
from spool.core.errors import InvalidValue, NotAllSubmitted, SpoolError, cannot
from spool.core.layout import why_not_name
from spool.formats import jobfile
from spool.python.job import Job, requests_of, serve, served
from spool.query.foresight import doubts
from spool.query.jobs import ALL_JOBS, JobFilter, JobList, list_jobs
from spool.query.parameters import tasks_in
from spool.store.glance import defaults_of
from spool.store.spool import Spool

if TYPE_CHECKING:
    from typing import Unpack

    from spool.core.accounting import RunFilter, Statistics
    from spool.core.model import Spec
    from spool.python.keys import CallKeys, JobKeys
    from spool.query.explain import Explanation, Preview
    from spool.query.machine import GpuList

log = logging.getLogger(__name__)


class Client:
    """One spool, read and changed through its files. Methods that need a dispatcher start one if none is running.

    Wherever a method takes a job, that is a `Job` or the name of one. Expected failures raise a SpoolError: NoSuchJob
    if no job has the name, InvalidJob if the keys do not make a valid job file, InvalidValue for a name or a text that
    no job file can have; SpoolUnusable for changes of another user's spool. Errors of the disk are OSErrors.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, *, make: bool = False) -> None:
        """Use the spool at *root*; by default that of the command line: `$SPOOL_DIR`, else `~/.spool`.

        *make*: create it if it does not exist. Raises SpoolUnusable.
        """
        path = os.path.abspath(root) if root is not None else default_root()
        if make:
            ensure_spool(path)
        self._spool = Spool.open(path)

    def __repr__(self) -> str:
        return f"<spool.Client {self.root}>"

    @property
    def root(self) -> str:
        """The directory of the spool."""
        return self._spool.root

    def job(self, name: str) -> Job:
        """Return the job of that name, whether it waits, runs or has ended. Raises NoSuchJob, and InvalidValue."""
        spool = self._spool
        if (why_not := why_not_name(name)) is not None:
            raise InvalidValue(cannot("find", f"a job {name!r}", why_not))
        if not spool.places(name) and not spool.runs(name):
            array, _, _ = name.rpartition("_")  # a task that was not issued yet has no file of its own
            tasks = tasks_in(spool, array) if array and spool.places(array) else None
            if tasks is None or name not in tasks.names():
                raise spool.no_such_job("find", f"job {name}", name)
        return Job(spool, name)

    def fresh_name(self, stem: str) -> str:
        """Return *stem* with a short suffix that makes it a name that no job has had. Raises InvalidValue."""
        if (why_not := why_not_name(f"{stem}-xxxx")) is not None:
            raise InvalidValue(cannot("name", f"a job after {stem!r}", why_not))
        return fresh_name(self.root, stem)

    def submit(
        self,
        command: str | Sequence[str],
        *,
        name: str | None = None,
        held: bool = False,
        replace: bool = False,
        **keys: Unpack[JobKeys],
    ) -> Job:
        """Put a job into the queue, or keep it held, and return it. It is on the disk when this returns.

        *command* is a text for the shell, or a program with its arguments. Without *name* the job gets a fresh one,
        made of the program's. *keys* are those of a job file, with values of the same form: `cpus=2, memory="4G",
        time_limit="1h"`. By default the job runs in the current directory, with the PATH, the virtual environment and
        so on of this process, as from `spool submit`; `workdir` and `env` override this. With *replace* it replaces a
        waiting or held job of that name, and waits for the end of a running one.
        """
        one = {**keys, "command": command, "name": name}
        return self.submit_many([one], held=held, replace=replace)[0]

    def submit_many(
        self,
        jobs: Iterable[str | Sequence[str] | Mapping[str, object]],
        *,
        held: bool = False,
        replace: bool = False,
        **keys: Unpack[JobKeys],
    ) -> tuple[Job, ...]:
        """Submit many jobs, faster than one by one, and return them in their order. All are checked before the first.

        Each is a command as for `submit`, or a mapping with the key `command`, and others that override *keys*, which
        all have in common; its `name` is optional too. Raises NotAllSubmitted, with the `submitted` jobs, if an error
        of the disk, or another submission of the same name, stops it between two of them.
        """
        check_submitter(self.root)
        drafts = self._drafts(jobs, keys, held=held)
        for draft in drafts:
            taken = where_taken(self.root, draft.name)
            if taken is not None and not replace:
                raise SpoolError(cannot("submit", f"job {draft.name}", f"a job of that name is in {taken}/"))
        begun: list[str] = []

        def texts() -> Iterator[tuple[str, bytes]]:
            for draft in drafts:
                begun.append(draft.name)
                yield draft.name, draft.text()

        try:
            submit(self.root, texts(), held=held, replace=replace)
        except OSError as error:
            why = "a job of that name has just been submitted" if isinstance(error, FileExistsError) else str(error)
            *done, failed = begun or [drafts[0].name]
            if done and not held:
                serve(self._spool)
            if done:
                raise NotAllSubmitted(f"job {failed}", why, done, len(drafts)) from error
            if isinstance(error, FileExistsError):
                raise SpoolError(cannot("submit", f"job {failed}", why)) from None
            raise
        if drafts and not held:
            serve(self._spool)
        return tuple(Job(self._spool, draft.name) for draft in drafts)

    def sweep(
        self,
        command: str | Sequence[str],
        *,
        matrix: Mapping[str, Iterable[object]],
        name: str | None = None,
        held: bool = False,
        replace: bool = False,
        **keys: Unpack[CallKeys],
    ) -> Job:
        """Submit one job for each combination of the values in *matrix*, as one array, and return the array.

        `{key}` in *command*, `env` and the paths is replaced by the job's value; *keys* are those of `submit`. The
        `tasks()` of the array are its jobs, and each has its `parameters`. The last key varies fastest.
        """
        one = {**keys, "command": command, "name": name, "matrix": matrix_of(matrix)}
        return self.submit_many([one], held=held, replace=replace)[0]

    def cancel(self, job: str | Job, reason: str = "", *, dry_run: bool = False) -> tuple[Change, ...]:
        """End a job, whether it waits or runs; return the change of each of its files.

        With *dry_run*, here and below, nothing is changed, and the result says what would be done.
        """
        changes = requests_of(self._spool).cancel(str(job), reason, dry_run=dry_run)
        return tuple(served(self._spool, change) for change in changes)

    def hold(self, job: str | Job, *, dry_run: bool = False) -> Change:
        """Hold a job until it is released; a running one is stopped, and starts over then."""
        return served(self._spool, requests_of(self._spool).hold(str(job), dry_run=dry_run))

    def release(self, job: str | Job, *, dry_run: bool = False) -> Change:
        """Let a held job run."""
        return served(self._spool, requests_of(self._spool).release(str(job), dry_run=dry_run))

    def requeue(self, job: str | Job, *, dry_run: bool = False, **keys: object) -> Change:
        """Run an ended job again, or stop a running one and start it over.

        *keys* are changed in its job file before: `requeue("train", memory="16G", time_limit=None)`; None removes a
        key. The rest of the file stays unchanged. Raises InvalidJob for keys that do not make a valid job file.
        """

        def changed(name: str, text: bytes) -> bytes:
            stated = {key: value for key, value in keys.items() if value is not None}
            new = jobfile.edited(text, stated, keys.keys() - stated.keys(), name=name)
            jobfile.parse(new, name=name, defaults=defaults_of(self.root))
            return new

        change = requests_of(self._spool).requeue(str(job), changed if keys else None, dry_run=dry_run)
        return served(self._spool, change)

    def suspend(self, job: str | Job, reason: str = "", *, dry_run: bool = False) -> Change:
        """Suspend a running job and the clock of its time limit. It keeps its resources."""
        return served(self._spool, requests_of(self._spool).suspend(str(job), reason, dry_run=dry_run))

    def go_on(self, job: str | Job, *, dry_run: bool = False) -> Change:
        """Continue a suspended job."""
        return served(self._spool, requests_of(self._spool).go_on(str(job), dry_run=dry_run))

    def wait(self, job: str | Job, *, timeout_s: float | None = None) -> End | None:
        """Wait until a job has ended and return its end; None after a timeout."""
        return (job if isinstance(job, Job) else self.job(job)).wait(timeout_s=timeout_s)

    def output(self, job: str | Job, *, run: int | None = None) -> bytes:
        """Return the output of a job so far: of its newest run, or of *run*; for an array that of each task."""
        return Job(self._spool, str(job)).output(run)

    def jobs(self, wanted: JobFilter = ALL_JOBS, *, everything: bool = False, forecast: bool = False) -> JobList:
        """Return active and recently ended jobs; with *everything* all that ever ended.

        The `left_ns` of a run is known by its progress or its limit. With *forecast* the planner is asked too: for when
        runs end that are like earlier ones (`left_by` "guess"), and when each waiting job starts (`start_at_ns`).
        """
        from spool.query.outlook import foreseen

        found = list_jobs(self._spool, wanted, everything=everything)
        return foreseen(self._spool, found, {}, ask=forecast)[0]

    def why(self, job: str | Job) -> Explanation:
        """Return why a job does not run yet, what must end first, and when it could start."""
        return Job(self._spool, str(job)).why()

    def gpus(self) -> GpuList:
        """Return each GPU of the machine: its memory and use, whose jobs and other processes are on it."""
        from spool.query.machine import gpus

        return gpus(self._spool)

    def plan(self) -> Preview:
        """Return what would start now and later, and why the rest waits. Nothing is started."""
        from spool.query.explain import preview

        return preview(self._spool)

    def stats(self, wanted: RunFilter | None = None, *, by: str | None = None) -> Statistics:
        """Return the sums over ended runs: waiting and run times, outcomes, use of CPUs and GPUs.

        *wanted* selects runs; *by* makes groups as `spool stats --by` does: "user", "day" and so on. Raises
        InvalidValue for another word.
        """
        from spool.core.accounting import By, RunFilter
        from spool.query.accounting import account

        try:
            key = By(by) if by is not None else None
        except ValueError:
            why = f"the groups are {', '.join(By)}"
            raise InvalidValue(cannot("count", f"runs by {by!r}", why)) from None
        return account(self._spool, wanted or RunFilter(), key).statistics

    def _drafts(
        self,
        jobs: Iterable[str | Sequence[str] | Mapping[str, object]],
        common: Mapping[str, object],
        *,
        held: bool,
    ) -> list[Draft]:
        """Return the jobs as files that the spool would take. Raises InvalidValue and InvalidJob."""
        exported = exports(self.root)
        drafts: list[Draft] = []
        specs: list[tuple[str, Spec]] = []
        names: set[str] = set()
        for job in jobs:
            keys = {**common, **job} if isinstance(job, Mapping) else {**common, "command": job}
            command, name = _command_of(keys.pop("command", None)), keys.pop("name", None)
            if isinstance(env := keys.get("env"), Mapping):
                keys["env"] = dict(env)
            name = _new_name(self.root, command, names) if name is None else str(name)
            if (why_not := why_not_name(name)) is not None:
                raise InvalidValue(cannot("name", f"a job {name!r}", why_not))
            if name in names:
                raise InvalidValue(cannot("submit", f"job {name}", "two of the jobs have that name"))
            names.add(name)
            draft = Draft(name, job_keys(command, keys, exported), held=held)
            try:
                specs.append((name, draft.check(self.root)))
            except TypeError as error:  # a value that no file can hold
                raise InvalidValue(cannot("submit", f"job {name}", str(error))) from None
            drafts.append(draft)
        for name, why in doubts(self.root, specs):
            log.warning("job %s %s", name, why)
        return drafts


def _new_name(root: str, command: str | Sequence[str], taken: Container[str]) -> str:
    stem = stem_of(command)
    while (name := fresh_name(root, stem)) in taken:
        pass
    return name


def matrix_of(choices: Mapping[str, Iterable[object]]) -> dict[str, list[object]]:
    """Return a matrix as a job file has it."""
    return {key: [plain(each) for each in values] for key, values in choices.items()}


def _command_of(command: object) -> str | list[str]:
    """Return a command as a job file has it. Raises InvalidValue."""
    if isinstance(command, str):
        return command
    if isinstance(command, Sequence) and not isinstance(command, (bytes, bytearray)):
        return [*command]
    remedy = "give a text for the shell, or a sequence of a program and its arguments"
    if callable(command):
        remedy += "; docs/PYTHON.md has what runs a function"
    raise InvalidValue(cannot("submit", "a job", f"its command is {type(command).__name__}", remedy=remedy))


def job(name: str, root: str | os.PathLike[str] | None = None) -> Job:
    """Return the job of that name in the spool at *root*, by default that of the command line. Raises NoSuchJob."""
    return Client(root).job(name)
