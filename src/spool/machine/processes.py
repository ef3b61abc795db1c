"""The processes of runs: which belong to a run and by what they show it, how they are signalled and measured.

A run is the family of its wrapper: as child subreaper the wrapper inherits whatever its command abandons, so that
`setsid`, double forks and daemons stay its descendants, and it ends after the last of them. So :func:`descendants`
reads the kernel's lists of children from the wrapper downwards; the rest of the machine does not matter.

Only if a wrapper itself was killed, :func:`search` walks over all processes. Those that are left are known by

* the run's mark in their environment (`mark_in`);
* the wrapper's session: the kernel reuses no pid that is still the session of a process;
* a stdout or stderr in the run's metadir, as its log is;
* being known from before, or being in the run's control group;
* an ancestor that one of these shows.

Not of a run are, with their descendants, what has the mark of another run of its spool, what serves a spool (a
dispatcher that a submission in a job has started), and this process.

As always with /proc, no look is one consistent moment: a process may fork and end before it is read. Resource use is
summed over the processes. Resident sizes count a shared page for every process that has it, so their sum is cheap and
never too low; proportional sizes count it only once. A process that has ended by then counts as nothing.

A hook has the variables of the run that it is about, but does not belong to it: `SPOOL_HOOK` says so, and identifies
the hook's own processes.

A spool is identified by its real path. A mark may name it by another path, through a symbolic link.

Marks are what a process says about itself. The family of a wrapper does not depend on them.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import count
from typing import NamedTuple

from msgspec import Struct

from spool.core.layout import JOBS, SERVICE, WRAPPER, Layout
from spool.core.lifecycle import Liveness
from spool.core.model import Jid
from spool.machine import identity
from spool.machine.identity import PROC, TICK_NS, Stat, certainly, is_shortage, read_bytes, read_of, read_stat

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
            with suppress(OSError):
                mark = _mark_of(int(name), real, proc)
                if mark is not None and mark[0] == spool_dir and mark[2] == "0":
                    found.append((int(name), mark[1]))
    return found


def job_of(pid: int, spool_dir: str, *, proc: str = PROC) -> str | None:
    """Return the job of that spool in the mark of the process *pid*, None if it has none."""
    with suppress(OSError):
        mark = _mark_of(pid, RealPaths({spool_dir: spool_dir}), proc)
        return mark[1] if mark is not None and mark[0] == spool_dir and mark[2] != "0" else None
    return None


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
    with suppress(OSError):
        if os.readlink(f"{proc}/{pid}/fd/{_HELD}") == directory:
            return True
    return directory in _places(pid, _OUTPUTS, proc)


def _places(pid: int, numbers: Iterable[int], proc: str) -> Iterator[str]:
    """Yield the directories of the files that these descriptors of a process refer to."""
    for number in numbers:
        with suppress(OSError):
            yield os.path.dirname(os.readlink(f"{proc}/{pid}/fd/{number}"))


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
                outputs = _places(int(entry), (1, 2), proc)
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


_INIT = 1
_KERNEL = 2  # kthreadd, the parent of every kernel thread
_MOST_WALKS = 3
_WALKS_WITHOUT_LOSS = 2
STANDS_STILL = "Tt"
"""Process states: stopped by a signal or a tracer."""
_IN_THE_KERNEL = "D"  # a wait that no signal interrupts
_KIBIBYTE = 1024
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Sought(Struct, frozen=True):
    """A run, or a hook, to find the processes of."""

    job: str
    run: int
    spool_dir: str  # its real path
    jid: Jid | None = None  # of its wrapper; None if it is not known
    known: frozenset[Process] = frozenset()  # those found before
    grouped: frozenset[int] = frozenset()  # the pids in its control group, which no process can leave by itself

    @property
    def key(self) -> tuple[str, int]:
        """The key of the run in results."""
        return self.job, self.run

    @property
    def mark(self) -> tuple[str, str, str]:
        """What its processes have in their environment."""
        return self.spool_dir, self.job, str(self.run)


def descendants(
    run: Sought, wrapper: Stat, *, halt: bool = False, proc: str = PROC, me: int | None = None
) -> dict[Process, Stat]:
    """Return the living descendants of the *wrapper* of *run*, each after its parent.

    A process that forks and ends at this moment, or whose parent does, may be missing. *halt*: stop each one when it is
    found, so that it forks no more. *me* is the pid of this process, if not the real one. Raises OSError if the machine
    lacks the resources for it.
    """
    real, own = RealPaths({run.spool_dir: run.spool_dir}), os.getpid() if me is None else me
    children = _children(proc)
    found: dict[Process, Stat] = {}
    seen, line = {wrapper.pid, own}, [(wrapper.pid, wrapper.threads)]
    while line:
        for child in children(*line.pop(), proc):
            if child in seen:
                continue
            stat = read_stat(child, proc=proc)
            if stat is None or stat.parent not in seen:  # it has ended, and its pid may be another's by now
                continue
            seen.add(child)
            if stat.dead or _is_strange(child, run.mark, real, proc):
                continue
            process = Process(child, stat.start_ticks)
            if halt and stat.state not in STANDS_STILL:
                with suppress(OSError):
                    _send(process, signal.SIGSTOP)
            found[process] = stat
            line.append((child, stat.threads))
    return found


def family(run: Sought, *, proc: str = PROC) -> dict[Process, Stat]:
    """Return the wrapper of *run* and its descendants; nothing if it has ended, is unknown or is elsewhere."""
    if run.jid is None or identity.liveness(run.jid, proc=proc) is not Liveness.ALIVE:
        return {}
    stat = read_stat(run.jid.pid, proc=proc)
    if stat is None:
        return {}
    return {Process(stat.pid, stat.start_ticks): stat} | descendants(run, stat, proc=proc)


def _children_of(pid: int, threads: int, proc: str) -> list[int]:
    """Return the children of a process, from the lists of all its threads."""
    try:
        tasks = [str(pid)] if threads == 1 else os.listdir(f"{proc}/{pid}/task")
    except OSError as error:
        if is_shortage(error):
            raise
        return []
    return [int(child) for task in tasks for child in (read_of(pid, f"task/{task}/children", proc) or b"").split()]


@cache
def _lists_children(proc: str) -> bool:
    """Whether the kernel lists the children of processes; it can be built without that."""
    return os.path.exists(f"{proc}/{os.getpid()}/task/{os.getpid()}/children")


def _children(proc: str) -> Callable[[int, int, str], list[int]]:
    """Return the function for the children of a process: the kernel's lists, or one walk over all processes."""
    if _lists_children(proc):
        return _children_of
    found: dict[int, list[int]] = {}
    for pid in _pids(proc):
        if (stat := read_stat(pid, proc=proc)) is not None:
            found.setdefault(stat.parent, []).append(pid)
    return lambda pid, threads, proc: found.get(pid, [])


def _is_strange(pid: int, mark: tuple[str, str, str], real: RealPaths, proc: str) -> bool:
    """Whether a process says that it belongs to another run, or to none."""
    environment = read_of(pid, "environ", proc) or b""  # another user's, or it has just ended
    said = mark_in(environment, real)
    return SERVES in environment or (said is not None and said[0] == mark[0] and said != mark)


class Found(Struct, frozen=True):
    """The result of a search: the processes of each run by its key, each after its parent."""

    members: dict[tuple[str, int], dict[Process, Stat]]
    certain: bool  # no process of a run can have been missed


def search(sought: Iterable[Sought], *, below: int | None = None, proc: str = PROC, me: int | None = None) -> Found:
    """Find the processes of runs whose wrappers are gone, by walks over all processes.

    *below* is the pid of a child subreaper, if they all descend from one: then only its descendants are walked over,
    and no other process of the machine makes the result uncertain.

    A process that ends before it is read may leave a child that the list misses. So the walk is repeated until two in a
    row have no such process; if that does not happen soon, the result is not certain. Raises OSError if the machine
    lacks the resources for a complete walk.
    """
    runs = list(sought)
    if not runs:
        return Found({}, True)
    calm, dead, own = 0, set[Process](), os.getpid() if me is None else me
    for _ in range(_MOST_WALKS):
        found = _walk(runs, _pids(proc) if below is None else _below(below, proc), proc, (own, dead))
        calm = calm + 1 if found.certain else 0
        if calm >= _WALKS_WITHOUT_LOSS or all(found.members.values()):
            break
    return Found(found.members, calm >= _WALKS_WITHOUT_LOSS)


class _Signs:
    """By what the processes of some runs show themselves."""

    def __init__(self, runs: Iterable[Sought]) -> None:
        self._real = RealPaths({run.spool_dir: run.spool_dir for run in runs})
        self._spools = frozenset(self._real)
        self._keys = {run.mark: run.key for run in runs}
        self._known = {process: run.key for run in runs for process in run.known}
        self._grouped = {pid: run.key for run in runs for pid in run.grouped}
        self._sessions = {run.jid.pid: (run.jid.start_ticks, run.key) for run in runs if run.jid is not None}
        self._places = {Layout(run.spool_dir).metadir(*run.key): run.key for run in runs}

    def owner(self, stat: Stat, said: bytes, proc: str) -> Iterator[tuple[str, int] | None]:
        """Yield the run of a process with the environment *said*, None if it is of none; nothing if it does not show.

        Its ancestors may show it then.
        """
        mark = mark_in(said, self._real) if said else None
        if SERVES in said or (mark is not None and mark[0] in self._spools):
            yield self._keys.get(mark) if mark is not None else None
            return
        key = self._known.get(Process(stat.pid, stat.start_ticks)) or self._grouped.get(stat.pid)
        begun_ticks, of_session = self._sessions.get(stat.session, (0, None))
        if key is None and stat.start_ticks >= begun_ticks:
            key = of_session
        if key is None:
            key = _by_output(stat.pid, self._places, proc)
        if key is not None:
            yield key


def _walk(runs: list[Sought], pids: list[int], proc: str, known_before: tuple[int, set[Process]]) -> Found:
    """Walk over *pids* once; certain if none had ended before it was read. Known before: this process, and zombies."""
    me, dead = known_before
    signs, alive, whole = _Signs(runs), dict[int, Stat](), True
    owners: dict[int, tuple[str, int] | None] = {me: None, _INIT: None, 0: None}
    for pid in reversed(pids):  # youngest first, because these end first
        stat = read_stat(pid, proc=proc)
        if stat is None:
            whole = False
        elif stat.dead:
            whole = whole and Process(pid, stat.start_ticks) in dead
            dead.add(Process(pid, stat.start_ticks))
        elif pid not in owners:
            alive[pid] = stat
            said = _said(pid, proc)
            if said is None or (not said and _is_passing(stat, proc)):
                whole = False
            else:
                for owner in signs.owner(stat, said, proc):
                    owners[pid] = owner
    members: dict[tuple[str, int], dict[Process, Stat]] = {run.key: {} for run in runs}
    for pid in alive:
        line = [pid]  # upwards to one whose run is known
        while line[-1] not in owners and line[-1] in alive and len(line) <= len(alive):
            line.append(alive[line[-1]].parent)
        owner = owners.get(line[-1])
        for step in reversed(line):
            owners.setdefault(step, owner)
            if owner is not None and step in alive:
                members[owner].setdefault(Process(step, alive[step].start_ticks), alive[step])
    return Found(members, whole)


def _is_passing(stat: Stat, proc: str) -> bool:
    """Whether a process without an environment is executing a program, or is about to end."""
    if stat.rss_pages == 0 and (stat.parent == _KERNEL or stat.pid == _KERNEL):
        return False
    return identity.is_between_programs(stat.pid, proc=proc) is not False


def _pids(proc: str) -> list[int]:
    return sorted(int(name) for name in certainly(lambda: os.listdir(proc)) if name.isdigit())


def _below(pid: int, proc: str) -> list[int]:
    """Return the pids of all descendants of a process."""
    children, found, line = _children(proc), list[int](), [pid]
    while line:
        parent = line.pop()
        if (stat := read_stat(parent, proc=proc)) is not None:
            line += (new := children(parent, stat.threads, proc))
            found += new
    return sorted(set(found))


def _said(pid: int, proc: str) -> bytes | None:
    """Return the environment of a process, b"" if it may not be read; None if it has ended."""
    try:
        return read_bytes(f"{proc}/{pid}/environ")
    except OSError as error:
        if is_shortage(error):
            raise
        return None if error.errno in (errno.ENOENT, errno.ESRCH) else b""


def _by_output(pid: int, places: Mapping[str, tuple[str, int]], proc: str) -> tuple[str, int] | None:
    """Return the run in whose metadir the stdout or stderr of the process is."""
    return next((places[place] for place in _places(pid, (1, 2), proc) if place in places), None)


def still(found: Mapping[Process, Stat], *, proc: str = PROC) -> frozenset[Process]:
    """Return the processes that were stopped when read, or must stop before their next instruction."""
    return frozenset(process for process, stat in found.items() if _stands_still(stat, proc))


def _stands_still(stat: Stat, proc: str) -> bool:
    # A shell that has just started a command by vfork waits in the kernel until that command's process executes it.
    # If that process is stopped before, the shell itself can only stop when it continues.
    return stat.state in STANDS_STILL or (stat.state == _IN_THE_KERNEL and identity.must_stop(stat.pid, proc=proc))


class Process(NamedTuple):
    """One process for its lifetime: the pid may be reused, the pair is unique within one boot."""

    pid: int
    start_ticks: int


class Sent(Struct, frozen=True):
    """The result of sending a signal."""

    signalled: frozenset[Process] = frozenset()  # without those that had ended before
    refused: frozenset[Process] = frozenset()  # another user's, pid 1, this process; or not identifiable


def send(processes: Iterable[Process], number: int) -> Sent:
    """Send a signal to each process if its identity still matches, in this order, and return the result.

    Parents should come first: a shell that is signalled after the program for which it waits may see that end, and go
    on to its next command or exit without its trap. The identity is checked while a pidfd holds the process, so that a
    reused pid is never signalled. Pid 1 and this process are refused.
    """
    signalled, refused = set[Process](), set[Process]()
    for process in processes:
        if process.pid <= _INIT or process.pid == os.getpid():
            refused.add(process)
            continue
        try:
            if _send(process, number):
                signalled.add(process)
        except ProcessLookupError:
            continue
        except OSError:  # also if the identity is unknown for the moment, for lack of memory
            refused.add(process)
    return Sent(frozenset(signalled), frozenset(refused))


def _send(process: Process, number: int) -> bool:
    """Signal the process; False if its pid belongs to another one by now. Raises OSError."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno != errno.ENOSYS and not is_shortage(error):
            raise
        # Without a descriptor there is a gap between the check and the signal; a run that cannot be ended is worse.
        if not _is(process):
            return False
        os.kill(process.pid, number)
        return True
    try:
        if not _is(process):
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    finally:
        os.close(fd)


def _is(process: Process) -> bool:
    stat = read_stat(process.pid)
    return stat is not None and not stat.dead and stat.start_ticks == process.start_ticks


def rss_bytes(found: Iterable[Stat]) -> int:
    """Return the sum of the resident sizes: an upper bound of the processes' memory together."""
    return sum(stat.rss_pages for stat in found) * _PAGE_BYTES


def pss_bytes(found: Iterable[Process], *, proc: str = PROC) -> int:
    """Return the sum of the proportional sizes, in which a page shared by n processes counts as an n-th each time.

    The kernel walks the page tables for it, milliseconds for a process of many gigabytes, so use it only if the
    resident sizes leave a doubt. A process whose size cannot be read counts with its resident size.
    """
    total = 0
    for pid, _ in found:
        size = _kibibytes(f"{proc}/{pid}/smaps_rollup", b"Pss:")
        total += _rss_bytes(pid, proc) if size is None else size
    return total


def peak_rss_bytes(pid: int, *, proc: str = PROC) -> int:
    """Return the peak resident size of a process, 0 if it cannot be read."""
    return _kibibytes(f"{proc}/{pid}/status", b"VmHWM:") or 0


def cpu_time_ns(found: Iterable[Stat]) -> int:
    """Return the CPU time of the processes and of all their children that ended and were waited for."""
    ticks = sum(s.user_ticks + s.system_ticks + s.children_user_ticks + s.children_system_ticks for s in found)
    return ticks * TICK_NS


def _rss_bytes(pid: int, proc: str) -> int:
    try:
        return int(read_bytes(f"{proc}/{pid}/statm").split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _kibibytes(path: str, key: bytes) -> int | None:
    """Return the value of a line "KEY: N kB" of *path* in bytes; None if it cannot be read or is not there."""
    try:
        for line in read_bytes(path).splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * _KIBIBYTE
    except OSError:
        pass
    return None


_PR_SET_CHILD_SUBREAPER = 36
_AT_LEAST, _BUDGET_NS = 64, 50_000_000  # reaped at a time, when children end faster than they can be reaped


def become_subreaper() -> bool:
    """Make this process inherit all orphans among its descendants; return whether it does.

    See prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    import ctypes  # imported here, because commands inherit no orphans

    with suppress(OSError, AttributeError):
        arguments = map(ctypes.c_ulong, (1, 0, 0, 0))
        return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, *arguments) == 0)
    return False


def children_of_self() -> frozenset[int] | None:
    """Return the pids of this process's children, zombies included; None if the kernel does not list them.

    The list is that of the main thread, which inherits all orphans.
    """
    pid = os.getpid()
    try:
        return frozenset(map(int, read_bytes(f"{PROC}/{pid}/task/{pid}/children").split()))
    except OSError:
        return None


class Children:
    """The children of this process; the main thread reaps them when one may have ended.

    On a busy machine reaping stops after a while, and is due again at once; :attr:`due_ns` says so.
    """

    def __init__(self, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Begin without children. *clock* is monotonic."""
        self.stopped: set[int] = set()  # stopped children, for the caller to collect
        self.due_ns: int | None = None  # when to reap again, even without a sign that one has ended
        self._clock = clock

    def reap(self) -> Iterator[tuple[int, int, resource.struct_rusage]]:
        """Yield pid, status and usage of each child that has ended."""
        self.due_ns = None
        until_ns = self._clock() + _BUDGET_NS
        for number in count():
            if number >= _AT_LEAST and self._clock() >= until_ns:
                self.due_ns = self._clock()
                return
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self.stopped.add(pid)
            else:
                yield pid, status, usage


def reap(pids: Iterable[int]) -> dict[int, int]:
    """Reap those of these children that have ended, and return their wait statuses; all others are left alone.

    The pids are given, because this process may have children that others wait for. A pid that is not a child is
    skipped.
    """
    ended: dict[int, int] = {}
    for pid in pids:
        with suppress(ChildProcessError):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                ended[pid] = status
    return ended
