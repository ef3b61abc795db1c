"""The cores of the machine as the kernel shows them, and pinning, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spool.core.model import Core
from spool.core.reasons import ranges_of
from spool.machine import host
from spool.machine.host import Host

OURS = os.sched_getaffinity(0)


def tree(root: Path, cores: dict[str, int]) -> Path:
    """Make the files of cores, given as lists of their CPUs, with their nodes."""
    system, nodes = root / "sys/devices/system", dict[int, list[str]]()
    for text, node in cores.items():
        nodes.setdefault(node, []).append(text)
        for cpu in text.split(","):
            place = system / f"cpu/cpu{cpu}/topology"
            place.mkdir(parents=True)
            (place / "thread_siblings_list").write_text(f"{text}\n")
    for node, lists in nodes.items():
        (system / f"node/node{node}").mkdir(parents=True)
        (system / f"node/node{node}/cpulist").write_text(f"{','.join(lists)}\n")
    (system / "node").mkdir(exist_ok=True)
    (system / "node/online").write_text(f"{ranges_of(nodes)}\n")
    return root


def test_cores_have_their_threads_and_their_node(tmp_path: Path) -> None:
    """Siblings are one core, whatever their numbers are, and each core is there once.

    In a container, or beside a CPU that is offline, a core has the threads that are left, or is not there.
    """
    root = tree(tmp_path, {"0,4": 0, "1,5": 0, "2,6": 1, "3,7": 1})
    expected = (Core((0, 4), 0), Core((1, 5), 0), Core((2, 6), 1), Core((3, 7), 1))
    assert host.read_cores(range(8), root) == expected
    assert host.read_cores({0, 5, 1, 9}, root) == (Core((0,), 0), Core((1, 5), 0), Core((9,), 0))


def test_what_cannot_be_read_is_a_core_of_its_own(tmp_path: Path) -> None:
    """Without /sys, or with nonsense in it, every CPU is a core of node 0, and none is in two cores.

    On this machine the cores have exactly the CPUs that this process may use.
    """
    assert host.read_cores({3, 1}, tmp_path) == (Core((1,)), Core((3,)))
    root = tree(tmp_path, {"0,1": 0})
    siblings = root / "sys/devices/system/cpu/cpu1/topology/thread_siblings_list"
    siblings.write_bytes(b"\xff-x\n")
    assert host.read_cores({0, 1}, root) == (Core((0, 1)),)
    siblings.write_text("1-2\n")  # it says something else than CPU 0
    assert host.read_cores({0, 1, 2}, root) == (Core((0, 1)), Core((2,)))
    found = Host().cores()
    assert sorted(cpu for core in found for cpu in core.cpus) == sorted(OURS)


def test_a_child_is_pinned_from_its_first_moment_and_the_thread_is_as_before() -> None:
    """What a thread starts while it is pinned has its CPUs; afterwards it may run everywhere, after an error too.

    The kernel takes a list of which one CPU is there; a run with fewer CPUs than it was granted must not start.
    """
    one = min(OURS)
    words = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]

    def start() -> None:
        with host.pinned(str(one)):
            said.append(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())
        with pytest.raises(OSError, match="Invalid argument"), host.pinned("65535"):
            pass
        said.append(os.sched_getaffinity(0))

    said: list[object] = []
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert said == [[str(one)], OURS]
    with pytest.raises(OSError, match=r"not all of CPUs .* can be used"), host.pinned(f"{one},65535"):
        pass
    assert os.sched_getaffinity(0) == OURS
