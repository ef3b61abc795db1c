"""How a wrapper is started: one small module per way, one Protocol."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from spool.formats.wrapper import Surroundings


@dataclass(frozen=True, slots=True)
class Launch:
    """One wrapper to be started. The metadir and the script in it are there already."""

    job: str
    run: int
    spool_dir: Path
    metadir: Path
    script: Path
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """What the wrapper inherits: the dispatcher's environment. What the run adds stands in the script."""

    def inherited(self) -> dict[str, str]:
        """Return the environment to start the wrapper with.

        The marks of an outer run are taken away. Those of this one are set, so that the wrapper can be found by
        them from its first moment on.
        """
        environment = {
            key: value
            for key, value in self.environment.items()
            if not key.startswith(("SPOOL_", "spool_")) and key not in _SHELLS_OWN
        }
        environment["SPOOL_DIR"] = str(self.spool_dir)
        environment["SPOOL_JOB"] = self.job
        environment["SPOOL_RUN"] = str(self.run)
        return environment


# The wrapper knows bash by the first; the others would turn options such as errexit on in it.
_SHELLS_OWN = frozenset({"BASH_VERSION", "SHELLOPTS", "BASHOPTS"})


@dataclass(frozen=True, slots=True)
class Started:
    """A wrapper on its way. What it is, its `jid` will prove; until then this is all that is known."""

    pid: int | None = None  # of the wrapper, where it is our child
    pidfd: int | None = None  # readable once it has ended; whoever gets it closes it


class Executor(Protocol):
    """One way to start a wrapper."""

    @property
    def name(self) -> str:
        """The word for it in job files and in the configuration."""

    def unavailable(self) -> str | None:
        """Return why it cannot start anything on this machine now, or None if it can."""

    def surroundings(self) -> Surroundings:
        """Return what the wrapper's text has to say for this executor on this machine."""

    def start(self, launch: Launch) -> Started:
        """Start the wrapper and do not wait for it. Raises SpoolError if nothing was started."""
