"""The children of this process: finding and reaping them."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count

from msgspec import Struct

from spool.core.model import SECOND_NS
from spool.machine.identity import PROC, read_bytes

_PR_SET_CHILD_SUBREAPER = 36
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

    On a busy machine reaping stops after a while, and is due again at once; :attr:`due_ns` says so.
    """

    def __init__(self, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Begin without children. *clock* is monotonic."""
        self.stopped: set[int] = set()  # stopped children, for the caller to collect
        self.due_ns: int | None = None  # when to reap again, even without a sign that one has ended
        self._clock = clock

    def reap(self) -> Iterator[tuple[int, int, resource.struct_rusage]]:
        """Yield pid, status and usage of each child that has ended."""
        self.due_ns = None
        until_ns = self._clock() + _BUDGET_NS
        for number in count():
            if number >= _AT_LEAST and self._clock() >= until_ns:
                self.due_ns = self._clock()
                return
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self.stopped.add(pid)
            else:
                yield pid, status, usage


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
