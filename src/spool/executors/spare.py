"""A shell that is up and waits to be told which wrapper to be.

To come up takes a shell about as long as all that a wrapper does before its command, so the next job's is started
while there is nothing else to do. It has no mark of any run until it becomes one's wrapper.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Mapping

from spool.formats.wrapper import TOLD
from spool.machine import identity

# The wrapper is read into this shell, and finds who it is as the next line (FORMAT 5).
_BECOME = 'IFS= read -r spool_script && . "$spool_script"'
_LONGEST = select.PIPE_BUF

Spawn = Callable[[list[str], int, Mapping[str, str]], int]
"""Start a shell with these arguments, this descriptor as its stdin and this environment; return its pid."""


class Spare:
    """One waiting shell, a child of this process. It leaves when this process does."""

    def __init__(self, spawn: Spawn, environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError."""
        theirs, self._pipe = os.pipe2(os.O_CLOEXEC)
        try:
            self.pid = spawn(["-c", _BECOME, "sh", TOLD], theirs, environment)
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(theirs)
        self._ticks = identity.start_ticks(self.pid)

    def become(self, script: str) -> bool:
        """Have it be the wrapper *script*. False: it is gone, or cannot be told; nothing was started."""
        word = os.fsencode(f"{script}\n{self.pid} {self._ticks or ''}\n")
        if "\n" in script or len(word) > _LONGEST:
            self.dismiss()
            return False
        try:
            os.write(self._pipe, word)
        except BrokenPipeError:
            return False
        finally:
            os.close(self._pipe)
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
        os.close(self._pipe)
