"""What may be wrong with a spool, and what to do about it. The machine around it is `ailments`."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from spool.client.submit import make_spool
from spool.core import layout
from spool.core.errors import InvalidConfig
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.lifecycle import Verdict
from spool.core.units import show_duration
from spool.dispatcher.listing import STALE_NS
from spool.formats import config
from spool.formats.config import Config
from spool.formats.state import parse_state
from spool.machine.tree import MachineProber
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
