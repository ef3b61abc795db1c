"""A control group for each run, on a hierarchy that is a plain directory here."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from spool.machine import cgroups
from spool.machine.cgroups import ControlFiles, RunGroup, RunGroups

PAGE = os.sysconf("SC_PAGE_SIZE")
FRESH = {
    "cgroup.procs": "",
    "cgroup.subtree_control": "",
    "cgroup.events": "populated 0\nfrozen 0\n",
    "cgroup.kill": "",
    "cpu.stat": "usage_usec 1500\nuser_usec 1000\n",
    "memory.max": "max\n",
    "memory.swap.max": "max\n",
    "memory.oom.group": "0\n",
    "memory.current": "4096\n",
    "memory.peak": "8192\n",
    "memory.events": "low 0\nhigh 0\nmax 3\noom 1\noom_kill 0\noom_group_kill 0\n",
}


class Kernel(ControlFiles):
    """Does with a directory what the kernel does with a hierarchy of control groups."""

    def __init__(self, root: Path, proc: Path) -> None:
        self.root, self.proc = root, proc
        self.is_delegated = True
        self.missing: set[str] = set()  # control files that this kernel does not have
        self.deaf: set[str] = set()  # those that take a value and do not keep it
        self._show(root, "cpu memory pids\n")

    def _show(self, group: Path, controllers: str) -> None:
        group.mkdir(exist_ok=True)
        for name, text in (FRESH | {"cgroup.controllers": controllers}).items():
            if name not in self.missing:
                (group / name).write_text(text)

    def make(self, path: Path) -> None:
        if not path.exists():
            self._show(path, self.read(path.parent / "cgroup.subtree_control"))

    def remove(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        if self.read(path / "cgroup.procs"):
            raise OSError(errno.EBUSY, "Device or resource busy")
        shutil.rmtree(path)

    def write(self, path: Path, text: str) -> None:
        if path.name == "cgroup.subtree_control":
            if self.read(path.parent / "cgroup.procs"):
                raise OSError(errno.EBUSY, "Device or resource busy")
            text = text.lstrip("+")
        if path.name == "cgroup.procs":
            for procs in self.root.rglob("cgroup.procs"):
                procs.write_text("".join(line for line in procs.read_text().splitlines(True) if line != f"{text}\n"))
            text = path.read_text() + text
        if path.name == "memory.max":
            text = str(int(text) // PAGE * PAGE)
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        if path.name not in self.deaf:
            path.write_text(text + "\n")

    def delegated(self, path: Path) -> bool:
        return self.is_delegated and path.exists()


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    """Show this process in the group /us, which is ours, of a hierarchy that is mounted at a path with a space."""
    proc, mount = tmp_path / "proc", tmp_path / "sys fs"
    (proc / "self").mkdir(parents=True)
    mount.mkdir()
    (proc / "self/cgroup").write_text("4:memory:/legacy\n0::/us\n")
    point = str(mount).replace(" ", r"\040")
    (proc / "self/mountinfo").write_text(
        "22 1 0:20 / /proc rw - proc proc rw\n"
        "30 23 0:26 /elsewhere /wrong rw,nosuid - cgroup2 cgroup2 rw\n"
        f"31 23 0:26 / {point} rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
    )
    made = Kernel(mount / "us", proc)
    (made.root / "cgroup.procs").write_text(f"{os.getpid()}\n")
    return made


@pytest.fixture
def groups(kernel: Kernel) -> RunGroups:
    """Give the groups for runs."""
    return found(kernel)


def found(kernel: Kernel) -> RunGroups:
    """Return where groups for runs can be made."""
    groups = cgroups.find_run_groups(proc=str(kernel.proc), files=kernel)
    assert isinstance(groups, RunGroups), groups
    return groups


def told(group: RunGroup) -> tuple[object, ...]:
    """Return all that a group tells."""
    numbers = group.peak_memory_bytes(), group.cpu_time_ns(), group.oom_kills()
    return *numbers, group.populated(), group.pids()


def test_a_delegated_group_is_prepared(kernel: Kernel, groups: RunGroups) -> None:
    """Our process moves into a leaf, and the group passes the memory controller on.

    Whoever looks again, or is started in the leaf, finds the same and makes no leaf within the leaf.
    """
    assert groups.path == kernel.root
    files = ("cgroup.procs", "dispatcher/cgroup.procs", "cgroup.subtree_control")
    assert [(kernel.root / name).read_text() for name in files] == ["", f"{os.getpid()}\n", "memory\n"]
    (kernel.proc / "self/cgroup").write_text("0::/us/dispatcher\n")
    assert found(kernel).path == kernel.root
    assert not (kernel.root / "dispatcher/dispatcher").exists()


def test_every_reason_against_it_is_a_sentence(kernel: Kernel) -> None:
    """Where no groups can be made, the answer says why, and nothing has changed."""

    def why() -> str:
        answer = cgroups.find_run_groups(proc=str(kernel.proc), files=kernel)
        assert isinstance(answer, str)
        return answer

    kernel.is_delegated = False
    assert "delegated" in why()
    kernel.is_delegated = True
    (kernel.root / "cgroup.controllers").write_text("cpu pids\n")
    assert "memory controller" in why()
    (kernel.root / "cgroup.controllers").write_text("cpu memory\n")
    (kernel.root / "cgroup.procs").write_text(f"{os.getpid()}\n4711\n")
    assert "busy" in why()
    assert not (kernel.root / "dispatcher").exists()
    assert {*(kernel.root / "cgroup.procs").read_text().split()} == {str(os.getpid()), "4711"}
    for text in ("4:memory:/legacy\n", "0::/gone/us\n", ""):
        (kernel.proc / "self/cgroup").write_text(text)
        assert why()
    (kernel.proc / "self/cgroup").unlink()
    assert "no cgroup version 2" in why()


def test_a_limit_is_in_force_for_all_of_a_run_together(kernel: Kernel, groups: RunGroups) -> None:
    """The run's group has the limit, rounded down to pages, no swap, and falls as a whole.

    Without the cpuset controller it binds no CPUs: the wrapper's affinity has to do, and the limit is in force.
    """
    group = groups.create("train", 2, 10 * PAGE + 5)
    assert (group.path, group.procs) == (kernel.root / "train.2", kernel.root / "train.2/cgroup.procs")
    values = {name: (group.path / name).read_text() for name in ("memory.max", "memory.swap.max", "memory.oom.group")}
    assert values == {"memory.max": f"{10 * PAGE}\n", "memory.swap.max": "0\n", "memory.oom.group": "1\n"}
    assert not groups.binds_cpus()
    group = groups.create("a", 1, 1 << 30, "0")
    assert not (group.path / "cpuset.cpus").exists()


@pytest.mark.parametrize(("deaf", "missing", "made"), [("memory.max", "", False), ("", "memory.max", False),
                                                       ("", "memory.swap.max", True)])  # fmt: skip
def test_a_limit_that_is_not_in_force_is_no_limit(
    kernel: Kernel, groups: RunGroups, deaf: str, missing: str, made: bool
) -> None:
    """When the kernel does not take the limit over, there is no group, and none is left behind.

    Where it does not count swap the limit holds.
    """
    kernel.deaf, kernel.missing = {deaf}, {missing}
    assert (groups.create("train", 1, 10 * PAGE) is not None) is (kernel.root / "train.1").exists() is made


def test_what_a_group_tells_is_read(groups: RunGroups) -> None:
    """Memory, peak, CPU time, kills for memory and the processes are what the files say."""
    group = groups.create("train", 1, None)
    assert (group.path / "memory.max").read_text() == "max\n"  # what has no limit can be counted and ended all the same
    assert told(group) == (8192, 1_500_000, 0, False, frozenset())
    (group.path / "memory.events").write_text("oom 2\noom_kill 7\noom_group_kill 1\n")
    (group.path / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    (group.path / "cgroup.procs").write_text("12\n13\n")
    assert told(groups.existing("train", 1))[2:] == (7, True, {12, 13})


def test_a_group_that_is_not_there_tells_nothing(groups: RunGroups) -> None:
    """Unknown is None: an absent group is neither empty nor unharmed, and removing it is done."""
    group = groups.existing("train", 1)
    assert {*told(group)} == {None}
    assert (group.kill(), group.remove()) == (False, True)


def test_a_group_is_killed_and_removed(groups: RunGroups) -> None:
    """All of a group is killed by one word; it can be removed once nobody is left."""
    group = groups.create("train", 1, None)
    group.procs.write_text("12\n")
    assert (group.remove(), group.kill(), (group.path / "cgroup.kill").read_text()) == (False, True, "1\n")
    group.procs.write_text("")
    assert group.remove()
    assert not group.path.exists()


def test_a_pinned_run_is_bound_to_its_cpus(kernel: Kernel) -> None:
    """If the cpuset controller is delegated too, it is switched on for the groups of the runs, and holds the CPUs."""
    (kernel.root / "cgroup.controllers").write_text("cpu cpuset memory pids\n")
    groups = found(kernel)
    (groups.path / "cgroup.controllers").write_text("cpu cpuset memory pids\n")
    switched = []
    kernel.write = lambda path, text, write=kernel.write: (  # type: ignore[method-assign]
        switched.append((path.name, text)) if path.name.startswith(("cpuset", "cgroup.sub")) else write(path, text)
    )
    assert groups.create("a", 1, None, "0-3,8") is not None
    assert switched == [("cgroup.subtree_control", "+cpuset"), ("cpuset.cpus", "0-3,8")]
    assert groups.create("b", 1, 1 << 30) is not None
    assert len(switched) == 2  # one that is not pinned has all


def test_real_files_are_written_in_place(tmp_path: Path) -> None:
    """A control file that is not there is not created, for the kernel alone makes them."""
    files = ControlFiles()
    with pytest.raises(FileNotFoundError):
        files.write(tmp_path / "memory.max", "1")
    (tmp_path / "memory.max").write_text("")
    files.write(tmp_path / "memory.max", "1")
    assert files.read(tmp_path / "memory.max") == "1"
    files.make(tmp_path / "group")
    files.make(tmp_path / "group")
    files.remove(tmp_path / "group")
    assert not files.delegated(tmp_path) or os.geteuid() != 0


def test_this_machine_can_be_asked() -> None:
    """On any machine the real question is answered, for a group that is not ours with a reason."""

    class Looking(ControlFiles):
        def delegated(self, path: Path) -> bool:
            super().delegated(path)
            return False

    assert isinstance(cgroups.find_run_groups(files=Looking()), str)
