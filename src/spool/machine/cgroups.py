"""What the control groups around this process allow it: processors and memory, version 1 and version 2.

A limit anywhere between this process's group and the root of the hierarchy holds, so all levels are read and the
lowest counts. In a container the upper levels cannot be seen; what can be seen is read. Every file may be missing,
unreadable or say "no limit": then that level says nothing.

Source of the file formats: cgroups(7), proc(5) on `/proc/PID/mountinfo`, and the kernel's
Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Version 1 writes "no limit" as the largest multiple of the page size that fits 63 bits.
_UNLIMITED_BYTES = 1 << 62

_RECLAIMABLE = {
    # The page cache of the group and, in version 2, the kernel's caches: given back before anything is refused.
    1: ("total_inactive_file", "total_active_file"),
    2: ("inactive_file", "active_file", "slab_reclaimable"),
}


@dataclass(frozen=True, slots=True)
class Levels:
    """The directories of one controller, from this process's own group up to the highest that can be seen."""

    version: int
    directories: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where this process's limits are written. Reads nothing by itself; the methods read anew each time."""

    cpu: Levels
    memory: Levels

    def cpu_milli(self) -> int | None:
        """Return the lowest processor quota in thousandths of a processor, or None without one."""
        return min((quota for at in self.cpu.directories for quota in _cpu_quota(at, self.cpu.version)), default=None)

    def memory_limit_bytes(self) -> int | None:
        """Return the lowest memory limit, or None without one."""
        return min(
            (limit for at in self.memory.directories for limit in _limits(at, self.memory.version)), default=None
        )

    def memory_available_bytes(self) -> int | None:
        """Return what can still be taken before a limit is reached, page cache counted as free; None: no limit."""
        rooms = (_room(at, self.memory.version) for at in self.memory.directories)
        return min((room for room in rooms if room is not None), default=None)


def find(root: Path = Path("/")) -> Cgroups:
    """Return where the control groups of this process are.

    *root* is put before every path, `/proc` and the mount points alike. Without control groups no level is found.
    """
    own = _own_groups(_text(root / "proc/self/cgroup") or "")
    mounts = tuple(_mounts(_text(root / "proc/self/mountinfo") or ""))
    return Cgroups(*(_levels(root, controller, own, mounts) for controller in ("cpu", "memory")))


def _own_groups(text: str) -> dict[str, str]:
    """Return controller -> path from `/proc/self/cgroup`; version 2 is the controller with the empty name."""
    groups = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if number.isdigit() and colon:
            groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


@dataclass(frozen=True, slots=True)
class _Mount:
    root: str  # which part of the hierarchy is mounted
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
        # On a hybrid machine the version 2 hierarchy exists beside version 1 and has no such controller: 1 goes first.
        if mount.version == 1 and controller in own and controller in mount.options:
            return Levels(1, _upwards(root, mount, own[controller]))
    for mount in mounts:
        if mount.version == 2 and "" in own:
            return Levels(2, _upwards(root, mount, own[""]))
    return Levels(2)


def _upwards(root: Path, mount: _Mount, group: str) -> tuple[Path, ...]:
    """Return the directory of *group* and those above it, as far up as *mount* shows."""
    top = root / mount.point.lstrip("/")
    prefix = mount.root.rstrip("/")
    inside = group[len(prefix) :] if group == prefix or group.startswith(prefix + "/") else ""
    parts = [part for part in inside.split("/") if part]
    if ".." in parts:  # a group outside of what this cgroup namespace shows
        parts = []
    return tuple(top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _cpu_quota(at: Path, version: int) -> Iterator[int]:
    if version == 2:
        quota, _, period = (_text(at / "cpu.max") or "").strip().partition(" ")
    else:
        quota, period = _text(at / "cpu.cfs_quota_us") or "", _text(at / "cpu.cfs_period_us") or ""
    taken, of = _number(quota), _number(period)  # "max" and -1 are no number of ours
    if taken is not None and of:
        yield taken * 1000 // of


def _limits(at: Path, version: int) -> Iterator[int]:
    # Above memory.high everything is throttled until it is back below: nothing to give out either.
    for name in ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",):
        limit = _number(_text(at / name) or "")
        if limit is not None and limit < _UNLIMITED_BYTES:
            yield limit


def _room(at: Path, version: int) -> int | None:
    limit = min(_limits(at, version), default=None)
    used = _number(_text(at / ("memory.current" if version == 2 else "memory.usage_in_bytes")) or "")
    if limit is None or used is None:
        return None
    counts = dict(line.split(" ", 1) for line in (_text(at / "memory.stat") or "").splitlines() if " " in line)
    cache = sum(_number(counts.get(name, "")) or 0 for name in _RECLAIMABLE[version])
    return max(0, limit - max(0, used - cache))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() and text.isascii() else None


def _unescaped(field: str) -> str:
    """Return a field of mountinfo with its octal escapes (blank, tab, newline, backslash) undone."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
