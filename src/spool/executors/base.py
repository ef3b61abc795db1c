"""What an executor is: the Protocols of a way to start wrappers and of what it has started, and what is handed to them.

A run is a `RunHandle` of the executor that has started it: nobody else looks at its processes or signals them. What
is asked of many runs at once is asked of their `Engine`, for one look can answer for all of them: a walk over the
processes of this machine, or one question to a cluster.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from spool.core.errors import SHORTAGES
from spool.core.lifecycle import EngineWord, Liveness
from spool.core.model import Jid, Machine, Spec
from spool.formats.wrapper import Surroundings
from spool.machine.cgroups import RunGroup
from spool.machine.host import login_environment


class Launch(Struct, frozen=True):
    """One wrapper to be started. The metadir and the script in it are there already."""

    job: str
    run: int
    spool_dir: str
    metadir: str
    script: str
    environment: Mapping[str, str] | None = None
    """What the wrapper inherits; None is the defined environment of every job."""

    keep: bool = False
    """Whether what shows the run on a terminal stays after its end, to be read, where there is such a thing."""

    group: RunGroup | None = None
    """The control group that the wrapper enters, as its text says."""

    spec: Spec | None = None
    """What the job file says, for an engine that is told what the run needs."""

    def inherited(self) -> dict[str, str]:
        """Return the environment to start the wrapper with. What the run adds stands in the script.

        The marks of an outer run are taken away. Those of this one are set, so that the wrapper can be found by
        them from its first moment on.
        """
        environment = login_environment() if self.environment is None else _without_marks(self.environment)
        environment["SPOOL_DIR"] = self.spool_dir
        environment["SPOOL_JOB"] = self.job
        environment["SPOOL_RUN"] = str(self.run)
        return environment


def _without_marks(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value
        for key, value in environment.items()
        if not key.startswith(("SPOOL_", "spool_")) and key not in _SHELLS_OWN
    }


# The wrapper knows bash by the first; the others would turn options such as errexit on in it.
_SHELLS_OWN = frozenset({"BASH_VERSION", "SHELLOPTS", "BASHOPTS"})


class Usage(Struct, frozen=True):
    """What a run has used; None is unknown."""

    cpu_time_ns: int | None = None
    peak_memory_bytes: int | None = None
    oom_killed: bool = False  # the kernel's out-of-memory killer took one of its processes


class EngineEnd(Struct, frozen=True):
    """How the engine of a run elsewhere says that it has ended."""

    word: EngineWord
    said: str  # in its own words


class Home(Protocol):
    """The spool whose runs an engine has, for what the engine has to remember of them."""

    @property
    def root(self) -> str:
        """Its path."""

    def identity(self) -> str:
        """Return what tells this spool from every other one."""

    def record(self, name: str, run: int, record: str) -> bytes | None:
        """Return the content of one record of a run, None if there is none."""

    def record_end(self, name: str, run: int, record: str) -> bytes:
        """Return the end of a record that grows, b"" if there is none."""

    def put_record(self, name: str, run: int, record: str, data: bytes) -> None:
        """Write one record of a run."""

    def jid(self, name: str, run: int) -> Jid | Liveness:
        """Return who the wrapper of a run says it is, ABSENT if it has not spoken, VOID if it never will."""


class RunHandle(Protocol):
    """A run that was started or adopted: whether it lives, what is left of it, what it has used.

    What the machine does not let it find out raises OSError: what cannot be seen is not gone.
    """

    @property
    def key(self) -> tuple[str, int]:
        """The job and the run."""

    @property
    def engine(self) -> Engine:
        """Where it runs."""

    @property
    def jid(self) -> Jid | None:
        """Who the wrapper is, as far as anybody has found out."""

    def identified(self, jid: Jid) -> None:
        """Know who the wrapper is: its record says so."""

    @property
    def exit_status(self) -> int | None:
        """What the wrapper has ended with, as wait() reports it; None as long as it lives, and where nobody tells."""

    def liveness(self) -> Liveness:
        """Return what became of the wrapper; ABSENT as long as it cannot be told who that is."""

    @property
    def is_child(self) -> bool:
        """Whether the wrapper is a child of this process, so that SIGCHLD tells of its end."""

    @property
    def waits(self) -> str | None:
        """Why it has not begun where it is, in its engine's words; None if it has, or if it is on this machine."""

    @property
    def halted(self) -> str | None:
        """Who has it stand still where it is, "" if nobody; None: nobody there says so, or its users decide that."""

    @property
    def ending(self) -> EngineEnd | None:
        """How its engine says that it has ended; None if it has not, and of a run on this machine."""

    @property
    def refusal(self) -> str | None:
        """Why its engine takes it neither now nor later, in the engine's words; None if it has not said so."""

    @property
    def resists(self) -> str:
        """Why it has not ended yet though it was told to, as free text; "" if nothing is in the way."""

    @property
    def alive_at_ns(self) -> int | None:
        """When a look at it last found it alive, or a process of it, by the wall clock; None if no look did."""

    def watch(self) -> int | None:
        """Return a new descriptor that is readable once the wrapper has ended; None where there can be none.

        Raises ProcessLookupError if it has ended already.
        """

    def has_ended(self) -> None:
        """Know that the wrapper has ended: what `watch` returned says so, or its error."""

    def left_behind(self) -> bool:
        """Whether anything of the run has outlived its wrapper."""

    def signal(self, signal_name: str, *, spare_shell: bool) -> int:
        """Signal what the run runs; *spare_shell*: not the shell of a command that is waiting for it.

        Returns how many processes were told. Raises OSError where it is not seen who they are.
        """

    @property
    def holds_memory(self) -> bool:
        """Whether the run is held to its memory limit without the dispatcher."""

    def usage(self) -> Usage:
        """Return what the run has used, after its end. The answer never changes."""

    def close(self) -> None:
        """Let go of the run, which is over."""


class Engine(Protocol):
    """Where runs run, whichever executor has started them: this machine, or another."""

    def machine(self) -> Machine | None:
        """Return what there is for its runs; None: what this machine has."""

    @property
    def tells(self) -> bool:
        """Whether :meth:`work` tells of every change, so that nobody has to ask each run."""

    @property
    def silent(self) -> bool:
        """Whether nobody answers there, so that nothing can be started."""

    def fileno(self) -> int | None:
        """Return a descriptor that is readable when :meth:`work` has something to do; the same for life."""

    def due_ns(self) -> int | None:
        """Return when it has something to do by itself, on the monotonic clock."""

    def work(self) -> Collection[RunHandle]:
        """Do what is due, without waiting for anything; return the runs with news."""

    def adopt(self, job: str, run: int, jid: Jid | None) -> RunHandle:
        """Return a run that another dispatcher has started; *jid* is who its wrapper said it is, if it has."""

    def terminate(self, runs: Mapping[Any, bool]) -> Collection[RunHandle]:
        """Go on ending *runs*: ask each to end, once, and force those that are True; return what is gone for good.

        One look serves all of them. Raises OSError where it is not seen what is left of them.
        """

    def suspend(self, runs: Mapping[Any, bool]) -> Collection[RunHandle]:
        """Have the runs that are True stand still, and the others go on; return those that do.

        Called again for the rest, since what forks meanwhile escapes a look. Raises OSError if it cannot see which
        processes to tell. :meth:`terminate` ends a run that stands still as any other.
        """


def refused(error: OSError) -> bool:
    """Tell whether *error* says that the machine has too little of something, and nothing about what was asked for."""
    return error.errno in SHORTAGES


def sounds_refused(text: str) -> bool:
    """Tell the same of what another program says: it has the words for these errors from the C library, as we do."""
    return any(os.strerror(number) in text for number in SHORTAGES)


class Executor(Protocol):
    """One way to start a wrapper."""

    @property
    def name(self) -> str:
        """The word for it in job files and in the configuration."""

    def unavailable(self) -> str | None:
        """Return why it cannot start anything on this machine now, or None if it can."""

    def surroundings(self) -> Surroundings:
        """Return what the wrapper's text has to say for this executor on this machine."""

    @property
    def engine(self) -> Engine:
        """Where its wrappers run."""

    def start(self, launch: Launch) -> RunHandle | None:
        """Start the wrapper and do not wait for it.

        Raises SpoolError if nothing was started, and never will be; StartRefused if that is for want of something on
        the machine, so that the job is to wait.

        None: nothing was started, and the job is to wait as long as :meth:`unavailable` has a reason. Who cannot tell
        returns a handle whose `liveness` is ABSENT: the wrapper's `jid`, or its absence, settles it.
        """

    def close(self) -> None:
        """Let go of what the starts share."""

    def attach(self, spool_dir: str, job: str, run: int, *, read_only: bool) -> tuple[str, ...]:
        """Return the command that puts a person before the terminal of a run. Raises SpoolError if it has none."""

    def forget(self, spool_dir: str, runs: Iterable[tuple[str, int]]) -> None:
        """Close what was kept of these runs, which are over, where there is such a thing. Never raises."""
