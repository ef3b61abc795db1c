"""Everything that wakes the dispatcher: file events, the ends of processes, signals, and timers.

Each component sets timers of its own, and the dispatcher sleeps until the first of them is due. The end of a child
raises SIGCHLD; the end of a wrapper that is not a child (it was adopted, or another program started it) shows on a
pidfd.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Literal

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
