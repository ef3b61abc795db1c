"""Everything that wakes the dispatcher: file events, the ends of processes, signals, and the clock.

The end of a child raises SIGCHLD; the end of a wrapper that is none (it was adopted, or another program started it)
is told by a pidfd. As a child subreaper the dispatcher inherits what a wrapper of its own leaves behind, so that an
ended run costs one short read to be sure that nothing is left, not a look at every process of the machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from spool.core.lifecycle import Liveness
from spool.dispatcher.terminator import processes_of
from spool.machine import identity, processes
from spool.state.table import Live

log = logging.getLogger(__name__)

_LEAVE = (signal.SIGTERM, signal.SIGINT)
_OUR_SIGNALS = (*_LEAVE, signal.SIGHUP, signal.SIGCHLD)
_KIBIBYTE = 1024


class Wakeup:
    """The reasons to wake, gathered in one epoll. Lives in the main thread."""

    def __init__(self, spool_dir: str) -> None:
        self._spool_dir = spool_dir
        self.leaving = False
        self._reload = True
        self._children = True
        self._runs: dict[int, Live] = {}  # by the pid of the wrapper
        self._by_fd: dict[int, Live] = {}
        self._ended: set[tuple[str, int]] = set()
        self._own_peak_kib = 0  # as far as it was looked at
        self._strangers: set[int] = set()  # children that are no run's
        self._own: frozenset[int] = frozenset()  # those that wait to become one's
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._readers[self._pipe[0]] = self._drain
        self._epoll.register(self._pipe[0], select.EPOLLIN)
        self._old_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, self._on_signal) for number in _OUR_SIGNALS}
        # Whoever has started us may have blocked some of them, which is inherited.
        self._old_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUR_SIGNALS)
        self._inherits = processes.become_subreaper()

    def close(self) -> None:
        """Give the signals and the orphans back."""
        processes.become_subreaper(on=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for fd in (*self._by_fd, *self._pipe):
            os.close(fd)
        self._epoll.close()

    def watch_files(self, fd: int | None, read: Callable[[], None]) -> None:
        """Wake when *fd* is readable, and call *read* then."""
        if fd is not None:
            self._readers[fd] = read
            self._epoll.register(fd, select.EPOLLIN)

    def wait(self, limit_ns: int | None) -> None:
        """Sleep until there is a reason not to, at most *limit_ns*."""
        if self._children or self._ended or self.leaving or self._reload:
            limit_ns = 0
        # Rounded up: a timer that fires too early would be waited for in a busy loop.
        timeout = None if limit_ns is None else (limit_ns // 1_000_000 + 1) / 1000 if limit_ns else 0
        for fd, _ in self._epoll.poll(timeout):
            reader = self._readers.get(fd)
            if reader is not None:
                reader()
            elif (live := self._by_fd.get(fd)) is not None:
                self._ended.add(live.key)
                self._epoll.unregister(fd)

    def wake(self) -> None:
        """End a sleep; from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._pipe[1], b"!")

    def reload_asked(self) -> bool:
        """Whether HUP asked for the configuration to be read again since the last call."""
        asked, self._reload = self._reload, False
        return asked

    # Runs.

    def watch_run(self, live: Live) -> None:
        """Wake when the wrapper of *live* ends, or at once if it has ended and nobody has seen that."""
        if live.pid is not None:
            self._runs[live.pid] = live
            self._strangers.discard(live.pid)
            return
        if live.jid is None or live.pidfd is not None:
            return
        try:
            fd = os.pidfd_open(live.jid.pid)
        except OSError:  # gone already, no descriptor left, or a kernel without pidfds
            fd = -1
        try:
            found = identity.liveness(live.jid)
        except OSError:  # it is not known now; the poll will see
            found = Liveness.ELSEWHERE
        if fd >= 0 and found is Liveness.ALIVE:
            with contextlib.suppress(OSError):  # the kernel has no room for it
                self._epoll.register(fd, select.EPOLLIN)
                live.pidfd = fd
                self._by_fd[fd] = live
                return
        if fd >= 0:
            os.close(fd)  # another process of that pid, here; the run's own is gone or elsewhere
        # Once the end is seen to, that the wrapper is gone is no news. All else the poll sees.
        if found is Liveness.GONE and not live.remains and not live.cleared:
            self._ended.add(live.key)

    def forget(self, live: Live) -> None:
        """Let go of a run that is over."""
        if live.pid is not None:
            self._runs.pop(live.pid, None)
        if live.pidfd is not None:
            if self._by_fd.pop(live.pidfd, None) is not None:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(live.pidfd)
            os.close(live.pidfd)
            live.pidfd = None

    def no_runs(self, pids: Iterable[int]) -> None:
        """Know these children, and no others, for processes of our own."""
        self._own = frozenset(pids)

    def look_at_children(self) -> None:
        """Have the next call of :meth:`reap` look, as if a child had just ended."""
        self._children = True

    def reap(self) -> Iterator[Live]:
        """Yield the runs whose wrapper, a child of ours, has ended: with its exit status and what it used."""
        if not self._children:
            return
        self._children = False
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._strangers.discard(pid)
            live = self._runs.get(pid)
            if live is None:
                continue
            live.exit_status = status
            live.cpu_time_ns = int((usage.ru_utime + usage.ru_stime) * 1e9)
            if self._says_something(usage.ru_maxrss):
                live.peak_memory_bytes = max(live.peak_memory_bytes or 0, usage.ru_maxrss * _KIBIBYTE)
            yield live

    def _says_something(self, peak_kib: int) -> bool:
        """Whether a child's peak is of its run: a child counts our memory until it has turned into the wrapper.

        The rusage of this process will not do: it counts whoever has started us, up to the same moment.
        """
        if peak_kib > self._own_peak_kib:
            self._own_peak_kib = processes.peak_rss_bytes([os.getpid()]) // _KIBIBYTE
        return peak_kib > self._own_peak_kib

    def ended_runs(self) -> set[tuple[str, int]]:
        """Return the runs whose wrapper, no child of ours, has ended since the last call."""
        ended, self._ended = self._ended, set()
        return ended

    def left_behind(self, live: Live) -> bool:
        """Whether processes of *live* outlived its wrapper."""
        inherited = processes.children_of_self() if self._inherits and live.pid is not None else None
        if inherited is None:
            return bool(processes_of([live], self._spool_dir)[live])
        unknown = {pid for pid in inherited if pid not in self._runs} - self._strangers - self._own
        if not unknown:
            return False
        found = processes_of(self._runs.values(), self._spool_dir)
        self._strangers |= unknown - {process.pid for members in found.values() for process in members}
        return bool(found.get(live))

    # Signals.

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGCHLD:
            self._children = True
        elif number == signal.SIGHUP:
            self._reload = True
        else:
            self.leaving = True

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._pipe[0], 4096):
                pass
