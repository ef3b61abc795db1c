"""What may be wrong with the machine around a spool: its clock, limits, room, systemd, GPUs, programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator

from spool.client.autostart import UNIT, unit_for
from spool.core import layout
from spool.core.errors import SpoolError
from spool.core.model import SECOND_NS
from spool.core.units import show_size
from spool.dispatcher.doctor import Finding, Level, configuration, good
from spool.dispatcher.hookcheck import examine_hooks
from spool.dispatcher.messengers import examine_messengers
from spool.dispatcher.survey import machine_now
from spool.executors import by_name
from spool.machine.host import file_system_of, is_shared_between_hosts, this_user
from spool.store.spool import Spool

_FEW_WATCHES = 64
_INOTIFY = "/proc/sys/fs/inotify"


def examine_machine(root: str) -> Iterator[Finding]:
    """Check the machine for the spool at *root*."""
    yield from _clock(root)
    yield from _file_system(root)
    yield from _room(root)
    yield from _inotify()
    yield from _executor(root)
    yield from _systemd(root)
    yield from _gpus(root)
    yield from examine_messengers(root)
    yield from examine_hooks(root)


def _file_system(root: str) -> Iterator[Finding]:
    kind = file_system_of(root)
    if is_shared_between_hosts(kind):
        text = f"{kind}: changes made on other hosts raise no event, and are seen after some seconds"
        yield Finding("disk type", Level.WARN, text, "a local disk is faster and safer")
    else:
        yield good("disk type", kind or "unknown")


def _room(root: str) -> Iterator[Finding]:
    found = os.statvfs(root)
    free_bytes = found.f_bavail * found.f_frsize
    floor = configuration(root).policy.disk_floor_bytes
    text = f"{show_size(free_bytes)} free; below {show_size(floor)} nothing starts"
    if free_bytes < floor:
        yield Finding("room", Level.FAIL, text, "`spool gc`, or a lower disk_floor in config.toml")
    elif free_bytes < 2 * floor:
        yield Finding("room", Level.WARN, text, "`spool gc`")
    else:
        yield good("room", text)
    if found.f_files and found.f_favail < 10_000:
        text = f"{found.f_favail} files more can be made; a run needs about ten"
        yield Finding("room for files", Level.WARN, text, "`spool gc`")


def _inotify() -> Iterator[Finding]:
    instances, watches = _number("max_user_instances"), _number("max_user_watches")
    if instances is None or watches is None:
        yield Finding("inotify", Level.WARN, "this kernel raises no file events", "spool looks every second instead")
        return
    used = _inotify_instances_used()
    text = f"{used} of {instances} instances in use, {watches} watches allowed"
    if used + 2 > instances or watches < _FEW_WATCHES:
        remedy = "sysctl fs.inotify.max_user_instances=1024 fs.inotify.max_user_watches=524288"
        yield Finding("inotify", Level.WARN, text, remedy)
    else:
        yield good("inotify", text)


def _number(name: str) -> int | None:
    try:
        with open(f"{_INOTIFY}/{name}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _inotify_instances_used() -> int:
    """Return how many inotify instances our processes have."""
    used = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                used += os.readlink(f"/proc/{pid}/fd/{fd}") == "anon_inode:inotify"
        except OSError:
            continue
    return used


def _executor(root: str) -> Iterator[Finding]:
    name = configuration(root).executor
    try:
        problem = by_name(name).unavailable()
    except SpoolError as error:
        problem = str(error)
    if problem is not None:
        yield Finding("executor", Level.FAIL, f"{name}: {problem}", "install it, or set another executor")
    else:
        yield good("executor", f"{name} can be used")


def _systemd(root: str) -> Iterator[Finding]:
    """Say what becomes of jobs when the user logs out."""
    if not os.path.isdir("/run/systemd/system"):
        yield good("systemd", "does not run here; jobs outlive your sessions")
        return
    unit = unit_for(root)
    text = f"{UNIT} is installed" if unit is not None else f"{UNIT} is not installed; `spool submit` starts a process"
    yield good("systemd", text)
    if shutil.which("loginctl") is None:
        return
    try:
        words = ["loginctl", "show-user", this_user(), "--property=Linger", "--value"]
        said = subprocess.run(words, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return
    if said == "yes":
        yield good("linger", "on: jobs outlive your last session")
    else:
        text = "off: systemd may end your jobs when your last session ends"
        yield Finding("linger", Level.WARN, text, "loginctl enable-linger")


def _gpus(root: str) -> Iterator[Finding]:
    machine = machine_now(Spool(root), time.time_ns())  # as every other command sees them
    if machine.gpu_problem is not None:
        yield Finding("GPUs", Level.FAIL, machine.gpu_problem, "does nvidia-smi work?")
        return
    names = sorted({gpu.name for gpu in machine.gpus})
    yield good("GPUs", f"{len(machine.gpus)}: {', '.join(names)}" if names else "none")
    for gpu in machine.gpus:
        if gpu.problem is not None:
            yield Finding(
                "GPUs", Level.WARN, f"GPU {gpu.index} ({gpu.uuid}): {gpu.problem}", "nothing new starts on it"
            )


def _clock(root: str) -> Iterator[Finding]:
    now = time.time_ns()
    late = []
    for name in (layout.HISTORY, layout.STATE):
        try:
            if os.stat(f"{root}/{name}").st_mtime_ns - now > 60 * SECOND_NS:
                late.append(name)
        except OSError:
            continue
    if late:
        text = f"{', '.join(late)} were written in the future: the clock was set back"
        yield Finding("clock", Level.WARN, text, "is the time right, and kept so (NTP)?")
    elif time.gmtime().tm_year < 2024:
        yield Finding("clock", Level.FAIL, f"it says {time.strftime('%Y-%m-%d')}", "set the clock")
    else:
        yield good("clock", time.strftime("%Y-%m-%d %H:%M:%S %Z"))
