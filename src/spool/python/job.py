"""One job for a Python program: its state, its end, its output, and what can be done to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from html import escape
from typing import TYPE_CHECKING, Any

from spool.client import autostart
from spool.client.output import POLL_S, Follower, OutputPiece, Stream, read_output, run_of
from spool.client.requests import DRY_RUN, Change, ChangeKind, Requests
from spool.client.waiting import End, Waiter
from spool.core.arrays import array_of
from spool.core.errors import SpoolError, cannot
from spool.core.layout import HELD, QUEUED, RUNNING
from spool.core.model import Result, State
from spool.formats.capabilities import contributed
from spool.query.jobs import JobLister, with_parameters
from spool.query.parameters import Parameters, tasks_in
from spool.query.rows import JobRow, row_of_result
from spool.store.ownership import this_user
from spool.store.spool import Spool

if TYPE_CHECKING:
    from spool.query.details import RunDetails
    from spool.query.explain import Explanation


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
        row = JobLister(self._spool).row(self.name)
        if row is None and (result := self._last_result()) is not None:
            row = row_of_result(result)  # its file, which was removed to end it, is not in done/ yet
        if row is None and (outcome := self.outcome) is not None:
            row = JobRow(self.name, outcome, reason="never issued")
        elif row is None:
            row = JobRow(self.name, State.QUEUED, reason="not issued yet")
        return with_parameters(self._spool, (row,))[0]

    def _last_result(self) -> Result | None:
        """Return the end of a job that is neither an array nor a task; None if there is none, or it continues."""
        run = None if array_of(self.name) else self._spool.latest_run(self.name)
        if run is None or self._spool.array(self.name, run) is not None:
            return None
        result = self._spool.result(self.name, run)
        return result if result is not None and result.again is None else None

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
        from spool.query.rows import html  # imported here, because only notebooks need it
        from spool.query.tasks import tasks_of

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
    """Return *change* once a dispatcher is there to carry it out, if it needs one."""
    if change.kind not in DRY_RUN | {ChangeKind.HELD, ChangeKind.CANCELLED}:
        serve(spool)
    return change


def serve(spool: Spool) -> None:
    """Start a dispatcher if none is running.

    No error if none can be started: the request is on the disk for the next one, and a list of jobs reports it.
    """
    autostart.ensure(spool.root)
