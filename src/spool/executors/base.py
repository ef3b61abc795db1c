"""The Protocols of executors: a way to start wrappers, the started runs, and the values that they receive.

A run is a `RunHandle` of the executor that has started it: no other part looks at its processes or signals them.
Questions about many runs at once go to their `Engine`, because one look can answer for all of them: a walk over the
processes of this machine, or one question to a cluster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from spool.core.errors import SHORTAGES, SpoolError, cannot
from spool.core.layout import SERVICE
from spool.core.lifecycle import EngineWord, Liveness
from spool.core.model import Jid, Machine, SignalTo, Spec
from spool.formats.run_records import Usage
from spool.formats.values import is_shell
from spool.formats.wrapper import Surroundings
from spool.machine import identity
from spool.machine.cgroups import RunGroup
from spool.machine.host import login_environment


class Launch(Struct, frozen=True):
    """One wrapper to start. Its metadir and the script in it exist already."""

    job: str
    run: int
    spool_dir: str
    metadir: str
    script: str
    keep: bool = False
    """Whether a terminal that shows the run stays readable after its end, if the executor has terminals."""

    group: RunGroup | None = None
    """The control group that the wrapper enters, as its text says."""

    spec: Spec | None = None
    """The job file's content, for an engine that must know the needs of the run."""

    cpus: str = ""
    """The CPUs that the wrapper is pinned to, with all that it starts; "": it is not."""

    def inherited(self) -> dict[str, str]:
        """Return the environment to start the wrapper with. The run's own additions are in the script.

        The marks of the run are set, so that the wrapper can be found by them from its first moment.
        """
        environment = login_environment()
        environment["SPOOL_DIR"] = self.spool_dir
        environment["SPOOL_JOB"] = self.job
        environment["SPOOL_RUN"] = str(self.run)
        if SERVICE in os.environ:  # if this dispatcher is killed, its wrappers pass to the job that has started it
            environment[SERVICE] = os.environ[SERVICE]
        return environment


class EngineEnd(Struct, frozen=True):
    """The end of a run elsewhere, as its engine reports it."""

    word: EngineWord
    said: str  # in the engine's own words


class Family:
    """The processes of a run on this machine at one moment, by their parents: which of them a signal is for."""

    def __init__(self, parents: Mapping[int, int | None], wrapper: int | None, number: int) -> None:
        """*parents*: of each process. *number*: of the signal."""
        self._children: dict[int | None, list[int]] = {}
        for pid in parents.keys() - {wrapper}:
            self._children.setdefault(parents[pid], []).append(pid)
        orphans = [pid for pid, parent in parents.items() if parent not in parents and pid != wrapper]
        self._first = self._children.get(wrapper) or orphans  # the command
        self._all = parents.keys() - {wrapper}
        self._number = number

    def told(self, to: SignalTo) -> set[int]:
        """Return the processes that get the signal. Raises OSError if that cannot be determined."""
        if to == "shell":
            return set(self._first)
        if to == "all":
            spared = {pid for pid in self._children if pid in self._all and _is_shell(pid) and not self._handles(pid)}
            return set(self._all - spared)
        shells = {pid for pid in self._all if _is_shell(pid) and (to or pid in self._children)}
        programs = self._topmost(self._first, lambda pid: pid not in shells)
        with_trap = () if to == "main" else filter(self._handles, shells)
        return {*self._topmost(programs, self._handles), *with_trap} or set(programs)

    def _topmost(self, pids: Iterable[int], counts: Callable[[int], bool]) -> list[int]:
        """Return those of *pids* that count, and in place of another one those of its descendants."""
        found = []
        for pid in pids:
            found += [pid] if counts(pid) else self._topmost(self._children.get(pid, ()), counts)
        return found

    def _handles(self, pid: int) -> bool:
        return identity.handles(pid, self._number)


def _is_shell(pid: int) -> bool:
    program = identity.program_of(pid)
    return is_shell(program) or program.endswith("/busybox")


class RunHandle(Protocol):
    """A run that was started or adopted: whether it is alive, its leftovers, its use of resources.

    Whatever the machine does not reveal raises OSError: a process that cannot be seen is not gone.
    """

    @property
    def key(self) -> tuple[str, int]:
        """The job and the run."""

    @property
    def engine(self) -> Engine:
        """The machine, or the cluster, where it runs."""

    @property
    def jid(self) -> Jid | None:
        """The wrapper's identity, as far as known."""

    def identified(self, jid: Jid) -> None:
        """Record the wrapper's identity, read from its record."""

    @property
    def exit_status(self) -> int | None:
        """The wrapper's exit status as wait() returns it; None while it is alive, and if it cannot be known."""

    def liveness(self) -> Liveness:
        """Return the state of the wrapper; ABSENT while its identity is unknown."""

    @property
    def is_child(self) -> bool:
        """Whether the wrapper is a child of this process, so that SIGCHLD announces its end."""

    @property
    def engine_id(self) -> str | None:
        """The id of its job at its engine, which has accepted it; None: not yet, or it is on this machine."""

    @property
    def waits(self) -> str | None:
        """Why it has not begun at its engine, in the engine's words; None if it has begun, or is on this machine."""

    @property
    def halted(self) -> str | None:
        """What suspends it elsewhere, "" if nothing does; None: unknown there, or its users decide that."""

    @property
    def ending(self) -> EngineEnd | None:
        """Its end as the engine reports it; None if it has not ended, and for a run on this machine."""

    @property
    def blocked(self) -> bool:
        """Whether it waits at its engine for something other than room, so that others may start before it."""

    @property
    def refusal(self) -> str | None:
        """Why its engine refuses it for good, in the engine's words; None if it does not."""

    @property
    def resists(self) -> str:
        """Why it has not ended yet after the order to end, as free text; "" if nothing prevents it."""

    by_others: bool
    """Whether others than its wrapper, such as a daemon of containers, may have started processes of it."""

    @property
    def lingers(self) -> bool:
        """Whether only its wrapper has been left for longer than that needs for its last records."""

    @property
    def doubtful(self) -> bool:
        """Whether processes of it may be left: its wrapper was killed, and no search for them was certain."""

    @property
    def alive_at_ns(self) -> int | None:
        """The last time at which it or one of its processes was seen alive, by the wall clock; None: never."""

    def watch(self) -> int | None:
        """Return a new descriptor that is readable once the wrapper has ended; None if it cannot be created.

        Raises ProcessLookupError if the wrapper has ended already.
        """

    def left_behind(self, exit_code: int | None = None) -> bool:
        """Whether any process of the run may have outlived its wrapper, which is gone; *exit_code*: its record `rc`."""

    def signal(self, signal_name: str, to: SignalTo) -> int:
        """Signal the run's processes that *to* names; return their number.

        Raises OSError if they cannot be determined.
        """

    @property
    def holds_memory(self) -> bool:
        """Whether the run's memory limit is enforced without the dispatcher."""

    def usage(self) -> Usage:
        """Return the run's use of resources, after its end. The answer never changes."""

    def close(self) -> None:
        """Release the run, which is over."""


class Engine(Protocol):
    """The place where runs run, regardless of their executor: this machine, or another.

    What is not overridden is so for an engine of this machine, which has no work of its own.
    """

    tells: bool = False
    """Whether :meth:`work` reports every change, so that the runs need no polling."""

    @property
    def silent(self) -> bool:
        """Whether it does not answer, so that no run can be started."""
        return False

    def machine(self) -> Machine | None:
        """Return the resources for its runs; None: those of this machine."""
        return None

    def fileno(self) -> int | None:
        """Return a descriptor that is readable when :meth:`work` has something to do; it never changes."""
        return None

    def due_ns(self) -> int | None:
        """Return when it has work of its own to do, on the monotonic clock."""
        return None

    def work(self) -> Collection[RunHandle]:
        """Do the due work, without waiting; return the runs with news."""
        return ()

    def adopt(self, job: str, run: int, jid: Jid | None) -> RunHandle:
        """Return a run that another dispatcher has started; *jid* is its wrapper's identity, if known."""

    def terminate(self, runs: Mapping[Any, bool]) -> Collection[RunHandle]:
        """Continue to end *runs*: ask each to end, once, and force those that are True; return those gone for good.

        One look serves all of them. Raises OSError if their remaining processes cannot be determined.
        """

    def suspend(self, runs: Mapping[Any, bool]) -> Collection[RunHandle]:
        """Suspend the runs that are True, and continue the others; return the runs that have reached that state.

        Called again for the rest, because processes forked during a look escape it. Raises OSError if the processes
        cannot be determined. :meth:`terminate` ends a suspended run like any other.
        """


def refused(error: OSError) -> bool:
    """Whether *error* is a shortage on the machine, not a fault of the request."""
    return error.errno in SHORTAGES


def sounds_refused(text: str) -> bool:
    """Whether another program's message reports a shortage: its words for it are the C library's, as Python's are."""
    return any(os.strerror(number) in text for number in SHORTAGES)


class Executor(Protocol):
    """One way to start a wrapper."""

    name: str
    """Its name in job files and in the configuration."""

    def unavailable(self) -> str | None:
        """Return why it cannot start anything on this machine now, or None if it can."""

    def surroundings(self) -> Surroundings:
        """Return what the wrapper's text needs to know about this executor on this machine."""

    engine: Engine
    """The engine where its wrappers run."""

    def start(self, launch: Launch) -> RunHandle | None:
        """Start the wrapper without waiting for it.

        Raises SpoolError if nothing was started, and never will be; StartRefused if that is due to a shortage on the
        machine, so that the job must wait.

        None: nothing was started, and the job must wait while :meth:`unavailable` gives a reason. An executor that
        cannot know returns a handle whose `liveness` is ABSENT: the wrapper's `jid`, or its absence, settles it.
        """

    def close(self) -> None:
        """Release the shared resources of the starts."""
        return

    def attach(self, spool_dir: str, job: str, run: int, *, read_only: bool) -> tuple[str, ...]:
        """Return the command that attaches a user to the terminal of a run. Raises SpoolError if it has none."""
        why, remedy = f"run {run} has no terminal: it runs as a plain process", f"`spool log -f {job}` shows its output"
        raise SpoolError(cannot("attach to", f"job {job}", why, remedy=remedy))

    def forget(self, spool_dir: str, runs: Iterable[tuple[str, int]]) -> None:
        """Close the terminals that were kept of these runs, which are over, if there are any. Never raises."""
        return
