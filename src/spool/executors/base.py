"""What an executor is: the Protocol of all ways to start a wrapper, and what is handed to them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from spool.core.errors import SHORTAGES
from spool.core.model import Jid
from spool.formats.wrapper import Surroundings


@dataclass(frozen=True, slots=True)
class Launch:
    """One wrapper to be started. The metadir and the script in it are there already."""

    job: str
    run: int
    spool_dir: str
    metadir: str
    script: str
    text: bytes  # of the script
    environment: Mapping[str, str] | None = None
    """What the wrapper inherits; None is the environment of this process as it was first asked for."""

    keep: bool = False
    """Whether what shows the run on a terminal stays after its end, to be read, where there is such a thing."""

    def inherited(self) -> dict[str, str]:
        """Return the environment to start the wrapper with. What the run adds stands in the script.

        The marks of an outer run are taken away. Those of this one are set, so that the wrapper can be found by
        them from its first moment on.
        """
        environment = dict(own_environment()) if self.environment is None else _without_marks(self.environment)
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


@cache
def own_environment() -> dict[str, str]:
    """Return what a dispatcher hands on; it does not change in its life, and asking costs as much as a small file."""
    return _without_marks(os.environ)


# The wrapper knows bash by the first; the others would turn options such as errexit on in it.
_SHELLS_OWN = frozenset({"BASH_VERSION", "SHELLOPTS", "BASHOPTS"})


@dataclass(frozen=True, slots=True)
class Started:
    """A wrapper on its way. What it is, its `jid` will prove; until then this is all that is known, if anything is."""

    pid: int | None = None  # of the wrapper, where it is our child
    identity: Jid | None = None  # of the wrapper, where it is not


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

    def start(self, launch: Launch) -> Started | None:
        """Start the wrapper and do not wait for it.

        Raises SpoolError if nothing was started, and never will be; StartRefused if that is for want of something on
        the machine, so that the job is to wait.

        None: nothing was started, and the job is to wait as long as :meth:`unavailable` has a reason. Who cannot tell
        returns an empty `Started`: the wrapper's `jid`, or its absence, settles it.
        """

    def get_ready(self, text: bytes | None = None) -> int | None:
        """Do what makes the next start shorter; return the pid of a child that waits for that, and is no run's.

        *text* is the script that will probably be started, where that is known.
        """

    def close(self) -> None:
        """Let go of what was made ready."""

    def attach(self, spool_dir: str, job: str, run: int, *, read_only: bool) -> tuple[str, ...]:
        """Return the command that puts a person before the terminal of a run. Raises SpoolError if it has none."""

    def forget(self, spool_dir: str, runs: Iterable[tuple[str, int]]) -> None:
        """Close what was kept of these runs, which are over, where there is such a thing. Never raises."""
