"""Reading the history from its oldest line on: `history.jsonl`, and the rotated files beside it.

The lines are in the order of writing (`told_at_ns`). A run may have ended long before, while no dispatcher was running,
but never after. So runs that ended since some moment are in lines written since then.
"""

from __future__ import annotations

import gzip
import os
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase, BytesIO

from spool.core import layout
from spool.core.accounting import By, Day, Ledger, RunFilter, Statistics
from spool.core.model import SECOND_NS, Result
from spool.formats.run_records import read_ended_runs, read_told

_SLACK_NS = 3600 * SECOND_NS  # tolerance in the order of lines, for a clock that was set
_STEP = 1 << 20
_PART = 1 << 16  # stays in the processor's cache until it is counted
_GLANCE = 1 << 14  # several lines
_PACKED = ".gz"


class History:
    """The ended runs of a spool, one by one, with few of them in memory.

    Rotated files are `history.jsonl.*` and `history.jsonl-*`, as logrotate calls them, gzipped or not. They are read in
    the order of their first lines.
    """

    def __init__(self, root: str) -> None:
        self._current = f"{root}/{layout.HISTORY}"
        self.unreadable = 0  # lines so far that could not be parsed
        self.problems: list[str] = []  # files so far that could not be read completely

    def sums(self, wanted: RunFilter, by: By | None) -> Statistics:
        """Return the sums over the runs that *wanted* selects; days are those of this machine's clock."""
        ledger = Ledger(wanted, by, local_day)
        ledger.add(self.since(wanted.since_at_ns))
        return ledger.statistics()

    def since(self, since_ns: int | None) -> Iterator[Result]:
        """Yield the runs that ended from *since_ns* on, and some before, in recorded order. Reads no older part."""
        files = [*self._rotated(), self._current]
        firsts = [self._first_told(path) for path in files]
        order = sorted(range(len(files)), key=lambda at: (at == len(files) - 1, firsts[at] or 0))
        for place, at in enumerate(order):
            later = order[place + 1 :]
            follows = firsts[later[0]] if later else None
            if since_ns is not None and follows is not None and follows < since_ns - _SLACK_NS:
                continue  # the next file is older: this whole file is older than asked for
            yield from self._read(files[at], since_ns)

    def _rotated(self) -> list[str]:
        folder, name = os.path.split(self._current)
        try:
            listed = os.listdir(folder)
        except FileNotFoundError:
            return []
        return sorted(f"{folder}/{file}" for file in listed if file.startswith((f"{name}.", f"{name}-")))

    def _read(self, path: str, since_ns: int | None) -> Iterator[Result]:
        try:
            with _opened(path) as file:
                if since_ns is not None and not path.endswith(_PACKED):
                    file.seek(_place_of(file.fileno(), since_ns - _SLACK_NS))
                for text in _texts(file):
                    runs, unreadable = read_ended_runs(text)
                    self.unreadable += unreadable
                    yield from runs
        except FileNotFoundError:
            return
        except (OSError, EOFError, zlib.error) as error:
            self.problems.append(f"cannot read all of {path}: {getattr(error, 'strerror', None) or error}")

    def _first_told(self, path: str) -> int | None:
        """Return when the first line of a file was written."""
        try:
            with _opened(path) as file:
                for _, line in zip(range(100), file, strict=False):
                    told = read_told(line)
                    if told is not None:
                        return told
        except (OSError, EOFError, zlib.error):
            pass
        return None


def _texts(file: BufferedIOBase) -> Iterator[bytes]:
    """Yield the text of a file in chunks of whole lines; the last may lack its newline."""
    pieces: list[bytes] = []
    while text := file.read1(_PART):
        cut = text.rfind(b"\n") + 1
        if cut:
            yield b"".join((*pieces, text[:cut]))
            pieces.clear()
        pieces.append(text[cut:])
    if any(pieces):
        yield b"".join(pieces)


@contextmanager
def _opened(path: str) -> Iterator[BufferedIOBase]:
    """Open a regular file, unpacked; anything else, a FIFO or a directory, is like an empty one. Never blocks."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        yield BytesIO()
        return
    with os.fdopen(fd, "rb") as file:
        yield gzip.GzipFile(fileobj=file, mode="rb") if path.endswith(_PACKED) else file


def _place_of(fd: int, since_ns: int) -> int:
    """Return the start of a line (or 0) such that all lines before it were written before *since_ns*."""
    place = os.fstat(fd).st_size
    while place > 0:
        place = max(0, place - _STEP)
        text = os.pread(fd, _GLANCE, place)
        begin = 0 if place == 0 else text.find(b"\n") + 1
        told = next((at for at in map(read_told, text[begin:].split(b"\n")[:-1]) if at is not None), None)
        if told is not None and told < since_ns:
            return place + begin
    return 0


def local_day(at_ns: int) -> Day:
    """Return the day of an instant by this machine's clock."""
    now = time.localtime(at_ns // SECOND_NS)
    start, end = (
        int(time.mktime((now.tm_year, now.tm_mon, now.tm_mday + later, 0, 0, 0, 0, 0, -1))) for later in (0, 1)
    )
    return f"{now.tm_year:04}-{now.tm_mon:02}-{now.tm_mday:02}", start * SECOND_NS, end * SECOND_NS
