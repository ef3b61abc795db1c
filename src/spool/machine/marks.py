"""Marks of processes: the variables and outputs that show the run or hook of a process.

A hook has the variables of the run that it is about, but does not belong to it: `SPOOL_HOOK` says so, and identifies
the hook's own processes.

A spool is identified by its real path. A mark may name it by another path, through a symbolic link.

Marks are what a process says about itself. The family of a wrapper (`machine/processes.py`) does not depend on them.
"""

from __future__ import annotations

import contextlib
import os
import time

from spool.core.layout import JOBS, SERVICE, WRAPPER, Layout
from spool.core.lifecycle import Liveness
from spool.core.model import Jid
from spool.machine import identity
from spool.machine.identity import PROC, read_bytes, read_of, read_stat

HOOK_MARK = "SPOOL_HOOK"
"""In the environment of a hook, which also has the variables of a run without being part of it."""

_HOOK_MARK = f"{HOOK_MARK}=".encode()
SERVES = f"{SERVICE}=".encode()
# Earlier versions started a shell ahead of its run, without its marks and with this among its arguments. A run that was
# started so is still a run for the dispatcher of this version that takes over.
_WAITED = b"spool_told"
_COMPILED = b"spool-wrapper"  # whose marks are not shown where they are too long
_OUTPUTS = (4, 5, 1, 2)  # of a wrapper, and of what it may have become
_HELD = 8  # the descriptor by which a wrapper holds its metadir
_SEEN_FOR_NS = 100_000_000  # how long a walk answers questions about one run after the other


class RealPaths(dict[str, str]):
    """The real path of each path, looked up once; paths known to be real are added at the start."""

    def __missing__(self, path: str) -> str:
        # A relative path would be relative to a foreign directory; spool sets none.
        self[path] = real = os.path.realpath(path) if os.path.isabs(path) else path
        return real


def mark_in(environment: bytes, real: RealPaths) -> tuple[str, str, str] | None:
    """Return the spool, by its real path, the job and the run in an environment; a hook counts as run 0."""
    if b"SPOOL_RUN=" not in environment and _HOOK_MARK not in environment:
        return None
    values = dict(entry.partition(b"=")[::2] for entry in environment.split(b"\0") if entry.startswith(b"SPOOL_"))
    spool, hook = os.fsdecode(values.get(b"SPOOL_DIR", b"")), os.fsdecode(values.get(HOOK_MARK.encode(), b""))
    job, run = os.fsdecode(values.get(b"SPOOL_JOB", b"")), os.fsdecode(values.get(b"SPOOL_RUN", b""))
    if hook:
        job, run = hook, "0"  # no run has that number
    return (real[spool], job, run) if spool and job and run else None


def hooks_of(spool_dir: str, *, proc: str = PROC) -> list[tuple[int, str]]:
    """Return the pid and the mark of each process with the mark of a hook of that spool."""
    found, real = [], RealPaths({spool_dir: spool_dir})
    for name in os.listdir(proc):
        if name.isdigit():
            try:
                environment = read_bytes(f"{proc}/{name}/environ")
            except OSError:
                continue
            mark = mark_in(environment, real) if _HOOK_MARK in environment else None
            if mark is not None and mark[0] == spool_dir and mark[2] == "0":
                found.append((int(name), mark[1]))
    return found


def job_of(pid: int, spool_dir: str, *, proc: str = PROC) -> str | None:
    """Return the job of that spool in the mark of the process *pid*, None if it has none."""
    try:
        environment = read_bytes(f"{proc}/{pid}/environ")
    except OSError:
        return None
    mark = mark_in(environment, RealPaths({spool_dir: spool_dir}))
    return mark[1] if mark is not None and mark[0] == spool_dir and mark[2] != "0" else None


def is_wrapper(pid: int, spool_dir: str, job: str, run: int, *, proc: str = PROC) -> bool:
    """Whether the process *pid* is, or may be, the wrapper of a run of the spool at that real path.

    A record can name any process; what counts is what the process itself shows. A wrapper has its script among its
    arguments, the run's marks in its environment, the metadir or its outputs there open, or a child with the marks. The
    first two name the place where the spool was when the run began; only the third follows a move. One that an
    earlier version started ahead of its run may have none of these, but shows that it waited for one. Raises OSError
    where the machine has too little left to tell.
    """
    metadir = Layout(spool_dir).metadir(job, run)
    arguments = read_of(pid, "cmdline", proc)
    if arguments is None:
        return True  # it has just ended; the next question will show that
    words = arguments.split(b"\0")
    if os.fsencode(f"{metadir}/{WRAPPER}") in words:
        return True
    spools = RealPaths({spool_dir: spool_dir})
    wanted = (spool_dir, job, str(run))
    mark = _mark_of(pid, spools, proc)
    if mark == wanted or _holds(pid, metadir, proc):
        return True
    if mark is not None or not (_WAITED in arguments or os.path.basename(words[0]) == _COMPILED):
        return False
    children = (read_of(pid, f"task/{pid}/children", proc) or b"").split()
    marks = {mark for child in children if (mark := _mark_of(int(child), spools, proc)) is not None}
    return not marks or wanted in marks


def _mark_of(pid: int, spools: RealPaths, proc: str) -> tuple[str, str, str] | None:
    return mark_in(read_of(pid, "environ", proc) or b"", spools)


def _holds(pid: int, directory: str, proc: str) -> bool:
    """Whether a wrapper holds *directory*, or one of its output descriptors refers to a file there."""
    with contextlib.suppress(OSError):
        if os.readlink(f"{proc}/{pid}/fd/{_HELD}") == directory:
            return True
    for number in _OUTPUTS:
        with contextlib.suppress(OSError):
            if os.path.dirname(os.readlink(f"{proc}/{pid}/fd/{number}")) == directory:
                return True
    return False


def runs_with_processes(spool_dir: str, *, proc: str = PROC) -> frozenset[tuple[str, int]]:
    """Return the runs of the spool at that real path that have processes, by mark and output only.

    For display only. To end a run, use `search`, which also follows its session and its descendants.
    """
    found, real = set(), RealPaths({spool_dir: spool_dir})
    runs = f"{Layout(spool_dir).at(JOBS)}/"
    for entry in os.listdir(proc):
        stat = read_stat(int(entry), proc=proc) if entry.isdigit() else None
        if stat is None or stat.dead:
            continue
        try:
            mark = mark_in(read_bytes(f"{proc}/{entry}/environ"), real)
            if mark is None:
                outputs = {os.path.dirname(os.readlink(f"{proc}/{entry}/fd/{number}")) for number in (1, 2)}
                here = [path.removeprefix(runs).partition("/") for path in outputs if path.startswith(runs)]
                mark = next(((spool_dir, name, run) for name, _, run in here), None)
        except OSError:  # another user's process, gone, or without outputs
            continue
        if mark is not None and mark[0] == spool_dir and mark[2].isdecimal() and mark[2] != "0":
            found.add((mark[1], int(mark[2])))
    return frozenset(found)


class MachineProber:
    """Answers a spool's questions about this machine. *gone_hosts*: hosts that the user has declared gone."""

    def __init__(self, gone_hosts: frozenset[str] = frozenset()) -> None:
        self._gone_hosts = gone_hosts
        self._walked: tuple[str, int, frozenset[tuple[str, int]]] | None = None  # the spool, the time, the result

    def boot_id(self) -> str:
        """Return the id of this boot."""
        return identity.boot_id()

    def liveness(self, jid: Jid) -> Liveness:
        """Return the state of the process *jid*; on a host that is gone, every process is."""
        found = identity.liveness(jid)
        if found is Liveness.ELSEWHERE and jid.host in self._gone_hosts:
            return Liveness.REBOOTED
        return found

    def is_wrapper(self, jid: Jid, root: str, name: str, run: int) -> bool:
        """Whether the living process *jid* is the wrapper of that run of the spool at *root*."""
        return is_wrapper(jid.pid, root, name, run)

    def has_left_processes(self, root: str, name: str, run: int) -> bool:
        """Whether a run of the spool at *root* has processes; one walk over /proc answers for all runs."""
        if self._walked is None or self._walked[0] != root or time.monotonic_ns() - self._walked[1] > _SEEN_FOR_NS:
            self._walked = root, time.monotonic_ns(), runs_with_processes(root)
        return (name, run) in self._walked[2]
