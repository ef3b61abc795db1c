"""The result of a job that made a call: its value, the exception that the call raised, or why there is neither."""

# ruff: noqa: N818  (like the errors of core/errors.py)

from __future__ import annotations

import itertools
import pickle
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any

from spool.client.output import read_output
from spool.client.waiting import End, task_names
from spool.core.errors import SpoolError, cannot
from spool.core.model import State
from spool.extras.functions import calls
from spool.store.spool import Spool

_MOST_LINES = 10


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

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        """Return the traceback, below the words that Python prints before a cause."""
        return f"\n{self.text}"


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
        self._value: Any = None
        self._error: BaseException | None = None
        self._is_read = False

    def error(self) -> BaseException | None:
        """Return the exception of the call, or why there is no value; None if there is one. Raises OSError."""
        if not self._is_read:
            try:
                self._value, self._error = self._read()
            except SpoolError as error:
                self._error = error
            self._is_read = True
        return self._error

    def value(self) -> Any:
        """Return the value. Raises what `error` returns or raises."""
        error = self.error()
        if error is not None:
            raise error
        return self._value

    def _read(self) -> tuple[Any, BaseException | None]:
        end, name = self._end, self._name
        found = calls.read_return(self._spool.root, name, end.run) if end.run is not None else None
        if found is None and end.outcome is State.FINISHED:
            why = "it calls no Python function, or its run was removed"
            raise SpoolError(cannot("read", f"the result of job {name}", why))
        if found is None:
            return None, self._noted(_FAILURES.get(end.outcome, JobFailed)(name, end))
        payload, told, differs = found
        if told is None:
            return _loaded(payload, name), None
        error: BaseException | None = None
        if payload:
            with suppress(Exception):  # its class is not here, or is another one
                error = _loaded(payload, name)
        if not isinstance(error, BaseException):
            error = RemoteError(told["type"], told["text"])
        error.__cause__ = RemoteTraceback(told["traceback"])
        if differs:
            error.add_note(f"job {name} had packages of other versions: {', '.join(differs)}")
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
