"""What processes use: memory and CPU time, added up.

Resident sizes count a page that is shared for every process that has it, so their sum is cheap and never too low;
proportional sizes count it once in all. A process that has ended by the time it is looked at uses nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from spool.machine.identity import PROC, TICK_NS, read_bytes, read_stat

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_KIBIBYTE = 1024


def rss_bytes(pids: Iterable[int], *, proc: str = PROC) -> int:
    """Return the sum of the resident sizes: an upper bound of what the processes have in memory together."""
    return sum(_rss_bytes(pid, proc) for pid in pids)


def pss_bytes(pids: Iterable[int], *, proc: str = PROC) -> int:
    """Return the sum of the proportional sizes, in which a page shared by n processes counts as an n-th for each.

    The kernel walks the page tables for it, milliseconds for a process of many gigabytes, so ask only where the
    resident sizes leave a doubt. A process that does not let itself be asked counts with its resident size.
    """
    total = 0
    for pid in pids:
        found = _kibibytes(f"{proc}/{pid}/smaps_rollup", b"Pss:")
        total += _rss_bytes(pid, proc) if found is None else found
    return total


def peak_rss_bytes(pids: Iterable[int], *, proc: str = PROC) -> int:
    """Return the sum of the largest resident sizes that each process ever had, not all of them at one moment."""
    return sum(_kibibytes(f"{proc}/{pid}/status", b"VmHWM:") or 0 for pid in pids)


def cpu_time_ns(pids: Iterable[int], *, proc: str = PROC) -> int:
    """Return the CPU time of the processes and of all their children that ended and were waited for."""
    total = 0
    for pid in pids:
        stat = read_stat(pid, proc=proc)
        if stat is not None:
            own = stat.user_ticks + stat.system_ticks
            total += (own + stat.children_user_ticks + stat.children_system_ticks) * TICK_NS
    return total


def _rss_bytes(pid: int, proc: str) -> int:
    try:
        return int(read_bytes(f"{proc}/{pid}/statm").split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _kibibytes(path: str, key: bytes) -> int | None:
    """Return the value of a line "KEY: N kB" of *path* in bytes; None if it cannot be read or is not there."""
    try:
        for line in read_bytes(path).splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * _KIBIBYTE
    except OSError:
        pass
    return None
