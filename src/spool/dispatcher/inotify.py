"""File events, by watchdog: a reason to look, and a hint where. Never the truth.

watchdog's observers start threads that pair up renames, and hold every event back for half a second while
half of a rename is missing. A dispatcher needs no pairs, so this uses the layer below: watchdog's inotify
descriptor, read in the dispatcher's own thread when the kernel says that there is something to read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from watchdog.observers.inotify_c import (
    CallbackId,
    InotifyConstants,
    InotifyEvent,
    InotifyFD,
    Mask,
    WatchDescriptor,
)

from spool.machine.host import file_system_of, is_shared_between_hosts

# `cp` ends with close, `mv` from elsewhere with moved-to, `ln` raises only create.
_MASK = Mask(
    InotifyConstants.IN_CLOSE_WRITE
    | InotifyConstants.IN_MOVED_FROM
    | InotifyConstants.IN_MOVED_TO
    | InotifyConstants.IN_CREATE
    | InotifyConstants.IN_DELETE
    | InotifyConstants.IN_DELETE_SELF
    | InotifyConstants.IN_MOVE_SELF
    | InotifyConstants.IN_ONLYDIR
)
_CAME = InotifyConstants.IN_CREATE | InotifyConstants.IN_MOVED_TO
_GONE = InotifyConstants.IN_DELETE | InotifyConstants.IN_MOVED_FROM
_OF_THE_LIBRARY = InotifyConstants.IN_IGNORED | InotifyConstants.IN_Q_OVERFLOW  # of its book-keeping
_MODES_TOO = Mask(_MASK | InotifyConstants.IN_ATTRIB)  # and times set by hand; a link made or removed raises none here


class NameChange(Enum):
    """What an event says of a name in a directory."""

    CAME = "there is something new under it"
    GONE = "nothing has it any more"
    OTHER = "what has it may be another than it was"


class Hint(NamedTuple):
    """Where to look, and why."""

    place: str
    filename: str
    change: NameChange = NameChange.OTHER


class _Inotify(InotifyFD):
    """The library's descriptor, not inherited by the jobs and read without its thread."""

    def __init__(self) -> None:
        super().__init__()
        self._is_reading = False  # else, until the first event, `close` would leave all of it to that thread

    @classmethod
    def _create_inotify_fd(cls) -> int:
        fd = super()._create_inotify_fd()
        os.set_inheritable(fd, False)
        return fd

    def fileno(self) -> int:
        return self._inotify_fd

    def _check_inotify_fd(self) -> bool:
        return True  # who reads knows that there is something to read


class DirectoryWatcher:
    """Watches directories."""

    def __init__(self) -> None:
        self._hints: list[Hint] = []
        self._lost = False  # events were lost, or a directory was replaced: everything must be looked at
        self.overflows = 0  # how often the kernel dropped events
        self.problem: str | None = None  # why events cannot be relied on, so that the caller polls
        self._general_problem: str | None = None  # the one that stays
        self._inotify: _Inotify | None = None
        self._places: dict[int, str] = {}
        self._wanted: dict[str, tuple[str, Mask]] = {}  # the directory of each key, and its events
        self._stale = False  # whether a directory is another than the one that is watched, or is gone
        self._also: dict[str, int] = {}  # directories that came later

    def start(self, directories: Mapping[str, str], modes_of: Collection[str] = ()) -> None:
        """Watch *directories* (a key for each path), *modes_of* some of them for changed modes too.

        Where that cannot be done, `problem` says why.
        """
        try:
            self._inotify = _Inotify()
            for key, path in directories.items():
                self._wanted[key] = path, _MODES_TOO if key in modes_of else _MASK
                self._watch(self._inotify, key)
        except OSError as error:
            self.close()
            self.problem = f"no file events ({error.strerror or error})"
            return
        kind = file_system_of(next(iter(directories.values())))
        if is_shared_between_hosts(kind):
            self._general_problem = f"a {kind} file system reports no changes made by other hosts"
            self.problem = self._general_problem

    def _watch(self, inotify: _Inotify, key: str) -> None:
        path, mask = self._wanted[key]
        wd = inotify.add_callback(os.fsencode(path), mask, self, CallbackId(1))
        if wd == -1:  # what watchdog makes of a directory that may not be read
            raise PermissionError(f"cannot watch {path}")
        self._places[wd] = key

    def renew(self) -> None:
        """Watch the directories that took the place of others; `problem` says where that cannot be done yet."""
        if self._inotify is None or not self._stale:
            return
        self.problem = self._general_problem
        self._stale = False
        for key in self._wanted.keys() - self._places.values():
            try:
                self._watch(self._inotify, key)
            except OSError as error:
                self._stale = True
                self.problem = f"no file events of {self._wanted[key][0]} ({error.strerror or error})"

    def also(self, key: str, directory: str) -> None:
        """Watch a directory that may not be there yet, and those in it whose name ends with `.d`, changed modes too."""
        if self._inotify is None or not os.path.isdir(directory):
            return
        with suppress(OSError):
            below = [f"{directory}/{name}" for name in os.listdir(directory) if name.endswith(".d")]
            for path in (directory, *filter(os.path.isdir, below)):
                if path not in self._also:
                    wd = self._inotify.add_callback(os.fsencode(path), _MODES_TOO, self, CallbackId(1))
                    if wd != -1:
                        self._places[wd] = key
                        self._also[path] = wd

    def fileno(self) -> int | None:
        """Return the descriptor that becomes readable when there are events, None if there is none."""
        return self._inotify.fileno() if self._inotify is not None else None

    def read(self) -> None:
        """Take in the events that are there; call it only when the descriptor is readable."""
        if self._inotify is not None:
            for event in self._inotify.read_events():
                if event.mask & _OF_THE_LIBRARY:
                    self._inotify.handle_event(event)
                else:
                    self.on_event(event)

    @property
    def has_hints(self) -> bool:
        """Whether there is something to look at."""
        return bool(self._hints)

    def take_hints(self) -> list[Hint]:
        """Return where to look, once."""
        hints, self._hints = self._hints, []
        return hints

    def take_lost(self) -> bool:
        """Whether events were lost since the last call, or a directory was replaced: everything needs a look."""
        lost, self._lost = self._lost, False
        return lost

    def close(self) -> None:
        """Stop watching."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    # What the library calls for each event.

    def on_event(self, event: InotifyEvent) -> None:
        """Remember where to look."""
        place = self._places.get(event.wd)
        mask = event.mask
        if place is None or mask & InotifyConstants.IN_DELETE_SELF:
            self._lost = True
        elif mask & InotifyConstants.IN_MOVE_SELF:  # it belongs to another directory by now, or to none
            if self._inotify is not None:
                self._inotify.remove_callbacks([(event.wd, CallbackId(1))])
            self.on_watch_deleted(event.wd)
        else:
            change = NameChange.CAME if mask & _CAME else NameChange.GONE if mask & _GONE else NameChange.OTHER
            self._hints.append(Hint(place, os.fsdecode(event.name), change))

    def on_watch_deleted(self, wd: WatchDescriptor) -> None:
        """Have everything looked at: a watched directory is gone."""
        self._places.pop(wd, None)
        self._stale = True
        self._also = {path: other for path, other in self._also.items() if other != wd}
        self._lost = True

    def on_queue_overflow(self) -> None:
        """Have everything looked at: the kernel dropped events."""
        self.overflows += 1
        self._lost = True
