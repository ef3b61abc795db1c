"""Everything that wakes the dispatcher: file events, the ends of processes, signals, and timers.

Each component sets timers of its own, and the dispatcher sleeps until the first of them is due. The end of a child
raises SIGCHLD; the end of a wrapper that is not a child (it was adopted, or another program started it) shows on a
pidfd.

A file event, by watchdog, is a reason to look, and a hint where; never the truth. watchdog's own observer for Linux
pairs up renames: when a file has left a directory, it holds back that event and all later ones of the directory for
half a second, and every start of a job is such a rename. So this has another emitter for watchdog's interface
(`watchdog.observers.api`). It reads inotify(7) itself and pairs up nothing, and the dispatcher's loop calls it when
there is something to read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import Enum
from types import FrameType
from typing import Literal, NamedTuple

from watchdog.events import DirDeletedEvent, FileCreatedEvent, FileDeletedEvent, FileModifiedEvent, FileSystemEvent
from watchdog.observers.api import EventEmitter, EventQueue, ObservedWatch

from spool.machine.host import file_system_of, is_shared_between_hosts
from spool.state.run import ActiveRun

Clock = Callable[[], int]
"""Returns the time on one of the clocks of the machine, in nanoseconds."""

Part = Literal[
    "files", "answers", "recovery", "ends", "suspensions", "limits", "stops", "arrays", "halt", "starts", "preemption",
    "gpu use", "paperwork", "conditions", "journal", "listeners", "gpus", "status", "machine", "old runs"
]  # fmt: skip
"""A part of a pass."""

_SHARE_OF_TIME = 5


def boot_clock() -> int:
    """Return the time since boot in nanoseconds, time asleep included: the clock of time limits."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Timer:
    """One deadline of one component, or none. An early deadline costs one pass without work."""

    __slots__ = ("at_ns",)

    def __init__(self) -> None:
        self.at_ns: int | None = None

    def set(self, at_ns: int | None) -> None:
        """Set the deadline, on the clock of the timer; None: no deadline."""
        self.at_ns = at_ns

    def advance(self, at_ns: int) -> None:
        """Set the deadline unless it is earlier already."""
        if self.at_ns is None or at_ns < self.at_ns:
            self.at_ns = at_ns


class Timers:
    """The timers of a dispatcher."""

    def __init__(self) -> None:
        self._timers: list[tuple[Timer, Part, Clock, bool]] = []

    def timer(self, part: Part, clock: Clock = time.monotonic_ns, *, always: bool = False) -> Timer:
        """Return a new timer on *clock*, which calls for that *part* of a pass, and which the part clears or sets anew.

        While the spool is unusable, only those that are *always* due count.
        """
        timer = Timer()
        self._timers.append((timer, part, clock, always))
        return timer

    def due(self) -> set[Part]:
        """Return the parts whose deadlines have passed."""
        return {part for timer, part, clock, _ in self._timers if timer.at_ns is not None and timer.at_ns <= clock()}

    def due_in_ns(self, *, held_up: bool = False) -> int | None:
        """Return the time until the first deadline, 0 if one has passed; None if there is none."""
        waits = [
            timer.at_ns - clock()
            for timer, _, clock, always in self._timers
            if timer.at_ns is not None and (always or not held_up)
        ]
        return max(0, min(waits)) if waits else None


class Pace:
    """Measures a piece of work (`with pace:`), and returns how long to pause it.

    The cost is processor time. On a busy machine the same work occasionally takes many times as long, and that alone
    must not delay it for long; but a slow disk must not delay everything else either.
    """

    def __init__(self, share: int) -> None:
        """Limit the work to one part in *share* of a processor, and one in five of this thread's time."""
        self._share = share
        self._begun = (0, 0)
        self.pause_ns = 0

    def __enter__(self) -> None:
        self._begun = (time.thread_time_ns(), time.monotonic_ns())

    def __exit__(self, *_: object) -> None:
        processor_ns, passed_ns = time.thread_time_ns() - self._begun[0], time.monotonic_ns() - self._begun[1]
        self.pause_ns = max(self._share * processor_ns, _SHARE_OF_TIME * passed_ns)


log = logging.getLogger(__name__)

_LEAVE = (signal.SIGTERM, signal.SIGINT)
_SIGNALS = 4096  # bytes read at once
_OUR_SIGNALS = (*_LEAVE, signal.SIGHUP, signal.SIGCHLD)


class Wakeup:
    """The reasons to wake, gathered in one epoll. Lives in the main thread."""

    def __init__(self) -> None:
        self.leaving = False
        self.reload = True
        self.children = True
        self._runs: dict[int, tuple[str, int]] = {}  # by the descriptor that shows the end of the wrapper
        self._fds: dict[tuple[str, int], int] = {}
        self.ended: set[tuple[str, int]] = set()
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._readers[self._pipe[0]] = self._drain
        self._epoll.register(self._pipe[0], select.EPOLLIN)
        self._old_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, self._on_signal) for number in _OUR_SIGNALS}
        # Some may be blocked, inherited from the process that started this one.
        self._old_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUR_SIGNALS)

    def close(self) -> None:
        """Restore the signals."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for fd in (*self._runs, *self._pipe):
            os.close(fd)
        self._epoll.close()

    def watch_files(self, fd: int | None, read: Callable[[], None]) -> None:
        """Wake when *fd* is readable, and call *read* then."""
        if fd is not None:
            self._readers[fd] = read
            self._epoll.register(fd, select.EPOLLIN)

    def unwatch_files(self, fd: int) -> None:
        """Stop watching *fd*, which is about to be closed."""
        if self._readers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def wait(self, limit_ns: int | None) -> None:
        """Sleep until there is a reason to wake, at most *limit_ns*."""
        if self.children or self.ended or self.leaving or self.reload:
            limit_ns = 0
        # Rounded up: a timer that fires too early would cause a busy loop.
        timeout = None if limit_ns is None else (limit_ns // 1_000_000 + 1) / 1000 if limit_ns else 0
        for fd, _ in self._epoll.poll(timeout):
            reader = self._readers.get(fd)
            if reader is not None:
                reader()
            elif (key := self._runs.get(fd)) is not None:
                self.ended.add(key)
                self._epoll.unregister(fd)

    def reload_asked(self) -> bool:
        """Whether HUP has requested a reload of the configuration since the last call."""
        asked, self.reload = self.reload, False
        return asked

    # Runs.

    def watch_run(self, live: ActiveRun) -> None:
        """Wake when the wrapper of *live* ends, or at once if it has ended unnoticed."""
        if live.handle is None or self.watches(live):
            return
        try:
            fd = live.handle.watch()
        except ProcessLookupError:
            if live.holds_room and not live.is_outlived:  # once the end is seen to, it is no news
                self.ended.add(live.key)
            return
        if fd is None:
            return  # polling notices it
        try:
            self._epoll.register(fd, select.EPOLLIN)
        except OSError:  # the kernel lacks room for it
            os.close(fd)
        else:
            self._runs[fd], self._fds[live.key] = live.key, fd

    def watches(self, live: ActiveRun) -> bool:
        """Whether an event shows the end of its wrapper."""
        handle = live.handle
        return live.key in self._fds or (handle is not None and (handle.is_child or handle.engine.tells))

    def forget(self, live: ActiveRun) -> None:
        """Stop watching a run that is over."""
        fd = self._fds.pop(live.key, None)
        if fd is not None:
            del self._runs[fd]
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
            os.close(fd)

    def look_at_children(self) -> None:
        """Let the next pass check for ended children."""
        self.children = True

    def children_ended(self) -> bool:
        """Whether a child may have ended since the last call."""
        ended, self.children = self.children, False
        return ended

    def ended_runs(self) -> set[tuple[str, int]]:
        """Return the runs whose wrappers, not children of this process, have ended since the last call."""
        ended, self.ended = self.ended, set()
        return ended

    # Signals.

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGCHLD:
            self.children = True
        elif number == signal.SIGHUP:
            self.reload = True
        else:
            self.leaving = True

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._pipe[0], _SIGNALS)) == _SIGNALS:
                pass


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


class _Emitter(EventEmitter):
    """Emits the events of several directories, as files, and the end of a watch, or lost events, as `DirDeletedEvent`.

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
                self._hear(event)

    def _event(self, wd: int, mask: int, name: bytes) -> FileSystemEvent | None:
        if mask & _Q_OVERFLOW:
            return DirDeletedEvent("")  # the kernel dropped some
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
        except OSError as error:
            self.problem = f"no file events ({error.strerror})"
            return
        kind = file_system_of(next(iter(directories.values())))
        if is_shared_between_hosts(kind):
            self._general_problem = f"a {kind} file system reports no changes made by other hosts"
        for key, path in directories.items():
            self._wanted[key] = path, _MODES_TOO if key in modes_of else _MASK
        self._stale = True
        self.renew()

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
        if isinstance(event, DirDeletedEvent):
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
