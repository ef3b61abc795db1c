"""A control group of its own for each run, where the kernel and the administrator allow it (cgroup version 2).

It needs a subtree that was delegated to us: for an ordinary user one that he may write, for root one that systemd
has marked as delegated, since root may write all of them. Then the kernel holds a run to its memory, tells whether
it had to kill for that, and ends all of its processes at once, however they hide. Everywhere else `find` says why
not, and memory is watched by polling.

Sources: cgroups(7); the kernel's Documentation/admin-guide/cgroup-v2.rst; systemd's "Control Group APIs and
Delegation" for the two kinds of directories (only leaves hold processes) and the mark.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from spool.machine.identity import PROC

_LEAF = "dispatcher"
_DELEGATION_MARKS = ("trusted.delegate", "user.delegate")


class ControlFiles:
    """The file operations that a hierarchy of control groups knows."""

    def read(self, path: Path) -> str:
        """Return the content of a control file. Raises OSError."""
        return path.read_text("ascii")

    def write(self, path: Path, text: str) -> None:
        """Give a control file a value. Raises OSError: it is not there, it refuses, we may not."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode("ascii"))
        finally:
            os.close(fd)

    def make(self, path: Path) -> None:
        """Make a group, or find it made. Raises OSError."""
        path.mkdir(exist_ok=True)

    def remove(self, path: Path) -> None:
        """Remove a group without processes. Raises OSError."""
        path.rmdir()

    def delegated(self, path: Path) -> bool:
        """Tell whether the group was handed over to us."""
        if os.geteuid() != 0:
            return path.stat().st_uid == os.geteuid() and os.access(path / "cgroup.procs", os.W_OK)
        return any(_mark(path, name) == b"1" for name in _DELEGATION_MARKS)


@dataclass(frozen=True, slots=True)
class RunGroup:
    """The control group of one run."""

    path: Path
    files: ControlFiles = field(repr=False)

    @property
    def procs(self) -> Path:
        """The file that a process enters the group by; the wrapper writes its pid there."""
        return self.path / "cgroup.procs"

    def pids(self) -> frozenset[int] | None:
        """Return the processes of the group; None if it cannot be read (it may have been removed)."""
        text = self._read("cgroup.procs")
        return None if text is None else frozenset(map(int, text.split()))

    def populated(self) -> bool | None:
        """Tell whether any process is left in the group or below it; None if that cannot be read."""
        value = self._value("cgroup.events", "populated")
        return None if value is None else value > 0

    def memory_bytes(self) -> int | None:
        """Return what the group has in memory now, page cache included; None if that cannot be read."""
        return self._number("memory.current")

    def peak_memory_bytes(self) -> int | None:
        """Return the most that it ever had; None on kernels before 5.19, which do not tell, and if it had none."""
        return self._number("memory.peak") or None

    def oom_kills(self) -> int | None:
        """Return how many of its processes the kernel has killed for memory; None if that cannot be read."""
        return self._value("memory.events", "oom_kill")

    def cpu_time_ns(self) -> int | None:
        """Return the CPU time of all that ever was in the group; None if that cannot be read."""
        micro = self._value("cpu.stat", "usage_usec")
        return None if micro is None else micro * 1000

    def kill(self) -> bool:
        """Kill every process of the group and below it; False where the kernel cannot (before 5.14)."""
        try:
            self.files.write(self.path / "cgroup.kill", "1")
        except OSError:
            return False
        return True

    def remove(self) -> bool:
        """Remove the group; False as long as a process is left in it."""
        try:
            self.files.remove(self.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _read(self, name: str) -> str | None:
        try:
            return self.files.read(self.path / name)
        except OSError:
            return None

    def _number(self, name: str) -> int | None:
        text = (self._read(name) or "").strip()
        return int(text) if text.isdigit() else None

    def _value(self, name: str, key: str) -> int | None:
        for line in (self._read(name) or "").splitlines():
            word, _, value = line.partition(" ")
            if word == key:
                return int(value)
        return None


@dataclass(frozen=True, slots=True)
class RunGroups:
    """The delegated group in which those of the runs are made."""

    path: Path
    files: ControlFiles = field(repr=False)

    def create(self, job: str, run: int, memory_bytes: int | None) -> RunGroup | None:
        """Make the group of a run and limit its memory; None if the kernel does not hold it to that.

        A limit that is silently not in force is worse than none, so it is read back. All processes of the run are
        killed together when it is exceeded, and none may escape into the swap.
        """
        group = RunGroup(self.path / f"{job}.{run}", self.files)
        try:
            self.files.make(group.path)
            if memory_bytes is not None:
                self._limit(group.path, memory_bytes)
        except OSError:
            group.remove()
            return None
        return group

    def existing(self, job: str, run: int) -> RunGroup:
        """Return the group that an earlier dispatcher has made for a run; its files tell whether it is there."""
        return RunGroup(self.path / f"{job}.{run}", self.files)

    def _limit(self, group: Path, memory_bytes: int) -> None:
        self.files.write(group / "memory.max", str(memory_bytes))
        self.files.write(group / "memory.oom.group", "1")
        with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap has none to limit
            self.files.write(group / "memory.swap.max", "0")
        held = self.files.read(group / "memory.max").strip()
        # The kernel rounds down to whole pages.
        if not held.isdigit() or not memory_bytes - os.sysconf("SC_PAGE_SIZE") < int(held) <= memory_bytes:
            raise OSError(f"memory.max is {held}, not {memory_bytes}")


def find(*, proc: str = PROC, files: ControlFiles | None = None) -> RunGroups | str:
    """Return where groups for runs can be made, or why they cannot.

    If they can, this process has been moved into a leaf of its own (`dispatcher`) below its group, for a group that
    holds processes cannot give its children controllers.
    """
    files = files or ControlFiles()
    own = _own_group(proc)
    if own is None:
        return "there is no cgroup version 2 hierarchy"
    # A dispatcher that was started again by the same service manager may find itself in its leaf already.
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
        why = "it does not pass the memory controller on"
    except OSError as error:  # EBUSY: it holds processes that are not ours to move
        why = error.strerror or str(error)
    with contextlib.suppress(OSError):
        files.write(own / "cgroup.procs", str(os.getpid()))
        if own != root / _LEAF:
            files.remove(root / _LEAF)
    return f"{root} cannot be used: {why}"


def _own_group(proc: str) -> Path | None:
    """Return the directory of this process's group in the version 2 hierarchy, if it has one."""
    try:
        lines = Path(proc, "self/cgroup").read_text("utf-8", "surrogateescape").splitlines()
        mounts = Path(proc, "self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    name = next((line.removeprefix("0::") for line in lines if line.startswith("0::/")), None)
    if name is None:
        return None
    for mount in mounts:
        fields, _, filesystem = mount.partition(" - ")
        if filesystem.startswith("cgroup2 "):
            root, point = (_unescape(field) for field in fields.split()[3:5])
            # Seen from a namespace or a container, the mount may show a part of the hierarchy only.
            below = os.path.relpath(name, root)
            if not below.startswith(".."):
                return Path(os.path.normpath(os.path.join(point, below)))
    return None


def _unescape(text: str) -> str:
    r"""Return a path of mountinfo: white space and backslashes stand there as \040 and the like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _mark(path: Path, name: str) -> bytes | None:
    try:
        return os.getxattr(path, name)
    except OSError:
        return None
