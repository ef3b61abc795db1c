"""The processes of runs: which belong to a run, how they are signalled, reaped and measured.

A process group is not enough: `setsid` and double forks leave it. To a run belong

* its wrapper, while that lives, and every process of the wrapper's session;
* every process that carries the run's mark in its environment (`SPOOL_DIR`, `SPOOL_JOB`, `SPOOL_RUN`);
* every process that was known to belong to it before;
* every orphan whose stdout or stderr is a file of the run's metadir, as its log is: `env -i setsid` takes the mark and
  the session away, and what is left of it when its parent ends is this;
* the descendants of all of these and whoever is in a session that one of them leads, whatever their environment,
  unless they carry the mark of another run of the same spool, or are this process: a dispatcher that was started from
  within a job is none of its own;
* every process of its control group, if it has one.

A hook finds the variables of the run that it is told of, and is none of its processes: `SPOOL_HOOK` says so, and by it
the hook's own processes are found.

A spool is looked for by its real path. A mark may name it by another, through a symbolic link.

Once the wrapper is gone, its pid may come back as somebody else's session, so the session counts no more, except
for our own children: as a subreaper we inherit the orphans of the wrappers that we started, and of no others.

One walk over /proc serves any number of runs. What is read is a moment that never was, as always with /proc: a process
may fork and end before it is asked. So a walk says whether that may have been; only one that is certain proves that
nothing of a run is left.

What processes use is added up. Resident sizes count a page that is shared for every process that has it, so their sum
is cheap and never too low; proportional sizes count it once in all. A process that has ended by the time it is looked
at uses nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from spool.core.layout import JOBS, WRAPPER, Layout
from spool.core.lazyclass import dataclass, replace
from spool.core.lifecycle import Liveness
from spool.core.model import Jid
from spool.machine import identity
from spool.machine.descriptors import certainly, is_shortage
from spool.machine.identity import PROC, TICK_NS, Stat, boot_id, pid_namespace, read_bytes, read_stat

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

_FIRST_LISTS, _ENOUGH_LISTS, _MOST_LISTS = 3, 2, 20
_EVERY, _PARTS = 4, 8  # a census asks at each fourth look an eighth of all again
_SEEN_FOR_NS = 100_000_000  # how long a walk answers questions about one run after the other
_INIT = 1
_KERNEL = 2  # kthreadd, the parent of every thread of the kernel

STANDS_STILL = "Tt"
"""The states of a process that a signal or a tracer has stopped."""

HOOK_MARK = "SPOOL_HOOK"
"""In the environment of a hook, which has the facts of a run in there too and is no part of it."""

_HOOK_MARK = f"{HOOK_MARK}=".encode()
_WAITED = b"spool_told"  # among the arguments of a shell that was started ahead of its run
_COMPILED = b"spool-wrapper"  # whose marks are not shown where they are too long
_OUTPUTS = (4, 5, 1, 2)  # of a wrapper, and of what it may have become
_SOMEBODY_ELSES = ("", 0)  # the mark says: a run that was not asked for
_PR_SET_CHILD_SUBREAPER = 36
_WNOTHREAD = 0x20000000  # of the children that this thread has started or inherited; see wait(2), __WNOTHREAD
_MANY = 100  # children: from here on a look at all of them at each end costs more than a descriptor for each
_LOOK_EVERY_NS, _REFUSED_FOR_NS = 1_000_000_000, 60_000_000_000
_SECOND_NS = 1_000_000_000
_KIBIBYTE = 1024
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run whose processes are looked for."""

    job: str
    run: int
    spool_dir: str  # its real path
    jid: Jid | None = None  # of its wrapper; None if it has none yet
    known: frozenset[Process] = frozenset()  # those found before
    grouped: frozenset[int] = frozenset()  # the pids in its control group, which nothing can leave by itself
    halts: bool = False  # whether what carries its mark is stopped as soon as it is seen; its wrapper is not

    @property
    def key(self) -> tuple[str, int]:
        """What the answer is sorted by."""
        return self.job, self.run


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at all processes has found."""

    members: dict[tuple[str, int], frozenset[Process]]
    still: frozenset[Process] = frozenset()  # of these, those that stood still when they were looked at
    certain: bool = True  # no process of a run can have been missed


def look(wanted: Iterable[TrackedRun], *, proc: str = PROC, me: int | None = None) -> Look:
    """Find the processes of each run, by (job, run), in one walk over /proc.

    A process may fork and end before it is known whose it is. So /proc is listed again until two lists in a row have no
    such process: a run of which any process lives then has one in the second, or in the first, and it was asked. Where
    that is not so after many lists, the look is not certain: what it has not found may be there.

    Only processes of our own user are asked for their environment. Zombies belong to nobody: they hold nothing.
    Raises OSError where the machine has too little left for a whole look: what was not seen is not gone.
    *me* is the pid of this process, if not the real one.
    """
    runs = list(wanted)
    if not runs:
        return Look({})
    walk = _Walk(runs, proc, os.getpid() if me is None else me)
    found = walk.members()
    for _ in range(_MOST_LISTS):
        # What moves has to be told at once; what is missed meanwhile is found by the look that comes after that.
        if walk.certain or (all(found.values()) and walk.something_moves(found)):
            break
        walk.list()
        found = walk.members()
    return Look(found, walk.still(found), walk.certain)


def scan(
    wanted: Iterable[TrackedRun], *, proc: str = PROC, me: int | None = None
) -> dict[tuple[str, int], frozenset[Process]]:
    """Return what :func:`look` finds: for what is shown and measured, where a process more or less does not matter."""
    return look(wanted, proc=proc, me=me).members


class ProcessCache:
    """The processes of runs, look after look: asked who they are, which is what takes long, are those that are new.

    And some of the others each time, for a pid may have come back since the last look, or a process be another's by
    now. Until then what is found is not quite certain: before anything is ended, `scan` has to agree.
    """

    def __init__(self, *, proc: str = PROC, me: int | None = None) -> None:
        self._proc, self._me = proc, me
        self._owners: dict[int, tuple[str, int] | None] = {}
        self._members: dict[tuple[str, int], dict[int, Process]] = {}
        self._reapers: set[int] = set()
        self._round: list[int] = []  # pids that are still to be asked again in this round
        self._looks = 0

    def ask_again(self, pid: int | None = None) -> None:
        """Have the next look ask that process anew, or all of them."""
        if pid is None:
            self._owners.clear()
        else:
            self._owners.pop(pid, None)

    def look(self, wanted: Callable[[], Iterable[TrackedRun]]) -> dict[tuple[str, int], dict[int, Process]]:
        """Return the processes of each run, by pid; *wanted* names the runs, and is called when processes are read.

        Raises OSError where the machine has too little left for that.
        """
        self._take_turns()
        names = certainly(lambda: os.listdir(self._proc))
        listed = {int(name) for name in names if name.isdigit()}
        for pid in self._owners.keys() - listed:
            del self._owners[pid]
        again: dict[tuple[str, int], set[Process]] = {}
        for key, members in self._members.items():
            for pid in [pid for pid in members if pid not in self._owners]:
                again.setdefault(key, set()).add(members.pop(pid))
        if listed <= self._owners.keys():
            return self._members
        runs = [replace(run, known=frozenset(again[run.key])) if run.key in again else run for run in wanted()]
        try:
            walk = _Walk(runs, self._proc, os.getpid() if self._me is None else self._me, self._owners, self._reapers)
            found = walk.members()
        except OSError:
            self._owners.clear()  # not all that are entered have been asked
            for key, processes in again.items():
                self._members[key].update((process.pid, process) for process in processes)
            raise
        self._owners.update(dict.fromkeys(listed - self._owners.keys()))  # zombies, and who has left meanwhile
        self._reapers = walk.reapers
        self._members = {
            key: self._members.get(key, {}) | {process.pid: process for process in processes}
            for key, processes in found.items()
        }
        return self._members

    def _take_turns(self) -> None:
        self._looks += 1
        if self._looks % _EVERY == 0:
            self._round = self._round or list(self._owners)
            for _ in range(min(len(self._round), len(self._owners) // _PARTS + 1)):
                self._owners.pop(self._round.pop(), None)


class _Walk:
    """One walk over /proc, and to whom each process belongs."""

    def __init__(
        self,
        runs: list[TrackedRun],
        proc: str,
        me: int,
        asked: dict[int, tuple[str, int] | None] | None = None,
        reapers: Iterable[int] = (),
    ) -> None:
        """Look at every process but those in *asked*: of them it is known to whom they belong."""
        self._proc, self._me, self._uid = proc, me, os.getuid()
        self._alive: dict[int, Stat] = {}
        self._marks: dict[int, tuple[str, str, str] | None] = {}
        self._owners = asked if asked is not None else {}
        self._looked_at = set(map(str, self._owners))
        self._hidden: set[int] = set()  # of the last list: those whose environment was not there to be read
        self._lists_without_loss = 0
        self.reapers = {_INIT, me, *reapers}  # who may inherit an orphan: us, and the parents of earlier dispatchers
        self._real = _RealPaths({run.spool_dir: run.spool_dir for run in runs})
        self._spools = frozenset(self._real)
        self._marked = {(run.spool_dir, run.job, str(run.run)): run.key for run in runs}
        self._metadirs: dict[str, tuple[str, int]] | None = None
        self._runs = runs
        self._known = {process: run.key for run in runs for process in run.known}
        self._grouped = {pid: run.key for run in runs for pid in run.grouped}
        self._wrappers: dict[Process, tuple[str, int]] = {}
        self._sessions: dict[int, tuple[str, int]] = {}  # of wrappers that live
        self._orphaned: dict[int, tuple[str, int]] = {}  # of those that do not
        self._keys = [run.key for run in runs]
        self._halting = {run.key: run.jid.pid if run.jid is not None else 0 for run in runs if run.halts}
        for _ in range(_FIRST_LISTS):
            if not self.certain:
                self.list()
        self._find_wrappers()
        # A process is entered before its parent is looked at, so that a pid that came back in the middle of the
        # walk cannot send us round in a circle.
        self._owners.update({me: None, 0: None, _INIT: None})
        kernel = self._alive.get(_KERNEL)
        if kernel is None or (kernel.parent == 0 and kernel.rss_pages == 0):  # in a container anybody may be that
            self._owners[_KERNEL] = None

    @property
    def certain(self) -> bool:
        """Whether no process can have been missed.

        A process that ends while /proc is listed may have had a child that the list has passed already, because pids
        have begun anew from the lowest: so one list is not enough.
        """
        return self._lists_without_loss >= _ENOUGH_LISTS

    def list(self) -> None:
        """List the processes and ask those that are new, the youngest first: they are the first to end."""
        names = {name for name in certainly(lambda: os.listdir(self._proc)) if name.isdigit()} - self._looked_at
        self._looked_at |= names
        self._hidden.clear()
        asked = [self._ask(pid) for pid in sorted(map(int, names), reverse=True)]
        self._find_reapers()
        # What has parents is known by them.
        lost = [pid for pid in self._hidden if self._is_orphan(self._alive[pid])]
        for pid in self._hidden:
            if identity.is_between_programs(pid, proc=self._proc):  # it has an environment in a moment
                self._looked_at.discard(str(pid))
                self._owners.pop(pid, None)
                del self._alive[pid]
        self._lists_without_loss = 0 if lost or not all(asked) else self._lists_without_loss + 1

    def _ask(self, pid: int) -> bool:
        """Find out what a process says of itself; False if it has ended before, and may have had a child."""
        stat = read_stat(pid, proc=self._proc)
        if stat is None or stat.dead:
            return False
        self._alive[pid] = stat
        mark = self._marks[pid] = None if stat.parent == _KERNEL and stat.rss_pages == 0 else self._mark(pid)
        if mark is not None and self._halting:
            self._halt(stat, self._marked.get(mark))
        return True

    def _halt(self, stat: Stat, owner: tuple[str, int] | None) -> None:
        """Stop a process that is to stand still, before it can fork and end: at the end of a walk it may be gone."""
        if owner in self._halting and stat.pid != self._halting[owner] and stat.state not in STANDS_STILL:
            with contextlib.suppress(OSError):
                _send(Process(stat.pid, stat.start_ticks), signal.SIGSTOP)

    def _find_reapers(self) -> None:
        at = self._alive.get(self._me)
        while at is not None and at.parent not in self.reapers:
            self.reapers.add(at.parent)
            at = self._alive.get(at.parent)

    def _find_wrappers(self) -> None:
        here = boot_id(proc=self._proc), pid_namespace(proc=self._proc)
        for run in self._runs:
            if run.jid is not None and (run.jid.boot_id, run.jid.pid_namespace) == here:
                leader = self._alive.get(run.jid.pid)
                if leader is not None and leader.start_ticks == run.jid.start_ticks:
                    self._wrappers[Process(run.jid.pid, run.jid.start_ticks)] = run.key
                    self._sessions[run.jid.pid] = run.key
                elif self._owners.get(run.jid.pid) == run.key:
                    self._sessions[run.jid.pid] = run.key
                else:
                    self._orphaned[run.jid.pid] = run.key

    def still(self, found: Mapping[tuple[str, int], Collection[Process]]) -> frozenset[Process]:
        """Return which of those found stood still when they were looked at."""
        each = (process for processes in found.values() for process in processes)
        return frozenset(process for process in each if self._alive[process.pid].state in STANDS_STILL)

    def something_moves(self, found: Mapping[tuple[str, int], Collection[Process]]) -> bool:
        """Whether any process besides the wrappers did not."""
        return bool({process for processes in found.values() for process in processes} - self.still(found) -
                    self._wrappers.keys())  # fmt: skip

    def members(self) -> dict[tuple[str, int], frozenset[Process]]:
        """Return the processes of each run."""
        found: dict[tuple[str, int], set[Process]] = {key: set() for key in self._keys}
        for stat in self._alive.values():
            owner = self._owner(stat)
            if owner is not None and owner in found:
                found[owner].add(Process(stat.pid, stat.start_ticks))
        return {key: frozenset(processes) for key, processes in found.items()}

    def _owner(self, stat: Stat) -> tuple[str, int] | None:
        line: list[Stat] = []  # from the process upwards, as far as nothing is decided
        owner: tuple[str, int] | None = None
        at: Stat | None = stat
        while at is not None:
            if at.pid in self._owners:
                owner = self._owners[at.pid]
                break
            self._owners[at.pid] = None
            line.append(at)
            decided, owner = self._own(at)
            if decided:
                break
            if at.parent not in self._alive:
                owner = self._owners.get(at.parent)
            at = self._alive.get(at.parent)
        for step in reversed(line):
            # What a process's ancestors do not say, its session may.
            owner = owner or self._by_session(step)
            self._owners[step.pid] = owner
        return owner

    def _own(self, stat: Stat) -> tuple[bool, tuple[str, int] | None]:
        """Tell what the process itself says: whether that decides, and for which run."""
        process = Process(stat.pid, stat.start_ticks)
        if process in self._wrappers:
            return True, self._wrappers[process]
        mark = self._marks.get(stat.pid)
        if mark is not None and mark[0] in self._spools:
            return True, self._marked.get(mark, _SOMEBODY_ELSES)
        if process in self._known:
            return True, self._known[process]
        if stat.pid in self._grouped:
            return True, self._grouped[stat.pid]
        if self._is_orphan(stat):
            owner = self._by_output(stat.pid)
            return owner is not None, owner
        return False, None

    def _is_orphan(self, stat: Stat) -> bool:
        """Whether its parent is nobody's; if it was gone when that was looked at, this one is an orphan by now."""
        return stat.parent in self.reapers or not (stat.parent in self._alive or stat.parent in self._owners)

    def _by_output(self, pid: int) -> tuple[str, int] | None:
        """Return whose metadir holds the file that the process has as stdout or stderr."""
        for number in (1, 2):
            try:
                directory = os.path.dirname(os.readlink(f"{self._proc}/{pid}/fd/{number}"))
            except OSError:
                continue
            if self._metadirs is None:
                self._metadirs = {Layout(run.spool_dir).metadir(*run.key): run.key for run in self._runs}
            if directory in self._metadirs:
                return self._metadirs[directory]
        return None

    def _by_session(self, stat: Stat) -> tuple[str, int] | None:
        if stat.session in self._sessions:
            return self._sessions[stat.session]
        leader = self._alive.get(stat.session)
        owner = self._owners.get(stat.session) if leader is None else self._owner(leader)
        if owner is not None:
            return owner  # one enters a session by birth alone
        return self._orphaned.get(stat.session) if stat.parent == self._me else None

    def _mark(self, pid: int) -> tuple[str, str, str] | None:
        """Return the spool, job and run that the environment of a process names."""
        try:
            if os.stat(f"{self._proc}/{pid}").st_uid != self._uid:
                return None
            environment = read_bytes(f"{self._proc}/{pid}/environ")
        except OSError as error:
            if is_shortage(error):
                raise
            if error.errno in (errno.ENOENT, errno.ESRCH):
                self._hidden.add(pid)
            return None
        if not environment and identity.is_between_programs(pid, proc=self._proc) is not False:
            self._hidden.add(pid)
        if b"SPOOL_RUN=" not in environment and _HOOK_MARK not in environment:
            return None
        return _mark_in(environment, self._real)


def hooks_of(spool_dir: str, *, proc: str = PROC) -> list[tuple[int, str]]:
    """Return the processes that carry the mark of a hook of that spool: each pid and mark."""
    found, real = [], _RealPaths({spool_dir: spool_dir})
    for name in os.listdir(proc):
        if name.isdigit():
            try:
                environment = read_bytes(f"{proc}/{name}/environ")
            except OSError:
                continue
            mark = _mark_in(environment, real) if _HOOK_MARK in environment else None
            if mark is not None and mark[0] == spool_dir and mark[2] == "0":
                found.append((int(name), mark[1]))
    return found


def job_of(pid: int, spool_dir: str, *, proc: str = PROC) -> str | None:
    """Return the job of that spool whose mark the process *pid* carries, None if it carries none."""
    try:
        environment = read_bytes(f"{proc}/{pid}/environ")
    except OSError:
        return None
    mark = _mark_in(environment, _RealPaths({spool_dir: spool_dir}))
    return mark[1] if mark is not None and mark[0] == spool_dir and mark[2] != "0" else None


def is_wrapper(pid: int, spool_dir: str, job: str, run: int, *, proc: str = PROC) -> bool:
    """Whether the process *pid* is, or may be, the wrapper of a run of the spool at that real path.

    A record can name any process; what counts is what the process itself shows. A wrapper has its script among its
    arguments, the run's marks in its environment, its outputs in the metadir, or a child with the marks. One that was
    started ahead of its run has none of these at first, but shows that it waited for one. Raises OSError where the
    machine has too little left to tell.
    """
    metadir = Layout(spool_dir).metadir(job, run)
    arguments = _read_of(pid, "cmdline", proc)
    if arguments is None:
        return True  # it has just ended; who asks again learns that
    words = arguments.split(b"\0")
    if os.fsencode(f"{metadir}/{WRAPPER}") in words:
        return True
    spools = _RealPaths({spool_dir: spool_dir})
    wanted = (spool_dir, job, str(run))
    mark = _mark_of(pid, spools, proc)
    if mark == wanted or _has_output_in(pid, metadir, proc):
        return True
    if mark is not None or not (_WAITED in arguments or os.path.basename(words[0]) == _COMPILED):
        return False
    children = (_read_of(pid, f"task/{pid}/children", proc) or b"").split()
    marks = {mark for child in children if (mark := _mark_of(int(child), spools, proc)) is not None}
    return not marks or wanted in marks


def _mark_of(pid: int, spools: _RealPaths, proc: str) -> tuple[str, str, str] | None:
    return _mark_in(_read_of(pid, "environ", proc) or b"", spools)


def _has_output_in(pid: int, directory: str, proc: str) -> bool:
    """Whether one of the descriptors with which a wrapper holds its outputs is of a file in *directory*."""
    for number in _OUTPUTS:
        with contextlib.suppress(OSError):
            if os.path.dirname(os.readlink(f"{proc}/{pid}/fd/{number}")) == directory:
                return True
    return False


def _read_of(pid: int, name: str, proc: str) -> bytes | None:
    """Return what /proc/PID/NAME says; None if the process is gone or does not show it. Raises OSError: a shortage."""
    try:
        return read_bytes(f"{proc}/{pid}/{name}")
    except OSError as error:
        if is_shortage(error):
            raise
        return None


def runs_with_processes(spool_dir: str, *, proc: str = PROC) -> frozenset[tuple[str, int]]:
    """Return the runs of the spool at that real path that have processes, as far as mark and output tell.

    For who only shows it. Who ends a run asks `scan`, which knows its session and its descendants too.
    """
    found, real = set(), _RealPaths({spool_dir: spool_dir})
    runs = f"{Layout(spool_dir).at(JOBS)}/"
    for entry in os.listdir(proc):
        stat = read_stat(int(entry), proc=proc) if entry.isdigit() else None
        if stat is None or stat.dead:
            continue
        try:
            mark = _mark_in(read_bytes(f"{proc}/{entry}/environ"), real)
            if mark is None:
                outputs = {os.path.dirname(os.readlink(f"{proc}/{entry}/fd/{number}")) for number in (1, 2)}
                here = [path.removeprefix(runs).partition("/") for path in outputs if path.startswith(runs)]
                mark = next(((spool_dir, name, run) for name, _, run in here), None)
        except OSError:  # somebody else's, gone, or without outputs
            continue
        if mark is not None and mark[0] == spool_dir and mark[2].isdecimal() and mark[2] != "0":
            found.add((mark[1], int(mark[2])))
    return frozenset(found)


class MachineProber:
    """What a look at a spool asks of this machine. *gone_hosts*: those that the user has declared gone."""

    def __init__(self, gone_hosts: frozenset[str] = frozenset()) -> None:
        self._gone_hosts = gone_hosts
        self._walked: tuple[str, int, frozenset[tuple[str, int]]] | None = None  # the spool, when, what

    def boot_id(self) -> str:
        """Return the id of this boot."""
        return identity.boot_id()

    def liveness(self, jid: Jid) -> Liveness:
        """Return what became of the process *jid*; on a host that is no more, nothing is alive."""
        found = identity.liveness(jid)
        if found is Liveness.ELSEWHERE and jid.host in self._gone_hosts:
            return Liveness.REBOOTED
        return found

    def is_wrapper(self, jid: Jid, root: str, name: str, run: int) -> bool:
        """Whether the living process *jid* is the wrapper of that run of the spool at *root*."""
        return is_wrapper(jid.pid, root, name, run)

    def has_left_processes(self, root: str, name: str, run: int) -> bool:
        """Whether there are processes of a run of the spool at *root*; one walk over /proc answers for all runs."""
        if self._walked is None or self._walked[0] != root or time.monotonic_ns() - self._walked[1] > _SEEN_FOR_NS:
            self._walked = root, time.monotonic_ns(), runs_with_processes(root)
        return (name, run) in self._walked[2]


class _RealPaths(dict[str, str]):
    """The real path of each path, looked up once; those that are known to be real are put in from the beginning."""

    def __missing__(self, path: str) -> str:
        # A relative one would be relative to a directory that is not ours; spool sets none.
        self[path] = real = os.path.realpath(path) if os.path.isabs(path) else path
        return real


def _mark_in(environment: bytes, real: _RealPaths) -> tuple[str, str, str] | None:
    """Return the spool, by its real path, the job and the run that an environment names; a hook is its run 0."""
    values = dict(entry.partition(b"=")[::2] for entry in environment.split(b"\0") if entry.startswith(b"SPOOL_"))
    spool, hook = os.fsdecode(values.get(b"SPOOL_DIR", b"")), os.fsdecode(values.get(HOOK_MARK.encode(), b""))
    job, run = os.fsdecode(values.get(b"SPOOL_JOB", b"")), os.fsdecode(values.get(b"SPOOL_RUN", b""))
    if hook:
        job, run = hook, "0"  # no run has that number
    return (real[spool], job, run) if spool and job and run else None


class Process(NamedTuple):
    """One process for as long as it lives: the pid may come back, the pair does not within one boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a signal."""

    signalled: frozenset[Process] = frozenset()
    gone: frozenset[Process] = frozenset()  # ended before
    refused: frozenset[Process] = frozenset()  # another user's, pid 1, this process; or it could not be told who it is


def send(processes: Iterable[Process], number: int, *, spare: Collection[int] = ()) -> Sent:
    """Send a signal to each process that still is the one it was, parents first, and say what became of it.

    The identity is checked while a pidfd holds the process, so that a pid that came back is never signalled.
    Pid 1, this process and the pids in *spare* are refused.
    """
    signalled: set[Process] = set()
    gone: set[Process] = set()
    refused: set[Process] = set()
    for process in _parents_first(processes):
        if process.pid <= _INIT or process.pid == os.getpid() or process.pid in spare:
            refused.add(process)
            continue
        try:
            found = _send(process, number)
        except ProcessLookupError:
            found = False
        except OSError:  # also where it is not known who has that pid: for want of memory, and for a moment
            refused.add(process)
            continue
        (signalled if found else gone).add(process)
    return Sent(frozenset(signalled), frozenset(gone), frozenset(refused))


def _parents_first(processes: Iterable[Process]) -> list[Process]:
    """Return the processes in an order in which nobody comes before its parent.

    A shell that is told after the program for which it waits may see that end first, and go on to its next command or
    end without its trap.
    """
    processes = list(processes)
    parents: dict[int, int] = {}
    for pid in {process.pid for process in processes}:
        with contextlib.suppress(OSError):
            if (stat := read_stat(pid)) is not None:
                parents[pid] = stat.parent
    order: list[int] = []
    seen: set[int] = set()
    for pid in parents:
        line = []  # from the process upwards
        while pid in parents and pid not in seen:
            seen.add(pid)  # pids that came back may make a circle of it
            line.append(pid)
            pid = parents[pid]
        order += reversed(line)
    rank = {pid: place for place, pid in enumerate(order)}
    return sorted(processes, key=lambda process: rank.get(process.pid, -1))


def _send(process: Process, number: int) -> bool:
    """Signal the process; False if it is another one by now. Raises OSError."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno != errno.ENOSYS and not is_shortage(error):
            raise
        # Without a descriptor there is a moment between the check and the signal; a run that cannot be ended is worse.
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


@dataclass(frozen=True, slots=True)
class Reaped:
    """A child that has ended, and what it and the children that it waited for have used."""

    pid: int
    exit_code: int  # 128+n for signal n
    cpu_time_ns: int
    peak_memory_bytes: int  # of the largest single process among them


def become_subreaper(*, on: bool = True) -> bool:
    """Make this process the parent of every orphan among its descendants, or no longer; False where the kernel cannot.

    With it, a run has left nothing behind if its wrapper's end adds no child to this process: no walk over /proc
    is needed. See prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    import ctypes  # here, for commands inherit no orphans

    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return False
    result: int = prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(on), *[ctypes.c_ulong(0)] * 3)
    return result == 0


class SpawnThread:
    """A thread that starts children, and does nothing else.

    The kernel lists children by the thread that started them, and gives orphans to the one that leads the process. So
    its list is as long as there are orphans, however many children there are.
    """

    def __init__(self) -> None:
        """Start no thread yet."""
        from concurrent.futures import ThreadPoolExecutor  # here, for commands start no children

        self._new_thread = partial(ThreadPoolExecutor, 1, "nursery", initializer=_hear_no_signals)
        self._thread: ThreadPoolExecutor | None = None

    def start(self, spawn: Callable[[], int]) -> int:
        """Return the pid of the child that *spawn* starts. What it raises is raised here."""
        if self._thread is None:
            self._thread = self._new_thread()
        try:
            begun = self._thread.submit(spawn)
        except RuntimeError:  # no room for a thread; a child that this one starts is in the list, and known there
            self.close()
            return spawn()
        return begun.result()

    def close(self) -> None:
        """End the thread; its children become the leader's."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _hear_no_signals() -> None:
    """Leave every signal to the main thread, which sleeps until one comes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def children_of_self(*, proc: str = PROC) -> frozenset[int] | None:
    """Return the pids of this process's children, zombies too; None where the kernel does not list them.

    They are those of its main thread: all orphans, but no child of a :class:`SpawnThread`.
    """
    pid = os.getpid() if proc == PROC else "self"
    try:
        return frozenset(map(int, read_bytes(f"{proc}/{pid}/task/{pid}/children").split()))
    except OSError:
        return None


class Children:
    """The children of this process, to be reaped by the thread that leads it when one may have ended.

    To wait for any child the kernel looks at all of them. Where there are many, each that is :meth:`added` and lives on
    has a pidfd, so that those that have ended are known by name. Orphans are children of the leading thread alone, and
    are looked for there. All others are no runs: they are looked for, among all, once a second at most; :attr:`due_ns`
    says when. Without a descriptor for each child all is as where there are few.
    """

    def __init__(self, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Know no child by name. *clock* is monotonic."""
        self.stopped: set[int] = set()  # children that were made to stand still, to be taken away by the one who asks
        self.due_ns: int | None = None  # when the next look at all children is due, though none may have ended since
        self._clock = clock
        self._named: dict[int, int | None] = {}  # the pidfd of each that lives, None: it has none
        self._new: set[int] = set()  # those that have none
        self._ready: select.epoll | None = None  # what the pidfds are registered in
        self._pids: dict[int, int] = {}  # by the pidfd
        self._looked_ns = self._refused_ns = -_REFUSED_FOR_NS

    def added(self, pid: int) -> None:
        """Know this child by name: a run waits for its end."""
        self._forget(pid)  # somebody else has reaped one of that pid
        self._named[pid] = None
        self._new.add(pid)

    def reap(self) -> Iterator[tuple[int, int, resource.struct_rusage]]:
        """Yield pid, status and usage of each child that has ended."""
        if self._are_many():
            for pid in [*self._new]:
                yield from self._reaped(pid)
            if self._watch_new():
                yield from self._reap_watched()
                return
        elif self._ready is not None:
            self.close()
        self.due_ns = None
        yield from self._reaped(-1)

    def close(self) -> None:
        """Give the descriptors back."""
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.close()
        for fd in self._pids:
            os.close(fd)
        self._pids.clear()
        self._named = dict.fromkeys(self._named)
        self._new.update(self._named)

    def _are_many(self) -> bool:
        if len(self._named) < (_MANY if self._ready is None else _MANY // 2):
            return False
        return self._clock() - self._refused_ns >= _REFUSED_FOR_NS

    def _watch_new(self) -> bool:
        """Have a pidfd of each child; return whether there is one. Half of the descriptors are left to others."""
        if not self._new:
            return self._ready is not None  # else all that there were have ended
        try:
            if len(self._named) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._ready = self._ready or select.epoll()
            for pid in [*self._new]:
                self._watch(self._ready, pid)
        except OSError:  # no descriptor left, or a kernel without pidfds
            self.close()
            self._refused_ns = self._clock()
            return False
        return True

    def _watch(self, ready: select.epoll, pid: int) -> None:
        fd = os.pidfd_open(pid)
        try:
            ready.register(fd, select.EPOLLIN)
        except OSError:
            os.close(fd)
            raise
        self._named[pid], self._pids[fd] = fd, pid
        self._new.discard(pid)

    def _reap_watched(self) -> Iterator[tuple[int, int, resource.struct_rusage]]:
        assert self._ready is not None
        for fd, _ in self._ready.poll(0, len(self._pids) + 1):
            yield from self._reaped(self._pids[fd])
        yield from self._reaped(-1, _WNOTHREAD)
        now_ns = self._clock()
        if now_ns - self._looked_ns >= _LOOK_EVERY_NS:
            self._looked_ns, self.due_ns = now_ns, None
            yield from self._reaped(-1)
        else:
            self.due_ns = self._looked_ns + _LOOK_EVERY_NS

    def _reaped(self, which: int, options: int = 0) -> Iterator[tuple[int, int, resource.struct_rusage]]:
        """Reap the child *which*, or with -1 all."""
        while True:
            try:
                pid, status, usage = os.wait4(which, os.WNOHANG | os.WUNTRACED | options)
            except ChildProcessError:
                self._forget(which)
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self.stopped.add(pid)
                continue
            self._forget(pid)
            yield pid, status, usage
            if which > 0:
                return

    def _forget(self, pid: int) -> None:
        self._new.discard(pid)
        fd = self._named.pop(pid, None)
        if fd is not None and self._ready is not None:
            self._ready.unregister(fd)  # closing does that only where no fork has a copy of it
            del self._pids[fd]
            os.close(fd)


def reap(pids: Iterable[int]) -> dict[int, Reaped]:
    """Take away those of these children that have ended, and say how; the others are left alone.

    The pids are named, for this process may have children that others wait for. One that is no child is skipped.
    """
    ended: dict[int, Reaped] = {}
    for pid in pids:
        try:
            reaped, status, usage = os.wait4(pid, os.WNOHANG)
        except ChildProcessError:
            continue
        if reaped:
            code = os.waitstatus_to_exitcode(status)
            cpu_time_ns = round((usage.ru_utime + usage.ru_stime) * _SECOND_NS)
            ended[pid] = Reaped(pid, code if code >= 0 else 128 - code, cpu_time_ns, usage.ru_maxrss * _KIBIBYTE)
    return ended


def rss_bytes(pids: Iterable[int], *, proc: str = PROC) -> int:
    """Return the sum of the resident sizes: an upper bound of what the processes have in memory together."""
    return sum(_rss_bytes(pid, proc) for pid in pids)


def pss_bytes(pids: Iterable[int], *, proc: str = PROC) -> int:
    """Return the sum of the proportional sizes, in which a page shared by n processes counts as an n-th for each.

    The kernel walks the page tables for it, milliseconds for a process of many gigabytes, so ask only where the
    resident sizes leave a doubt. A process that does not let itself be asked counts with its resident size.
    """
    total = 0
    for pid in pids:
        found = _kibibytes(f"{proc}/{pid}/smaps_rollup", b"Pss:")
        total += _rss_bytes(pid, proc) if found is None else found
    return total


def peak_rss_bytes(pids: Iterable[int], *, proc: str = PROC) -> int:
    """Return the sum of the largest resident sizes that each process ever had, not all of them at one moment."""
    return sum(_kibibytes(f"{proc}/{pid}/status", b"VmHWM:") or 0 for pid in pids)


def cpu_time_ns(pids: Iterable[int], *, proc: str = PROC) -> int:
    """Return the CPU time of the processes and of all their children that ended and were waited for."""
    total = 0
    for pid in pids:
        stat = read_stat(pid, proc=proc)
        if stat is not None:
            own = stat.user_ticks + stat.system_ticks
            total += (own + stat.children_user_ticks + stat.children_system_ticks) * TICK_NS
    return total


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
