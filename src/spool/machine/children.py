"""The children of this process, and the orphans that it takes in."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from spool.machine.identity import PROC, read_bytes

_PR_SET_CHILD_SUBREAPER = 36
_SECOND_NS = 1_000_000_000
_KIBIBYTE = 1024


@dataclass(frozen=True, slots=True)
class Reaped:
    """A child that has ended, and what it and the children that it waited for have used."""

    pid: int
    exit_code: int  # 128+n for signal n
    cpu_time_ns: int
    peak_memory_bytes: int  # of the largest single process among them


def become_subreaper(*, on: bool = True) -> bool:
    """Make this process the parent of every orphan among its descendants, or no longer; False where the kernel cannot.

    With it, a run has left nothing behind if its wrapper's end adds no child to this process: no walk over /proc
    is needed. See prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return False
    result: int = prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(on), *[ctypes.c_ulong(0)] * 3)
    return result == 0


class Nursery:
    """A thread that starts children, and does nothing else.

    The kernel lists children by the thread that started them, and gives orphans to the one that leads the process. So
    its list is as long as there are orphans, however many children there are.
    """

    def __init__(self) -> None:
        """Start no thread yet."""
        self._thread: ThreadPoolExecutor | None = None

    def start(self, spawn: Callable[[], int]) -> int:
        """Return the pid of the child that *spawn* starts. What it raises is raised here."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "nursery", initializer=_hear_no_signals)
        try:
            begun = self._thread.submit(spawn)
        except RuntimeError:  # no room for a thread; a child that this one starts is in the list, and known there
            self.close()
            return spawn()
        return begun.result()

    def close(self) -> None:
        """End the thread; its children become the leader's."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _hear_no_signals() -> None:
    """Leave every signal to the main thread, which sleeps until one comes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def children_of_self(*, proc: str = PROC) -> frozenset[int] | None:
    """Return the pids of this process's children, zombies too; None where the kernel does not list them.

    They are those of its main thread: all orphans, but no child of a :class:`Nursery`.
    """
    pid = os.getpid() if proc == PROC else "self"
    try:
        return frozenset(map(int, read_bytes(f"{proc}/{pid}/task/{pid}/children").split()))
    except OSError:
        return None


def reap(pids: Iterable[int]) -> dict[int, Reaped]:
    """Take away those of these children that have ended, and say how; the others are left alone.

    The pids are named, for this process may have children that others wait for. One that is no child is skipped.
    """
    ended: dict[int, Reaped] = {}
    for pid in pids:
        try:
            reaped, status, usage = os.wait4(pid, os.WNOHANG)
        except ChildProcessError:
            continue
        if reaped:
            code = os.waitstatus_to_exitcode(status)
            cpu_time_ns = round((usage.ru_utime + usage.ru_stime) * _SECOND_NS)
            ended[pid] = Reaped(pid, code if code >= 0 else 128 - code, cpu_time_ns, usage.ru_maxrss * _KIBIBYTE)
    return ended
