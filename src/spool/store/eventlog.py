"""`events.jsonl` on the disk, and the cursors of its listeners: the writer and the reader (FORMAT 15).

The first line has the position of the rest. Positions count bytes and only grow: when the part that all listeners have
read is cut off, the file begins at a later position, and no cursor changes. A cursor is a small file for each listener,
created by the dispatcher when the listener starts, and advanced by the listener.
"""

from __future__ import annotations

import os
import stat
import threading
import time

from msgspec import Struct
from msgspec.structs import replace

from spool.core import layout
from spool.core.events import Event
from spool.core.layout import Layout
from spool.formats.events import parse_base, parse_cursor, parse_event, render_base, render_cursor
from spool.store.disk import Disk, of_the_spool, open_log
from spool.store.reading import read_bytes, read_record

_MOST = 1 << 30  # the most bytes read at once
LONG_BYTES = 1 << 20  # worth cutting
MOST_BYTES = 1 << 28  # this much is kept for a listener that does not read: about a million events
_HEAD = 4096  # the first line is shorter
_AT_ONCE = 1 << 18
_LONGEST = 1 << 26  # of a line; a longer one is not ours


class EventWriter:
    """Writes the events. It opens nothing before the first event, or before the first listener."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._layout = Layout(root)
        self._disk = disk
        self._fd: int | None = None
        self._mutex = threading.Lock()  # the descriptor changes when the file is cut
        self._torn = False
        self._base = 0  # the position of the first byte after the first line
        self._head = 0  # bytes of the first line
        self._size = 0  # of the file

    @property
    def end(self) -> int:
        """The position after the last event."""
        self._open()
        return self._base + self._size - self._head

    @property
    def is_long(self) -> bool:
        """Whether the file is long enough to look for a part that all have read."""
        return self._size > LONG_BYTES

    def append(self, lines: bytes) -> None:
        """Append whole lines."""
        fd = self._open()
        if self._torn:  # the last append was incomplete: start a new line
            lines = b"\n" + lines
        self._torn = True
        try:
            self._disk.append(fd, lines)
        finally:
            self._size = os.fstat(fd).st_size
        self._torn = False

    def sync(self) -> None:
        """Wait until every line is on the disk; from any thread."""
        with self._mutex:
            if self._fd is not None:
                self._disk.sync_log(self._fd)

    def begin(self, kind: str) -> bool:
        """Start the cursor of listener *kind* at the end, unless it has one; return whether it is new."""
        if self.cursor(kind) is not None:
            return False
        self._disk.ensure_directory(self._layout.at(layout.CURSORS))
        self._disk.put(self._layout.cursor(kind), render_cursor(self.end, 0))
        return True

    def cursor(self, kind: str) -> int | None:
        """Return the position of listener *kind*; None if it has no cursor."""
        found = parse_cursor(read_bytes(self._layout.cursor(kind)))
        return found[0] if found is not None else None

    def kinds(self) -> list[str]:
        """Return the present listeners, and those of the last dispatcher."""
        return cursors(self._layout)

    def unread(self) -> bool:
        """Whether some listener has unread events."""
        if not os.path.lexists(self._layout.at(layout.EVENTS)):
            return False
        return any((self.cursor(kind) or 0) < self.end for kind in self.kinds())

    def cut(self) -> int:
        """Remove the part that all listeners have read; return the number of unread bytes removed.

        That number is 0 unless more than `MOST_BYTES` are unread: a listener that never reads must not fill the disk.
        """
        positions = [self.cursor(kind) for kind in self.kinds()]
        if not positions or self._fd is None:
            return 0
        end = self.end
        # A listener whose cursor is unreadable may have read nothing.
        read = max(self._base, min(self._base if at is None else min(at, end) for at in positions))
        too_much = end - read > MOST_BYTES
        if read - self._base < self._size // 2 and not too_much:
            return 0
        path = self._layout.at(layout.EVENTS)
        with of_the_spool(path):
            events = (read_record(path, _MOST) or b"")[self._head :]
        keep = read
        if too_much:
            keep = self._base + events.find(b"\n", end - MOST_BYTES // 2 - self._base) + 1
        self._disk.put(path, render_base(keep) + events[keep - self._base :])
        with self._mutex:
            os.close(self._fd)
            self._fd = None
        self._open()
        return keep - read

    def close(self) -> None:
        """Let go of the file."""
        with self._mutex:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _open(self) -> int:
        if self._fd is not None:
            return self._fd
        path = self._layout.at(layout.EVENTS)
        with of_the_spool(path):  # an unreadable file must not be replaced
            data = read_record(path, _MOST)
        base = parse_base(data) if data else None
        if data is None or base is None:
            # Greater than every position used so far: a file has fewer bytes than nanoseconds of age.
            base = time.time_ns()
            data = render_base(base)
            self._disk.put(path, data)
        self._base, self._head, self._size = base, data.index(b"\n") + 1, len(data)
        fd = open_log(path)
        if not data.endswith(b"\n"):
            self._disk.append(fd, b"\n")
            self._size += 1
        with self._mutex:
            self._fd = fd
        return fd


def cursors(paths: Layout) -> list[str]:
    """Return the listeners that have a cursor."""
    try:
        return sorted(name for name in os.listdir(paths.at(layout.CURSORS)) if not name.startswith("."))
    except OSError:
        return []


class EventLine(Struct, frozen=True):
    """One line: the event (None: unreadable), its position and that of the next line."""

    event: Event | None
    at: int
    end: int


class EventReader:
    """Reads the events for one listener."""

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

    def another(self) -> EventReader:
        """Return a reader of the same file, for another thread."""
        return EventReader(self._root, self._kind, self._disk)

    def read(self, position: int) -> list[EventLine]:
        """Return some of the whole lines from *position* on."""
        if not self._open():
            return []
        assert self._fd is not None
        position = max(position, self._base)  # the part before was cut off, or the file was replaced
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
            found.append(EventLine(self._here(parse_event(line)) if line else None, position, end))
            position = end
        return found

    def _here(self, event: Event | None) -> Event | None:
        """Return *event* with the paths of this spool, which may have been moved since."""
        root = self._layout.root
        if event is None or event.spool_dir == root:
            return event
        metadir = event.metadir
        if metadir is not None and event.job is not None and event.run is not None:
            metadir = self._layout.metadir(event.job, event.run)
        return replace(event, spool_dir=root, metadir=metadir)

    def save(self, position: int, tries: int = 0) -> None:
        """Save the position: everything before it is done, and the event there was tried *tries* times."""
        if (position, tries) != self._saved:
            cursor = render_cursor(position, tries)
            try:
                self._disk.put(self._cursor, cursor)
            except FileNotFoundError:  # the directory was removed
                self._disk.ensure_directory(self._layout.at(layout.CURSORS))
                self._disk.put(self._cursor, cursor)
            self._saved = position, tries

    def close(self) -> None:
        """Let go of the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> bool:
        """Open the file, or open it again if it was replaced; return whether there is one."""
        try:
            status = os.stat(self._path)
        except OSError:
            return False
        if self._fd is not None and os.path.samestat(status, os.fstat(self._fd)):
            return True
        self.close()
        if not stat.S_ISREG(status.st_mode):
            return False
        fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        head = os.pread(fd, _HEAD, 0)
        base = parse_base(head)
        if base is None:
            os.close(fd)
            return False
        self._fd, self._base, self._head = fd, base, head.index(b"\n") + 1
        return True
