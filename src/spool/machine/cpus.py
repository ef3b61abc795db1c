"""The cores that runs may be pinned to, and pinning a process; only a spool with `cpu_pinning` needs it.

The topology is what the kernel shows below `/sys/devices/system`: the siblings of each hardware thread, and the NUMA
nodes. What cannot be read is a core of its own, on node 0.

Sources: the kernel's Documentation/admin-guide/cputopology.rst and Documentation/ABI/stable/sysfs-devices-node.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spool.core.model import Core
from spool.core.pinning import cpus_in


def read_cores(allowed: Iterable[int], root: Path = Path("/")) -> tuple[Core, ...]:
    """Return the cores with CPUs among *allowed*, ordered by their first CPU.

    *root* is prefixed to the path of every file that is read.
    """
    usable = set(allowed)
    system = root / "sys/devices/system"
    nodes = {cpu: node for node, cpus in _nodes(system) for cpu in cpus}
    cores, seen = list[Core](), set[int]()
    for cpu in sorted(usable):
        if cpu not in seen:
            siblings = _list(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
            core = {cpu, *usable.intersection(siblings)} - seen
            seen |= core
            cores.append(Core(tuple(sorted(core)), nodes.get(cpu, 0)))
    return tuple(cores)


def _nodes(system: Path) -> Iterator[tuple[int, tuple[int, ...]]]:
    for node in _list(system / "node/online"):
        yield node, _list(system / f"node/node{node}/cpulist")


def _list(path: Path) -> tuple[int, ...]:
    try:
        return cpus_in(path.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return ()


def pin(pid: int, cpus: str) -> None:
    """Let a process or thread (0: this thread) run on *cpus* alone. Raises OSError, also if it may have only some."""
    wanted = set(cpus_in(cpus))
    os.sched_setaffinity(pid, wanted)
    if os.sched_getaffinity(pid) != wanted:
        raise OSError(errno.EINVAL, f"not all of CPUs {cpus} can be used")


def unpin(pid: int) -> None:
    """Let a process run on every CPU that this thread may run on. Raises OSError."""
    os.sched_setaffinity(pid, os.sched_getaffinity(0))


@contextmanager
def pinned(cpus: str) -> Iterator[None]:
    """Pin this thread, and so the children that it starts meanwhile. Raises OSError."""
    before = os.sched_getaffinity(0)
    try:
        pin(0, cpus)
        yield
    finally:
        os.sched_setaffinity(0, before)
