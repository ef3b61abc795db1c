"""The runs of this machine, whatever started them: their liveness, their end, their use of resources.

A run is ended by TERM to its whole process tree, and after the grace by KILL, look after look until nothing of it is
left (`core/lifecycle.py` decides each step). Before KILL all of it is frozen, by its control group or by STOP: a frozen
process does not fork, and a child is known by its parent while that exists. The wrapper is spared while something else
is left, so that it can record the exit code; not for ever, since it may be blocked. None of this needs another process,
or a descriptor that is not reserved: on a machine that has run out of them, a run must be ended all the more.

A run is over when a look that cannot have missed anything finds nothing (`machine/processes.py`). For children of this
process the kernel's list of children proves the same, however fast they fork: a process that outlives its parent
becomes a child of this process, and stays in the list until it is reaped.

spool never stops a wrapper. A wrapper that another program has stopped is continued here.

As a child subreaper the dispatcher inherits the leftovers of its own wrappers, so that for an ended run one short read
proves that nothing is left, not a look at every process of the machine. If such a look is needed, one serves all runs
whose wrappers have ended by then.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from spool.core.lifecycle import EndStep, Liveness, Remains, ending
from spool.core.model import SECOND_NS, Jid, SignalTo
from spool.executors.base import Family, Usage
from spool.machine import children, identity, marks, processes
from spool.machine.cgroups import RunGroup, RunGroups
from spool.machine.children import Children
from spool.machine.processes import STANDS_STILL, Look, Process, ProcessCache, TrackedRun, pss_bytes, rss_bytes, send

log = logging.getLogger(__name__)

_WRAPPER_GRACE_NS = 2 * SECOND_NS  # after everything else is gone or killed, for the epilog and the exit code
_FREEZE_NS = SECOND_NS  # processes to be killed should be frozen in this time; one that waits for a disk is not
_MOST_LOOKS = 8  # of a pass, until all of a run is frozen
_BUDGET_NS = SECOND_NS // 10  # after that, looks yield to the rest of a pass
_KIBIBYTE = 1024


def _is_wrapper(jid: Jid, spool_dir: str, job: str, run: int) -> bool:
    return marks.is_wrapper(jid.pid, spool_dir, job, run)


class LocalRun:
    """A run whose processes are on this machine."""

    def __init__(
        self,
        engine: LocalProcesses,
        key: tuple[str, int],
        *,
        pid: int | None = None,
        jid: Jid | None = None,
        group: RunGroup | None = None,
    ) -> None:
        """Identify a run by its wrapper: *pid* if it is a child of this process, or *jid*. Neither: by its mark."""
        self.engine = engine
        self.key = key
        self.pid = pid
        self.jid = jid
        self.exit_status: int | None = None
        self.waits = self.halted = self.ending = self.refusal = self.engine_id = None  # only engines give these
        self.blocked = False
        self.alive_at_ns: int | None = None
        self.was_lean = False  # its wrapper was never a copy of this process, so that its peak is the run's
        self._group = group
        self._usage = Usage()
        self.resists = ""
        self._found: frozenset[Process] = frozenset()  # by the last look at a run that must end
        self._still: frozenset[Process] = frozenset()  # besides the wrapper, if all of them were stopped in that look
        self._told: set[Process] = set()  # these have received TERM
        self._told_at_ticks = 0  # when the first of them did, in the unit of processes' start times
        self._killing_since_ns: int | None = None  # the grace is over since then
        self._alone_since_ns: int | None = None  # only the wrapper is left since then

    @property
    def is_child(self) -> bool:
        """Whether the wrapper is a child of this process."""
        return self.pid is not None

    def identified(self, jid: Jid) -> None:
        """Record the wrapper's identity, if it belongs to this run: a record can name any process."""
        if jid.pid == self.pid if self.pid is not None else self.engine.is_own(self, jid):
            self.jid = jid

    def liveness(self) -> Liveness:
        """Return the state of the wrapper: for a child, ended only once it is reaped."""
        if self.pid is not None:
            return Liveness.ALIVE if self.exit_status is None else Liveness.GONE
        return Liveness.ABSENT if self.jid is None else self.engine.liveness(self.jid)

    def watch(self) -> int | None:
        """Return a pidfd of a wrapper that is not a child of this process."""
        if self.pid is not None or self.jid is None:
            return None
        try:
            fd = os.pidfd_open(self.jid.pid)
        except OSError:  # gone already, no descriptor left, or a kernel without pidfds
            fd = -1
        try:
            found = identity.liveness(self.jid)
        except OSError:  # its identity is unknown now; polling notices it
            found = Liveness.ELSEWHERE
        if fd >= 0 and found is Liveness.ALIVE:
            return fd
        if fd >= 0:
            os.close(fd)  # another process has that pid here; the run's own is gone or elsewhere
        if found is Liveness.GONE:
            raise ProcessLookupError
        return None

    def has_ended(self) -> None:
        """Record that the wrapper has ended."""
        self.engine.wrapper_ended(self)

    def left_behind(self) -> bool:
        """Whether processes of the run outlived its wrapper."""
        return self.engine.left_behind(self)

    def signal(self, signal_name: str, to: SignalTo) -> int:
        """Signal the processes of the run that *to* names, never its wrapper; return their number."""
        members, number = self.engine.processes_of([self])[self], signal.Signals[f"SIG{signal_name}"]
        family = Family({process.pid: _parent(process) for process in members}, self.wrapper_pid, number)
        told = family.told(to)
        return len(send([process for process in members if process.pid in told], number).signalled)

    @property
    def holds_memory(self) -> bool:
        """Whether the kernel counts the run's memory, and ends it when it exceeds the limit."""
        return self._group is not None and self._group.peak_memory_bytes() is not None

    def usage(self) -> Usage:
        """Return the kernel's counts, of its control group if it has one, and those of the looks at it."""
        group, self._group = self._group, None
        if group is not None:
            peak, cpu_time_ns = group.peak_memory_bytes(), group.cpu_time_ns()
            self._usage = Usage(
                cpu_time_ns if cpu_time_ns is not None else self._usage.cpu_time_ns,
                peak if peak is not None else self._usage.peak_memory_bytes,
                bool(group.oom_kills()),
            )
            group.remove()
        return self._usage

    def close(self) -> None:
        """Release the run."""
        self.engine.forget(self)

    # For its engine.

    def ended(self, status: int, cpu_time_ns: int, peak_bytes: int) -> None:
        """Record that the wrapper, a child of this process, is reaped."""
        self.exit_status = status
        self._usage = Usage(cpu_time_ns, self._usage.peak_memory_bytes)
        self.used(peak_bytes)

    def used(self, memory_bytes: int) -> None:
        """Record how much memory the run had at once."""
        if memory_bytes:  # else no process was left to measure
            usage = self._usage
            self._usage = Usage(usage.cpu_time_ns, max(usage.peak_memory_bytes or 0, memory_bytes))

    def wake(self) -> None:
        """Continue its wrapper if that is stopped: it only waits, and a run without it never ends."""
        jid = self.jid or (identity.of_process(self.pid) if self.pid is not None and self.exit_status is None else None)
        if jid is None or not _stands_still(wrapper := Process(jid.pid, jid.start_ticks)):
            return
        if self.engine.liveness(jid) is Liveness.ALIVE and send([wrapper], signal.SIGCONT).signalled:
            log.warning("job %s run %d: its wrapper was stopped by a signal; spool has continued it", *self.key)

    @property
    def peak_bytes(self) -> int:
        """The largest memory use of the run that was seen."""
        return self._usage.peak_memory_bytes or 0

    def wanted(self, *, halts: bool = False) -> TrackedRun:
        """Return the identification of its processes; *halts*: stop each one when it is found.

        A child of this process is known before it has written its jid.
        """
        jid = self.jid
        if jid is None and self.pid is not None:
            gone = Jid(self.pid, 0, identity.boot_id(), identity.pid_namespace(), identity.host())
            self.jid = identity.of_process(self.pid) if self.exit_status is None else None
            jid = self.jid or gone
        job, run = self.key
        grouped = (self._group.pids() if self._group is not None else None) or frozenset()
        return TrackedRun(job, run, self.engine.spool_dir, jid, self._found | self._told, grouped, halts)

    def press(self, look: Look, *, kill: bool, certain: bool) -> EndStep:
        """Continue to end it, after a look at its remaining processes; return the step taken.

        *kill*: the grace is over. *certain*: the look cannot have missed any.
        """
        now, found = time.monotonic_ns(), look.members[self.key]
        wrapper = frozenset(process for process in found if process.pid == self.wrapper_pid)
        others = found - wrapper
        if others:
            self._alone_since_ns = None
        elif self._alone_since_ns is None:
            self._alone_since_ns = now
        if others and kill and self._killing_since_ns is None:
            self._killing_since_ns = now
        frozen = certain and bool(others) and others <= look.still and others == self._still
        remains = Remains(
            others=bool(others),
            wrapper=bool(wrapper),
            certain=certain and not (self._group is not None and self._group.populated()),
            grace_over=kill,
            frozen=frozen or self._is_frozen(),
            tired=self._lasts(self._killing_since_ns, _FREEZE_NS, now),
            # A wrapper that has another child whenever one was killed would go on for ever.
            wrapper_grace_over=self._lasts(self._killing_since_ns if others else self._alone_since_ns,
                                           _WRAPPER_GRACE_NS, now),
        )  # fmt: skip
        step = ending(remains)
        self._found = found
        self._still = others if others <= look.still else frozenset()
        match step:
            case EndStep.ASK:
                self._ask(others, wrapper, look)
            case EndStep.FREEZE:
                if self._group is None or not self._group.freeze(on=True):
                    send(others - look.still, signal.SIGSTOP)
            case EndStep.KILL | EndStep.KILL_ALL:
                refused = send(others if step is EndStep.KILL else found, signal.SIGKILL).refused
                self._note(f"spool may not end process {min(refused).pid}" if refused else "")
                self._go_on(all_of_it=step is EndStep.KILL_ALL)
            case EndStep.OVER | EndStep.LOOK:
                self._go_on()
                self._note("" if step is EndStep.OVER else "processes come and go too fast to tell whether one is its")
        # Only another program stops a wrapper, and then everything waits for it.
        if wrapper & look.still and step is not EndStep.KILL_ALL:
            send(wrapper, signal.SIGCONT)
        return step

    def _ask(self, others: frozenset[Process], wrapper: frozenset[Process], look: Look) -> None:
        """Send TERM to the processes that must receive it, and continue stopped ones: they do not handle it before."""
        if not others:
            news = set(wrapper - self._told)  # between two of its children: no later one must start
        elif news := self._untold(others, others | wrapper):
            self._told_at_ticks = self._told_at_ticks or identity.ticks_now()
        if news:
            send(news, signal.SIGTERM)
            self._told |= news
        if still := others & self._told & look.still:
            send(still, signal.SIGCONT)

    def _note(self, why: str) -> None:
        """Log why it goes on, once."""
        if why and why != self.resists:
            log.warning("job %s run %d: it cannot be ended yet: %s", *self.key, why)
        self.resists = why

    def _is_frozen(self) -> bool:
        return self._group is not None and self._group.frozen()

    def _go_on(self, *, all_of_it: bool = False) -> None:
        """Continue its control group, if it was frozen; or end it, *all_of_it*."""
        if self._group is not None:
            if all_of_it:
                self._group.kill()
            if self._group.frozen():
                self._group.freeze(on=False)

    @staticmethod
    def _lasts(since_ns: int | None, for_ns: int, now_ns: int) -> bool:
        return since_ns is not None and now_ns >= since_ns + for_ns

    def suspend(self, look: Look, *, on: bool) -> bool:
        """Stop the processes that a look has found, or continue them; return whether all of them obeyed.

        The wrapper is spared: it only waits, and tmux wakes a session whose first process is stopped. So a run whose
        wrapper is not known yet must not be suspended. A look cannot have missed stopped processes, only running ones.
        """
        others = {process for process in look.members[self.key] if process.pid != self.wrapper_pid}
        wrong = others - look.still if on else others & look.still
        send(wrong, signal.SIGSTOP if on else signal.SIGCONT)
        return not wrong and (not on or (bool(others) and look.certain))

    def _untold(self, others: frozenset[Process], left: frozenset[Process]) -> set[Process]:
        """Return the processes that must receive TERM now: first all, later older ones that were not seen before.

        Processes that a job starts to clean up after itself, and the epilog, do not receive it before the grace is
        over. But between the look and the signal a shell may have begun its next command, and waits for that before its
        trap.
        """
        if not self._told:
            return set(others)
        pids = {process.pid for process in left}
        return {
            process
            for process in others - self._told
            if process.start_ticks < self._told_at_ticks or _parent(process) not in pids
        }

    @property
    def wrapper_pid(self) -> int | None:
        """The pid of its wrapper; None while the wrapper cannot be told from the job's other processes."""
        return self.jid.pid if self.jid is not None else self.pid


class LocalProcesses:
    """The processes of all runs on this machine. `inherit` makes it the parent of their orphans."""

    tells = False  # nothing reports processes that are not children of this process
    silent = False

    def __init__(
        self,
        spool_dir: str = "",
        *,
        liveness: Callable[[Jid], Liveness] = identity.liveness,
        groups: RunGroups | None = None,
        is_wrapper: Callable[[Jid, str, str, int], bool] = _is_wrapper,
    ) -> None:
        """Begin without runs. *liveness* returns the state of a wrapper, *groups* is the place for control groups.

        *is_wrapper* tells whether a living process is that of a run.
        """
        self.spool_dir = spool_dir
        self.liveness = liveness
        self._is_wrapper = is_wrapper
        self.groups = groups
        self._children: dict[int, LocalRun] = {}  # by the pid of the wrapper
        self._processes = Children()
        self._unrelated: set[int] = set()  # children of no run
        self._inherits = False
        self._inherited: frozenset[int] | None = None  # children of this process after the last reaping, once read
        self._ended: set[LocalRun] = set()  # wrappers that have ended, with leftovers not looked for yet
        self._left: dict[LocalRun, bool] = {}  # whether they had leftovers, by a look after their end, until asked
        self._own_peak_kib = 0  # as far as it was looked at
        self._census = ProcessCache()
        self._unheard: set[LocalRun] = set()  # the kernel does not report when their wrappers are stopped

    def inherit(self) -> None:
        """Become the parent of every orphan of a run."""
        self._inherits = children.become_subreaper()

    def close(self) -> None:
        """Stop adopting orphans."""
        self._processes.close()
        if self._inherits:
            children.become_subreaper(on=False)

    def machine(self) -> None:
        """Return None: its resources are those of this machine."""

    def fileno(self) -> None:
        """Return None: SIGCHLD and pidfds report the ends."""

    def due_ns(self) -> int | None:
        """Return when to reap, on the monotonic clock, even without an ended child; None: not before one ends."""
        return self._processes.due_ns

    def work(self) -> tuple[()]:
        """Return nothing: :meth:`reap` reports all."""
        return ()

    def wake_wrappers(self) -> None:
        """Continue stopped wrappers that are not children of this process: those of children, :meth:`reap` notices."""
        for run in self._unheard:
            run.wake()

    def child(self, job: str, run: int, pid: int, group: RunGroup | None = None) -> LocalRun:
        """Return the run whose wrapper is this child."""
        made = self._children[pid] = LocalRun(self, (job, run), pid=pid, group=group)
        self._processes.added(pid)
        self._unrelated.discard(pid)
        self._census.ask_again(pid)  # its pid may have belonged to an unrelated process
        return made

    def no_child(self, job: str, run: int, jid: Jid | None, group: RunGroup | None = None) -> LocalRun:
        """Return a run that another program has started; *jid* identifies its wrapper, if known."""
        made = LocalRun(self, (job, run), jid=jid, group=group)
        self._unheard.add(made)
        return made

    def limit_array(self, array: str, at_once: int | None) -> None:
        """Do nothing: the planner keeps the limits."""

    def keep_back(self, arrays: Collection[str], *, paused: bool) -> None:
        """Do nothing: nothing waits here that was started."""

    def adopt(self, job: str, run: int, jid: Jid | None) -> LocalRun:
        """Return a run that another dispatcher has started."""
        self._census.ask_again()  # its processes were seen as unrelated ones
        adopted = self.no_child(job, run, None, self.groups.existing(job, run) if self.groups is not None else None)
        if jid is not None:
            adopted.identified(jid)
        return adopted

    def is_own(self, run: LocalRun, jid: Jid) -> bool:
        """Whether *jid* can be the wrapper of *run*; of a process that is gone only the record is left."""
        if self.liveness(jid) is not Liveness.ALIVE:
            return True
        return self._is_wrapper(jid, self.spool_dir, *run.key)

    def forget(self, run: LocalRun) -> None:
        """Drop a run that is over."""
        self._ended.discard(run)
        self._left.pop(run, None)
        self._unheard.discard(run)
        if run.pid is not None:
            self._children.pop(run.pid, None)

    def reap(self) -> Iterator[LocalRun]:
        """Yield the runs whose wrapper, a child of this process, has ended, with its exit status and resource use.

        A stopped wrapper is continued.
        """
        self._inherited = None
        for pid, status, usage in self._processes.reap():
            self._unrelated.discard(pid)
            run = self._children.get(pid)
            if run is not None:
                says = run.was_lean or self._says_something(usage.ru_maxrss)
                peak_bytes = usage.ru_maxrss * _KIBIBYTE if says else 0
                run.ended(status, int((usage.ru_utime + usage.ru_stime) * 1e9), peak_bytes)
                yield run
        while self._processes.stopped:
            if (run := self._children.get(self._processes.stopped.pop())) is not None:
                run.wake()

    def _says_something(self, peak_kib: int) -> bool:
        """Whether a child's peak is its run's: a child counts this process's memory until it has become the wrapper.

        The rusage of this process cannot be used: it counts the process that started this one, up to the same moment.
        """
        if peak_kib > self._own_peak_kib:
            self._own_peak_kib = processes.peak_rss_bytes([os.getpid()]) // _KIBIBYTE
        return peak_kib > self._own_peak_kib

    def wrapper_ended(self, run: LocalRun) -> None:
        """Let the next look for leftovers of wrappers serve *run*, too."""
        self._ended.add(run)

    def left_behind(self, run: LocalRun) -> bool:
        """Whether processes of *run* outlived its wrapper."""
        if run not in self._left:
            orphans = self._unknown_orphans() if run.is_child else None
            if orphans is not None and not orphans:
                return False
            self._look_back(run, orphans or set())
        return self._left.pop(run)

    def _unknown_orphans(self) -> set[int] | None:
        """Return the inherited processes that belong to no known run; None if the kernel does not list them.

        An orphan of a run becomes a child of this process only if the wrapper was one.
        """
        if not self._inherits:
            return None
        if self._inherited is None:
            # Once for all that have ended together: their leftovers became children of this process before the wrappers
            # could be reaped, and only reaping removes them.
            self._inherited = children.children_of_self()
        inherited = self._inherited
        if inherited is None:
            return None
        return {pid for pid in inherited if pid not in self._children} - self._unrelated

    def _look_back(self, run: LocalRun, orphans: set[int]) -> None:
        """Look for the leftovers of *run* and of all other runs whose wrappers are known to have ended."""
        ended = {run, *self._ended, *(child for child in self._children.values() if child.exit_status is not None)}
        self._ended.clear()
        look = self.look_for({*ended, *self._children.values()} if orphans else ended)
        if look.certain:
            self._unrelated |= orphans - {process.pid for members in look.members.values() for process in members}
        self._left |= {each: bool(look.members[each.key]) or not self._sees_all(each, look) for each in ended}
        self._note_alive(ended, look)

    def processes_of(self, runs: Iterable[LocalRun]) -> dict[LocalRun, set[Process]]:
        """Return the processes of each run: its session, its descendants and those that carry its marks."""
        runs = list(runs)
        found = processes.scan(run.wanted() for run in runs)
        return {run: set(found[run.key]) for run in runs}

    def look_for(self, runs: Iterable[LocalRun], halt: Mapping[LocalRun, bool] | None = None) -> Look:
        """Look for the processes of these runs, and tell whether any can have been missed; stop those of *halt*.

        On a machine that is too busy for certainty the look yields to the rest of the pass, and is not certain.
        """
        wanted = [run.wanted(halts=halt is not None and halt[run]) for run in runs]
        return processes.look(wanted, until_ns=time.monotonic_ns() + _BUDGET_NS)

    def _sees_all(self, run: LocalRun, look: Look) -> bool:
        """Whether processes of a run that a look has not found do not exist."""
        if look.certain or look.members[run.key]:
            return look.certain
        # Every process that a child of this process has left behind is its child by now, or a descendant of one.
        return run.is_child and run.exit_status is not None and self._unknown_orphans() == set()

    def terminate(self, runs: Mapping[LocalRun, bool]) -> Collection[LocalRun]:
        """Continue to end *runs*, after one walk over all processes, or as many as time allows."""
        self._inherited = None
        gone, going, until_ns = list[LocalRun](), dict(runs), time.monotonic_ns() + _BUDGET_NS
        for _ in range(_MOST_LOOKS):
            look = self.look_for(going, halt=going)
            self._note_alive(going, look)
            steps = {run: run.press(look, kill=kill, certain=self._sees_all(run, look)) for run, kill in going.items()}
            gone += [run for run, step in steps.items() if step is EndStep.OVER]
            going = {run: runs[run] for run, step in steps.items() if step is EndStep.FREEZE}
            if not going or time.monotonic_ns() >= until_ns:
                break
        return gone

    def _note_alive(self, runs: Iterable[LocalRun], look: Look) -> None:
        """Record which of *runs* a look has found alive: the last such look bounds the end of a run."""
        for run in runs:
            if look.members[run.key]:
                run.alive_at_ns = time.time_ns()

    def suspend(self, runs: Mapping[LocalRun, bool]) -> Collection[LocalRun]:
        """Suspend or continue *runs*, after one walk over all processes; return those in the wanted state."""
        known = {run: on for run, on in runs.items() if run.wrapper_pid is not None or not on}
        look = self.look_for(known, halt=known)
        return [run for run, on in known.items() if run.suspend(look, on=on)]

    def memory_bytes(self, limits: Mapping[LocalRun, int]) -> dict[LocalRun, int]:
        """Return the memory use of these runs, exactly if it exceeds the limit beside each run.

        Left out are runs within their limit that use no more than their known peak, and runs without processes. Runs
        that seem to exceed their limit are measured again, closely: resident sizes count shared pages once for each
        process, so they are cheap and never too low.
        """
        found = self._census.look(lambda: (run.wanted() for run in limits))
        used, over = dict[LocalRun, int](), list[LocalRun]()
        for run, limit in limits.items():
            members = found.get(run.key, {})
            resident = rss_bytes(members)
            if resident <= run.peak_bytes and resident <= limit:
                continue
            own = [pid for pid, process in members.items() if identity.start_ticks(pid) == process.start_ticks]
            used[run] = rss_bytes(own)
            if used[run] > limit:
                used[run] = pss_bytes(own)
            if used[run] > limit:
                over.append(run)
        for run, really in self.processes_of(over).items():
            used[run] = pss_bytes(process.pid for process in really)
        for run, memory_bytes in used.items():
            run.used(memory_bytes)
        return {run: memory_bytes for run, memory_bytes in used.items() if memory_bytes}


def _stands_still(process: Process) -> bool:
    stat = identity.read_stat(process.pid)
    return stat is not None and stat.start_ticks == process.start_ticks and stat.state in STANDS_STILL


def _parent(process: Process) -> int | None:
    stat = identity.read_stat(process.pid)
    return stat.parent if stat is not None else None
