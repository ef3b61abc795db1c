"""What the machine has and what of it is ours, from files made up and from the real ones; its cores, and pinning."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil  # type: ignore[import-untyped]
import pytest

from spool.core.model import Core
from spool.core.reasons import ranges_of
from spool.machine import cgroups, host
from spool.machine.host import Host, HostMemory, disk_free_bytes, file_system_of
from spool.store.ownership import this_user

MIB = 1 << 20
GIB = 1 << 30
NO_LIMIT_V1 = "9223372036854771712"
CPU_V1 = "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs"


class Root:
    """A made-up root directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, name: str, text: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, group: str, root: str = "/", point: str = "/sys/fs/cgroup") -> None:
        self.put("proc/self/cgroup", f"0::{group}\n")
        self.put("proc/self/mountinfo", f"25 20 0:22 {root} {point} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n")

    def v1(self, group: str, root: str = "/") -> None:
        self.put("proc/self/cgroup", f"5:memory:{group}\n4:cpu,cpuacct:{group}\n1:name=systemd:/\n0::/\n")
        self.put(
            "proc/self/mountinfo",
            "22 20 0:20 / /proc rw - proc proc rw\n"
            "31 25 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
            f"32 25 0:28 {root} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
            f"33 25 0:29 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        )

    def host(self, cpus: int = 16) -> Host:
        return Host(root=self.path, affinity=lambda: cpus, memory=lambda: HostMemory(64 * GIB, 40 * GIB))


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Make an empty root directory."""
    return Root(tmp_path)


def test_without_control_groups_the_machine_is_all_ours(root: Root) -> None:
    """With no cgroup file at all, the affinity mask and the machine's memory stand as they are."""
    assert root.host().cpus() == 16
    assert root.host().memory() == HostMemory(64 * GIB, 40 * GIB)


@pytest.mark.parametrize(
    ("version", "files", "cpus"),
    [
        *(("v2", {"sys/fs/cgroup/box/cpu.max": text}, cpus) for text, cpus in (
            ("max 100000", 16), ("250000 100000", 2), ("50000 100000", 1), ("garbage", 16), ("", 16), ("1 0", 16))),
        *(("v1", {f"{CPU_V1}_quota_us": quota, f"{CPU_V1}_period_us": "100000"}, cpus)
          for quota, cpus in (("-1", 16), ("400000", 4))),
    ],
)  # fmt: skip
def test_a_quota_is_rounded_down_to_whole_cpus(root: Root, version: str, files: dict[str, str], cpus: int) -> None:
    """2.5 gives 2, half a processor gives 1, "max", -1 of version 1 and what cannot be read give no limit."""
    getattr(root, version)("/box")
    for name, text in files.items():
        root.put(name, f"{text}\n")
    assert root.host().cpus() == cpus


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
LIMIT_V1, USED_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes"
CACHE = f"active_file {2 * GIB}\ninactive_file {GIB}\nslab_reclaimable {512 * MIB}"
CACHE_V1 = f"inactive_file 4096\ntotal_inactive_file {GIB}\ntotal_active_file {2 * GIB}"
# Of each: the version and where the group is, what the files say, the total, and what can be had if they tell it.
LIMITED: dict[str, tuple[str, dict[str, str], dict[str, object], int, int | None]] = {
    "parent": ("v2", {"group": "/a/b"}, {f"{V2}/a/b/memory.max": "max", f"{V2}/a/memory.max": 8 * GIB}, 8 * GIB, None),
    "high": ("v2", {"group": "/a"}, {f"{V2}/a/memory.max": 8 * GIB, f"{V2}/a/memory.high": 6 * GIB}, 6 * GIB, None),
    "beyond": ("v2", {"group": "/a"}, {f"{V2}/a/memory.high": GIB, f"{V2}/a/memory.current": 2 * GIB}, GIB, 0),
    "2**63": ("v1", {"group": "/a/b"}, {f"{V1}/a/b/{LIMIT_V1}": NO_LIMIT_V1}, 64 * GIB, 40 * GIB),
    "a parent of 2**63": (
        "v1", {"group": "/a/b"}, {f"{V1}/a/b/{LIMIT_V1}": NO_LIMIT_V1, f"{V1}/a/{LIMIT_V1}": 4 * GIB}, 4 * GIB, None
    ),
    "more than all": ("v2", {"group": "/"}, {f"{V2}/memory.max": 99 * GIB}, 64 * GIB, 40 * GIB),
    "a container": ("v1", {"group": "/a/b", "root": "/a/b"}, {f"{V1}/{LIMIT_V1}": 2 * GIB}, 2 * GIB, None),
    "out of sight": ("v2", {"group": "/../other"}, {f"{V2}/memory.max": 2 * GIB}, 2 * GIB, None),
    "a blank": ("v2", {"group": "/", "point": "/my\\040groups"}, {"my groups/memory.max": 2 * GIB}, 2 * GIB, None),
    "caches": (
        "v2", {"group": "/"},
        {f"{V2}/memory.max": 8 * GIB, f"{V2}/memory.current": 7 * GIB, f"{V2}/memory.stat": CACHE},
        8 * GIB, 4 * GIB + 512 * MIB,
    ),
    "caches of version 1": (
        "v1", {"group": "/"},
        {f"{V1}/{LIMIT_V1}": 8 * GIB, f"{V1}/{USED_V1}": 7 * GIB, f"{V1}/memory.stat": CACHE_V1},
        8 * GIB, 4 * GIB,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LIMITED)
def test_the_lowest_limit_on_memory_counts(root: Root, case: str) -> None:
    """Whatever version says it, and wherever it says it; what can be had is the limit less what is in use.

    A parent binds; what lies above memory.high is throttled at once; 2**63 less a page is how version 1 spells none; a
    group may be allowed more than there is; where only a part of the hierarchy is mounted, or the path leads out of the
    namespace, the mount point is read, which may have a blank; caches do not count as used.
    """
    version, group, files, total, available = LIMITED[case]
    getattr(root, version)(**group)
    for name, value in files.items():
        root.put(name, f"{value}\n")
    memory = root.host().memory()
    assert memory.total_bytes == total
    assert available in (None, memory.available_bytes)


def test_the_file_system_of_a_path_is_its_innermost_mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the mounts that a path is below the longest counts, the last one at a place, and none of a similar name."""
    here = str(tmp_path)
    mounts = [("/", "ext4"), (f"{here}/grün er", "nfs4"), (f"{here}/a", "xfs"), (f"{here}/a", "tmpfs")]
    found = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: found)
    paths = ("a", "a/b", "ab", "grün er/spool")
    assert [file_system_of(f"{here}/{path}") for path in paths] == ["tmpfs", "tmpfs", "ext4", "nfs4"]


def test_the_real_machine_answers(tmp_path: Path) -> None:
    """The real files and psutil give a sane answer; the space of a directory that is gone is None, and not 0."""
    assert 1 <= Host().cpus() <= len(os.sched_getaffinity(0))
    memory = Host().memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert cgroups.find().memory.version in (1, 2)
    assert disk_free_bytes(tmp_path / "gone") is None
    assert (disk_free_bytes(tmp_path) or 0) > 0


def test_the_environment_of_a_login_is_what_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PATH and LANG come from the files of the system, USER and SHELL from the account, and none from the starter."""
    for name in ("USER", "LOGNAME", "SHELL", "LANG", "PATH"):
        monkeypatch.setenv(name, "of-the-starter")
    monkeypatch.setenv("HOME", str(tmp_path))
    try:
        account = pwd.getpwuid(os.getuid())
    except KeyError:
        pytest.skip("this user has no account, as in some containers")
    bare = {"HOME": str(tmp_path), "USER": account.pw_name, "LOGNAME": account.pw_name, "SHELL": account.pw_shell}
    bare |= {"LANG": "C.UTF-8", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    assert host.login_environment(str(tmp_path / "nothing")) == bare
    (tmp_path / "default").mkdir()
    (tmp_path / "default/locale").write_text("# LANG=no\nLANG='de_DE.UTF-8'\n")
    paths = "# ENV_PATH PATH=/no\nENV_PATH\tPATH=/of/users:/bin\nENV_SUPATH PATH=/of/root:/bin\n"
    (tmp_path / "login.defs").write_text(paths)
    path = "/of/users:/bin" if os.getuid() else "/of/root:/bin"
    assert host.login_environment(str(tmp_path)) == bare | {"LANG": "de_DE.UTF-8", "PATH": path}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('PATH="/opt/bin:/bin"\n', "/opt/bin:/bin"),
        ("export PATH=/opt/bin\n", "/opt/bin"),
        ("PATH=$HOME/bin:/bin\n", None),
        ("=x\n \n\0\nPATH\nPATH=\n", None),
        ("PATH=/a\x1b[31m\n", None),
    ],
)
def test_odd_lines_of_the_system_give_no_odd_path(tmp_path: Path, text: str, path: str | None) -> None:
    """What nobody can read as a plain setting is passed over."""
    (tmp_path / "environment").write_text(text)
    expected = path or host.login_environment(str(tmp_path / "nothing"))["PATH"]
    assert host.login_environment(str(tmp_path))["PATH"] == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("$SCRATCH/${USER}", f"/s/{this_user()}"),
        ("/a$$x", "/a$x"),  # what `$$` stands for begins no variable
        ("/$${x}", "/${x}"),
        ("/$$$HOME$", "/$/h$"),
        ("/a$-b$", "/a$-b$"),
    ],
)
def test_variables_of_a_path_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch, path: str, expected: str) -> None:
    """`env` counts, and so does what every job begins with; what the starter has does not."""
    monkeypatch.setenv("SCRATCH", "/of/the/starter")
    monkeypatch.setenv("HOME", "/h")
    assert "$SCRATCH" in (host.why_not_expanded("$SCRATCH/x", {}) or "")
    assert host.why_not_expanded(path, {"SCRATCH": "/s"}) is None
    assert host.expanded(path, {"SCRATCH": "/s"}) == expected
    assert host.expanded("~/$1", {}) == os.path.expanduser("~/")


def test_the_memory_is_the_kernels_word_or_else_psutils(tmp_path: Path) -> None:
    """`/proc/meminfo` answers by itself; psutil, which takes longer to import, where that does not say all of it."""
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:  16000000 kB\nMemFree:  1000000 kB\nMemAvailable:  9000000 kB\nHugePages: 0\n")
    assert host.host_memory(str(told)) == HostMemory(16_000_000 << 10, 9_000_000 << 10)
    real = psutil.virtual_memory().total
    assert host.host_memory().total_bytes == real
    for text in ("", "16000000 kB\n", "4 kB\nMemAvailable: 5 kB\n", "x kB\nMemAvailable: 5 kB\n"):
        told.write_text(text and f"MemTotal: {text}")
        assert host.host_memory(str(told)).total_bytes == real
    assert host.host_memory(str(tmp_path / "gone")).total_bytes == real


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
