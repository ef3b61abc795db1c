"""The runs of this machine, whatever started them: their liveness, their end, their use of resources.

A run is ended by TERM to its whole process tree, and after the grace by KILL, look after look until nothing of it is
left (`core/lifecycle.py` decides each step). Before KILL all of it is frozen, by its control group or by STOP: a frozen
process does not fork, and a child is known by its parent while that exists. The wrapper is spared while something else
is left, so that it can record the exit code; not for ever, since it may be blocked. None of this needs another process,
or a descriptor that is not reserved: on a machine that has run out of them, a run must be ended all the more.

A run is over when its wrapper is: as child subreaper that outlasts whatever the command has abandoned, so its end is
proof, and no other process of the machine is looked at. Only if a wrapper itself was killed, its processes are searched
for. If processes come and go so fast that no search is certain for `SEARCH_NS`, and none finds one, the run ends too.

spool never stops a wrapper. A wrapper that another program has stopped is continued here.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import suppress

from spool.core.lifecycle import EndStep, Liveness, Remains, ending
from spool.core.model import SECOND_NS, Jid, SignalTo
from spool.executors.base import Engine, Family
from spool.formats.run_records import Usage
from spool.machine import identity, processes
from spool.machine.cgroups import RunGroup, RunGroups
from spool.machine.identity import Stat
from spool.machine.processes import STANDS_STILL, Children, Process, Sought, pss_bytes, rss_bytes, send

log = logging.getLogger(__name__)

_WRAPPER_GRACE_NS = 2 * SECOND_NS  # after everything else is gone or killed, for the epilog and the exit code
_FREEZE_NS = SECOND_NS  # processes to be killed should be frozen in this time; one that waits for a disk is not
_MOST_LOOKS = 8  # of a pass, until all of a run is frozen
_BUDGET_NS = SECOND_NS // 10  # after that, looks yield to the rest of a pass
SEARCH_NS = 10 * SECOND_NS
"""How long the processes of a killed wrapper are searched for, unless one of them is found."""

_KIBIBYTE = 1024


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
        self.by_others = False  # a daemon may have started its processes, which carry its mark
        self.doubtful = False  # its wrapper was killed, and processes of it may be left
        self.released = False  # its wrapper was killed when nothing else of it was left
        self._found: frozenset[Process] = frozenset()  # by the last look at a run that must end
        self._still: frozenset[Process] = frozenset()  # besides the wrapper, if all of them were stopped in that look
        self._told: set[Process] = set()  # these have received TERM
        self._told_at_ticks = 0  # when the first of them did, in the unit of processes' start times
        self._killing_since_ns: int | None = None  # the grace is over since then
        self._alone_since_ns: int | None = None  # only the wrapper is left since then
        self._searched_since_ns: int | None = None  # its wrapper was killed

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

    def left_behind(self, exit_code: int | None = None) -> bool:
        """Whether processes of the run may have outlived its wrapper, which is gone; *exit_code* is its record `rc`."""
        return self.engine.left_behind(self, exit_code)

    def signal(self, signal_name: str, to: SignalTo) -> int:
        """Signal the processes of the run that *to* names, never its wrapper; return their number."""
        members, number = self.members(), signal.Signals[f"SIG{signal_name}"]
        parents: dict[int, int | None] = {process.pid: stat.parent for process, stat in members.items()}
        told = Family(parents, self.wrapper_pid, number).told(to)
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

    def is_found_gone(self) -> bool:
        """Whether a search finds nothing of a run without a known wrapper; after a while a doubtful one will do."""
        found, now = processes.search([self.sought()]), time.monotonic_ns()
        if found.members[self.key]:
            self._searched_since_ns = None
            return False
        self._searched_since_ns = self._searched_since_ns or now
        return found.certain or self._lasts(self._searched_since_ns, SEARCH_NS, now)

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
        stat = identity.read_stat(jid.pid) if jid is not None else None
        if jid is None or stat is None or stat.start_ticks != jid.start_ticks or stat.state not in STANDS_STILL:
            return
        wrapper = Process(jid.pid, jid.start_ticks)
        if self.engine.liveness(jid) is Liveness.ALIVE and send([wrapper], signal.SIGCONT).signalled:
            log.warning("job %s run %d: its wrapper was stopped by a signal; spool has continued it", *self.key)

    @property
    def peak_bytes(self) -> int:
        """The largest memory use of the run that was seen."""
        return self._usage.peak_memory_bytes or 0

    def sought(self) -> Sought:
        """Return what its processes are known by, besides their descent from its wrapper."""
        grouped = (self._group.pids() if self._group is not None else None) or frozenset()
        return Sought(*self.key, self.engine.spool_dir, self.jid, self._found | self._told, grouped)

    def descendants(self, wrapper: Stat, *, halt: bool = False) -> dict[Process, Stat]:
        """Return the processes of the run besides its wrapper, each after its parent; *halt*: stop each when found."""
        found = processes.descendants(Sought(*self.key, self.engine.spool_dir), wrapper, halt=halt)
        if self.by_others:
            marked = processes.search([self.sought()]).members[self.key]
            found |= {process: stat for process, stat in marked.items() if process.pid != wrapper.pid}
        return found

    def wrapper(self) -> Stat | None:
        """Return its wrapper, a child of this process even before it has written its jid; None if it has ended."""
        if self.pid is not None and self.exit_status is None:
            stat = identity.read_stat(self.pid)
            if self.jid is None and stat is not None:
                self.jid = identity.of_process(self.pid)
            return stat if stat is not None and not stat.dead else None
        if self.pid is not None or self.jid is None or self.engine.liveness(self.jid) is not Liveness.ALIVE:
            return None
        return identity.read_stat(self.jid.pid)

    def members(self, *, halt: bool = False) -> dict[Process, Stat]:
        """Return the same; nothing once its wrapper has ended."""
        wrapper = self.wrapper()
        return self.descendants(wrapper, halt=halt) if wrapper is not None else {}

    def press(self, others: Mapping[Process, Stat], wrapper: Stat | None, *, kill: bool, certain: bool) -> EndStep:
        """Continue to end it, after a look at its remaining processes; return the step taken.

        *kill*: the grace is over. *certain*: without a wrapper, the look cannot have missed any.
        """
        still = processes.still(others)
        step = ending(self._remains(others, wrapper, still, kill=kill, certain=certain))
        self._found = frozenset(others)
        self._still = still if len(still) == len(others) else frozenset()
        own = Process(wrapper.pid, wrapper.start_ticks) if wrapper is not None else None
        match step:
            case EndStep.ASK:
                self._ask(others, own, still)
            case EndStep.FREEZE:
                if self._group is None or not self._group.freeze(on=True):
                    send((process for process in others if process not in still), signal.SIGSTOP)
            case EndStep.KILL | EndStep.KILL_ALL:
                killed = [*others, *((own,) if own is not None and step is EndStep.KILL_ALL else ())]
                refused = send(killed, signal.SIGKILL).refused
                self._note(f"spool may not end process {min(refused).pid}" if refused else "")
                self._go_on(all_of_it=step is EndStep.KILL_ALL)
                self.released = step is EndStep.KILL_ALL and not others
            case EndStep.OVER | EndStep.LOOK:
                self._go_on()
                self._note("" if step is EndStep.OVER else "its wrapper was killed; what it has left is searched for")
        # Only another program stops a wrapper, and then everything waits for it.
        if wrapper is not None and own is not None and wrapper.state in STANDS_STILL and step is not EndStep.KILL_ALL:
            send((own,), signal.SIGCONT)
        return step

    def _remains(
        self, others: Mapping[Process, Stat], wrapper: Stat | None, still: Set[Process], *, kill: bool, certain: bool
    ) -> Remains:
        """Return the findings of a look, and remember since when it has been so."""
        now, group = time.monotonic_ns(), self._group
        if wrapper is None:
            self._searched_since_ns = self._searched_since_ns or now
        if others and kill:
            self._killing_since_ns = self._killing_since_ns or now
        self._alone_since_ns = None if others else self._alone_since_ns or now
        self.doubtful = wrapper is None and not others and not certain
        frozen = bool(others) and others.keys() == still == self._still
        certain = certain or self._lasts(self._searched_since_ns, SEARCH_NS, now)
        # A wrapper that has another child whenever one was killed would go on for ever.
        since_ns = self._killing_since_ns if others else self._alone_since_ns
        return Remains(
            others=bool(others),
            wrapper=wrapper is not None,
            certain=certain and not (group is not None and group.populated()),
            grace_over=kill,
            frozen=frozen or (group is not None and group.frozen()),
            tired=self._lasts(self._killing_since_ns, _FREEZE_NS, now),
            wrapper_grace_over=self._lasts(since_ns, _WRAPPER_GRACE_NS, now),
        )

    def _ask(self, others: Mapping[Process, Stat], wrapper: Process | None, still: frozenset[Process]) -> None:
        """Send TERM to the processes that must receive it, and continue stopped ones: they do not handle it before."""
        if not others:  # between two of its children: no later one must start
            news = [wrapper] if wrapper is not None and wrapper not in self._told else []
        elif news := self._untold(others, wrapper):
            self._told_at_ticks = self._told_at_ticks or identity.ticks_now()
        send(news, signal.SIGTERM)
        self._told |= set(news)
        send((process for process in others if process in self._told and process in still), signal.SIGCONT)

    def _note(self, why: str) -> None:
        """Log why it goes on, once."""
        if why and why != self.resists:
            log.warning("job %s run %d: it cannot be ended yet: %s", *self.key, why)
        self.resists = why

    def _go_on(self, *, all_of_it: bool = False) -> None:
        """Continue its control group, if it was frozen; or end it, *all_of_it*."""
        if self._group is not None:
            if all_of_it:
                self._group.kill()
            if self._group.frozen():
                self._group.freeze(on=False)

    @property
    def lingers(self) -> bool:
        """Whether only its wrapper has been left for longer than that needs for its records."""
        return self._lasts(self._alone_since_ns, _WRAPPER_GRACE_NS, time.monotonic_ns())

    @staticmethod
    def _lasts(since_ns: int | None, for_ns: int, now_ns: int) -> bool:
        return since_ns is not None and now_ns >= since_ns + for_ns

    def suspend(self, *, on: bool) -> bool:
        """Stop its processes, or continue them, after a look; return whether all of them obeyed.

        The wrapper is spared: it only waits, and tmux wakes a session whose first process is stopped. So a run whose
        wrapper is not known yet must not be suspended. What runs may fork during a look: only two looks that find the
        same stopped processes are proof.
        """
        others = self.members(halt=on)
        still = processes.still(others)
        before, self._still = self._still, still if len(still) == len(others) else frozenset()
        if not on:
            send(still, signal.SIGCONT)
            return not still
        return bool(others) and others.keys() == still == before

    def _untold(self, others: Mapping[Process, Stat], wrapper: Process | None) -> list[Process]:
        """Return the processes that must receive TERM now: first all, later older ones that were not seen before.

        Processes that a job starts to clean up after itself, and the epilog, do not receive it before the grace is
        over. But between the look and the signal a shell may have begun its next command, and waits for that before its
        trap.
        """
        if not self._told:
            return [*others]
        pids = {pid for pid, _ in others} | ({wrapper.pid} if wrapper is not None else set())
        return [
            process
            for process, stat in others.items()
            if process not in self._told and (process.start_ticks < self._told_at_ticks or stat.parent not in pids)
        ]

    @property
    def wrapper_pid(self) -> int | None:
        """The pid of its wrapper; None while the wrapper cannot be told from the job's other processes."""
        return self.jid.pid if self.jid is not None else self.pid


class LocalProcesses(Engine):
    """The processes of all runs on this machine."""

    def __init__(
        self,
        spool_dir: str = "",
        *,
        liveness: Callable[[Jid], Liveness] = identity.liveness,
        groups: RunGroups | None = None,
        is_wrapper: Callable[..., bool] = lambda jid, *run: processes.is_wrapper(jid.pid, *run),
        outlasted: Callable[..., bool] = lambda job, run, *, exited: True,
    ) -> None:
        """Begin without runs. *liveness* returns the state of a wrapper, *groups* is the place for control groups.

        *is_wrapper* tells whether a living process is that of a run; *outlasted*, whether the records of a run prove
        that its wrapper, which is gone, has ended by itself, after all that it had started.
        """
        self.spool_dir = spool_dir
        self.liveness = liveness
        self._is_wrapper = is_wrapper
        self._outlasted = outlasted
        self.groups = groups
        self._children: dict[int, LocalRun] = {}  # by the pid of the wrapper
        self._processes = Children()
        self._own_peak_kib = 0  # as far as it was looked at
        self._unheard: set[LocalRun] = set()  # the kernel does not report when their wrappers are stopped

    def due_ns(self) -> int | None:
        """Return when to reap, on the monotonic clock, even without an ended child; None: not before one ends."""
        return self._processes.due_ns

    def wake_wrappers(self) -> None:
        """Continue stopped wrappers that are not children of this process: those of children, :meth:`reap` notices."""
        for run in self._unheard:
            run.wake()

    def child(self, job: str, run: int, pid: int, group: RunGroup | None = None) -> LocalRun:
        """Return the run whose wrapper is this child."""
        made = self._children[pid] = LocalRun(self, (job, run), pid=pid, group=group)
        return made

    def no_child(self, job: str, run: int, jid: Jid | None, group: RunGroup | None = None) -> LocalRun:
        """Return a run that another program has started; *jid* identifies its wrapper, if known."""
        made = LocalRun(self, (job, run), jid=jid, group=group)
        self._unheard.add(made)
        return made

    def adopt(self, job: str, run: int, jid: Jid | None) -> LocalRun:
        """Return a run that another dispatcher has started."""
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
        self._unheard.discard(run)
        if run.pid is not None:
            self._children.pop(run.pid, None)

    def reap(self) -> Iterator[LocalRun]:
        """Yield the runs whose wrapper, a child of this process, has ended, with its exit status and resource use.

        A stopped wrapper is continued.
        """
        for pid, status, usage in self._processes.reap():
            run = self._children.get(pid)
            if run is not None:
                # A child counts this process's memory until it has become the wrapper. The rusage of this process is
                # no help: it counts the process that started this one, up to the same moment.
                if not run.was_lean and usage.ru_maxrss > self._own_peak_kib:
                    self._own_peak_kib = processes.peak_rss_bytes(os.getpid()) // _KIBIBYTE
                says = run.was_lean or usage.ru_maxrss > self._own_peak_kib
                peak_bytes = usage.ru_maxrss * _KIBIBYTE if says else 0
                run.ended(status, int((usage.ru_utime + usage.ru_stime) * 1e9), peak_bytes)
                yield run
        while self._processes.stopped:
            if (run := self._children.get(self._processes.stopped.pop())) is not None:
                run.wake()

    def has_outlasted(self, run: LocalRun, exit_code: int | None = None) -> bool:
        """Whether the wrapper of *run* has ended by itself, and so after all that its command has left behind."""
        exited = run.exit_status is not None and os.WIFEXITED(run.exit_status)
        if run.released or (exited and exit_code == os.WEXITSTATUS(run.exit_status or 0)):
            return True  # a wrapper that ends in any other way does so with another code
        with suppress(OSError):  # then it is searched for
            return (run.pid is None or run.exit_status is not None) and self._outlasted(*run.key, exited=exited)
        return False

    def left_behind(self, run: LocalRun, exit_code: int | None = None) -> bool:
        """Whether processes of *run* may have outlived its wrapper, which is gone; *exit_code* is its record `rc`."""
        if self.has_outlasted(run, exit_code):
            return False
        # What a killed wrapper has left, `terminate` searches for.
        return run.wrapper_pid is not None or not run.is_found_gone()

    def terminate(self, runs: Mapping[LocalRun, bool]) -> Collection[LocalRun]:
        """Continue to end *runs*, after one look at them, or as many as time allows."""
        gone, going, until_ns = list[LocalRun](), dict(runs), time.monotonic_ns() + _BUDGET_NS
        for _ in range(_MOST_LOOKS):
            steps = self._press(going)
            gone += [run for run, step in steps.items() if step is EndStep.OVER]
            going = {run: runs[run] for run, step in steps.items() if step is EndStep.FREEZE}
            if not going or time.monotonic_ns() >= until_ns:
                break
        return gone

    def _press(self, runs: Mapping[LocalRun, bool]) -> dict[LocalRun, EndStep]:
        """Look once at each of *runs*, and take its next step."""
        steps: dict[LocalRun, EndStep] = {}
        orphaned: list[LocalRun] = []
        for run, kill in runs.items():
            wrapper = run.wrapper()
            if wrapper is not None:
                others = run.descendants(wrapper, halt=kill)
                run.alive_at_ns = time.time_ns()
                steps[run] = run.press(others, wrapper, kill=kill, certain=True)
            elif self.has_outlasted(run):
                steps[run] = run.press({}, None, kill=kill, certain=True)
            elif run.pid is None or run.exit_status is not None:  # else it is about to be reaped
                orphaned.append(run)
        found = processes.search(run.sought() for run in orphaned)
        for run in orphaned:
            others = found.members[run.key]
            if others:
                run.alive_at_ns = time.time_ns()
            steps[run] = run.press(others, None, kill=runs[run], certain=found.certain)
        return steps

    def suspend(self, runs: Mapping[LocalRun, bool]) -> Collection[LocalRun]:
        """Suspend or continue *runs*, after a look at each; return those in the wanted state."""
        known = {run: on for run, on in runs.items() if run.wrapper_pid is not None or not on}
        return [run for run, on in known.items() if run.suspend(on=on)]

    def memory_bytes(self, limits: Mapping[LocalRun, int]) -> dict[LocalRun, int]:
        """Return the memory use of these runs, exactly if it exceeds the limit beside each run.

        Left out are runs within their limit that use no more than their known peak, and runs without processes. Runs
        that seem to exceed their limit are measured again, closely: resident sizes count shared pages once for each
        process, so they are cheap and never too low.
        """
        used: dict[LocalRun, int] = {}
        for run, limit in limits.items():
            if (wrapper := run.wrapper()) is None:
                continue
            members = run.descendants(wrapper)
            memory_bytes = rss_bytes([wrapper, *members.values()])
            if memory_bytes > limit:
                memory_bytes = pss_bytes([Process(wrapper.pid, wrapper.start_ticks), *members])
            elif memory_bytes <= run.peak_bytes:
                continue
            run.used(memory_bytes)
            used[run] = memory_bytes
        return used
