"""`events.jsonl` on the disk, and the cursors of those who read it: its writer's end and its readers' (FORMAT 15).

The first line says at which position the rest begins. Positions count bytes and only grow: when what everybody has
read is cut off, the file begins at a later one, and nobody's cursor changes. A cursor is a small file for each
listener, made by the dispatcher when somebody begins to listen, and moved on by the listener.
"""

from __future__ import annotations

import os
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

_MOST = 1 << 30  # of the file that is read at once
LONG_BYTES = 1 << 20  # worth cutting
MOST_BYTES = 1 << 28  # this much is kept for a listener that does not read: about a million events
_HEAD = 4096  # the first line is shorter
_AT_ONCE = 1 << 18
_LONGEST = 1 << 26  # of a line; a longer one is not ours


class EventWriter:
    """The writer's end. Nothing is opened before the first event, or before somebody listens."""

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
        """Whether there is enough in it to look whether all has been read."""
        return self._size > LONG_BYTES

    def append(self, lines: bytes) -> None:
        """Append whole lines."""
        fd = self._open()
        if self._torn:  # the last append did not come to its end: this one begins a line of its own
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
        """Let listener *kind* hear of everything from now on, unless it listens already; return whether that is new."""
        if self.cursor(kind) is not None:
            return False
        self._disk.ensure_directory(self._layout.at(layout.CURSORS))
        self._disk.put(self._layout.cursor(kind), render_cursor(self.end, 0))
        return True

    def cursor(self, kind: str) -> int | None:
        """Return how far listener *kind* has come; None if it does not listen."""
        found = parse_cursor(read_bytes(self._layout.cursor(kind)))
        return found[0] if found is not None else None

    def kinds(self) -> list[str]:
        """Return who listens, or did when the last dispatcher lived."""
        return cursors(self._layout)

    def unread(self) -> bool:
        """Whether somebody has not heard of everything."""
        if not os.path.lexists(self._layout.at(layout.EVENTS)):
            return False
        return any((self.cursor(kind) or 0) < self.end for kind in self.kinds())

    def cut(self) -> int:
        """Throw away what everybody has read; return how many bytes were thrown away that somebody has not.

        Those are none unless there are more than `MOST_BYTES`: a listener that never reads may not fill the disk.
        """
        positions = [self.cursor(kind) for kind in self.kinds()]
        if not positions or self._fd is None:
            return 0
        end = self.end
        # Whose cursor cannot be read may have read nothing.
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
        with of_the_spool(path):  # what cannot be read must not be replaced
            data = read_record(path, _MOST)
        base = parse_base(data) if data else None
        if data is None or base is None:
            # No position was ever given away that is greater: a file holds fewer bytes than it is nanoseconds old.
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
    """One line: the event (None: it cannot be read), where it stands and where the next begins."""

    event: Event | None
    at: int
    end: int


class EventReader:
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

    def another(self) -> EventReader:
        """Return one that reads the same, for another thread."""
        return EventReader(self._root, self._kind, self._disk)

    def read(self, position: int) -> list[EventLine]:
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
            found.append(EventLine(self._here(parse_event(line)) if line else None, position, end))
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
