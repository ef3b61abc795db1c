"""Following the output of a job: of one run, or of all its runs until it has ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from spool.core import layout
from spool.formats.outputs import Outputs, outputs_of
from spool.store.awaiting import Awaited, End
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
    found = outputs_of(script) if script else None
    log = spool.layout.record(name, run, layout.JOB_LOG)
    if found is None:
        return Outputs(log, None)
    return Outputs(found.stdout or log, found.stderr)


class Follower:
    """Reads the output of a job from a run on. `end` says how the job ended once that is known."""

    def __init__(
        self,
        spool: Spool,
        name: str,
        *,
        run: int | None = None,
        only: bool = False,
        after: int | None = None,
        lines: int | None = None,
    ) -> None:
        self._spool = spool
        self._name = name
        self._awaited = Awaited(spool, name)
        self._only = only  # that run, and none that may follow
        self._after = after or 0  # only runs later than this one
        self._lines = lines
        self._run: int | None = None
        self._tails: dict[Stream, Tail] = {}
        self.end: End | None = None
        if run is not None:
            self._begin(run)

    def pieces(self) -> Iterator[Piece | None]:
        """Yield what there is, and None where nothing is new: time to wait a little. Ends with the job, or the run."""
        if self._run is not None:
            yield Piece(self._run, Stream.OUT, b"")
        while True:
            self.end = self._awaited.look()
            newest = self._spool.latest_run(self._name)
            if newest is not None and newest <= self._after:
                newest = None
            if self._run is None and newest is not None:
                first = min(run for run in self._spool.runs(self._name) if run > self._after)
                self._begin(first)
                yield Piece(first, Stream.OUT, b"")
            over = self.end is not None or self._run_is_over(newest)
            yield from self._drained()
            if over and self._run is not None and newest is not None and newest > self._run and not self._only:
                self._begin(min(run for run in self._spool.runs(self._name) if run > self._run))
                yield Piece(self._run, Stream.OUT, b"")
                continue
            if self.end is not None or (over and self._only):
                return
            yield None

    def _run_is_over(self, newest: int | None) -> bool:
        if self._run is None:
            return False
        return (newest is not None and newest > self._run) or (
            self._spool.record(self._name, self._run, layout.RESULT) is not None
        )

    def _begin(self, run: int) -> None:
        where = outputs(self._spool, self._name, run)
        paths = {Stream.OUT: where.stdout, Stream.ERR: where.stderr}
        for stream, path in paths.items():
            tail = self._tails.get(stream)
            if tail is not None and tail.path == path:
                continue  # appended to by run after run: go on where we are
            if tail is not None:
                self._tails.pop(stream).close()
            if path is not None:
                self._tails[stream] = Tail(path)
                if self._lines is not None and self._run is None:
                    self._tails[stream].skip_to_last(self._lines)
        self._run = run

    def _drained(self) -> Iterator[Piece]:
        assert self._run is not None or not self._tails
        for stream, tail in self._tails.items():
            while data := tail.read():
                yield Piece(self._run or 0, stream, data)

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails.values():
            tail.close()
