"""The outputs of a run: where they are, and reading a file that grows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

from spool.core import layout
from spool.formats.outputs import Outputs, outputs_of
from spool.store.spool import Spool

_BLOCK = 1 << 16


class Stream(Enum):
    """Which of the two outputs."""

    OUT = "stdout"
    ERR = "stderr"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some output of a run. Empty at the beginning of one that is looked at from now on."""

    run: int
    stream: Stream
    data: bytes


class Tail:
    """One file that grows; and that may be cut short, replaced, or not there yet."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd: int | None = None
        self._at = 0

    def skip_to_last(self, lines: int) -> None:
        """Pass over all but the last *lines* lines of what is there now."""
        if not self._opened():
            return
        assert self._fd is not None
        end = os.fstat(self._fd).st_size
        at, wanted = end, lines + 1
        if lines == 0:
            self._at = end
            return
        while at > 0 and wanted > 0:
            start = max(0, at - _BLOCK)
            block = os.pread(self._fd, at - start, start)
            if at == end and not block.endswith(b"\n"):
                wanted -= 1  # the last line has no end yet
            cut = len(block)
            while wanted > 0 and (cut := block.rfind(b"\n", 0, cut)) >= 0:
                wanted -= 1
            at = start + cut + 1 if cut >= 0 else start
        self._at = at

    def read(self) -> bytes:
        """Return what is new, at most some of it; empty if nothing is."""
        if not self._opened():
            return b""
        assert self._fd is not None
        data = os.pread(self._fd, _BLOCK, self._at)
        if data:
            self._at += len(data)
            return data
        if os.fstat(self._fd).st_size < self._at:
            self._at = 0  # it was cut short, and begins anew
            return self.read()
        if self._replaced():
            self.close()
            self._at = 0
            return self.read()
        return b""

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _opened(self) -> bool:
        if self._fd is None:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:
                return False
        return True

    def _replaced(self) -> bool:
        """Whether another file has the name now. One that was only removed is read to its end."""
        assert self._fd is not None
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            return False


def outputs(spool: Spool, name: str, run: int) -> Outputs:
    """Return where a run's output goes; stdout is always a path."""
    script = spool.record(name, run, layout.WRAPPER)
    found = outputs_of(script, spool.layout.metadir(name, run)) if script else None
    log = spool.layout.record(name, run, layout.JOB_LOG)
    if found is None:
        return Outputs(log, None)
    return Outputs(found.stdout or log, found.stderr)
