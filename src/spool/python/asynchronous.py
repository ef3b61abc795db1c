"""The client for programs that run on asyncio.

What reads or writes files runs in a thread of the loop's pool, one call at a time for each caller; what waits is
watched by one task, however many jobs are waited for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, closing, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from spool.client.output import OutputPiece, Stream
from spool.client.waiting import POLL_S, End, Follower
from spool.python.client import Client, HasJob, Job, Progress, WaitedJobs, job_of, shown
from spool.store.spool import Spool

_T = TypeVar("_T", bound=Job | HasJob)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _awaited(
    method: Callable[Concatenate[Client, _P], _R],
) -> Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, _R]]:
    """Return a method of `Client` to be awaited, which a thread carries out."""

    @wraps(method)
    async def awaited(self: AsyncClient, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return await asyncio.to_thread(method, self.client, *args, **kwargs)

    return awaited


class AsyncClient:
    """One spool, as a `Client` whose methods are awaited; `client` is that one, for the methods that this one lacks.

    The `Job`s that it returns are those of `Client`: their methods block. The errors are those of `Client`, too.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, *, make: bool = False) -> None:
        """Use the spool at *root*, as `Client` does. Raises SpoolUnusable."""
        self.client: Client = Client(root, make=make)
        self._waiting: dict[Job, list[asyncio.Future[End]]] = {}
        self._new: list[Job] = []
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<spool.AsyncClient {self.client.root}>"

    submit = _awaited(Client.submit)
    submit_many = _awaited(Client.submit_many)
    sweep = _awaited(Client.sweep)
    cancel = _awaited(Client.cancel)
    jobs = _awaited(Client.jobs)
    output = _awaited(Client.output)

    async def follow(self, job: str | Job) -> AsyncIterator[bytes]:
        """Yield the output as it appears, as `Job.follow` does."""
        with closing(await asyncio.to_thread(Follower, Spool(self.client.root), (str(job),))) as follower:
            for piece in follower.pieces():
                if piece is None:
                    await asyncio.sleep(POLL_S)
                elif isinstance(piece, OutputPiece) and piece.data and piece.stream is Stream.OUT:
                    yield piece.data

    async def wait(self, job: str | Job, *, timeout_s: float | None = None) -> End | None:
        """Wait until a job has ended and return its end; None after a timeout. Raises NoSuchJob."""
        waited = job if isinstance(job, Job) else await asyncio.to_thread(self.client.job, job)
        found = await self._first((waited,), timeout_s)
        return None if found is None else found[1]

    async def as_completed(
        self, jobs: Iterable[_T], *, timeout_s: float | None = None, progress: Progress = False
    ) -> AsyncIterator[_T]:
        """Yield each of *jobs* when it has ended, as `as_completed` does. Raises NoSuchJob, and TimeoutError."""
        async with aclosing(self._ends(jobs, timeout_s, progress)) as ends:
            async for waited, _ in ends:
                yield waited

    async def wait_all(
        self, jobs: Iterable[Job | HasJob], *, timeout_s: float | None = None, progress: Progress = False
    ) -> tuple[End | None, ...]:
        """Wait until all *jobs* have ended, and return their ends, as `wait_all` does. Raises NoSuchJob."""
        wanted = list(jobs)
        found: dict[Job, End] = {}
        with suppress(TimeoutError):
            async with aclosing(self._ends(wanted, timeout_s, progress)) as ends:
                async for waited, end in ends:
                    found[job_of(waited)] = end
        return tuple(found.get(job_of(waited)) for waited in wanted)

    async def wait_any(self, jobs: Iterable[_T], *, timeout_s: float | None = None) -> _T | None:
        """Wait until one of *jobs* has ended, and return it, as `wait_any` does. Raises NoSuchJob."""
        found = await self._first(jobs, timeout_s)
        return None if found is None else found[0]

    async def _first(self, jobs: Iterable[_T], timeout_s: float | None) -> tuple[_T, End] | None:
        with suppress(TimeoutError):
            async with aclosing(self._ends(jobs, timeout_s, False)) as ends:
                async for found in ends:
                    return found
        return None

    async def _ends(
        self, jobs: Iterable[_T], timeout_s: float | None, progress: Progress
    ) -> AsyncGenerator[tuple[_T, End]]:
        loop = asyncio.get_running_loop()
        until = None if timeout_s is None else loop.time() + timeout_s
        ended: asyncio.Queue[tuple[_T, asyncio.Future[End]]] = asyncio.Queue()
        pending: dict[asyncio.Future[End], Job] = {}
        for waited in jobs:
            end = self._end_of(job_of(waited))
            pending[end] = job_of(waited)
            end.add_done_callback(lambda end, waited=waited: ended.put_nowait((waited, end)))  # type: ignore[misc]
        try:
            with shown(progress, total := len(pending)) as show:
                while pending:
                    async with asyncio.timeout_at(until):
                        waited, end = await ended.get()
                    pending.pop(end)
                    found = end.result()
                    show(total - len(pending))
                    yield waited, found
        finally:
            for end, job in pending.items():
                end.cancel()
                others = [each for each in self._waiting.pop(job, []) if each is not end]
                if others:
                    self._waiting[job] = others

    def _end_of(self, job: Job) -> asyncio.Future[End]:
        """Return the future end of a job, which the task that watches them all will set."""
        end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        if job not in self._waiting:
            self._waiting[job] = []
            self._new.append(job)
        self._waiting[job].append(end)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        return end

    async def _watch(self) -> None:
        """Watch all jobs that are waited for, until there are none."""
        waits = WaitedJobs()
        try:
            while self._waiting:
                new, self._new = self._new, []
                for job, end in await asyncio.to_thread(_look, waits, new):
                    self._settle(job, end)
                if self._waiting and not self._new:
                    await asyncio.sleep(waits.pause_s)
        except Exception as error:
            for job in list(self._waiting):
                self._settle(job, error)
        finally:
            self._waiting.clear()
            self._new.clear()

    def _settle(self, job: Job, end: End | Exception) -> None:
        for each in self._waiting.pop(job, ()):
            if not each.done():
                each.set_exception(end) if isinstance(end, Exception) else each.set_result(end)


def _look(waits: WaitedJobs, new: Sequence[Job]) -> list[tuple[Job, End | Exception]]:
    """Return the jobs that have ended, with their ends, and those that are unknown, with the errors."""
    return [*waits.add(new).items(), *waits.poll()]
