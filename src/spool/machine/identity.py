"""The identity of a process: its pid, start time, boot, pid namespace and host; descriptors to read it with.

A pid alone proves nothing: on a machine with 32,768 of them the same one is reused within a minute. Everything is read
from /proc directly; every function accepts another root for it, so that tests can simulate any machine.

A dispatcher that cannot read /proc can neither end a run nor tell whether one is over. So it holds a few descriptors in
reserve, and closes them for the moment of a look that finds no others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterable, Set
from functools import cache
from typing import TypeVar

from msgspec import Struct

from spool.core.errors import TOO_LITTLE
from spool.core.lifecycle import Liveness
from spool.core.model import Jid

T = TypeVar("T")

_RESERVE = 4  # no step needs more at once
_reserve: list[int] = []
_before: list[tuple[int, int]] = []  # the original limits of this process, once it has changed them


def keep() -> None:
    """Close inherited descriptors beyond the first three on exec, so that no child inherits them.

    The starter may have left a pipe or a lock open, which would be held while any child lives.
    """
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:  # no /proc: then nothing can be started either
        return
    for fd in map(int, names):
        if fd > 2:
            with contextlib.suppress(OSError):  # the descriptor of the listing is closed by now
                os.set_inheritable(fd, False)


def take_all() -> None:
    """Raise the limit of this process to the maximum, and reserve some descriptors. Jobs get the original limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _before:
        _before.append((soft, hard))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _put_by()


def limit_for_jobs() -> int | None:
    """Return the descriptor limit for jobs, None if it is that of this process."""
    return _before[0][0] if _before else None


def give_limit_to(pid: int) -> None:
    """Give a child of this process, which starts foreign programs, the original limit."""
    if _before:
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _before[0])


def certainly(step: Callable[[], T]) -> T:
    """Return *step*(), which opens and closes a few descriptors, using the reserve if no others are left."""
    try:
        return step()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE) or not _reserve:
            raise
    while _reserve:
        os.close(_reserve.pop())
    try:
        return step()
    finally:
        _put_by()


def is_shortage(error: OSError) -> bool:
    """Whether *error* means a shortage of this process or the machine, and says nothing about the file."""
    return error.errno in TOO_LITTLE


def _put_by() -> None:
    with contextlib.suppress(OSError):
        while len(_reserve) < _RESERVE:
            _reserve.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


PROC = "/proc"
TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
"""The kernel's unit for process starts and CPU time."""

_START_TICKS = 19  # its index among the fields after the name
_SIZE, _ENVIRONMENT_END = 20, 48
_PAGE = 4096
_LONGEST_ENTRY = 32  # of a list in /proc
_PENDING = re.compile(rb"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)", re.MULTILINE)
_CAUGHT = re.compile(rb"^SigCgt:\s*([0-9a-f]+)", re.MULTILINE)

_NAMELESS = frozenset({"", "(none)", "localhost", "localhost.localdomain"})


class Stat(Struct, frozen=True):
    """The part of /proc/PID/stat that spool uses; see proc_pid_stat(5). Times are clock ticks."""

    pid: int
    state: str
    parent: int
    session: int
    user_ticks: int
    system_ticks: int
    children_user_ticks: int  # of children that ended and were waited for
    children_system_ticks: int
    threads: int
    start_ticks: int  # since boot
    rss_pages: int

    @property
    def dead(self) -> bool:
        """True for a zombie: only its exit code is left. A leader that ended before its threads has more than one."""
        return self.state in "ZXx" and self.threads <= 1


def read_bytes(path: str) -> bytes:
    """Return the content of a file of /proc in as few system calls as possible. Raises OSError."""
    return certainly(lambda: _read(path))


def read_of(pid: int, name: str, proc: str = PROC) -> bytes | None:
    """Return the content of /proc/PID/NAME; None if the process is gone or hides it. Raises OSError: a shortage."""
    try:
        return read_bytes(f"{proc}/{pid}/{name}")
    except OSError as error:
        if is_shortage(error):
            raise
        return None


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.read(fd, 65536)
        # /proc returns at most a page or so at a time, and only whole entries of a list: a long answer may be partial.
        if len(content) < _PAGE - _LONGEST_ENTRY:
            return content
        parts = [content]
        while more := os.read(fd, 1 << 20):
            parts.append(more)
        return b"".join(parts)
    finally:
        os.close(fd)


def read_stat(pid: int, *, proc: str = PROC) -> Stat | None:
    """Return the content of /proc/PID/stat, or None if there is no such process. Raises OSError if that is unknown.

    The second field is the program's name in parentheses, which may itself hold spaces and parentheses.
    """
    fields = _stat_fields(pid, proc)
    if fields is None:
        return None
    return Stat(
        pid=pid,
        state=fields[0].decode("ascii", "replace"),
        parent=int(fields[1]),
        session=int(fields[3]),
        user_ticks=int(fields[11]),
        system_ticks=int(fields[12]),
        children_user_ticks=int(fields[13]),
        children_system_ticks=int(fields[14]),
        threads=int(fields[17]),
        start_ticks=int(fields[_START_TICKS]),
        rss_pages=int(fields[21]),
    )


def is_between_programs(pid: int, *, proc: str = PROC) -> bool | None:
    """Whether a process with an empty environment is executing a program, and about to have one.

    None: it has ended, or is about to, and starts nothing more. False: its environment is really empty.
    """
    fields = _stat_fields(pid, proc)
    if fields is None or fields[0] in b"ZXx" or fields[_SIZE] == b"0":
        return None
    if len(fields) <= _ENVIRONMENT_END or fields[_ENVIRONMENT_END] != b"0":
        return False
    return _tells_environments(proc)


def must_stop(pid: int, *, proc: str = PROC) -> bool:
    """Whether a SIGSTOP waits for a process: it executes nothing of its program before it stops."""
    return _has_signal(_PENDING, pid, signal.SIGSTOP, proc)


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for the signal *number*."""
    return _has_signal(_CAUGHT, pid, number, PROC)


def _has_signal(masks: re.Pattern[bytes], pid: int, number: int, proc: str) -> bool:
    found = masks.findall(read_of(pid, "status", proc) or b"")
    return any(int(mask, 16) >> (number - 1) & 1 for mask in found)


def program_of(pid: int) -> str:
    """Return the path of the program that a process executes, "" if unknown."""
    try:
        return os.readlink(f"{PROC}/{pid}/exe").removesuffix(" (deleted)")
    except OSError:
        return ""


@cache
def _tells_environments(proc: str) -> bool:
    """Whether the kernel shows the address of a process's environment: that of this process is known to have one."""
    fields = _stat_fields(os.getpid(), proc) if proc == PROC else None
    return fields is not None and len(fields) > _ENVIRONMENT_END and fields[_ENVIRONMENT_END] != b"0"


def _stat_fields(pid: int, proc: str) -> list[bytes] | None:
    """Return the fields from the third on."""
    text = read_of(pid, "stat", proc) or b""
    fields = text[text.rfind(b")") + 2 :].split()
    return fields if len(fields) >= 22 else None


@cache
def boot_id(*, proc: str = PROC) -> str:
    """Return the id of this boot of the machine. Raises OSError if the kernel shows none."""
    return read_bytes(f"{proc}/sys/kernel/random/boot_id").decode("ascii").strip()


@cache
def pid_namespace(*, proc: str = PROC) -> str:
    """Return the name of our pid namespace, as in "pid:[4026531836]". Raises OSError if the kernel shows none."""
    return os.readlink(f"{proc}/self/ns/pid")


@cache
def host() -> str:
    """Return the name of this host, without white space.

    A machine without a proper name would be mistaken for any other such machine, so /etc/machine-id is added.
    """
    name = "".join(os.uname().nodename.split())
    if name not in _NAMELESS:
        return name
    try:
        machine = read_bytes("/etc/machine-id").decode("ascii", "replace").strip()[:12]
    except OSError:
        machine = ""
    return "-".join(part for part in ("localhost", machine) if part)


def start_ticks(pid: int, *, proc: str = PROC) -> int | None:
    """Return when the process started, in clock ticks since boot; None if there is no such process."""
    fields = _stat_fields(pid, proc)
    return None if fields is None else int(fields[_START_TICKS])


def ticks_now() -> int:
    """Return the current time in the unit of process starts: clock ticks since boot."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // TICK_NS


def of_process(pid: int, *, proc: str = PROC) -> Jid | None:
    """Return the identity of a process of ours, or None if there is no such process."""
    ticks = start_ticks(pid, proc=proc)
    if ticks is None:
        return None
    return Jid(pid, ticks, boot_id(proc=proc), pid_namespace(proc=proc), host())


def liveness(jid: Jid, *, proc: str = PROC, here: str | None = None) -> Liveness:
    """Return the state of the process *jid* on this machine; *here* is this host's name, by default `host()`.

    In the same boot and pid namespace the host's name does not matter: it may have been changed since.
    """
    if jid.engine is not None:
        return Liveness.ELSEWHERE  # its engine is asked, even if it runs on this very node
    if jid.boot_id != boot_id(proc=proc):
        return Liveness.REBOOTED if jid.host == (here or host()) else Liveness.ELSEWHERE
    if jid.pid_namespace != pid_namespace(proc=proc):
        return Liveness.ELSEWHERE
    stat = read_stat(jid.pid, proc=proc)
    if stat is None or stat.dead or stat.start_ticks != jid.start_ticks:
        return Liveness.GONE
    return Liveness.ALIVE


def processes_of(uids: Set[int], *, proc: str = PROC) -> dict[int, list[Stat]]:
    """Return the processes of each of these users that are alive, lowest pid first. Raises OSError."""
    found: dict[int, list[Stat]] = {uid: [] for uid in uids}
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdigit()):
        if (uid := owner_of(pid, proc=proc)) in found:
            stat = read_stat(pid, proc=proc)
            if stat is not None and not stat.dead:
                found[uid].append(stat)
    return found


def owner_of(pid: int, *, proc: str = PROC) -> int:
    """Return the user of a process; -1 if there is none. Raises OSError if that is unknown."""
    try:
        return os.stat(f"{proc}/{pid}").st_uid
    except OSError as error:
        if is_shortage(error):
            raise
        return -1


def session_lives(pid: int, ticks: int, processes: Iterable[Stat]) -> bool:
    """Whether the process *pid*, begun at *ticks*, or a process of the session that it led, is among *processes*.

    The kernel gives *pid* to no other process while it is the session of one.
    """
    found = {stat.pid: stat for stat in processes if stat.pid == pid or stat.session == pid}
    return found[pid].start_ticks == ticks if pid in found else bool(found)
