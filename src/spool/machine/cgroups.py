"""Control groups: the limits of those around this process, and one group for each run if possible.

The limits on processors and memory are read, version 1 and version 2. A limit anywhere between this process's group and
the root of the hierarchy is in force, so all levels are read and the lowest counts. In a container only the visible
levels are read. Every file may be missing, unreadable or say "no limit": then that level sets none.

A group for each run needs version 2 and a subtree that was delegated to us: for an ordinary user one that is writable,
for root one that systemd has marked as delegated, since root can write all of them. Then the kernel enforces a run's
memory limit, reports whether it killed for it, and ends all of the run's processes at once, however they hide.
Otherwise `find_run_groups` says why, and memory is polled.

Sources: cgroups(7); proc(5) on `/proc/PID/mountinfo`; the kernel's Documentation/admin-guide/cgroup-v1/memory.rst and
cgroup-v2.rst; systemd's "Control Group APIs and Delegation" for the two kinds of directories (only leaves hold
processes) and the mark.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from spool.machine.identity import PROC

# Version 1 writes "no limit" as the largest multiple of the page size that fits 63 bits.
_UNLIMITED_BYTES = 1 << 62

_RECLAIMABLE = {
    # Page cache of the group and, in version 2, kernel caches: reclaimed before an allocation fails.
    1: ("total_inactive_file", "total_active_file"),
    2: ("inactive_file", "active_file", "slab_reclaimable"),
}
_LEAF = "dispatcher"
_DELEGATION_MARKS = ("trusted.delegate", "user.delegate")


class Levels(Struct, frozen=True):
    """The directories of one controller, from this process's own group up to the highest visible one."""

    version: int
    directories: tuple[Path, ...] = ()


class Cgroups(Struct, frozen=True):
    """The files with this process's limits. Each method reads them anew."""

    cpu: Levels
    memory: Levels

    def cpu_milli(self) -> int | None:
        """Return the lowest processor quota in thousandths of a processor, or None without one."""
        return min((quota for at in self.cpu.directories for quota in _cpu_quota(at, self.cpu.version)), default=None)

    def memory_bytes(self) -> tuple[int | None, int | None]:
        """Return the lowest memory limit, and the least room up to one, page cache counted as free; None: no limit."""
        limits, rooms = list[int](), list[int]()
        for at in self.memory.directories:
            if (limit := _memory_limit(at, self.memory.version)) is not None:
                limits.append(limit)
                if (used := _memory_used(at, self.memory.version)) is not None:
                    rooms.append(max(0, limit - used))
        return min(limits, default=None), min(rooms, default=None)


def find(root: Path = Path("/")) -> Cgroups:
    """Return the control groups of this process.

    *root* is prefixed to every path, `/proc` and the mount points alike. Without control groups no level is found.
    """
    own = _own_groups(_text(root / "proc/self/cgroup") or "")
    mounts = tuple(_mounts(_text(root / "proc/self/mountinfo") or ""))
    return Cgroups(*(_levels(root, controller, own, mounts) for controller in ("cpu", "memory")))


def _own_groups(text: str) -> dict[str, str]:
    """Return controller -> path from `/proc/self/cgroup`; the controller of version 2 has an empty name."""
    groups = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if number.isdigit() and colon:
            groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


class _Mount(Struct, frozen=True):
    root: str  # the mounted part of the hierarchy
    point: str
    version: int
    options: frozenset[str]


def _mounts(text: str) -> Iterator[_Mount]:
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if dash and len(fields) >= 5 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
            version = 2 if kind[0] == "cgroup2" else 1
            yield _Mount(_unescaped(fields[3]), _unescaped(fields[4]), version, frozenset(kind[2].split(",")))


def _levels(root: Path, controller: str, own: dict[str, str], mounts: tuple[_Mount, ...]) -> Levels:
    for mount in mounts:
        # On a hybrid machine the version 2 hierarchy exists as well, without such a controller: prefer version 1.
        if mount.version == 1 and controller in own and controller in mount.options:
            return Levels(1, _upwards(root, mount, own[controller]))
    for mount in mounts:
        if mount.version == 2 and "" in own:
            return Levels(2, _upwards(root, mount, own[""]))
    return Levels(2)


def _upwards(root: Path, mount: _Mount, group: str) -> tuple[Path, ...]:
    """Return the directory of *group* and its parents, as far up as *mount* shows."""
    top = root / mount.point.lstrip("/")
    prefix = mount.root.rstrip("/")
    inside = group[len(prefix) :] if group == prefix or group.startswith(prefix + "/") else ""
    parts = [part for part in inside.split("/") if part]
    if ".." in parts:  # a group outside this cgroup namespace
        parts = []
    return tuple(top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _cpu_quota(at: Path, version: int) -> Iterator[int]:
    if version == 2:
        quota, _, period = (_text(at / "cpu.max") or "").strip().partition(" ")
    else:
        quota, period = _text(at / "cpu.cfs_quota_us") or "", _text(at / "cpu.cfs_period_us") or ""
    taken, of = _number(quota), _number(period)  # "max" and -1 give None
    if taken is not None and of:
        yield taken * 1000 // of


def _memory_limit(at: Path, version: int) -> int | None:
    # Above memory.high every process is throttled, so that memory is not available either.
    names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    limits = (_number(_text(at / name) or "") for name in names)
    return min((limit for limit in limits if limit is not None and limit < _UNLIMITED_BYTES), default=None)


def _memory_used(at: Path, version: int) -> int | None:
    used = _number(_text(at / ("memory.current" if version == 2 else "memory.usage_in_bytes")) or "")
    counts = dict(line.split(" ", 1) for line in (_text(at / "memory.stat") or "").splitlines() if " " in line)
    cache = sum(_number(counts.get(name, "")) or 0 for name in _RECLAIMABLE[version])
    return None if used is None else max(0, used - cache)


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "surrogateescape")
    except OSError:
        return None


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() and text.isascii() else None


def _unescaped(field: str) -> str:
    """Return a field of mountinfo with its octal escapes (blank, tab, newline, backslash) undone."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


class ControlFiles:
    """The file operations of a hierarchy of control groups."""

    def read(self, path: Path) -> str:
        """Return the content of a control file. Raises OSError."""
        return path.read_text("ascii")

    def write(self, path: Path, text: str) -> None:
        """Write a value to a control file. Raises OSError if it is missing, refuses the value, or is not writable."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode("ascii"))
        finally:
            os.close(fd)

    def make(self, path: Path) -> None:
        """Create a group, unless it exists. Raises OSError."""
        path.mkdir(exist_ok=True)

    def remove(self, path: Path) -> None:
        """Remove a group without processes. Raises OSError."""
        path.rmdir()

    def delegated(self, path: Path) -> bool:
        """Whether the group was delegated to us."""
        if os.geteuid() != 0:
            return path.stat().st_uid == os.geteuid() and os.access(path / "cgroup.procs", os.W_OK)
        return any(_mark(path, name) == b"1" for name in _DELEGATION_MARKS)


class RunGroup(Struct, frozen=True):
    """The control group of one run."""

    path: Path
    files: ControlFiles

    @property
    def procs(self) -> Path:
        """The file for entering the group; the wrapper writes its pid there."""
        return self.path / "cgroup.procs"

    def pids(self) -> frozenset[int] | None:
        """Return the processes of the group; None if it cannot be read (it may have been removed)."""
        text = self._read("cgroup.procs")
        return None if text is None else frozenset(map(int, text.split()))

    def populated(self) -> bool | None:
        """Whether any process is left in the group or below it; None if that cannot be read."""
        value = self._value("cgroup.events", "populated")
        return None if value is None else value > 0

    def peak_memory_bytes(self) -> int | None:
        """Return the peak memory of the group; None on kernels before 5.19, and if it used none."""
        return _number(self._read("memory.peak") or "") or None

    def oom_kills(self) -> int | None:
        """Return how many of its processes the kernel has killed for lack of memory; None if that cannot be read."""
        return self._value("memory.events", "oom_kill")

    def cpu_time_ns(self) -> int | None:
        """Return the CPU time of all processes ever in the group; None if that cannot be read."""
        micro = self._value("cpu.stat", "usage_usec")
        return None if micro is None else micro * 1000

    def freeze(self, *, on: bool) -> bool:
        """Freeze or thaw all of its processes, including new ones; False if the kernel cannot."""
        return self._write("cgroup.freeze", "1" if on else "0")

    def frozen(self) -> bool:
        """Whether all of its processes are stopped by :meth:`freeze`."""
        return bool(self._value("cgroup.events", "frozen"))

    def kill(self) -> bool:
        """Kill every process of the group and below it; False if the kernel cannot (before 5.14)."""
        return self._write("cgroup.kill", "1")

    def remove(self) -> bool:
        """Remove the group; False while it still has processes."""
        try:
            self.files.remove(self.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _write(self, name: str, text: str) -> bool:
        try:
            self.files.write(self.path / name, text)
        except OSError:
            return False
        return True

    def _read(self, name: str) -> str | None:
        try:
            return self.files.read(self.path / name)
        except OSError:
            return None

    def _value(self, name: str, key: str) -> int | None:
        for line in (self._read(name) or "").splitlines():
            word, _, value = line.partition(" ")
            if word == key:
                return int(value)
        return None


class RunGroups(Struct, frozen=True):
    """The delegated group that contains the groups of the runs."""

    path: Path
    files: ControlFiles

    def create(self, job: str, run: int, memory_bytes: int | None, cpus: str = "") -> RunGroup | None:
        """Create the group of a run with its limits; None if the kernel does not enforce the one on memory.

        That limit is read back, because one that is silently not in force is worse than none. If it is exceeded, all
        processes of the run are killed together, and none may escape into swap. *cpus* bind the group where the cpuset
        controller was delegated too; elsewhere the affinity of the wrapper has to do.
        """
        group = RunGroup(self.path / f"{job}.{run}", self.files)
        try:
            self.files.make(group.path)
            if memory_bytes is not None:
                self._limit(group.path, memory_bytes)
        except OSError:
            group.remove()
            return None
        if cpus and self.binds_cpus():
            with contextlib.suppress(OSError):
                self.files.write(group.path / "cpuset.cpus", cpus)
        return group

    def binds_cpus(self) -> bool:
        """Whether groups of runs can have their own CPUs, which is switched on here when the first run is pinned."""
        try:
            if "cpuset" not in self.files.read(self.path / "cgroup.controllers").split():
                return False
            control = self.path / "cgroup.subtree_control"
            if "cpuset" not in self.files.read(control).split():
                self.files.write(control, "+cpuset")
        except OSError:
            return False
        return True

    def existing(self, job: str, run: int) -> RunGroup:
        """Return the group that an earlier dispatcher created for a run; it may not exist any more."""
        return RunGroup(self.path / f"{job}.{run}", self.files)

    def _limit(self, group: Path, memory_bytes: int) -> None:
        self.files.write(group / "memory.max", str(memory_bytes))
        self.files.write(group / "memory.oom.group", "1")
        with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap cannot limit it
            self.files.write(group / "memory.swap.max", "0")
        held = self.files.read(group / "memory.max").strip()
        # The kernel rounds down to whole pages.
        if not held.isdigit() or not memory_bytes - os.sysconf("SC_PAGE_SIZE") < int(held) <= memory_bytes:
            raise OSError(f"memory.max is {held}, not {memory_bytes}")


def find_run_groups(*, proc: str = PROC, files: ControlFiles | None = None) -> RunGroups | str:
    """Return the parent for groups of runs, or why there is none.

    On success this process has been moved into a leaf of its own (`dispatcher`) below its group, because a group that
    holds processes cannot give its children controllers.
    """
    files = files or ControlFiles()
    own = _own_group(Path(proc))
    if own is None:
        return "there is no cgroup version 2 hierarchy"
    # A dispatcher restarted by the same service manager may already be in its leaf.
    root = own.parent if own.name == _LEAF else own
    try:
        if not files.delegated(root):
            return f"{root} is not delegated to this user"
        if "memory" not in files.read(root / "cgroup.controllers").split():
            return f"the memory controller is not delegated to {root}"
        files.make(root / _LEAF)
        files.write(root / _LEAF / "cgroup.procs", str(os.getpid()))
    except OSError as error:
        return f"{root} cannot be used: {error.strerror or error}"
    try:
        files.write(root / "cgroup.subtree_control", "+memory")
        if "memory" in files.read(root / "cgroup.subtree_control").split():
            return RunGroups(root, files)
        why = "it does not pass on the memory controller"
    except OSError as error:  # EBUSY: it holds processes that we must not move
        why = error.strerror or str(error)
    with contextlib.suppress(OSError):
        files.write(own / "cgroup.procs", str(os.getpid()))
        if own != root / _LEAF:
            files.remove(root / _LEAF)
    return f"{root} cannot be used: {why}"


def _own_group(proc: Path) -> Path | None:
    """Return the directory of this process's group in the version 2 hierarchy, if it has one."""
    name = _own_groups(_text(proc / "self/cgroup") or "").get("")
    for mount in _mounts(_text(proc / "self/mountinfo") or ""):
        if name and mount.version == 2:
            # In a namespace or a container, the mount may show only part of the hierarchy.
            below = os.path.relpath(name, mount.root)
            if not below.startswith(".."):
                return Path(os.path.normpath(os.path.join(mount.point, below)))
    return None


def _mark(path: Path, name: str) -> bytes | None:
    try:
        return os.getxattr(path, name)
    except OSError:
        return None
