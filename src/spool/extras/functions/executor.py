"""`spool.Executor`: calls of Python functions as jobs, as those of `concurrent.futures`, and what they return."""

# ruff: noqa: N818  (like the errors of core/errors.py)

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import cache, cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from spool.client import autostart
from spool.client.draft import (
    Draft,
    escaped,
    exports,
    fresh_name,
    job_keys,
    may_be_secret,
    may_go,
    placeholders,
    plain,
    stem_of,
)
from spool.client.output import read_output
from spool.client.requests import Requests
from spool.client.submit import default_root, ensure_spool, ever_used
from spool.client.waiting import End, Waiter
from spool.core import layout
from spool.core.errors import SHORTAGES, InvalidValue, SpoolError, cannot
from spool.core.layout import QUEUED, RUNNING, why_not_name
from spool.core.model import State
from spool.extras.functions import calls
from spool.python.client import Job
from spool.query.foresight import doubts
from spool.store.arrays import task_names
from spool.store.disk import Disk
from spool.store.ownership import check_owner, this_user
from spool.store.spool import Spool

if TYPE_CHECKING:
    from typing import Unpack

    from spool.python.client import CallKeys

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_MOST_LINES = 10  # of a log, beside an exception
_MOST_TASKS = 100_000  # of one array, FORMAT 3.1
_POLL_S = 0.005
_SERVE_EVERY_S = 2.0
_EXPANDING_S = 5.0
_SHORTAGE_S = 0.5
_OTHER_PROCESS = "each call is a process of its own: let the function do that"
_ELSEWHERE = {
    "max_workers": "the spool decides how many calls run; the key max_running limits those of one map",
    "initializer": _OTHER_PROCESS,
    "initargs": _OTHER_PROCESS,
    "mp_context": _OTHER_PROCESS,
    "max_tasks_per_child": _OTHER_PROCESS,
    "thread_name_prefix": "the keyword name names the jobs",
    **dict.fromkeys(("command", "script"), "spool.Client submits a command"),
    **dict.fromkeys(("array", "matrix", "rows", "task"), "map and submit_all make arrays"),
}
_SYNCING = 8  # threads: syncs at the same time share their way to the disk


class JobFailed(SpoolError):
    """A job has ended without a return of its call: killed, out of time or memory, or cancelled.

    *name* is the job, *end* how it ended. The notes of the exception have the last lines of its log.
    """

    def __init__(self, name: str, end: End) -> None:
        self.name = name
        self.end = end
        reason = f": {end.reason}" if end.reason else ""
        super().__init__(f"job {name} returned nothing: {end.outcome}{reason}")

    def __reduce__(self) -> tuple[type[JobFailed], tuple[str, End]]:
        """Return how to make it again in another process."""
        return type(self), (self.name, self.end)


class OutOfMemory(JobFailed):
    """The job of a call was killed because it took more memory than it had."""


class TimedOut(JobFailed):
    """The job of a call reached its time limit."""


class Cancelled(JobFailed, CancelledError):
    """The job of a call was cancelled."""


class Lost(JobFailed):
    """The processes of a call are gone, and no record says how they ended."""


class RemoteError(SpoolError):
    """A call raised an exception that cannot be made again here. *type* is its full name."""

    def __init__(self, type: str, text: str) -> None:  # noqa: A002
        self.type = type
        super().__init__(f"{type}: {text}")

    def __reduce__(self) -> tuple[type[RemoteError], tuple[str, str]]:
        """Return how to make it again in another process."""
        return type(self), (self.type, str(self).removeprefix(f"{self.type}: "))


class RemoteTraceback(Exception):
    """The traceback of an exception in its own process: the cause of the exception here."""

    def __str__(self) -> str:
        """Return the traceback, below the words that Python prints before a cause."""
        return f"\n{self.args[0]}"


_FAILURES = {
    State.OUT_OF_MEMORY: OutOfMemory,
    State.TIMEOUT: TimedOut,
    State.CANCELLED: Cancelled,
    State.LOST: Lost,
    State.PREEMPTED: Lost,
}


class CallResult:
    """The result of an ended job. It is read when it is first asked for, and kept.

    What keeps it from being read for the moment (Ctrl-C, no free descriptor) is raised, and the next call tries again.
    """

    def __init__(self, spool: Spool, name: str, end: End) -> None:
        self._spool = spool
        self._name = name
        self._end = end

    def error(self) -> BaseException | None:
        """Return the exception of the call, or why there is no value; None if there is one. Raises OSError."""
        return self._read[1]

    def value(self) -> Any:
        """Return the value. Raises what `error` returns or raises."""
        value, error = self._read
        if error is not None:
            raise error
        return value

    @cached_property
    def _read(self) -> tuple[Any, BaseException | None]:
        end, name = self._end, self._name
        try:
            found = calls.read_return(self._spool.root, name, end.run) if end.run is not None else None
            if found is None and end.outcome is State.FINISHED:
                why = "it calls no Python function, or its run was removed"
                raise SpoolError(cannot("read", f"the result of job {name}", why))
            if found is None:
                return None, self._noted(_FAILURES.get(end.outcome, JobFailed)(name, end))
            payload, told = found
            if told is None:
                return _loaded(payload, name), None
        except SpoolError as wrong:
            return None, wrong
        error: BaseException | None = None
        if payload:
            with suppress(Exception):  # its class is not here, or is another one
                error = _loaded(payload, name)
        if not isinstance(error, BaseException):
            error = RemoteError(told["type"], told["text"])
        error.__cause__ = RemoteTraceback(told["traceback"])
        return None, self._noted(error, told["traceback"])

    def _noted(self, error: BaseException, trace: str = "") -> BaseException:
        """Return *error* with the last lines of the log, except its own traceback *trace*."""
        if self._end.run is None:
            return error
        most = _MOST_LINES + len(trace.splitlines())
        words = ""
        with suppress(OSError, SpoolError):
            words = b"".join(read_output(self._spool, self._name, self._end.run, lines=most)).decode("utf-8", "replace")
        if lines := words.removesuffix(trace).splitlines()[-_MOST_LINES:]:
            error.add_note("\n".join((f"the last lines of the log of job {self._name}:", *lines)))
        return error


def result_of(spool: Spool, name: str, end: End) -> Any:
    """Return what the call of an ended job has returned; for an array, the list of all results in order.

    Raises what the call has raised, or a JobFailed.
    """
    record = spool.array(name, end.run) if end.run is not None else None
    if record is None or end.run is None:
        return CallResult(spool, name, end).value()
    results = [_task_result(spool, task) for task in task_names(spool, name, end.run, record)]
    return list(itertools.chain.from_iterable(results)) if calls.is_list(spool.root, name) else results


def _task_result(spool: Spool, name: str) -> Any:
    run = spool.latest_run(name)
    result = spool.result(name, run) if run is not None else None
    if result is None:
        end = End(name, State.CANCELLED, reason="it never ran")
    else:
        end = End(name, result.outcome, result.exit_code, result.reason, result.run)
    return CallResult(spool, name, end).value()


def _loaded(payload: bytes, name: str) -> Any:
    try:
        return pickle.loads(payload)  # noqa: S301  (this user's own: `calls.read_return` has looked)
    except Exception as error:
        why = f"its pickle cannot be loaded here: {' '.join(str(error).split()) or type(error).__name__}"
        raise SpoolError(cannot("read", f"the result of job {name}", why)) from error


class Future(concurrent.futures.Future[T]):
    """A call that is a job. Its result is read from the disk when it is first asked for.

    It outlives this process: `spool.job(name).result()` has the same result in another one.
    """

    def __init__(self, watcher: Watcher, name: str, array: str = "") -> None:
        """Return the future of the job *name*, a task of *array* unless that is empty."""
        super().__init__()
        self._watcher = watcher
        self.name = name
        self.array = array
        self._is_over = False

    @property
    def job(self) -> Job:
        """The job of the call."""
        return Job(self._watcher.spool, self.name)

    def __repr__(self) -> str:
        """Return the name and the state."""
        return f"<spool.Future {self.name}: {'running' if self.running() else self._state.lower()}>"

    def running(self) -> bool:
        """Whether the job runs now."""
        running = self._watcher.spool.layout.job_file(RUNNING, self.name)
        return not self.done() and os.path.lexists(running)

    def result(self, timeout: float | None = None) -> T:
        """Return what the call has returned; raise what it has raised, or a JobFailed.

        Raises TimeoutError if the job goes on for longer than *timeout* seconds, and CancelledError if it was cancelled
        before it began.
        """
        value: T = self._result_after(timeout).value()
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what `result` would raise, None if it would return a value. Raises as it for the time and a cancel."""
        error = super().exception(timeout)
        return error if error is not None else self._result_after(0).error()

    def _result_after(self, timeout: float | None) -> CallResult:
        found = super().result(timeout)
        assert isinstance(found, CallResult)  # set by the watcher alone
        return found

    def cancel(self) -> bool:
        """Cancel the call if it waits, and return whether it is cancelled. One that has begun goes on."""
        if not self.done():
            self._watcher.withdraw(self)
        return self.cancelled()

    def finish(self, result: CallResult | None, error: BaseException | None = None) -> None:
        """Set its end, for the watcher: without a *result* or an *error* instead of one it was cancelled as it waited.

        The user's thread and the watcher's may both find an end; the first counts.
        """
        with self._condition:
            if self._is_over:
                return
            self._is_over = True
        if result is None and error is None:
            super().cancel()
        if self.set_running_or_notify_cancel():
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(cast("T", result))  # `result` has the value


class Watcher:
    """The open calls of one executor, and the thread that sees how they go on."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self._requests = Requests(spool, this_user())
        self._open: dict[str, Future[Any]] = {}
        self._new: list[str] = []
        self._wakes = threading.Condition()
        self._thread: threading.Thread | None = None
        self._served = 0.0  # monotonic
        self._told: str | None = None  # why no dispatcher serves the spool
        self._unread: list[End] = []  # whose exception could not be read for the moment
        self._is_closed = False

    def close(self) -> None:
        """Let the thread end with the last call."""
        with self._wakes:
            self._is_closed = True
            self._wakes.notify()

    def watch(self, futures: Iterable[Future[Any]]) -> None:
        """Watch calls until they have ended."""
        with self._wakes:
            for future in futures:
                self._open[future.name] = future
                self._new.append(future.name)
            if self._thread is None:
                thread = threading.Thread(target=self._watch, name="spool futures", daemon=True)
                thread.start()
                self._thread = thread
            self._wakes.notify()

    @property
    def open(self) -> list[Future[Any]]:
        """The calls that have not ended."""
        with self._wakes:
            return list(self._open.values())

    def withdraw(self, future: Future[Any]) -> None:
        """Cancel a call if its job waits."""
        if self._requests.withdraw(future.name):
            self._finish(future, None)

    def withdraw_all(self, futures: Sequence[Future[Any]]) -> None:
        """Cancel every job of *futures* that waits, also those of an array that a dispatcher is just expanding."""
        until = time.monotonic() + _EXPANDING_S
        while waiting := [each for each in futures if not each.running() and not each.done()]:
            gone = {array for array in {each.array for each in waiting} - {""} if self._requests.withdraw(array)}
            for future in waiting:
                if future.array in gone:
                    self._finish(future, None)
                else:
                    future.cancel()
            if time.monotonic() >= until:
                return
            time.sleep(_POLL_S)

    def serve(self) -> None:
        """Start a dispatcher if there is none, also if the last one was killed; at most every few seconds."""
        now = time.monotonic()
        if now - self._served >= _SERVE_EVERY_S:
            self._served = now
            told = autostart.ensure(self.spool.root)
            if told is not None and told != self._told:
                log.warning(told)
            self._told = told

    def _watch(self) -> None:
        ends = Waiter(self.spool)
        while True:
            with self._wakes:
                while not self._open:
                    if self._is_closed:
                        self._thread = None
                        return
                    self._wakes.wait()
                new, self._new = self._new, []
            try:
                self._look(ends, new)
            except OSError as error:
                if error.errno in SHORTAGES:  # of descriptors or memory: it may pass
                    with self._wakes:
                        self._new[:0] = new
                    time.sleep(_SHORTAGE_S)
                    continue
                why = error.strerror or str(error)  # the spool is gone, or the disk: nothing more is known
                self._give_up(SpoolError(cannot("watch", "the calls", why, where=self.spool.root)))
            except Exception as error:  # without this thread, no call would ever end
                self._give_up(error)
            time.sleep(ends.pause_s)

    def _look(self, ends: Waiter, new: Sequence[str]) -> None:
        for name, error in ends.add(new).items():  # its files were removed
            self._end(End(name, State.LOST, reason=str(error)))
        ended, self._unread = [*self._unread, *ends.poll()], []
        for end in ended:
            try:
                self._end(end)
            except OSError:  # the next look tries again
                self._unread.append(end)
        self.serve()

    def _end(self, end: End) -> None:
        future = self._open.get(end.name)
        if future is None:
            return
        if end.outcome is State.CANCELLED and end.run is None:
            self._finish(future, None)
            return
        result = CallResult(self.spool, end.name, end)
        # A value is read when it is asked for, and may be large; an exception is what others wait for.
        self._finish(future, result, result.error() if end.outcome is not State.FINISHED else None)

    def _finish(self, future: Future[Any], result: CallResult | None, error: BaseException | None = None) -> None:
        """End a call, and watch it no more. It has its end by then, so that a wait for all open calls misses none."""
        future.finish(result, error)
        with self._wakes:
            self._open.pop(future.name, None)

    def _give_up(self, error: Exception) -> None:
        for future in self.open:
            self._finish(future, None, error)


class Executor(concurrent.futures.Executor):
    """An executor whose calls are jobs of a spool: each has its own process, CPUs, memory and GPUs, and a log.

    *keys* are those of a job file: `Executor(cpus=2, memory="4G", gpus=1, time_limit="1h")`. Each call runs in a fresh
    interpreter, in the present directory, with the modules, the variables and the Python of this process. Its job is
    seen and changed as any other. The jobs go on if this process ends before them.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        export: str | Sequence[str] | None = None,
        **keys: Unpack[CallKeys],
    ) -> None:
        """Use the spool at *root*, as `Client` does; it is made if it does not exist.

        Jobs are called `NAME-1`, `NAME-2` and so on; without *name* after their function. *export* has the words of
        `spool submit --export`; without it, a call gets what `spool submit` copies and what this program has set in
        `os.environ`, except possible secrets. The key `max_running` limits how many calls of one `map` run at once.
        Logs a warning if this machine can never run such a call. Raises SpoolUnusable, also for a spool that others can
        write to, InvalidJob, InvalidValue.
        """
        for key in keys:
            if (remedy := _ELSEWHERE.get(key)) is not None:
                raise InvalidValue(cannot("make", "an Executor", f"it has no {key}", remedy=remedy))
        if name is not None and (why_not := why_not_name(f"{name}-1")) is not None:
            raise InvalidValue(cannot("name", f"jobs {name!r}", why_not))
        path = os.path.abspath(root) if root is not None else default_root()
        ensure_spool(path)
        check_owner(path)
        calls.check_spool(path)
        self._spool = Spool.open(path)
        self._name = name
        self._export = (export,) if isinstance(export, str) else export
        self._number = 0
        self._keys = {key: dict(value) if isinstance(value, Mapping) else value for key, value in keys.items()}
        self._of_arrays = {key: self._keys.pop(key) for key in ("max_running",) if key in keys}
        self._watcher = Watcher(self._spool)
        self._lock = threading.Lock()
        self._closed = False
        self._disk = Disk(self._spool.layout.at(layout.STAGING))
        self._syncs = concurrent.futures.ThreadPoolExecutor(_SYNCING, thread_name_prefix="spool sync")
        self._said: set[str] = set()
        self._function = ("", "")  # the last large one: its hash, and the path of a call that has it
        for more in ({"array": "0"}, {}):
            spec = self._draft(first := f"{name}-1" if name is not None else "call", more).check(path)
        for _, why in doubts(path, [(first, spec)]):
            self._say(f"a call of this executor {why}")

    @property
    def root(self) -> str:
        """The directory of the spool."""
        return self._spool.root

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Make a job of the call `fn(*args, **kwargs)` and return its future. The job is in the spool on return.

        Raises SpoolError if the function or an argument cannot be pickled, and OSError.
        """
        rendered = calls.render(fn, [(args, kwargs)])
        with self._lock:
            name = self._submitted(fn, rendered, {})
            future: Future[T] = Future(self._watcher, name)
            self._watcher.watch((future,))
        return future

    def submit_all(
        self,
        fn: Callable[..., T],
        /,
        *iterables: Iterable[Any],
        chunksize: int = 1,
        parameters: Iterable[Mapping[str, object]] | None = None,
    ) -> list[Future[Any]]:
        """Make one array of the calls of *fn* with the arguments in *iterables*; return the future of each task.

        A task makes *chunksize* calls, and its result is a list then.
        *parameters* has a mapping for each task, all with the same keys: what lists show of it, and what replaces
        `{key}` in the executor's `env` and paths. Raises InvalidJob if they make no valid job file.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        parts: list[Any] = [(row, {}) for row in zip(*iterables, strict=False)]
        if chunksize > 1:
            parts = [parts[at : at + chunksize] for at in range(0, len(parts), chunksize)]
        if not parts:
            self._check_open()
            return []
        if len(parts) > _MOST_TASKS:
            why = f"{len(parts):,} tasks are more than the {_MOST_TASKS:,} of an array"
            raise InvalidValue(cannot("submit", f"calls of {calls.name_of(fn)}", why, remedy="set chunksize"))
        tasks: dict[str, object] = {"array": f"0-{len(parts) - 1}"}
        if parameters is not None:
            shown = [{key: plain(value) for key, value in each.items()} for each in parameters]
            if len(shown) != len(parts):
                raise ValueError(f"{len(parts)} tasks need as many parameters, not {len(shown)}.")
            tasks = {"rows": shown}
        rendered = calls.render(fn, parts, is_list=chunksize > 1)
        with self._lock:
            array = self._submitted(fn, rendered, tasks)
            futures: list[Future[Any]] = [Future(self._watcher, f"{array}_{at}", array) for at in range(len(parts))]
            self._watcher.watch(futures)
        return futures

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """Return the results of `fn` over *iterables*, in order; all calls are one array, submitted at once.

        Raises what a call raises, when its result is due, and TimeoutError if that is not there *timeout* seconds after
        `map` was called. Then, and when its iterator is closed before the last, the calls that wait are cancelled. A
        task makes *chunksize* calls, which saves processes.
        """
        until = None if timeout is None else time.monotonic() + timeout
        futures = self.submit_all(fn, *iterables, chunksize=chunksize)
        return _in_order(self._watcher, futures, until, is_list=chunksize > 1)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. *wait*: until every call has ended. *cancel_futures*: cancel those that wait."""
        with self._lock:
            self._closed = True
        if cancel_futures:
            self._watcher.withdraw_all(self._watcher.open)
        if wait:
            concurrent.futures.wait(self._watcher.open)
        self._watcher.close()
        self._syncs.shutdown(wait=wait)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _say(self, text: str) -> None:
        """Log a warning, once."""
        if text not in self._said:
            self._said.add(text)
            log.warning(text)

    def _submitted(self, fn: Callable[..., Any], rendered: tuple[bytes, bytes], more: Mapping[str, object]) -> str:
        """Put a call and its job into the spool, under a name that is free; return the name."""
        self._check_open()
        root, (text, function) = self._spool.root, rendered
        digest = sha256(function).hexdigest() if function else ""
        like = self._function[1] if self._function[0] == digest else ""
        while True:
            name = self._next_name(fn)
            draft = self._draft(name, more)
            if "rows" in more:
                draft.check(root)
            try:
                call = calls.publish(root, name, text, function, like)
            except FileExistsError:  # another process was faster
                continue
            place = self._spool.layout.job_file(QUEUED, name)
            try:
                self._disk.publish(place, draft.text())
            except BaseException as error:
                for path in (call, call + layout.FUNCTION):
                    self._disk.discard(path)
                if isinstance(error, FileExistsError):
                    continue
                raise
            if function:
                self._function = digest, call
            self._syncs.submit(self._sync, call, place)
            self._watcher.serve()
            return name

    def _next_name(self, fn: Callable[..., Any]) -> str:
        root = self._spool.root
        while True:
            if self._name is None:
                name = fresh_name(root, stem_of([calls.name_of(fn).rpartition(".")[2]]))
            else:
                self._number += 1
                name = f"{self._name}-{self._number}"
            if not ever_used(root, name):
                return name

    def _draft(self, name: str, more: Mapping[str, object]) -> Draft:
        keys = {**self._keys, **more, **(self._of_arrays if more else {})}
        known = placeholders(keys)
        command = [
            escaped(word, known) for word in (sys.executable, "-u", "-P", "-m", "spool.extras.functions.calls", name)
        ]
        exported = exports(self._spool.root, self._export or ())
        if self._export is None:
            own = _set_by_this_program()
            exported.take({name for name in own if not may_be_secret(name, os.environ[name])}, os.environ)
            secrets = {name for name in own - exported.taken.keys() if may_be_secret(name, os.environ[name])}
            exported.remarks += [f"{name} is not passed on: it may be a secret; export names it" for name in secrets]
        for why in exported.remarks:
            self._say(why)
        made = job_keys(command, keys, exported)
        if isinstance(env := made.get("env"), dict) and isinstance(path := env.get("PYTHONPATH"), str):
            env["PYTHONPATH"] = ":".join(filter(None, path.split(":")))  # an empty entry is the current directory
        return Draft(name, made)

    def _sync(self, call: str, job: str) -> None:
        """Bring a call and its job to the disk: what a power cut spares goes on."""
        for path in (call, call + layout.FUNCTION, job):
            try:
                self._disk.sync_file(path)
            except FileNotFoundError:  # it runs already
                continue
        self._disk.sync_directories(map(os.path.dirname, (call, job)))


@cache
def _begun_with() -> dict[str, str] | None:
    """Return the environment that this program was started with, None if that cannot be told."""
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
    except OSError:
        return None
    # A program that shows a title of its own has overwritten it.
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs} if all(each[1] for each in pairs) else None


def _set_by_this_program() -> set[str]:
    """Return the variables that this program has set or changed since it was started."""
    before = _begun_with()
    return {key for key, value in os.environ.items() if may_go(key) and before.get(key) != value} if before else set()


def _in_order(watcher: Watcher, futures: list[Future[Any]], until: float | None, *, is_list: bool) -> Iterator[Any]:
    """Yield the results of calls in order, and keep none; cancel the calls that wait if that is not gone on with."""
    waiting = futures[::-1]
    del futures
    try:
        while waiting:
            left = None if until is None else max(until - time.monotonic(), 0)
            result = waiting[-1].result(left)
            waiting.pop()
            values = result[::-1] if is_list else [result]
            del result
            while values:
                yield values.pop()
    finally:
        watcher.withdraw_all(waiting)
