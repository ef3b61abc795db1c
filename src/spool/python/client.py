"""Spool for Python programs: the functions of the command line, with values in and values out. Nothing is printed."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from html import escape
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar

from spool.client import autostart
from spool.client.draft import Draft, exports, fresh_name, job_keys, plain, stem_of
from spool.client.output import OutputPiece, Stream, read_output, run_of
from spool.client.requests import Change, ChangeKind, Requests
from spool.client.submit import check_submitter, default_root, ensure_spool, root_at, submit, where_taken
from spool.client.waiting import POLL_S, End, Follower, Waiter, wait_for_ends
from spool.core.arrays import array_of
from spool.core.errors import InvalidValue, NoSuchJob, NotAllSubmitted, SpoolError, cannot
from spool.core.layout import HELD, QUEUED, RUNNING, why_not_name
from spool.core.model import State
from spool.formats import jobfile
from spool.formats.capabilities import contributed
from spool.query.foresight import doubts
from spool.query.jobs import JobLister, list_jobs
from spool.query.rows import (
    ALL_JOBS,
    JobFilter,
    JobList,
    JobRow,
    Parameters,
    html,
    row_of_result,
    tasks_in,
    with_parameters,
)
from spool.store.glance import defaults_of
from spool.store.ownership import this_user
from spool.store.spool import Spool

if TYPE_CHECKING:
    from typing import Unpack

    from spool.core.accounting import RunFilter, Statistics
    from spool.core.model import Spec
    from spool.query.details import RunDetails
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
        path = root_at(os.fspath(root)) if root is not None else default_root()
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
                autostart.ensure(self.root)
            if done:
                raise NotAllSubmitted(f"job {failed}", why, done, len(drafts)) from error
            if isinstance(error, FileExistsError):
                raise SpoolError(cannot("submit", f"job {failed}", why)) from None
            raise
        if drafts and not held:
            autostart.ensure(self.root)
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
        choices = {key: [plain(each) for each in values] for key, values in matrix.items()}
        one = {**keys, "command": command, "name": name, "matrix": choices}
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
        from spool.query.listing import foreseen

        return foreseen(self._spool, list_jobs(self._spool, wanted, everything=everything), ask=forecast)

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
        from spool.store.history import History

        try:
            key = By(by) if by is not None else None
        except ValueError:
            why = f"the groups are {', '.join(By)}"
            raise InvalidValue(cannot("count", f"runs by {by!r}", why)) from None
        return History(self._spool.root).sums(wanted or RunFilter(), key)

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


class Job:
    """A job by its name, in one spool: nothing is read before it is asked for, and each answer is read anew.

    `str(job)` is the name. Two are equal if they have the same name in the same spool.
    """

    __slots__ = ("_parameters", "_spool", "_waiter", "name")

    def __init__(self, spool: Spool, name: str, parameters: Mapping[str, str] | None = None) -> None:
        """*parameters*: those of a task, as far as they are known."""
        self._spool = spool
        self.name: str = name
        self._parameters = parameters
        self._waiter: Waiter | None = None  # while it has not ended: some ends are believed after a while only

    @property
    def root(self) -> str:
        """The directory of the spool."""
        return self._spool.root

    @property
    def parameters(self) -> dict[str, str]:
        """The values of an array's matrix or rows that this task has; empty for another job."""
        if self._parameters is None:
            self._parameters = dict(Parameters(self._spool).of(self.name))
        return dict(self._parameters)

    @property
    def outcome(self) -> State | None:
        """How the job has ended; None if it has not. Raises NoSuchJob."""
        if self._waiter is None:
            self._waiter = Waiter(self._spool, (self.name,))
        ends = self._waiter.poll()
        if not ends:
            return None
        self._waiter = None  # it may run again
        return ends[0].outcome

    def wait(self, *, timeout_s: float | None = None) -> End | None:
        """Wait until the job has ended and return its end; None after a timeout. Raises NoSuchJob."""
        return next(iter(Waiter(self._spool, (self.name,)).wait(timeout_s)), None)

    def result(self, *, timeout_s: float | None = None) -> Any:
        """Wait until the job has ended and return what its Python function returned; for an array a list of all.

        The function may have been submitted by another process. Raises what it has raised, a SpoolError if the job
        ended without a result, and TimeoutError.
        """
        end = self.wait(timeout_s=timeout_s)
        if end is None:
            raise TimeoutError
        for _, value_of in contributed("value"):
            return value_of(self._spool, self.name, end)
        raise SpoolError(cannot("read", f"the result of job {self.name}", "this installation cannot call functions"))

    def output(self, run: int | None = None) -> bytes:
        """Return the output so far: of the newest run, or of *run*; for an array that of each task."""
        return b"".join(read_output(self._spool, self.name, run_of(self._spool, self.name, run)))

    def tail(self, lines: int = 10) -> str:
        """Return the last lines of the output of the newest run."""
        run = run_of(self._spool, self.name)
        return b"".join(read_output(self._spool, self.name, run, lines=lines)).decode("utf-8", "replace")

    def follow(self) -> Iterator[bytes]:
        """Yield the output as it appears, from the newest run on, until the job has ended."""
        with closing(Follower(self._spool, (self.name,))) as follower:
            for piece in follower.pieces():
                if piece is None:
                    time.sleep(POLL_S)
                elif isinstance(piece, OutputPiece) and piece.data and piece.stream is Stream.OUT:
                    yield piece.data

    def cancel(self, reason: str = "") -> tuple[Change, ...]:
        """End the job, whether it waits or runs; return the change of each of its files."""
        return tuple(served(self._spool, each) for each in requests_of(self._spool).cancel(self.name, reason))

    def why(self) -> Explanation:
        """Return why the job does not run yet, when it could start, what it is doing, or how it ended."""
        from spool.query.explain import why

        return why(self._spool, self.name)

    def runs(self) -> tuple[RunDetails, ...]:
        """Return each start of the job, with its outcome, times, resources and files, as `spool show` knows them."""
        from spool.query.details import job_details

        return job_details(self._spool, self.name).runs

    def row(self) -> JobRow:
        """Return the job as a list of jobs has it. Raises NoSuchJob."""
        spool, name = self._spool, self.name
        row = JobLister(spool).row(name)
        run = spool.latest_run(name) if row is None and not array_of(name) else None
        if run is not None and spool.array(name, run) is None:  # its file, removed to end it, is not in done/ yet
            result = spool.result(name, run)
            row = row_of_result(result) if result is not None and result.again is None else None
        if row is None:
            state = self.outcome or State.QUEUED
            row = JobRow(name=name, state=state, reason="never issued" if state.ended else "not issued yet")
        return with_parameters(spool, (row,))[0]

    def tasks(self) -> tuple[Job, ...]:
        """Return the tasks of an array in their order, with their parameters; of another job none."""
        tasks = tasks_in(self._spool, self.name)
        if tasks is None:
            return ()
        names = tasks.names()
        return tuple(Job(self._spool, name, tasks.parameters(at)) for at, name in enumerate(names))

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        try:
            places = self._spool.places(self.name)
            state = next((place for place in (RUNNING, HELD, QUEUED) if place in places), "")
            state = state or self.outcome or "not issued yet"
        except (OSError, SpoolError):
            state = "unknown"
        return f"<spool.Job {self.name}: {state}>"

    def _repr_html_(self) -> str:
        """Return the job as a table for a notebook; an array with its tasks."""
        from spool.query.listing import tasks_of

        try:
            tasks = tasks_of(self._spool, self.name)
            return html((self.row(), *(tasks.rows if tasks is not None else ())), time.time_ns())
        except SpoolError as error:
            return html((), time.time_ns()) + f"<p>{escape(str(error))}</p>"

    def __reduce__(self) -> tuple[object, ...]:
        return _job_at, (self.root, self.name, self._parameters)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and (self.root, self.name) == (other.root, other.name)

    def __hash__(self) -> int:
        return hash((self.root, self.name))


def _job_at(root: str, name: str, parameters: Mapping[str, str] | None) -> Job:
    """Return a job that was pickled; it is the same in another process."""
    return Job(Spool(root), name, parameters)


def requests_of(spool: Spool) -> Requests:
    """Return the requests for changes of jobs. Raises SpoolUnusable if the spool is another user's."""
    return Requests(spool, this_user())


def served(spool: Spool, change: Change) -> Change:
    """Return *change* once a dispatcher is there to carry it out, if it needs one.

    No error if none can be started: the request is on the disk for the next one, and a list of jobs reports it.
    """
    if not change.dry_run and change.kind not in {ChangeKind.HELD, ChangeKind.CANCELLED}:
        autostart.ensure(spool.root)
    return change


_Names = str | Sequence[str]


class CallKeys(TypedDict, total=False):
    """The keys of a job that calls a Python function."""

    shell: str
    workdir: str
    env: Mapping[str, str]
    setup: str
    container: str | Mapping[str, Any]
    cpus: int
    memory: str
    gpus: int
    gpu_memory: str
    gpu_min_memory: str
    gpu_type: _Names
    resources: Mapping[str, int]
    time_limit: str
    signal: str
    signal_to: Literal["main", "all", "shell"]
    umask: str
    limits: Mapping[str, int | str]
    nice: int
    gpu_idle: str
    gpu_idle_action: Literal["warn", "stop"]
    kill_grace: str
    priority: int
    depends_on: _Names | Mapping[str, Any]
    on_dependency_failure: Literal["cancel", "wait"]
    start_after: Any
    scheduling_timeout: str
    group: str
    group_limit: int
    max_running: int
    retry: Mapping[str, Any]
    requeue: bool
    preemptible: bool
    stdout: str
    stderr: str
    prolog: str
    epilog: str
    executor: str
    executor_options: Sequence[str]
    keep_session: bool
    project: str
    tags: Sequence[str]
    comment: str
    notify: _Names | Mapping[str, Any]


class JobKeys(CallKeys, total=False):
    """The keys of any job; those that spool writes itself are not among them."""

    script: str
    array: str
    matrix: Mapping[str, Sequence[object]]
    rows: Sequence[Mapping[str, object]]


_EVERY_S = 0.1  # how often to draw a line of progress


class HasJob(Protocol):
    """What stands for a job, like the futures of an executor."""

    @property
    def job(self) -> Job:
        """The job."""
        ...


_T = TypeVar("_T", bound=Job | HasJob)
Progress = bool | Callable[[int, int], object]
"""Whether to show progress, or a function that is called with the number of ended jobs, and of all."""


def job_of(waited: Job | HasJob) -> Job:
    """Return the job of what is waited for. Raises TypeError."""
    job = waited if isinstance(waited, Job) else getattr(waited, "job", None)
    if not isinstance(job, Job):
        raise TypeError(f"cannot wait for {waited!r}: it is neither a Job nor has one as its attribute `job`")
    return job


class WaitedJobs:
    """Jobs that are waited for, of any spools."""

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        """Wait for *jobs*. Raises NoSuchJob for the first that is unknown."""
        self._waiters: dict[str, Waiter] = {}
        for error in self.add(jobs).values():
            raise error

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values()))

    @property
    def pause_s(self) -> float:
        """How long to wait before the next look."""
        return max((waiter.pause_s for waiter in self._waiters.values() if waiter), default=0.0)

    def add(self, jobs: Iterable[Job]) -> dict[Job, NoSuchJob]:
        """Wait for *jobs* too, and return the errors of those that are unknown."""
        unknown: dict[Job, NoSuchJob] = {}
        by_root: dict[str, list[str]] = {}
        for job in jobs:
            by_root.setdefault(job.root, []).append(job.name)
        for root, names in by_root.items():
            waiter = self._waiters.setdefault(root, Waiter(Spool(root)))
            unknown |= {Job(Spool(root), name): error for name, error in waiter.add(names).items()}
        return unknown

    def discard(self, job: Job) -> None:
        """Wait for a job no longer."""
        if job.root in self._waiters:
            self._waiters[job.root].discard(job.name)

    def poll(self) -> list[tuple[Job, End]]:
        """Return the jobs that have ended since the last look, with their ends."""
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> list[tuple[Job, End]]:
        """Wait until a job has ended, and return what `poll` does; nothing after a timeout, or if no job is left."""
        ends = wait_for_ends(self._waiters.values(), timeout_s)
        return [(Job(Spool(waiter.root), end.name), end) for waiter, end in ends]


def as_completed(jobs: Iterable[_T], *, timeout_s: float | None = None, progress: Progress = False) -> Iterator[_T]:
    """Yield each of *jobs* when it has ended, whatever its outcome. Raises NoSuchJob, and TimeoutError.

    *jobs* are Jobs, or objects with a Job as their attribute `job`, such as the futures of calls. *progress*:
    show how many have ended, by tqdm if that is installed, else on a terminal by a line on stderr; or a function that
    is called with the number of ended jobs and that of all.
    """
    return (waited for waited, _ in _ends(list(jobs), timeout_s, progress))


def wait_all(
    jobs: Iterable[Job | HasJob], *, timeout_s: float | None = None, progress: Progress = False
) -> tuple[End | None, ...]:
    """Wait until all *jobs* have ended, and return their ends in the order of *jobs*. Raises NoSuchJob.

    After a timeout the end of a job that has not ended is None. *progress* is that of `as_completed`.
    """
    wanted = list(jobs)
    found: dict[Job, End] = {}
    try:
        for waited, end in _ends(wanted, timeout_s, progress):
            found[job_of(waited)] = end
    except TimeoutError:
        pass
    return tuple(found.get(job_of(waited)) for waited in wanted)


def wait_any(jobs: Iterable[_T], *, timeout_s: float | None = None) -> _T | None:
    """Wait until one of *jobs* has ended, and return it; None after a timeout, or if there are no jobs.

    Raises NoSuchJob.
    """
    try:
        return next((waited for waited, _ in _ends(list(jobs), timeout_s, False)), None)
    except TimeoutError:
        return None


def _ends(jobs: Sequence[_T], timeout_s: float | None, progress: Progress) -> Iterator[tuple[_T, End]]:
    """Begin to wait, at once, and return what yields the ends. Raises NoSuchJob."""
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    left: dict[Job, list[_T]] = {}
    for waited in jobs:
        left.setdefault(job_of(waited), []).append(waited)
    waits = WaitedJobs(left)

    def ends() -> Iterator[tuple[_T, End]]:
        done = 0
        with shown(progress, len(jobs)) as show:
            while left:
                found = waits.wait(max(0.0, until - time.monotonic()))
                if not found:
                    raise TimeoutError(f"{len(jobs) - done} of {len(jobs)} jobs have not ended in time")
                for job, end in found:
                    for waited in left.pop(job):
                        done += 1
                        show(done)
                        yield waited, end

    return ends()


@contextmanager
def shown(progress: Progress, total: int) -> Iterator[Callable[[int], object]]:
    """Yield what to call with the number of jobs that have ended, to show it as `as_completed` says."""
    if callable(progress):
        yield lambda done: progress(done, total)
        return
    bar: Any = None
    if progress:
        with suppress(ImportError):
            from tqdm.auto import tqdm

            bar = tqdm(total=total, unit="job")
    if bar is not None:
        with closing(bar):
            yield lambda done: bar.update()
    elif progress and sys.stderr.isatty():
        yield from _on_a_line(total)
    else:
        yield lambda done: None


def _on_a_line(total: int) -> Iterator[Callable[[int], object]]:
    """Yield what shows the number of jobs that have ended on a line of stderr, and end the line."""
    next_s = 0.0

    def draw(done: int) -> None:
        nonlocal next_s
        if done == total or time.monotonic() >= next_s:
            next_s = time.monotonic() + _EVERY_S
            print(f"\r{done} of {total} jobs have ended", end="", file=sys.stderr, flush=True)

    draw(0)
    try:
        yield draw
    finally:
        print(file=sys.stderr)
