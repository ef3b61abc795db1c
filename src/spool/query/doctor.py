"""What may be wrong with a spool, and what to do about it; and with the machine around it.

Of the machine: its clock, limits, room, systemd, GPUs, programs, and whom it is to tell of things.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec

from spool.client.autostart import UNIT, unit_for
from spool.client.submit import make_spool
from spool.core import layout
from spool.core.errors import InvalidConfig, SpoolError
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.lifecycle import Verdict
from spool.core.model import SECOND_NS
from spool.core.units import show_duration, show_size
from spool.executors import by_name
from spool.formats import config
from spool.formats.config import Config
from spool.formats.state import parse_state
from spool.listeners import transports
from spool.listeners.discovery import find_hooks
from spool.listeners.message import UndeliveredError, has_secret, masked
from spool.listeners.metrics import NOT_INSTALLED
from spool.listeners.notifications import expanded, who_else_reads
from spool.machine.host import file_system_of, is_shared_between_hosts, this_user
from spool.machine.processes import MachineProber
from spool.query.jobs import STALE_NS
from spool.query.snapshot import machine_now
from spool.store.disk import Disk, read_file, remedy_for
from spool.store.lock import Service
from spool.store.spool import Forbearing, Spool, read_bytes

_STALE_S = 3600


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `remedy` says what to do; `fixed` is what was done about it."""

    check: str
    level: Level
    text: str
    remedy: str = ""
    fixed: bool = False


def good(check: str, text: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(check, Level.OK, text)


def examine(root: str, *, fix: bool) -> Iterator[Finding]:
    """Check the spool at *root*; with *fix* put right what can be put right without a risk."""
    yield from _directories(root, fix=fix)
    if not os.path.isdir(f"{root}/{QUEUED}"):
        return
    spool = Forbearing(root)
    checks = [_modes, _one_file_system]
    if os.path.isdir(spool.layout.at(layout.STAGING)):  # no look makes what is missing
        checks += [_moves, _leases, _staging]
    for check in (*checks, _complaints, _configuration, _dispatcher, _jobs, _runs):
        name = check.__name__.strip("_").replace("_", " ")
        try:
            yield from check(spool, fix)
        except OSError as error:
            where = f"{error.filename}: " if error.filename is not None else ""
            yield Finding(name, Level.FAIL, f"cannot be checked: {where}{error.strerror}", remedy_for(error))
    for path, unread in spool.unread.items():
        yield Finding("reading", Level.FAIL, f"cannot read {path}: {unread.strerror}", remedy_for(unread))


def configuration(root: str) -> Config:
    """Return the configuration in force, the defaults if it is broken."""
    try:
        return config.parse(read_bytes(f"{root}/{layout.CONFIG}") or b"")
    except InvalidConfig:
        return Config()


def _directories(root: str, *, fix: bool) -> Iterator[Finding]:
    there = _there(root)
    missing = [name for name in layout.DIRECTORIES if name not in there]
    if not missing:
        yield good("directories", f"the spool is in {root}")
        return
    if fix:
        make_spool(root)
        yield Finding("directories", Level.WARN, f"{root} lacked {', '.join(missing)}; made now", fixed=True)
        return
    what = f"{', '.join(missing)} {_are(missing)} missing" if there else "there is no spool"
    yield Finding("directories", Level.FAIL, f"{root}: {what}", "`spool init` makes what is missing")


def _there(root: str) -> list[str]:
    return [name for name in layout.DIRECTORIES if os.path.isdir(f"{root}/{name}")]


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _modes(spool: Spool, fix: bool) -> Iterator[Finding]:
    me = os.getuid()
    bad = False
    for name in ("", *_there(spool.root)):
        path = spool.layout.at(name).rstrip("/")
        status = os.stat(path)
        if status.st_uid != me:
            bad = True
            yield Finding("owner", Level.FAIL, f"{path} is not yours", f"chown {me} {path}, or use your own spool")
        elif status.st_mode & 0o022:
            bad = True
            if fix:
                os.chmod(path, 0o700)
            text = f"{path} can be written by others, who could run anything as you"
            yield Finding("mode", Level.FAIL, text, f"chmod 700 {path}", fixed=fix)
    if not bad:
        open_ = stat.S_IMODE(os.stat(spool.root).st_mode) & 0o077
        yield (
            Finding("mode", Level.WARN, f"{spool.root} can be read by others", f"chmod 700 {spool.root}")
            if open_
            else good("mode", "only you can look into it")
        )


def _one_file_system(spool: Spool, fix: bool) -> Iterator[Finding]:
    devices = {name: os.stat(spool.layout.at(name)).st_dev for name in _there(spool.root)}
    apart = [name for name, device in devices.items() if device != devices[QUEUED]]
    if apart:
        text = f"{', '.join(apart)} {_are(apart)} on another file system than {QUEUED}, so that files cannot be moved"
        yield Finding("file system", Level.FAIL, text, "keep the whole spool on one file system")
    else:
        yield good("file system", "the whole spool is on one file system")


def _moves(spool: Spool, fix: bool) -> Iterator[Finding]:
    """Do what a submission and a start do: create, link, rename, sync."""
    disk = Disk(spool.layout.at(layout.STAGING))
    there = f"{spool.layout.at(QUEUED)}/.doctor.{os.getpid()}"
    begun = time.monotonic_ns()
    try:
        staged = disk.staged(b"\n", durable=True)
        try:
            disk.link(staged, there)
            disk.rename(there, staged)
            disk.sync_directory(spool.layout.at(QUEUED))
        finally:
            disk.discard(there)
            disk.discard(staged)
    except OSError as error:
        remedy = "a file system without hard links cannot hold a spool" if error.errno in (errno.EPERM, 95) else ""
        yield Finding("moves", Level.FAIL, f"files cannot be made, linked and moved: {error.strerror}", remedy)
        return
    took_ms = (time.monotonic_ns() - begun) / 1e6
    yield good("moves", f"files can be made, linked and moved ({took_ms:.1f} ms with two syncs)")


def _leases(spool: Spool, fix: bool) -> Iterator[Finding]:
    disk = Disk(spool.layout.at(layout.STAGING))
    staged = disk.staged(b"\n")
    fd = os.open(staged, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        works = True
    except OSError:
        works = False
    finally:
        os.close(fd)
        disk.discard(staged)
    if works:
        yield good("leases", "the kernel tells whether somebody is still writing a file")
    else:
        text = "no leases here: a dropped file counts as whole when it has not changed for 0.3 s"
        yield Finding("leases", Level.WARN, text, "write into .tmp/ and mv from there")


def _staging(spool: Spool, fix: bool) -> Iterator[Finding]:
    disk = Disk(spool.layout.at(layout.STAGING))
    stale = []
    with os.scandir(disk.staging) as entries:
        for entry in entries:
            pid = entry.name.split(".", 1)[0]
            old = time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_S
            if pid.isdecimal() and old and not os.path.exists(f"/proc/{pid}"):
                stale.append(entry)
    if not stale:
        yield good("staging", "nothing was left behind in .tmp/")
        return
    stays = [error for entry in stale for error in disk.removing(entry.path) if error is not None] if fix else []
    text = f"{len(stale)} files in .tmp/ were left behind by processes that are no more"
    remedy = "`spool doctor --fix` removes them"
    if stays:
        remedy = f"{stays[0].filename}: {stays[0].strerror}; remove it by hand"
    yield Finding("staging", Level.WARN, text, remedy, fixed=fix and not stays)


def _complaints(spool: Spool, fix: bool) -> Iterator[Finding]:
    tail = layout.JOB_SUFFIX + layout.ERROR_SUFFIX
    for place in (QUEUED, HELD):
        path = spool.layout.at(place)
        for file in os.listdir(path) if os.path.isdir(path) else ():
            name = file.removesuffix(tail)
            if file.endswith(tail) and not os.path.lexists(spool.layout.job_file(place, name)):
                if fix:
                    Disk(spool.layout.at(layout.STAGING)).discard(spool.layout.error_file(place, name))
                text = f"{place}/{file} speaks of a job that is not there"
                yield Finding("complaints", Level.WARN, text, "remove it", fixed=fix)


def _configuration(spool: Spool, fix: bool) -> Iterator[Finding]:
    data = read_file(spool.layout.at(layout.CONFIG))
    if data is None:
        yield good("configuration", "none: the defaults are in force")
        return
    try:
        config.parse(data)
    except InvalidConfig as error:
        remedy = f"mend {spool.layout.at(layout.CONFIG)}; `spool check` reads it too"
        for problem in error.problems:
            yield Finding("configuration", Level.FAIL, problem.message, remedy)
        return
    yield good("configuration", "config.toml is valid")


def _dispatcher(spool: Spool, fix: bool) -> Iterator[Finding]:
    service = spool.service()
    if spool.paused:
        yield Finding("pause", Level.WARN, "the spool is paused: nothing starts", "`spool resume`")
    path = spool.layout.at(layout.STATE)
    if service is Service.NONE:
        waits = spool.names(QUEUED) or spool.names(RUNNING)
        text = "no dispatcher runs" + (", and jobs wait or run" if waits else "; nothing waits")
        level = Level.WARN if waits else Level.OK
        yield Finding("dispatcher", level, text, "`spool dispatch`, or the next `spool submit`, starts one")
        return
    data = spool.file(layout.STATE)
    state = parse_state(data) if data else None
    if service is Service.ASTRAY:
        who = f"the dispatcher with pid {state.pid}" if state is not None else "a dispatcher"
        text = f"somebody has deleted or replaced .lock, and {who} lives"
        yield Finding("lock", Level.WARN, text, "it makes .lock anew at its next look; look again")
    try:
        silent_ns = time.time_ns() - os.stat(path).st_mtime_ns
    except OSError:
        silent_ns = 0
    if state is None:
        yield Finding("dispatcher", Level.WARN, "one holds the lock and has not said anything yet", "look again")
    elif silent_ns > STALE_NS:
        text = f"pid {state.pid} holds the lock and has been silent for {show_duration(silent_ns)}"
        yield Finding("dispatcher", Level.FAIL, text, f"is it stopped? its jobs survive `kill -9 {state.pid}`")
    else:
        yield good("dispatcher", f"pid {state.pid} on {state.host} serves this spool")
        for problem in state.problems:
            yield Finding("dispatcher", Level.WARN, problem)


def _jobs(spool: Spool, fix: bool) -> Iterator[Finding]:
    tail = layout.JOB_SUFFIX + layout.ERROR_SUFFIX
    bad = [
        name
        for place in (QUEUED, HELD)
        for name in spool.names(place)
        if os.path.lexists(f"{spool.layout.at(place)}/{name}{tail}")
    ]
    if bad:
        text = f"{len(bad)} job files cannot be used: {', '.join(sorted(bad)[:5])}"
        yield Finding("job files", Level.WARN, text, "`spool show NAME` says what is wrong with one")
    else:
        waiting, held = len(spool.names(QUEUED)), len(spool.names(HELD))
        yield good("job files", f"{waiting} wait, {held} are held, {len(spool.names(RUNNING))} run")


def _runs(spool: Spool, fix: bool) -> Iterator[Finding]:
    """Look for runs that nobody has settled."""
    prober = MachineProber()
    running = set(spool.names(RUNNING))
    problems = 0
    for name in running | set(spool.names(DONE)):
        run = spool.latest_run(name)
        if run is None:
            if name in running:
                problems += 1
                yield Finding("runs", Level.WARN, f"{name} lies in running/ without a run", "a dispatcher queues it")
            continue
        if name not in running and spool.result(name, run) is not None:
            continue
        verdict = spool.prove(name, run, prober).verdict
        if verdict is Verdict.UNREACHABLE:
            problems += 1
            text = f"run {run} of {name} belongs to another host or container and cannot be judged here"
            remedy = "if that host is no more, name it in `other_hosts_gone` in config.toml"
            yield Finding("runs", Level.FAIL, text, remedy)
        elif name not in running or (verdict is Verdict.ENDED and not spool.dispatcher_lives()):
            problems += 1
            text = f"run {run} of {name} has no result.toml yet"
            yield Finding("runs", Level.WARN, text, "a dispatcher settles it from the evidence")
    if not problems:
        yield good("runs", "every run is alive or has its result")


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


def examine_messengers(root: str) -> Iterator[Finding]:
    """Check whom the configuration of the spool at *root* names, and where metrics go. Nothing, if it names nobody."""
    config = configuration(root)
    if config.contacts or config.notify:
        yield from _addresses(root, config)
    if config.metrics is not None:
        yield _metrics(os.path.expanduser(config.metrics))


def _addresses(root: str, config: Config) -> Iterator[Finding]:
    named = dict.fromkeys([*config.contacts, *(to for rule in config.notify for to in rule.to)])
    fine = True
    found: list[str] = []
    for name in named:
        try:
            for address in expanded(name, config.contacts):
                found.append(address)
                way = transports.transport_for(address, config.notifier)
                if isinstance(way, transports.AppriseService):
                    way.check()
        except UndeliveredError as error:
            fine = False
            yield Finding("notify", Level.WARN, f"{masked(name)}: {error}", "`contacts` and `notify` in config.toml")
    if any(map(has_secret, found)):
        for path in who_else_reads(root, in_config=True, job=None):
            fine = False
            yield Finding("notify", Level.WARN, f"{path} holds secrets, and others can read it", f"chmod 600 {path}")
    if fine:
        yield good("notify", f"{len(named)} receivers are understood; whether they answer, only a message can tell")


def _metrics(path: str) -> Finding:
    if find_spec("prometheus_client") is None:
        why, _, remedy = NOT_INSTALLED.partition("; ")
        return Finding("metrics", Level.WARN, why, remedy)
    directory = os.path.dirname(path)
    if not os.access(directory, os.W_OK | os.X_OK):
        return Finding(
            "metrics", Level.WARN, f"{directory} is not there or cannot be written to", "`metrics` in config.toml"
        )
    return good("metrics", f"they are written to {path}")


def examine_hooks(root: str) -> Iterator[Finding]:
    """Check the hooks of the spool at *root*. Nothing, if there are none."""
    hooks = find_hooks(root)
    for problem in hooks.problems:
        yield Finding("hooks", Level.WARN, problem, "docs/HOOKS.md says what is run")
    if hooks.paths and not hooks.problems:
        yield good("hooks", f"they are run for {', '.join(sorted(hooks.paths))}")
