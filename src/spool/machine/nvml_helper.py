"""The asker's end of the NVML helper: one question at a time, and an end to waiting for an answer."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from spool.machine.nvml import IDLE_SECONDS, Sample

_MOMENT_SECONDS = 0.1  # for a process that is dead to be gone


class NvmlHelper:
    """A child process that asks NVML. It is started by the first question, and again when it is gone.

    Nothing here waits for longer than it is told to, whatever the driver does. At most one helper exists at a time:
    one that was killed inside a driver that hangs goes when the driver lets it, and until then no other is started.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, idle_seconds: float = IDLE_SECONDS) -> None:
        """Start nothing yet. *environment* is the helper's; None is this process's own."""
        self._environment = environment
        self._idle_seconds = idle_seconds
        self._ready = select.epoll()
        self._process: subprocess.Popen[bytes] | None = None
        self._dying: subprocess.Popen[bytes] | None = None
        self._answer = 0  # the descriptor that the living helper writes to
        self._text = b""
        self._again = False  # whether the open question may be asked a second time
        self.asking = False

    @property
    def pid(self) -> int | None:
        """The helper's pid, or None while there is none."""
        return None if self._process is None else self._process.pid

    def fileno(self) -> int:
        """Return a descriptor that can be polled, the same for life: readable when an answer can be received."""
        return self._ready.fileno()

    def ask(self) -> str | None:
        """Ask, unless a question is open already. Return why it cannot be asked now, or None."""
        if self.asking:
            return None
        self._again = True
        return self._ask()

    def receive(self, wait_ns: int) -> Sample | None:
        """Return the answer to the open question, or None if there is none after *wait_ns*."""
        deadline_ns = time.monotonic_ns() + wait_ns
        while self.asking:
            if not self._ready.poll(max(0, deadline_ns - time.monotonic_ns()) / 1e9):
                return None
            chunk = os.read(self._answer, 1 << 20)
            self._text += chunk
            if not chunk:
                trouble = self._gone()
            elif not self._text.endswith(b"\n"):
                continue
            else:
                return self._read(self._text)
            if trouble is not None:
                return Sample(failure=trouble)
        return None

    def stop(self) -> None:
        """End the helper and forget the question."""
        process = self._forget()
        if process is not None:
            process.kill()
            if process.poll() is None:
                self._dying = process

    def close(self) -> None:
        """End the helper for good."""
        self.stop()
        if self._dying is not None:
            _code(self._dying)
        self._ready.close()

    def _ask(self) -> str | None:
        if self._process is not None and self._process.poll() is not None:
            self._forget()  # it left because nobody asked
        if self._process is None:
            if self._dying is not None and _code(self._dying) is None:
                return "the process that asks NVML hangs in the driver and cannot be ended"
            self._dying = None
            try:
                self._start()
            except OSError as error:
                return f"cannot start the process that asks NVML: {error.strerror}"
        assert self._process is not None and self._process.stdin is not None  # noqa: PT018 - for the type
        with suppress(BrokenPipeError):  # it left this moment: the end of its answers will say so
            self._process.stdin.write(b"\n")
        self._ready.register(self._answer, select.EPOLLIN)
        self.asking = True
        return None

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spool.machine.nvml", str(self._idle_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # A session of its own: Ctrl-C at the dispatcher's terminal is not meant for it. It inherits no lock.
            start_new_session=True,
            close_fds=True,
            cwd="/",
            env={
                **(os.environ if self._environment is None else self._environment),
                # It must find what this process has found, however that came about.
                "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
            },
        )
        assert self._process.stdout is not None
        self._answer = self._process.stdout.fileno()

    def _read(self, text: bytes) -> Sample:
        try:
            sample = Sample.from_json(text.decode())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            sample = Sample(failure=f"the process that asks NVML answered what cannot be read: {error}", leaving=True)
        if sample.leaving:
            self.stop()
        else:
            self._done()
        return sample

    def _gone(self) -> str | None:
        """Return why there will be no answer, or None if the question was asked again."""
        process = self._forget()
        code = None if process is None else _code(process)
        if process is not None and code is None:
            self._dying = process
        if code == 0 and self._again:  # it was just leaving because nobody had asked
            self._again = False
            return self._ask()
        return f"the process that asks NVML ended, {'signal' if (code or 0) < 0 else 'code'} {abs(code or 0)}"

    def _done(self) -> None:
        if self.asking:
            self._ready.unregister(self._answer)
        self.asking = False
        self._text = b""

    def _forget(self) -> subprocess.Popen[bytes] | None:
        """Close all ways to the helper, and return it."""
        self._done()
        process, self._process = self._process, None
        for pipe in () if process is None else (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return process


def _code(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code, negative for a signal; None if it still lives after a moment."""
    try:
        return process.wait(_MOMENT_SECONDS)
    except subprocess.TimeoutExpired:
        return None
