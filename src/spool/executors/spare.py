"""A shell that is up and waits to be told which wrapper to be.

To come up takes a shell about as long as all that a wrapper does before its command, so the next job's is started
while there is nothing else to do. Where that job is known already the shell reads the wrapper's text as well, and
waits where the wrapper would find out who it is. It has no mark of any run until it becomes one's wrapper.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Mapping

from spool.formats.wrapper import READY, TEXT_FD
from spool.machine import identity

# The text is in a file without a name: that of the run is nowhere yet when this may be read. (Not all have /dev/fd.)
_BECOME = f"read -r spool_told && . /proc/self/fd/{TEXT_FD}"

Spawn = Callable[[list[str], Mapping[int, int], Mapping[str, str]], int]
"""Start a shell with these arguments, descriptors (the shell's number: ours) and environment; return its pid."""


class Spare:
    """One waiting shell, a child of this process. It leaves when this process does."""

    def __init__(self, spawn: Spawn, environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError."""
        self._text: bytes | None = None  # what it has read
        theirs, self._pipe = os.pipe2(os.O_CLOEXEC)
        self._file = -1
        try:
            self._file = os.memfd_create("wrapper")
            self.pid = spawn(["-c", _BECOME, "sh", READY], {0: theirs, TEXT_FD: self._file}, environment)
        except OSError:
            self._close()
            raise
        finally:
            os.close(theirs)
        self._ticks: int | None = None  # it looks for itself then
        with contextlib.suppress(OSError):
            self._ticks = identity.start_ticks(self.pid)

    def reads(self, text: bytes | None) -> bool:
        """Have it read the wrapper *text*, unless it has read one; return whether it has read that, and no other."""
        if self._text is None and text is not None and self._write(text) and self._tell("\n"):
            self._text = text
        return self._text == text

    def become(self, text: bytes) -> bool:
        """Have it be the wrapper *text*. False: it is gone, or has read another; nothing was started."""
        if not self.reads(text) or not self._tell(f"{self.pid} {self._ticks or ''}\n"):
            self.dismiss()
            return False
        self._close()
        os.sched_yield()  # a pipe wakes its reader on this processor, though another may be idle
        return True

    def _write(self, text: bytes) -> bool:
        try:
            os.ftruncate(self._file, 0)
            return os.pwrite(self._file, text, 0) == len(text)
        except OSError:  # no memory for it
            return False

    def _tell(self, line: str) -> bool:
        try:
            os.write(self._pipe, line.encode())
        except BrokenPipeError:
            return False
        return True

    @property
    def gone(self) -> bool:
        """Whether somebody has ended it; its pid may be another's by now."""
        other_end = select.poll()
        other_end.register(self._pipe, 0)  # an error is reported all the same: nobody holds it
        return bool(other_end.poll(0))

    def dismiss(self) -> None:
        """End it."""
        if not self.gone:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        self._close()

    def _close(self) -> None:
        os.close(self._pipe)
        if self._file >= 0:
            os.close(self._file)
