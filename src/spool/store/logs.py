"""The logs of a dispatcher: `.journal`, `history.jsonl` and `events.jsonl`, which listeners read (FORMAT 15).

An appended line survives a crash of the dispatcher; only a synced line survives a power cut. By default syncs are
grouped: a thread of this module makes them, so that they do not delay the next start, and no line waits longer than
GROUP_S. Use :meth:`Logs.sync` before any step that needs the lines on the disk.

The first line of `events.jsonl` has the position of the rest. Positions count bytes and only grow: when the part that
all listeners have read is cut off, the file begins at a later position, and no cursor changes. A cursor is a small file
for each listener, created by the dispatcher when the listener starts, and advanced by the listener.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from spool.core import layout
from spool.core.layout import Layout
from spool.core.model import Event
from spool.formats import journal
from spool.formats.events import parse_base, parse_cursor, parse_event, render_base, render_cursor
from spool.store.disk import Disk, is_name_of, of_the_spool, open_log
from spool.store.locked_spool import LockedSpool
from spool.store.reading import read_bytes, read_record

_MOST = 1 << 30  # the most bytes read at once
LONG_BYTES = 1 << 20  # worth cutting
MOST_BYTES = 1 << 28  # this much is kept for a listener that does not read: about a million events
_HEAD = 4096  # the first line is shorter
_AT_ONCE = 1 << 18
_LONGEST = 1 << 26  # of a line; a longer one is not ours


class _Log:
    """An open log. A last line that a power cut or a full disk cut short is completed: the next one starts a line."""

    def __init__(self, path: str, disk: Disk) -> None:
        self._disk = disk
        self.fd = open_log(path)
        try:
            with of_the_spool(path):
                size = os.fstat(self.fd).st_size
                self._torn = size > 0 and os.pread(self.fd, 1, size - 1) != b"\n"
                if self._torn:
                    self.append(b"")
        except BaseException:
            os.close(self.fd)
            raise

    def append(self, lines: bytes) -> None:
        """Append whole lines; after an incomplete append, start a new line."""
        data = b"\n" + lines if self._torn else lines
        self._torn = True
        self._disk.append(self.fd, data)
        self._torn = False


class EventWriter:
    """Writes the events. It opens nothing before the first event, or before the first listener."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._layout = Layout(root)
        self._disk = disk
        self._log: _Log | None = None
        self._mutex = threading.Lock()  # the descriptor changes when the file is cut
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
        log = self._open()
        try:
            log.append(lines)
        finally:
            self._size = os.fstat(log.fd).st_size

    def sync(self) -> None:
        """Wait until every line is on the disk; from any thread."""
        with self._mutex:
            if self._log is not None:
                self._disk.sync_log(self._log.fd)

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
        if not positions or self._log is None:
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
        self.close()
        self._open()
        return keep - read

    def close(self) -> None:
        """Let go of the file."""
        with self._mutex:
            if self._log is not None:
                os.close(self._log.fd)
                self._log = None

    def _open(self) -> _Log:
        if self._log is not None:
            return self._log
        path = self._layout.at(layout.EVENTS)
        with of_the_spool(path):  # an unreadable file must not be replaced
            data = read_record(path, _MOST)
        base = parse_base(data) if data else None
        if data is None or base is None:
            # Greater than every position used so far: a file has fewer bytes than nanoseconds of age.
            base = time.time_ns()
            data = render_base(base)
            self._disk.put(path, data)
        log = _Log(path, self._disk)
        self._base, self._head, self._size = base, data.index(b"\n") + 1, os.fstat(log.fd).st_size
        with self._mutex:
            self._log = log
        return log


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


GROUP_S = 0.04  # with the sync itself, 50 ms
AGAIN_S = 1.0  # after a sync that failed
_COMPACT_LINES = 20_000


class Logs:
    """Appends to the logs of a locked spool. For use from one thread. Failures raise SpoolTrouble."""

    def __init__(self, spool: LockedSpool, *, strict: bool = False) -> None:
        self._spool = spool
        self._disk = spool.disk
        self.strict = strict  # sync each line as it is written
        self.events = EventWriter(spool.root, spool.disk)  # opened for the first listener
        self._paths = {name: spool.layout.at(name) for name in (layout.HISTORY, layout.JOURNAL)}
        self._open: dict[str, _Log] = {}
        try:
            for name, path in self._paths.items():
                self._open[name] = _Log(path, self._disk)
        except BaseException:
            for log in self._open.values():
                os.close(log.fd)
            raise
        self._lines = 0
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._gone: set[str] = set()  # logs whose file is gone, and which could not be opened anew
        self._mutex = threading.Lock()  # a descriptor changes when its file is compacted or rotated
        self._thread: threading.Thread | None = None
        self.problem: OSError | None = None  # why the last grouped sync failed; it is retried

    def read_journal(self) -> list[journal.Line]:
        """Return all lines of the journal."""
        path = self._paths[layout.JOURNAL]
        with of_the_spool(path):
            lines = list(journal.parse(read_record(path, 1 << 31) or b""))
        self._lines = len(lines)
        return lines

    def remember(self, lines: Iterable[journal.Line]) -> None:
        """Append *lines* to the journal."""
        self._append(layout.JOURNAL, journal.render(lines))

    def account(self, lines: bytes) -> None:
        """Append whole lines to the history."""
        self._append(layout.HISTORY, lines)

    def _append(self, name: str, lines: bytes) -> None:
        if self._gone:
            self.keep()
        if lines:
            with of_the_spool(self._paths[name]):
                self._open[name].append(lines)
            self._lines += lines.count(b"\n") if name == layout.JOURNAL else 0
            self._changed()

    def tell(self, lines: bytes) -> None:
        """Append whole lines to the events for the listeners."""
        with of_the_spool(self._spool.layout.at(layout.EVENTS)):
            self.events.append(lines)
        self._changed()

    def keep_strict(self, *, strict: bool) -> None:
        """Sync each line at once from now on, or in groups."""
        self.strict = strict

    def keep(self) -> None:
        """Open logs anew whose files were rotated away, deleted or replaced.

        For regular calls: until the next one, lines go to the old file. While a log cannot be opened anew, because
        something else has its name, nothing is appended to it.
        """
        self._renew(layout.HISTORY)
        if self._renew(layout.JOURNAL):
            self._lines = _COMPACT_LINES + 1  # what it had is written again, by compaction

    def sync(self) -> None:
        """Wait until every line is on the disk."""
        with of_the_spool(self._paths[layout.JOURNAL]), self._mutex:
            self.events.sync()
            for log in self._open.values():  # the history first: the journal forgets a run once it has its line
                self._disk.sync_log(log.fd)
            self.problem = None

    @property
    def long(self) -> bool:
        """Whether the journal is worth compacting."""
        return self._lines > _COMPACT_LINES

    def compact(self, lines: list[journal.Line]) -> None:
        """Replace the journal by *lines*, the part worth remembering.

        Everything left out must be on the disk in another form first: as names in the state directories.
        """
        places = [self._spool.layout.at(place) for place in (*layout.PLACES, layout.JOBS)]
        path = self._paths[layout.JOURNAL]
        with of_the_spool(path):
            self._disk.sync_log(self._open[layout.HISTORY].fd)
            self._disk.sync_directories(places)
            self._disk.put(path, journal.render(lines), durable=True)
        # It may grow by twice the live lines before the next compaction: the cost stays in proportion to the work.
        self._lines = -len(lines)
        self._renew(layout.JOURNAL)

    def _renew(self, name: str) -> bool:
        """Open a log anew if another file has its name, or none, and return whether that was so."""
        path, old = self._paths[name], self._open[name]
        if is_name_of(os.fstat(old.fd), path):
            self._gone.discard(name)
            return False
        self._gone.add(name)
        kept = name == layout.HISTORY  # a journal is written anew
        if kept:
            with of_the_spool(path):
                self._disk.sync_log(old.fd)  # no later sync is of this file
        new = _Log(path, self._disk)
        try:
            with of_the_spool(path):
                if kept:
                    self._disk.sync_directories([self._spool.root])
        except BaseException:
            os.close(new.fd)
            raise
        with self._mutex:
            self._open[name] = new
            os.close(old.fd)
        self._gone.discard(name)
        return True

    def close(self) -> None:
        """Sync and close both logs."""
        self._closing.set()
        self._dirty.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.sync()
        finally:
            for log in self._open.values():
                os.close(log.fd)
            self.events.close()

    def _changed(self) -> None:
        if self.strict:
            self.sync()
            return
        if self._thread is None:
            thread = threading.Thread(target=self._sync_groups, name="spool-sync", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the machine has no thread to spare: until it has, each line is synced by itself
                self.sync()
                return
            self._thread = thread
        if not self._dirty.is_set():
            self._dirty.set()

    def _sync_groups(self) -> None:
        while not self._closing.is_set():
            self._dirty.wait()
            if self._closing.wait(GROUP_S if self.problem is None else AGAIN_S):
                return
            self._dirty.clear()
            try:
                self.sync()
            except OSError as error:
                self.problem = error
                self._dirty.set()
