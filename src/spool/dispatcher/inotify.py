"""File events, by watchdog: a reason to look, and a hint where. Never the truth.

watchdog's own observer for Linux pairs up renames: when a file has left a directory, it holds back that event and all
later ones of the directory for half a second, and every start of a job is such a rename. So this is another emitter for
watchdog's interface (`watchdog.observers.api`). It reads inotify(7) itself and pairs up nothing, and the dispatcher's
loop calls it when there is something to read; docs/ARCHITECTURE.md has the figures.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from watchdog.events import DirDeletedEvent, FileCreatedEvent, FileDeletedEvent, FileModifiedEvent, FileSystemEvent
from watchdog.observers.api import EventEmitter, EventQueue, ObservedWatch

from spool.machine.host import file_system_of, is_shared_between_hosts

_LIBC = ctypes.CDLL(None, use_errno=True)
_EVENT = struct.Struct("iIII")  # the watch, the mask, a cookie that pairs renames, the length of the name that follows
_BUFFER = 1 << 16

# From <sys/inotify.h>.
_ATTRIB, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x4, 0x8, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF, _Q_OVERFLOW, _IGNORED, _ONLYDIR = 0x400, 0x800, 0x4000, 0x8000, 0x1000000

# `cp` ends with close, `mv` from elsewhere with moved-to, `ln` raises only create.
_MASK = _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF | _ONLYDIR
_MODES_TOO = _MASK | _ATTRIB  # and times set by hand; a link made or removed raises none here


class NameChange(Enum):
    """The meaning of an event for a name in a directory."""

    CAME = "there is something new under it"
    GONE = "nothing has it any more"
    OTHER = "what has it may be another than it was"


class Hint(NamedTuple):
    """Where to look, and why."""

    place: str
    filename: str
    change: NameChange = NameChange.OTHER


_CHANGES = {"created": NameChange.CAME, "deleted": NameChange.GONE, "modified": NameChange.OTHER}


class _EventsLost(FileSystemEvent):
    """The kernel dropped events."""

    event_type = "lost"


class _Emitter(EventEmitter):
    """Emits the events of several directories, as files, and the end of a watch as `DirDeletedEvent`.

    It is never started: the thread that wants the events reads them, so they need no queue with locks.
    """

    def __init__(self, hear: Callable[[FileSystemEvent], None]) -> None:
        super().__init__(EventQueue(), ObservedWatch("/", recursive=False))  # its directories are in the events
        self._hear = hear
        self._directories: dict[int, str] = {}
        self.fd = _checked(_LIBC.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))

    def watch_directory(self, path: str, mask: int) -> None:
        """Emit the events of *mask* from now on. Raises OSError."""
        self._directories[_checked(_LIBC.inotify_add_watch(self.fd, os.fsencode(path), mask), path)] = path

    def queue_event(self, event: FileSystemEvent) -> None:
        """Pass *event* on at once."""
        self._hear(event)

    def queue_events(self, timeout: float = 0) -> None:
        """Read the pending events; *timeout* is not needed."""
        try:
            events = os.read(self.fd, _BUFFER)
        except BlockingIOError:
            return
        at = 0
        while at < len(events):
            wd, mask, _, size = _EVENT.unpack_from(events, at)
            at += _EVENT.size + size
            event = self._event(wd, mask, events[at - size : at].rstrip(b"\0"))
            if event is not None:
                self.queue_event(event)

    def _event(self, wd: int, mask: int, name: bytes) -> FileSystemEvent | None:
        if mask & _Q_OVERFLOW:
            return _EventsLost("")
        directory = self._directories.get(wd)
        if directory is None or mask & _DELETE_SELF:  # the end of its watch was reported, or will be
            return None
        if mask & (_MOVE_SELF | _IGNORED):
            del self._directories[wd]
            if mask & _MOVE_SELF:  # it belongs to another directory by now, or to none
                _LIBC.inotify_rm_watch(self.fd, wd)
            return DirDeletedEvent(directory)
        came, gone = mask & (_CREATE | _MOVED_TO), mask & (_DELETE | _MOVED_FROM)
        kind = FileCreatedEvent if came else FileDeletedEvent if gone else FileModifiedEvent
        return kind(f"{directory}/{os.fsdecode(name)}")


def _checked(answer: int, path: str = "") -> int:
    """Return the answer of inotify. Raises OSError."""
    if answer == -1:
        number = ctypes.get_errno()
        words = {
            errno.EACCES: f"cannot watch {path}",
            errno.EMFILE: "inotify instance limit reached",
            errno.ENOSPC: "inotify watch limit reached",
        }
        raise OSError(number, words.get(number) or os.strerror(number))
    return answer


class DirectoryWatcher:
    """Watches directories."""

    def __init__(self) -> None:
        self.hints: list[Hint] = []
        self.lost = False  # events were lost, or a directory was replaced: everything must be looked at
        self.overflows = 0  # how often the kernel dropped events
        self.problem: str | None = None  # why events cannot be relied on, so that the caller polls
        self._general_problem: str | None = None  # the one that stays
        self._emitter: _Emitter | None = None
        self._keys: dict[str, str] = {}  # of the watched directories
        self._wanted: dict[str, tuple[str, int]] = {}  # the directory of each key, and its events
        self._stale = False  # whether a directory was replaced since it was watched, or is gone

    def start(self, directories: Mapping[str, str], modes_of: Collection[str] = ()) -> None:
        """Watch *directories* (a key for each path), *modes_of* some of them for changed modes too.

        If that fails, `problem` has the reason.
        """
        try:
            self._emitter = _Emitter(self._on_event)
            for key, path in directories.items():
                self._wanted[key] = path, _MODES_TOO if key in modes_of else _MASK
                self._watch(self._emitter, key, *self._wanted[key])
        except OSError as error:
            self.close()
            self.problem = f"no file events ({error.strerror})"
            return
        kind = file_system_of(next(iter(directories.values())))
        if is_shared_between_hosts(kind):
            self._general_problem = f"a {kind} file system reports no changes made by other hosts"
            self.problem = self._general_problem

    def _watch(self, emitter: _Emitter, key: str, path: str, mask: int) -> None:
        emitter.watch_directory(path, mask)
        self._keys[path] = key

    def renew(self) -> None:
        """Watch the directories that replaced others; `problem` names those that cannot be watched yet."""
        if self._emitter is None or not self._stale:
            return
        self.problem = self._general_problem
        self._stale = False
        for key in self._wanted.keys() - self._keys.values():
            try:
                self._watch(self._emitter, key, *self._wanted[key])
            except OSError as error:
                self._stale = True
                self.problem = f"no file events of {self._wanted[key][0]} ({error.strerror})"

    def also(self, key: str, directory: str) -> None:
        """Watch a directory that may not exist yet, and those in it whose name ends with `.d`, changed modes too."""
        if self._emitter is None or not os.path.isdir(directory):
            return
        with suppress(OSError):
            below = [f"{directory}/{name}" for name in os.listdir(directory) if name.endswith(".d")]
            for path in (directory, *filter(os.path.isdir, below)):
                if path not in self._keys:
                    with suppress(PermissionError):
                        self._watch(self._emitter, key, path, _MODES_TOO)

    def fileno(self) -> int | None:
        """Return the descriptor that becomes readable when there are events, None if there is none."""
        return self._emitter.fd if self._emitter is not None else None

    def read(self) -> None:
        """Read the pending events."""
        if self._emitter is not None:
            self._emitter.queue_events()

    def _on_event(self, event: FileSystemEvent) -> None:
        path = os.fsdecode(event.src_path)
        if isinstance(event, _EventsLost):
            self.overflows += 1
            self.lost = True
        elif isinstance(event, DirDeletedEvent):
            self._keys.pop(path, None)
            self._stale = self.lost = True
        else:
            directory, _, filename = path.rpartition("/")
            self.hints.append(Hint(self._keys[directory], filename, _CHANGES[event.event_type]))

    def take_hints(self) -> list[Hint]:
        """Return the hints, once."""
        hints, self.hints = self.hints, []
        return hints

    def take_lost(self) -> bool:
        """Whether events were lost since the last call, or a directory was replaced: everything needs a look."""
        lost, self.lost = self.lost, False
        return lost

    def close(self) -> None:
        """Stop watching."""
        if self._emitter is not None:
            os.close(self._emitter.fd)
            self._emitter = None
