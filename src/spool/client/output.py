"""The output of a job, and of the tasks of an array: finding and reading it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum

from msgspec import Struct

from spool.core import layout
from spool.core.errors import NoSuchJob, SpoolError, cannot
from spool.core.runtimes import Progress
from spool.formats.wire import metrics_in, one_line
from spool.formats.wrapper import Outputs, outputs_of
from spool.store.arrays import task_names
from spool.store.reading import end_of_file
from spool.store.spool import Spool

_MOST_LINES = 10  # of a failed run, which are shown with its end
_BLOCK = 1 << 16
_LOOKED_AT = 1 << 14  # bytes at the end of a file in which last lines are looked for
_FARTHEST = 1 << 26  # how far back to look for the last lines: data without line breaks is not text


class Stream(Enum):
    """Standard output or standard error."""

    OUT = "stdout"
    ERR = "stderr"


class OutputPiece(Struct, frozen=True):
    """Some output of a run of a job, of an array's tasks too. Empty when a run's output begins."""

    job: str
    run: int
    stream: Stream
    data: bytes


class Tail:
    """A growing file that may be truncated, replaced, or not there yet."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd: int | None = None
        self._at = 0

    def skip_to_last(self, lines: int) -> None:
        """Skip all but the last *lines* lines of the present content, and everything farther back than `_FARTHEST`."""
        if not self._opened():
            return
        assert self._fd is not None
        end = os.fstat(self._fd).st_size
        at, wanted = end, lines + 1
        if lines == 0:
            self._at = end
            return
        least = max(0, end - _FARTHEST)
        while at > least and wanted > 0:
            start = max(least, at - _BLOCK)
            block = os.pread(self._fd, at - start, start)
            if at == end and not block.endswith(b"\n"):
                wanted -= 1  # the last line is incomplete
            cut = len(block)
            while wanted > 0 and (cut := block.rfind(b"\n", 0, cut)) >= 0:
                wanted -= 1
            at = start + cut + 1 if cut >= 0 else start
        self._at = at

    def read(self) -> bytes:
        """Return new output, possibly not all of it; empty if there is none."""
        if not self._opened():
            return b""
        assert self._fd is not None
        data = os.pread(self._fd, _BLOCK, self._at)
        if data:
            self._at += len(data)
            return data
        if os.fstat(self._fd).st_size < self._at:
            self._at = 0  # it was truncated: start over
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
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):  # a pipe or a device: it keeps nothing, and may never end
                self.close()
                return False
        return True

    def _replaced(self) -> bool:
        """Whether the name belongs to another file now. A file that was only removed is read to its end."""
        assert self._fd is not None
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            return False


def last_lines(path: str | None) -> tuple[str, ...]:
    """Return the last lines of an output file, of its last `_LOOKED_AT` bytes; () if there is no such file.

    A line that was redrawn, as a progress bar is, counts as it was drawn last.
    """
    data = b""
    with suppress(OSError):
        data = end_of_file(path, _LOOKED_AT, follow=True) if path is not None else b""
    lines = data.decode("utf-8", "replace").replace("\r\n", "\n").rstrip().split("\n")
    return tuple(line.rstrip("\r").rpartition("\r")[2] for line in lines[-_MOST_LINES:]) if data.strip() else ()


def last_words_of(spool: Spool, name: str, run: int) -> tuple[str, ...]:
    """Return the last lines that a run wrote: to its error output if that is separate, and not empty, or to its log."""
    where = outputs(spool, name, run)
    return last_lines(where.stderr) or last_lines(where.stdout)


def outputs(spool: Spool, name: str, run: int) -> Outputs:
    """Return the output files of a run; stdout is always a path."""
    script = spool.record(name, run, layout.WRAPPER)
    log = spool.layout.record(name, run, layout.JOB_LOG)
    found = (outputs_of(script, spool.layout.metadir(name, run)) if script else None) or Outputs(log, None)
    return Outputs(found.stdout or log, found.stderr)


def run_of(spool: Spool, name: str, run: int | None = None, *, verb: str = "show the output of") -> int:
    """Return the selected run: *run*, or the newest. Raises NoSuchJob, SpoolError before the first.

    *verb* says in errors what is wanted of it.
    """
    runs = spool.runs(name)
    if run is not None:
        if run not in runs:
            has = f"its runs are {', '.join(map(str, runs))}" if runs else "it has not run yet"
            raise NoSuchJob(cannot(verb, f"run {run} of job {name}", has))
        return run
    newest = spool.latest_run(name)
    if newest is None:
        if not spool.places(name):
            raise spool.no_such_job(verb, f"job {name}", name)
        raise SpoolError(cannot(verb, f"job {name}", "it has not run yet", remedy=f"`spool why {name}` says why"))
    return newest


def output_paths(spool: Spool, name: str, run: int, stream: Stream) -> Iterator[str]:
    """Yield the output file of a run, or those of the tasks of an array."""
    if spool.array(name, run) is None:
        yield _path_of(spool, name, run, stream)
        return
    array = ArrayOutput(spool, name, run)
    for task in array.tasks:
        if (its_run := array.run_of(task)) is not None:
            yield _path_of(spool, task, its_run, stream)


def _path_of(spool: Spool, name: str, run: int, stream: Stream) -> str:
    where = outputs(spool, name, run)
    path = where.stderr if stream is Stream.ERR else where.stdout
    if path is None:
        raise SpoolError(cannot("show", f"the error output of job {name}", "it goes to the same file as the output"))
    return path


def read_output(
    spool: Spool, name: str, run: int, stream: Stream = Stream.OUT, *, lines: int | None = None
) -> Iterator[bytes]:
    """Yield the output of a run so far; for an array that of each task, under its name. *lines*: only the last ones.

    Raises SpoolError if an ended run has left no such file.
    """
    if spool.array(name, run) is not None:
        array = ArrayOutput(spool, name, run, lines=lines)
        for task in array.tasks:
            yield from (piece.data for piece in array.of(task) if piece.stream is stream)
        return
    path = _path_of(spool, name, run, stream)
    if not os.path.exists(path) and spool.result(name, run) is not None:
        raise SpoolError(cannot("show", f"the output of job {name}", f"run {run} has left no such file", where=path))
    yield from _so_far(path, lines)


def _so_far(path: str, lines: int | None) -> Iterator[bytes]:
    """Yield the present content of a file, or its last *lines* lines."""
    tail = Tail(path)
    if lines is not None:
        tail.skip_to_last(lines)
    while data := tail.read():
        yield data
    tail.close()


class ArrayOutput:
    """The outputs of the tasks of one expanded array: the newest run of each in full, under its name.

    *lines*: only the last lines of each. *apart*: each piece is of its task, instead of a line with its name.
    """

    def __init__(self, spool: Spool, name: str, run: int, *, lines: int | None = None, apart: bool = False) -> None:
        self._spool = spool
        self._name = name
        self._lines = lines
        self._apart = apart
        record = spool.array(name, run)
        self._since_ns = (record.expanded_at_ns if record is not None else None) or 0
        self.tasks: tuple[str, ...] = task_names(spool, name, run, record)

    def run_of(self, task: str) -> int | None:
        """Return the newest run of a task; None if it has not begun."""
        run = self._spool.latest_run(task)
        result = self._spool.result(task, run) if run is not None else None
        return None if result is not None and (result.ended_at_ns or 0) < self._since_ns else run

    def of(self, task: str) -> Iterator[OutputPiece]:
        """Yield the whole output of a task after a line with its name; nothing if it has none, or has not begun.

        A last line without an end gets one, because the next name follows.
        """
        if (run := self.run_of(task)) is None:
            return
        where = outputs(self._spool, task, run)
        for stream, path in ((Stream.OUT, where.stdout), (Stream.ERR, where.stderr)):
            if path is None:
                continue
            name, head, data = (task, b"", b"\n") if self._apart else (self._name, f"==> {task} <==\n".encode(), b"\n")
            for data in _so_far(path, self._lines):
                yield OutputPiece(name, run, stream, head + data)
                head = b""
            if not data.endswith(b"\n"):
                yield OutputPiece(name, run, stream, b"\n")


_TAIL = 8192  # bytes at the end of an output to search
_MOST = 24  # characters of a text
# As tqdm draws it: " 37%|###7      | 37/100"; "-5%|" is none.
_BAR = re.compile(rb"(?<![\d.,])(?<!(?<![A-Za-z])-)(100|\d{1,2})(?:[.,]\d+)? ?%\|")


def progress_of(spool: Spool, name: str, run: int) -> Progress:
    """Return the progress of a run. A text that the run has written takes precedence over a bar."""
    word, path = (
        one_line(spool.record(name, run, layout.PROGRESS) or b""),
        spool.layout.record(name, run, layout.PROGRESS),
    )
    if not word:
        where, metadir = outputs(spool, name, run), spool.layout.metadir(name, run)
        bars = ((path, _BAR.findall(_tail(path, metadir))) for path in (where.stderr, where.stdout) if path)
        word, path = next(((f"{found[-1].decode()}%", path) for path, found in bars if found), ("", ""))
    word = word if len(word) <= _MOST else f"{word[: _MOST - 1]}…"
    with suppress(OSError):
        return Progress(word, os.stat(path).st_mtime_ns)
    return Progress(word)


def metrics_of(spool: Spool, name: str, run: int) -> tuple[tuple[str, str], ...]:
    """Return the metrics that a run has written, the last value of each, in the order of their keys' first lines.

    Only the last few KiB of the file count.
    """
    return metrics_in(spool.record_end(name, run, layout.METRICS))


def last_line_of(spool: Spool, name: str, run: int) -> str:
    """Return the last line of a run's output that is not blank, as it is in a terminal after carriage returns."""
    where, metadir = outputs(spool, name, run), spool.layout.metadir(name, run)
    text = _tail(where.stdout, metadir) if where.stdout is not None else b""
    lines = text.decode("utf-8", "replace").replace("\r", "\n").splitlines()
    return next((found for line in reversed(lines) if (found := one_line(line))), "")


def _tail(path: str, metadir: str) -> bytes:
    """Return the end of a run's output; b"" for a file that was last written before the run began."""
    with suppress(OSError):
        if path.startswith(f"{metadir}/") or (
            os.stat(path).st_mtime_ns >= os.stat(f"{metadir}/{layout.WRAPPER}").st_mtime_ns
        ):
            return end_of_file(path, _TAIL, follow=True)
    return b""
