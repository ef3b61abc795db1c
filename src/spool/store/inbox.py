"""`events.jsonl` as a listener reads it, and how far it has come (FORMAT 15)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from spool.core import layout
from spool.core.events import Event
from spool.core.layout import Layout
from spool.formats.events import parse_base, parse_cursor, parse_event, render_cursor
from spool.store.disk import Disk
from spool.store.spool import read_bytes

_HEAD = 4096  # the first line is shorter
_AT_ONCE = 1 << 18
_LONGEST = 1 << 26  # of a line; a longer one is not ours


@dataclass(frozen=True, slots=True)
class Found:
    """One line: the event (None: it cannot be read), where it stands and where the next begins."""

    event: Event | None
    at: int
    end: int


class Inbox:
    """The reader's end, for one listener."""

    def __init__(self, root: str, kind: str, disk: Disk) -> None:
        self._root, self._kind = root, kind
        self._layout = Layout(root)
        self._path = self._layout.at(layout.EVENTS)
        self._cursor = self._layout.cursor(kind)
        self._disk = disk
        self._fd: int | None = None
        self._base = 0
        self._head = 0
        cursor = parse_cursor(read_bytes(self._cursor))
        self.position, self.tries = cursor if cursor is not None else (0, 0)
        self._saved: tuple[int, int] | None = cursor

    def another(self) -> Inbox:
        """Return one that reads the same, for another thread."""
        return Inbox(self._root, self._kind, self._disk)

    def read(self, position: int) -> list[Found]:
        """Return some of the whole lines that stand at *position* and after it."""
        if not self._open():
            return []
        assert self._fd is not None
        position = max(position, self._base)  # what was before was cut off, or the file is another
        size = _AT_ONCE
        while True:
            data = os.pread(self._fd, size, self._head + position - self._base)
            whole = data.rpartition(b"\n")[0]
            if whole or len(data) < size or size >= _LONGEST:
                break
            size *= 8
        found = []
        for line in whole.split(b"\n") if whole else ():
            end = position + len(line) + 1
            found.append(Found(self._here(parse_event(line)) if line else None, position, end))
            position = end
        return found

    def _here(self, event: Event | None) -> Event | None:
        """Return *event* with the paths of this spool: it may have been moved since that was told."""
        root = self._layout.root
        if event is None or event.spool_dir == root:
            return event
        metadir = event.metadir
        if metadir is not None and event.job is not None and event.run is not None:
            metadir = self._layout.metadir(event.job, event.run)
        return replace(event, spool_dir=root, metadir=metadir)

    def save(self, position: int, tries: int = 0) -> None:
        """Write down that all before *position* is done, and how often what stands there was begun."""
        if (position, tries) != self._saved:
            self._disk.put(self._cursor, render_cursor(position, tries))
            self._saved = position, tries

    def close(self) -> None:
        """Let go of the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> bool:
        """See to it that the file of that name is the one that is open."""
        try:
            status = os.stat(self._path)
        except OSError:
            return False
        if self._fd is not None and os.path.samestat(status, os.fstat(self._fd)):
            return True
        self.close()
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        head = os.pread(fd, _HEAD, 0)
        base = parse_base(head)
        if base is None:
            os.close(fd)
            return False
        self._fd, self._base, self._head = fd, base, head.index(b"\n") + 1
        return True
