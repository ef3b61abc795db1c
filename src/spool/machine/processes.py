"""The processes of runs: which belong to a run, how they are signalled and measured.

A process group is not enough: `setsid` and double forks leave it. A run consists of

* its wrapper, while that lives, and every process of the wrapper's session;
* every process that carries the run's mark in its environment (`SPOOL_DIR`, `SPOOL_JOB`, `SPOOL_RUN`);
* every process that was known to belong to it before;
* every orphan whose stdout or stderr is a file of the run's metadir, as its log is: `env -i setsid` removes the mark
  and the session, and after the end of its parent only the output shows its run;
* the descendants of all of these and every process in a session that one of them leads, whatever their environment,
  unless they carry the mark of another run of the same spool, or are this process: a dispatcher that was started from
  within a job does not belong to it;
* every process of its control group, if it has one.

`machine/marks.py` defines the marks. A hook has one of its own, and does not belong to the run that it is about.

Once the wrapper is gone, its pid may be reused for a foreign session, so the session no longer counts, except for our
own children: as a subreaper we inherit the orphans of the wrappers that we started, and no others.

One walk over /proc serves any number of runs. As always with /proc, the result is not one consistent moment: a process
may fork and end before it is read. So a walk reports whether that may have happened; only a certain walk proves that no
process of a run is left.

Resource use is summed over the processes. Resident sizes count a shared page for every process that has it, so their
sum is cheap and never too low; proportional sizes count it only once. A process that has ended by then counts as
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from spool.core.layout import Layout
from spool.core.model import Jid
from spool.machine import identity
from spool.machine.descriptors import certainly, is_shortage
from spool.machine.identity import PROC, TICK_NS, Stat, boot_id, pid_namespace, read_bytes, read_stat
from spool.machine.marks import RealPaths, mark_in

_FIRST_LISTS, _ENOUGH_LISTS, _MOST_LISTS = 3, 2, 20
_MOST_PROGRAMS = 4  # programs that a process may execute in a row while its environment is read
_EVERY, _PARTS = 4, 8  # every fourth look checks an eighth of the known processes again
_INIT = 1
_KERNEL = 2  # kthreadd, the parent of every kernel thread

STANDS_STILL = "Tt"
"""Process states: stopped by a signal or a tracer."""
_IN_THE_KERNEL = "D"  # a wait that no signal interrupts

_SOMEBODY_ELSES = ("", 0)  # the mark of a run that was not asked for
_KIBIBYTE = 1024
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class TrackedRun(Struct, frozen=True):
    """A run to find the processes of."""

    job: str
    run: int
    spool_dir: str  # its real path
    jid: Jid | None = None  # of its wrapper; None if it has none yet
    known: frozenset[Process] = frozenset()  # those found before
    grouped: frozenset[int] = frozenset()  # the pids in its control group, which no process can leave by itself
    halts: bool = False  # stop its marked processes as soon as they are seen, except for its wrapper

    @property
    def key(self) -> tuple[str, int]:
        """The key of the run in results."""
        return self.job, self.run


class Look(Struct, frozen=True):
    """The result of one look at all processes."""

    members: dict[tuple[str, int], frozenset[Process]]
    still: frozenset[Process] = frozenset()  # of these, those that were stopped when read
    certain: bool = True  # no process of a run can have been missed


def look(wanted: Iterable[TrackedRun], *, proc: str = PROC, me: int | None = None, until_ns: int | None = None) -> Look:
    """Find the processes of each run, by (job, run), in one walk over /proc.

    A process may fork and exit before its run is known, leaving a child that the list misses. So /proc is listed again
    until two lists in a row have no such process: a run with a living process then has one in the second list, or in
    the first, where it was read. If that does not happen after many lists, or by *until_ns* on the monotonic clock, the
    look is not certain: there may be processes that it has not found.

    The environment is read only for processes of our own user. Zombies belong to no run: they hold nothing. Raises
    OSError if the machine lacks the resources for a complete look: a process that was not seen may still be there. *me*
    is the pid of this process, if not the real one.
    """
    runs = list(wanted)
    if not runs:
        return Look({})
    walk = _Walk(runs, proc, os.getpid() if me is None else me)
    found = walk.members()
    for _ in range(_MOST_LISTS):
        # Running processes must be signalled at once; the next look finds those that are missed.
        if walk.certain or (all(found.values()) and walk.something_moves(found)):
            break
        if until_ns is not None and time.monotonic_ns() >= until_ns:
            break
        walk.list()
        found = walk.members()
    return Look(found, walk.still(found), walk.certain)


def scan(
    wanted: Iterable[TrackedRun], *, proc: str = PROC, me: int | None = None
) -> dict[tuple[str, int], frozenset[Process]]:
    """Return the result of :func:`look`, for display and measurement, where a process more or less does not matter."""
    return look(wanted, proc=proc, me=me).members


class ProcessCache:
    """The processes of runs, from look to look: only new processes are read, because reading takes long.

    Some of the others are read again each time, since a pid may have been reused, or a process may have changed its
    run. Until then the result is not quite certain: before processes are ended, `scan` has to agree.
    """

    def __init__(self, *, proc: str = PROC, me: int | None = None) -> None:
        self._proc, self._me = proc, me
        self._owners: dict[int, tuple[str, int] | None] = {}
        self._members: dict[tuple[str, int], dict[int, Process]] = {}
        self._reapers: set[int] = set()
        self._round: list[int] = []  # pids still to be read again in this round
        self._looks = 0

    def ask_again(self, pid: int | None = None) -> None:
        """Let the next look read that process again, or all of them."""
        if pid is None:
            self._owners.clear()
        else:
            self._owners.pop(pid, None)

    def look(self, wanted: Callable[[], Iterable[TrackedRun]]) -> dict[tuple[str, int], dict[int, Process]]:
        """Return the processes of each run, by pid; *wanted* returns the runs; called only if processes are read.

        Raises OSError if the machine lacks the resources for that.
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
            self._owners.clear()  # some entered pids have not been read
            for key, processes in again.items():
                self._members[key].update((process.pid, process) for process in processes)
            raise
        self._owners.update(dict.fromkeys(listed - self._owners.keys()))  # zombies, and processes that just ended
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
    """One walk over /proc, and the run of each process."""

    def __init__(
        self,
        runs: list[TrackedRun],
        proc: str,
        me: int,
        asked: dict[int, tuple[str, int] | None] | None = None,
        reapers: Iterable[int] = (),
    ) -> None:
        """Look at every process not in *asked*, which holds the runs of known processes."""
        self._proc, self._me, self._uid = proc, me, os.getuid()
        self._alive: dict[int, Stat] = {}
        self._marks: dict[int, tuple[str, str, str] | None] = {}
        self._owners = asked if asked is not None else {}
        self._looked_at = set(map(str, self._owners))
        self._hidden: set[int] = set()  # in the last list: processes whose environment could not be read
        self._executing: set[int] = set()  # of these: those about to execute a program
        self._lists_without_loss = 0
        self.reapers = {_INIT, me, *reapers}  # parents of orphans: us, and those of earlier dispatchers
        self._real = RealPaths({run.spool_dir: run.spool_dir for run in runs})
        self._spools = frozenset(self._real)
        self._marked = {(run.spool_dir, run.job, str(run.run)): run.key for run in runs}
        self._metadirs: dict[str, tuple[str, int]] | None = None
        self._runs = runs
        self._known = {process: run.key for run in runs for process in run.known}
        self._grouped = {pid: run.key for run in runs for pid in run.grouped}
        self._wrappers: dict[Process, tuple[str, int]] = {}
        self._sessions: dict[int, tuple[str, int]] = {}  # of living wrappers
        self._orphaned: dict[int, tuple[str, int]] = {}  # of wrappers that have ended
        self._keys = [run.key for run in runs]
        self._halting = {run.key: run.jid.pid if run.jid is not None else 0 for run in runs if run.halts}
        for _ in range(_FIRST_LISTS):
            if not self.certain:
                self.list()
        self._find_wrappers()
        # A process is entered before its parent is visited, so that a pid reused during the walk cannot cause an
        # endless loop.
        self._owners.update({me: None, 0: None, _INIT: None})
        kernel = self._alive.get(_KERNEL)
        if kernel is None or (kernel.parent == 0 and kernel.rss_pages == 0):  # may be any process in a container
            self._owners[_KERNEL] = None

    @property
    def certain(self) -> bool:
        """Whether no process can have been missed.

        A process that ends while /proc is listed may leave a child behind the current position, because pids wrap
        around to the lowest: so one list is not enough.
        """
        return self._lists_without_loss >= _ENOUGH_LISTS

    def list(self) -> None:
        """List the processes and read the new ones, youngest first, because these end first."""
        names = {name for name in certainly(lambda: os.listdir(self._proc)) if name.isdigit()} - self._looked_at
        self._looked_at |= names
        self._hidden.clear()
        self._executing.clear()
        asked = [self._ask(pid) for pid in sorted(map(int, names), reverse=True)]
        self._find_reapers()
        # A process with a parent is attributed by that.
        lost = [pid for pid in self._hidden if self._is_orphan(self._alive[pid])]
        for pid in self._executing:  # it has an environment now, or soon
            self._looked_at.discard(str(pid))
            self._owners.pop(pid, None)
            del self._alive[pid]
        self._lists_without_loss = 0 if lost or not all(asked) else self._lists_without_loss + 1

    def _ask(self, pid: int) -> bool:
        """Read what a process says about itself; False if it has ended already, and may have left a child."""
        stat = read_stat(pid, proc=self._proc)
        if stat is None or stat.dead:
            return False
        self._alive[pid] = stat
        mark = self._marks[pid] = None if stat.parent == _KERNEL and stat.rss_pages == 0 else self._mark(pid)
        if mark is not None and self._halting:
            self._halt(stat, self._marked.get(mark))
        return True

    def _halt(self, stat: Stat, owner: tuple[str, int] | None) -> None:
        """Stop a process that must be stopped before it can fork and exit: at the end of the walk it may be gone."""
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
        """Return the processes found that were stopped when read, or must stop before their next instruction."""
        each = (process for processes in found.values() for process in processes)
        return frozenset(process for process in each if self._stands_still(process.pid))

    def _stands_still(self, pid: int) -> bool:
        # A shell that has just started a command by vfork waits in the kernel until that command's process executes it.
        # If that process is stopped before, the shell itself can only stop when it continues.
        state = self._alive[pid].state
        return state in STANDS_STILL or (state == _IN_THE_KERNEL and identity.must_stop(pid, proc=self._proc))

    def something_moves(self, found: Mapping[tuple[str, int], Collection[Process]]) -> bool:
        """Whether any process besides the wrappers was running."""
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
        line: list[Stat] = []  # from the process upwards, as far as undecided
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
            # If the ancestors of a process do not decide, its session may.
            owner = owner or self._by_session(step)
            self._owners[step.pid] = owner
        return owner

    def _own(self, stat: Stat) -> tuple[bool, tuple[str, int] | None]:
        """Return what the process itself shows: whether that decides, and for which run."""
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
        """Whether its parent belongs to no run; a parent that was gone when read makes it an orphan by now."""
        return stat.parent in self.reapers or not (stat.parent in self._alive or stat.parent in self._owners)

    def _by_output(self, pid: int) -> tuple[str, int] | None:
        """Return the run in whose metadir the stdout or stderr of the process is."""
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
            return owner  # a process enters a session only by birth
        return self._orphaned.get(stat.session) if stat.parent == self._me else None

    def _mark(self, pid: int) -> tuple[str, str, str] | None:
        """Return the spool, job and run in the environment of a process."""
        try:
            if os.stat(f"{self._proc}/{pid}").st_uid != self._uid:
                return None
            environment = read_bytes(f"{self._proc}/{pid}/environ")
            for _ in range(_MOST_PROGRAMS):
                if environment:
                    break
                executing = identity.is_between_programs(pid, proc=self._proc)
                if executing is not False:
                    self._hidden.add(pid)
                    if executing:
                        self._executing.add(pid)
                    return None
                environment = read_bytes(f"{self._proc}/{pid}/environ")  # it had already executed the next program
        except OSError as error:
            if is_shortage(error):
                raise
            if error.errno in (errno.ENOENT, errno.ESRCH):
                self._hidden.add(pid)
            return None
        return mark_in(environment, self._real)


class Process(NamedTuple):
    """One process for its lifetime: the pid may be reused, the pair is unique within one boot."""

    pid: int
    start_ticks: int


class Sent(Struct, frozen=True):
    """The result of sending a signal."""

    signalled: frozenset[Process] = frozenset()
    gone: frozenset[Process] = frozenset()  # had ended before
    refused: frozenset[Process] = frozenset()  # another user's, pid 1, this process; or not identifiable


def send(processes: Iterable[Process], number: int, *, spare: Collection[int] = ()) -> Sent:
    """Send a signal to each process if its identity still matches, parents first, and return the result.

    The identity is checked while a pidfd holds the process, so that a reused pid is never signalled. Pid 1, this
    process and the pids in *spare* are refused.
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
        except OSError:  # also if the identity is unknown for the moment, for lack of memory
            refused.add(process)
            continue
        (signalled if found else gone).add(process)
    return Sent(frozenset(signalled), frozenset(gone), frozenset(refused))


def _parents_first(processes: Iterable[Process]) -> list[Process]:
    """Return the processes in an order in which each comes after its parent.

    A shell that is signalled after the program for which it waits may see that end first, and go on to its next command
    or exit without its trap.
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
            seen.add(pid)  # reused pids may form a circle
            line.append(pid)
            pid = parents[pid]
        order += reversed(line)
    rank = {pid: place for place, pid in enumerate(order)}
    return sorted(processes, key=lambda process: rank.get(process.pid, -1))


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


def rss_bytes(pids: Iterable[int], *, proc: str = PROC) -> int:
    """Return the sum of the resident sizes: an upper bound of the processes' memory together."""
    return sum(_rss_bytes(pid, proc) for pid in pids)


def pss_bytes(pids: Iterable[int], *, proc: str = PROC) -> int:
    """Return the sum of the proportional sizes, in which a page shared by n processes counts as an n-th each time.

    The kernel walks the page tables for it, milliseconds for a process of many gigabytes, so use it only if the
    resident sizes leave a doubt. A process whose size cannot be read counts with its resident size.
    """
    total = 0
    for pid in pids:
        found = _kibibytes(f"{proc}/{pid}/smaps_rollup", b"Pss:")
        total += _rss_bytes(pid, proc) if found is None else found
    return total


def peak_rss_bytes(pids: Iterable[int], *, proc: str = PROC) -> int:
    """Return the sum of each process's peak resident size; the peaks need not coincide."""
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
