"""The logs of a dispatcher, `.journal`, `history.jsonl` and `events.jsonl`, and the syncs of their lines.

An appended line survives a crash of the dispatcher; only a synced line survives a power cut. By default syncs are
grouped: a thread of this module makes them, so that they do not delay the next start, and no line waits longer than
GROUP_S. Use :meth:`Logs.sync` before any step that needs the lines on the disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from spool.core import layout
from spool.formats import journal
from spool.store.disk import of_the_spool, open_log
from spool.store.eventlog import EventWriter
from spool.store.lock import is_there
from spool.store.locked_spool import LockedSpool
from spool.store.reading import read_record

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
        self._open: dict[str, int] = {}
        try:
            for name, path in self._paths.items():
                self._open[name] = open_log(path)
                with of_the_spool(path):
                    self._mend(self._open[name])
        except BaseException:
            for fd in self._open.values():
                os.close(fd)
            raise
        self._lines = 0
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._torn: set[int] = set()  # logs whose last append was incomplete
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
        data = journal.render(lines)
        if self._gone:
            self.keep()
        if data:
            with of_the_spool(self._paths[layout.JOURNAL]):
                self._append(self._open[layout.JOURNAL], data)
            self._lines += data.count(b"\n")
            self._changed()

    def account(self, lines: bytes) -> None:
        """Append whole lines to the history."""
        if self._gone:
            self.keep()
        if lines:
            with of_the_spool(self._paths[layout.HISTORY]):
                self._append(self._open[layout.HISTORY], lines)
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
            for fd in self._open.values():  # the history first: the journal forgets a run once it has its line
                self._disk.sync_log(fd)
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
            self._disk.sync_log(self._open[layout.HISTORY])
            self._disk.sync_directories(places)
            self._disk.put(path, journal.render(lines), durable=True)
        # It may grow by twice the live lines before the next compaction: the cost stays in proportion to the work.
        self._lines = -len(lines)
        self._renew(layout.JOURNAL)

    def _renew(self, name: str) -> bool:
        """Open a log anew if another file has its name, or none, and return whether that was so."""
        path, fd = self._paths[name], self._open[name]
        if is_there(fd, path):
            self._gone.discard(name)
            return False
        self._gone.add(name)
        kept = name == layout.HISTORY  # a journal is written anew
        if kept:
            with of_the_spool(path):
                self._disk.sync_log(fd)  # no later sync is of this file
        new = open_log(path)
        try:
            with of_the_spool(path):
                self._mend(new)
                if kept:
                    self._disk.sync_directories([self._spool.root])
        except BaseException:
            os.close(new)
            raise
        with self._mutex:
            self._open[name] = new
            self._torn.discard(fd)
            os.close(fd)
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
            for fd in self._open.values():
                os.close(fd)
            self.events.close()

    def _append(self, fd: int, data: bytes) -> None:
        """Append whole lines; after an incomplete append, start a new line."""
        if fd in self._torn:
            data = b"\n" + data
        self._torn.add(fd)
        self._disk.append(fd, data)
        self._torn.discard(fd)

    def _changed(self) -> None:
        if self.strict:
            self.sync()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._sync_groups, name="spool-sync", daemon=True)
            self._thread.start()
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

    def _mend(self, fd: int) -> None:
        """Complete a last line that a power cut or a full disk cut short, so that the next one starts a line."""
        size = os.fstat(fd).st_size
        if size:
            path = f"/proc/self/fd/{fd}"
            reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                torn = os.pread(reader, 1, size - 1) != b"\n"
            finally:
                os.close(reader)
            if torn:
                self._disk.append(fd, b"\n")
