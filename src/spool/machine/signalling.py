"""Signals to processes that are still the ones that were meant."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from spool.machine.descriptors import is_shortage
from spool.machine.identity import read_stat

_INIT = 1


class Process(NamedTuple):
    """One process for as long as it lives: the pid may come back, the pair does not within one boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a signal."""

    signalled: frozenset[Process] = frozenset()
    gone: frozenset[Process] = frozenset()  # ended before
    refused: frozenset[Process] = frozenset()  # another user's, pid 1, this process; or it could not be told who it is


def send(processes: Iterable[Process], number: int, *, spare: Collection[int] = ()) -> Sent:
    """Send a signal to each process that still is the one it was, parents first, and say what became of it.

    The identity is checked while a pidfd holds the process, so that a pid that came back is never signalled.
    Pid 1, this process and the pids in *spare* are refused.
    """
    signalled: set[Process] = set()
    gone: set[Process] = set()
    refused: set[Process] = set()
    for process in _parents_first(processes):
        if process.pid <= _INIT or process.pid == os.getpid() or process.pid in spare:
            refused.add(process)
            continue
        try:
            found = _send(process, number)
        except ProcessLookupError:
            found = False
        except OSError:  # also where it is not known who has that pid: for want of memory, and for a moment
            refused.add(process)
            continue
        (signalled if found else gone).add(process)
    return Sent(frozenset(signalled), frozenset(gone), frozenset(refused))


def _parents_first(processes: Iterable[Process]) -> list[Process]:
    """Return the processes in an order in which nobody comes before its parent.

    A shell that is told after the program for which it waits may see that end first, and go on to its next command or
    end without its trap.
    """
    processes = list(processes)
    parents: dict[int, int] = {}
    for pid in {process.pid for process in processes}:
        with contextlib.suppress(OSError):
            if (stat := read_stat(pid)) is not None:
                parents[pid] = stat.parent
    order: list[int] = []
    seen: set[int] = set()
    for pid in parents:
        line = []  # from the process upwards
        while pid in parents and pid not in seen:
            seen.add(pid)  # pids that came back may make a circle of it
            line.append(pid)
            pid = parents[pid]
        order += reversed(line)
    rank = {pid: place for place, pid in enumerate(order)}
    return sorted(processes, key=lambda process: rank.get(process.pid, -1))


def _send(process: Process, number: int) -> bool:
    """Signal the process; False if it is another one by now. Raises OSError."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno != errno.ENOSYS and not is_shortage(error):
            raise
        # Without a descriptor there is a moment between the check and the signal; a run that cannot be ended is worse.
        if not _is(process):
            return False
        os.kill(process.pid, number)
        return True
    try:
        if not _is(process):
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    finally:
        os.close(fd)


def _is(process: Process) -> bool:
    stat = read_stat(process.pid)
    return stat is not None and not stat.dead and stat.start_ticks == process.start_ticks
