"""Processors, memory, disk and users of the machine, the part that this process may use, and whether it is shared.

A dispatcher in a container or under a service manager's limits shares a large machine. Only the resources that its jobs
can really get count, so the affinity mask and the limits of the control groups apply.

The cores that runs may be pinned to are those that the kernel shows below `/sys/devices/system`: the siblings of each
hardware thread, and the NUMA nodes. What cannot be read is a core of its own, on node 0. Sources: the kernel's
Documentation/admin-guide/cputopology.rst and Documentation/ABI/stable/sysfs-devices-node.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from spool.core.errors import shown
from spool.core.model import NVIDIA, Core
from spool.core.units import cpus_in
from spool.formats.capabilities import GpuVendor, capabilities
from spool.machine import cgroups

PCI = "/sys/bus/pci/devices"
NO_CARD = "this machine has no NVIDIA card"
_DISPLAY = ("0x03",)  # the class of display controllers: a card's audio and USB are devices of their own
_OF_NVIDIA = (NVIDIA, "0x10de", _DISPLAY, "the driver's library, libnvidia-ml.so.1")
_SHARED = ("nfs", "cifs", "smb", "9p", "lustre", "ceph", "gluster", "beegfs", "gpfs", "afs", "fuse.")


class HostMemory(Struct, frozen=True):
    """The memory of the whole machine."""

    total_bytes: int
    available_bytes: int  # without swapping


def umask() -> int:
    """Return the umask of this process."""
    with suppress(OSError), open("/proc/self/status", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    found = os.umask(0o077)  # a kernel before 4.7
    os.umask(found)
    return found


def disk_free_bytes(directory: Path) -> int | None:
    """Return the bytes that an ordinary user can still write beside *directory*; None if unknown."""
    try:
        at = os.statvfs(directory)
    except OSError:
        return None
    return at.f_bavail * at.f_frsize


def file_system_of(path: str) -> str:
    """Return the type of the file system that holds *path*, "" if it cannot be told."""
    import psutil  # type: ignore[import-untyped]  # 10 ms that most commands need not pay

    real, best, kind = os.path.realpath(path), "", ""
    with suppress(OSError):
        for mount in psutil.disk_partitions(all=True):
            point = mount.mountpoint
            if f"{real}/".startswith(point.rstrip("/") + "/") and len(point) >= len(best):
                best, kind = point, mount.fstype
    return kind


def reset_io_priority() -> None:
    """Give this process the I/O priority that its niceness implies, as after a login."""
    import psutil

    with suppress(OSError, psutil.Error):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_NONE)


def is_shared_between_hosts(file_system: str) -> bool:
    """Whether files on such a file system may be changed by another host, without a file event here."""
    return file_system.startswith(_SHARED)


def is_mounted_noexec(path: str) -> bool:
    """Whether the file system of *path* is mounted noexec. Raises OSError."""
    return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)


class _LocalZone(tzinfo):
    """The zone of this process. An instant that is moved into it gets the offset of that day."""

    def fromutc(self, moment: datetime) -> datetime:
        return moment.replace(tzinfo=UTC).astimezone()

    def utcoffset(self, moment: datetime | None) -> None: ...
    def dst(self, moment: datetime | None) -> None: ...
    def tzname(self, moment: datetime | None) -> None: ...


LOCAL_ZONE = _LocalZone()
"""The time zone of this process, for instants to show, with its changes to and from summer time."""


def usable_cpus() -> set[int]:
    """Return the processors that this process may run on; a command in a pinned job is told those beside it as well."""
    own = os.sched_getaffinity(0)
    if "SPOOL_CPU_LIST" not in os.environ:
        return own
    try:
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))  # as far as its cpuset lets it
        return os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, own)


def host_memory(meminfo: str = "/proc/meminfo") -> HostMemory:
    """Return the machine's memory as the kernel counts it (`MemTotal`, `MemAvailable`)."""
    with suppress(OSError, ValueError), open(meminfo, encoding="utf-8") as file:
        said = {key: value.split() for key, _, value in (line.partition(":") for line in file)}
        total, available = (said.get(key, []) for key in ("MemTotal", "MemAvailable"))
        if total[1:] == available[1:] == ["kB"] and int(available[0]) <= int(total[0]):
            return HostMemory(int(total[0]) << 10, int(available[0]) << 10)
    # A kernel before 3.14, or a container that shows a false total.
    import psutil

    memory = psutil.virtual_memory()
    return HostMemory(memory.total, memory.available)


class Host:
    """The processors and the memory around this process.

    The control groups are located once; their values are read at each call. *root* is prefixed to the path of every
    file that is read.
    """

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        affinity: Callable[[], int] = lambda: len(usable_cpus()),
        memory: Callable[[], HostMemory] = host_memory,
    ) -> None:
        self._root = root
        self._cgroups = cgroups.find(root)
        self._affinity = affinity
        self._memory = memory

    def cores(self) -> tuple[Core, ...]:
        """Return the cores that this process, and so a run, may use."""
        return read_cores(usable_cpus(), self._root)

    def cpus(self) -> int:
        """Return the number of whole processors that can be used at once, at least 1: a quota of 2.5 is 2."""
        quota_milli = self._cgroups.cpu_milli()
        cpus = self._affinity()
        return max(1, cpus if quota_milli is None else min(cpus, quota_milli // 1000))

    def memory(self) -> HostMemory:
        """Return the total and available memory: of the machine or of a control group, whichever is less."""
        host = self._memory()
        limit, room = self._cgroups.memory_bytes()
        return HostMemory(
            host.total_bytes if limit is None else min(host.total_bytes, limit),
            host.available_bytes if room is None else min(host.available_bytes, room),
        )


_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEFAULT_LANG = "C.UTF-8"
_MOST_SETTINGS = 1 << 16  # no file of settings is larger


def login_environment(etc: str = "/etc") -> dict[str, str]:
    """Return the initial environment of every job: that of a login, independent of how this process was started.

    PATH and LANG come from the files in *etc*, as for a login. HOME is the meaning of `~` in this process.
    """
    return {"HOME": os.path.expanduser("~"), **_login(etc, os.getuid())}


@lru_cache(maxsize=4)
def _login(etc: str, uid: int) -> dict[str, str]:
    user, shell = str(uid), ""
    with suppress(KeyError):  # a container may run under a number that no account has
        account = pwd.getpwuid(uid)
        user, shell = account.pw_name, account.pw_shell
    if not shell or os.path.basename(shell) in ("nologin", "false"):
        shell = "/bin/sh"
    said = _settings_of(f"{etc}/environment")
    locale = _settings_of(f"{etc}/locale.conf") | _settings_of(f"{etc}/default/locale")
    path = _settings_of(f"{etc}/login.defs").get("ENV_PATH" if uid else "ENV_SUPATH")
    return {
        "USER": user,
        "LOGNAME": user,
        "SHELL": shell,
        "LANG": locale.get("LANG") or said.get("LANG") or _DEFAULT_LANG,
        "PATH": said.get("PATH") or path or _DEFAULT_PATH,
    }


def _settings_of(path: str) -> dict[str, str]:
    """Return the lines `KEY=VALUE` of a system file, and those like `ENV_PATH PATH=VALUE`.

    A value may be quoted. A value that refers to other variables is skipped: nothing expands it.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read(_MOST_SETTINGS).splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        before, equals, value = line.strip().partition("=")
        words = before.split()
        value = value.strip().strip("\"'")
        if equals and words and value.isprintable() and not line.lstrip().startswith("#") and "$" not in value:
            found[words[1] if words[0] == "export" and len(words) == 2 else words[0]] = value
    return found


_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\}|(\$))", re.ASCII)  # as `os.path.expandvars` reads it; `$$` is `$`


def expanded(path: str, env: Mapping[str, str]) -> str:
    """Return *path* of a job file, with `~` and the variables of a job with that *env* expanded."""
    return os.path.expanduser(_VARIABLE.sub(lambda found: _value_of(found, env) or "", path))


def why_not_expanded(path: str, env: Mapping[str, str]) -> str | None:
    """Return why *path* of a job file cannot be expanded: it refers to an unknown variable or user.

    The variables are those of a job with that *env*.
    """
    for match in _VARIABLE.finditer(path):
        if _value_of(match, env) is None:
            return f"{shown(match[0])} is not set for this job; set it in `env`, or write the path out"
    place = _VARIABLE.sub(lambda found: _value_of(found, env) or "", path)
    if place.startswith("~") and os.path.expanduser(place).startswith("~"):
        return f"there is no user {shown(place.partition('/')[0][1:])} on this machine; write the path out"
    return None


def _value_of(variable: re.Match[str], env: Mapping[str, str]) -> str | None:
    if variable[3]:
        return "$"
    name = variable[1] or variable[2] or ""
    return env[name] if name in env else login_environment().get(name)


def read_cores(allowed: Iterable[int], root: Path = Path("/")) -> tuple[Core, ...]:
    """Return the cores with CPUs among *allowed*, ordered by their first CPU.

    *root* is prefixed to the path of every file that is read.
    """
    usable = set(allowed)
    system = root / "sys/devices/system"
    online = _cpus_of(system / "node/online")
    nodes = {cpu: node for node in online for cpu in _cpus_of(system / f"node/node{node}/cpulist")}
    cores, seen = list[Core](), set[int]()
    for cpu in sorted(usable):
        if cpu not in seen:
            siblings = _cpus_of(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
            core = {cpu, *usable.intersection(siblings)} - seen
            seen |= core
            cores.append(Core(tuple(sorted(core)), nodes.get(cpu, 0)))
    return tuple(cores)


def _cpus_of(path: Path) -> tuple[int, ...]:
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


@contextmanager
def pinned(cpus: str) -> Iterator[None]:
    """Pin this thread, and so the children that it starts meanwhile. Raises OSError."""
    before = os.sched_getaffinity(0)
    try:
        pin(0, cpus)
        yield
    finally:
        os.sched_setaffinity(0, before)


def unlisted_cards(pci: str = PCI, *, listed: Collection[str] = ()) -> str:
    """Return what is wrong with the cards on the bus that no driver lists; "" if there are none.

    *listed* are the vendors whose driver lists GPUs.
    """
    try:
        devices = os.listdir(pci)
    except OSError:
        return ""
    found = [(_text_of(f"{pci}/{device}/vendor"), _text_of(f"{pci}/{device}/class")) for device in devices]
    for name, number, classes, library in (_OF_NVIDIA, *((each.name, *each.on_the_bus) for each in _vendors())):
        cards = sum(vendor == number and kind.startswith(classes) for vendor, kind in found)
        if cards and name not in listed:
            they = f"1 {name} card is" if cards == 1 else f"{cards} {name} cards are"
            return f"{they} on the PCI bus, but {library}, is missing or lists none"
    return ""


def vendors_here(environment: Mapping[str, str] | None = None) -> tuple[GpuVendor, ...]:
    """Return the vendors beside NVIDIA whose GPUs may be here: one of their signs is."""
    variables = os.environ if environment is None else environment
    return tuple(
        vendor
        for vendor in _vendors()
        if any(sign[1:] in variables if sign.startswith("$") else os.path.exists(sign) for sign in vendor.signs)
    )


def _vendors() -> list[GpuVendor]:
    return [capability.gpus for capability in capabilities() if capability.gpus is not None]


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


MACHINE_FILE = "/etc/spool/machine.toml"
SHARED_DIRECTORY = "/run/spool"

NO_ASKING = "the part of spool that asks its arbiter is missing"
"""Why nothing starts on a shared machine where the capability that asks for leases is not there."""
NO_ASKING_REMEDY = 'install all of spool; or `machine = "off"` in config.toml starts jobs without asking'


def shared_directory(setting: str) -> str | None:
    """Return the directory of the arbiter by the key `machine`; None: the machine is not shared.

    With "auto" only the proven absence of the machine's file means that.
    """
    if setting == "off":
        return None
    if setting != "auto":
        return os.path.normpath(os.path.expanduser(setting))
    try:
        os.stat(MACHINE_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass  # it is there, and cannot be looked at
    return SHARED_DIRECTORY
