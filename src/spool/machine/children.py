"""The children of this process: finding and reaping them."""

from __future__ import annotations

import errno
import os
import resource
import select
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count

from msgspec import Struct

from spool.core.model import SECOND_NS
from spool.machine.identity import PROC, read_bytes

_PR_SET_CHILD_SUBREAPER = 36
_MANY = 100  # children; with more, checking all of them at each end costs more than a descriptor for each
_LOOK_EVERY_NS, _REFUSED_FOR_NS = 1_000_000_000, 60_000_000_000
_AT_LEAST, _BUDGET_NS = 64, 50_000_000  # reaped at a time, when children end faster than they can be reaped
_KIBIBYTE = 1024


class Reaped(Struct, frozen=True):
    """A child that has ended, and the resource use of it and of the children that it waited for."""

    pid: int
    exit_code: int  # 128+n for signal n
    cpu_time_ns: int
    peak_memory_bytes: int  # of the largest single process among them


def become_subreaper() -> bool:
    """Make this process inherit all orphans among its descendants; return whether it does.

    See prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    import ctypes  # imported here, because commands inherit no orphans

    with suppress(OSError, AttributeError):
        arguments = map(ctypes.c_ulong, (1, 0, 0, 0))
        return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, *arguments) == 0)
    return False


def children_of_self() -> frozenset[int] | None:
    """Return the pids of this process's children, zombies included; None if the kernel does not list them.

    The list is that of the main thread, which inherits all orphans.
    """
    pid = os.getpid()
    try:
        return frozenset(map(int, read_bytes(f"{PROC}/{pid}/task/{pid}/children").split()))
    except OSError:
        return None


class Children:
    """The children of this process; the main thread reaps them when one may have ended.

    To wait for any child, the kernel checks all of them. If there are many, each child that is :meth:`added` and still
    lives gets a pidfd, so that ended ones are known by pid; all children are then checked once a second at most, for
    those that are stopped or no runs. If there are not enough descriptors, all are checked as if they were few.

    On a busy machine reaping stops after a while, and is due again at once; :attr:`due_ns` says so.
    """

    def __init__(self, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Begin without children. *clock* is monotonic."""
        self.stopped: set[int] = set()  # stopped children, for the caller to collect
        self.due_ns: int | None = None  # when to check all children again, even without a sign that one has ended
        self._clock = clock
        self._named: dict[int, int | None] = {}  # the pidfd of each living child, None without one
        self._new: set[int] = set()  # children without a pidfd
        self._ready: select.epoll | None = None  # watches the pidfds
        self._pids: dict[int, int] = {}  # by pidfd
        self._looked_ns = self._refused_ns = -_REFUSED_FOR_NS

    def added(self, pid: int) -> None:
        """Watch this child, the wrapper of a run."""
        self._forget(pid)  # an earlier child of that pid was reaped elsewhere
        self._named[pid] = None
        self._new.add(pid)

    def reap(self) -> Iterator[tuple[int, int, resource.struct_rusage]]:
        """Yield pid, status and usage of each child that has ended."""
        if self._are_many():
            for pid in [*self._new]:
                yield from self._reaped(pid)
            if self._watch_new():
                yield from self._reap_watched()
                return
        elif self._ready is not None:
            self.close()
        self.due_ns = None
        yield from self._reaped(-1)

    def close(self) -> None:
        """Close all descriptors."""
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.close()
        for fd in self._pids:
            os.close(fd)
        self._pids.clear()
        self._named = dict.fromkeys(self._named)
        self._new.update(self._named)

    def _are_many(self) -> bool:
        if len(self._named) < (_MANY if self._ready is None else _MANY // 2):
            return False
        return self._clock() - self._refused_ns >= _REFUSED_FOR_NS

    def _watch_new(self) -> bool:
        """Open a pidfd for each new child; return whether there are any. Half of the descriptors stay free."""
        if not self._new:
            return self._ready is not None  # None if all of them have ended
        try:
            if len(self._named) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._ready = self._ready or select.epoll()
            for pid in [*self._new]:
                self._watch(self._ready, pid)
        except OSError:  # no descriptor left, or a kernel without pidfds
            self.close()
            self._refused_ns = self._clock()
            return False
        return True

    def _watch(self, ready: select.epoll, pid: int) -> None:
        fd = os.pidfd_open(pid)
        try:
            ready.register(fd, select.EPOLLIN)
        except OSError:
            os.close(fd)
            raise
        self._named[pid], self._pids[fd] = fd, pid
        self._new.discard(pid)

    def _reap_watched(self) -> Iterator[tuple[int, int, resource.struct_rusage]]:
        assert self._ready is not None
        for fd, _ in self._ready.poll(0, len(self._pids) + 1):
            yield from self._reaped(self._pids[fd])
        now_ns = self._clock()
        looks = now_ns - self._looked_ns >= _LOOK_EVERY_NS
        self.due_ns = None if looks else self._looked_ns + _LOOK_EVERY_NS
        if looks:
            self._looked_ns = now_ns
            yield from self._reaped(-1)

    def _reaped(self, which: int) -> Iterator[tuple[int, int, resource.struct_rusage]]:
        """Reap the child *which*, or with -1 all children, within the time limit."""
        until_ns = self._clock() + _BUDGET_NS
        for number in count():
            if number >= _AT_LEAST and self._clock() >= until_ns:
                self.due_ns = self._clock()
                return
            try:
                pid, status, usage = os.wait4(which, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                self._forget(which)
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self.stopped.add(pid)
                continue
            self._forget(pid)
            yield pid, status, usage
            if which > 0:
                return

    def _forget(self, pid: int) -> None:
        self._new.discard(pid)
        fd = self._named.pop(pid, None)
        if fd is not None and self._ready is not None:
            self._ready.unregister(fd)  # closing it does so only if no fork has a copy
            del self._pids[fd]
            os.close(fd)


def reap(pids: Iterable[int]) -> dict[int, Reaped]:
    """Reap those of these children that have ended, and return how; all others are left alone.

    The pids are given, because this process may have children that others wait for. A pid that is not a child is
    skipped.
    """
    ended: dict[int, Reaped] = {}
    for pid in pids:
        try:
            reaped, status, usage = os.wait4(pid, os.WNOHANG)
        except ChildProcessError:
            continue
        if reaped:
            code = os.waitstatus_to_exitcode(status)
            cpu_time_ns = round((usage.ru_utime + usage.ru_stime) * SECOND_NS)
            ended[pid] = Reaped(pid, code if code >= 0 else 128 - code, cpu_time_ns, usage.ru_maxrss * _KIBIBYTE)
    return ended
