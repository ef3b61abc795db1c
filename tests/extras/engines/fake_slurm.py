"""A Slurm whose commands answer at once, and whose jobs outlive every dispatcher. They wait, and never begin."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from spool.core.model import SECOND_NS
from spool.extras.commands import Command, CommandEnd
from spool.extras.engines.engine import ClusterEngine
from spool.extras.engines.language import Language
from spool.extras.engines.slurm import SlurmLanguage
from spool.store.locked_spool import LockedSpool


@dataclass
class Job:
    """One job of it."""

    comment: str
    state: str = "PENDING"
    forgotten: bool = False


class FakeLanguage(SlurmLanguage):
    """Slurm's language, whose programs are always there."""

    def missing(self) -> str | None:
        """Miss none."""
        return None


class FakeSlurm(ClusterEngine):
    """Speaks Slurm's language to itself. Its clock goes on by three seconds at every look."""

    jobs: ClassVar[list[Job]] = []

    def __init__(self, language: Language, home: LockedSpool | None, **_: Any) -> None:
        commands: Any = Commands()
        super().__init__(language, home, commands, lambda: commands.now_ns)


class Commands:
    """What the engine takes for the helper that runs commands."""

    def __init__(self) -> None:
        self.now_ns = 1000 * SECOND_NS
        self._orders: list[tuple[Command, Callable[[CommandEnd], object]]] = []

    def order(self, command: Command, take: Callable[[CommandEnd], object]) -> None:
        """Take a command in."""
        self._orders.append((command, take))

    def work(self) -> None:
        """Answer all commands."""
        self.now_ns += 3 * SECOND_NS
        orders, self._orders = self._orders, []
        for take, end in [(take, self._answer(command.arguments)) for command, take in orders]:
            take(end)

    def due_ns(self) -> None:
        """Have nothing to do by itself."""

    def fileno(self) -> int:
        """Return a descriptor that nobody waits for."""
        return 0

    def close(self) -> None:
        """Let go of nothing."""

    def _answer(self, words: tuple[str, ...]) -> CommandEnd:
        match os.path.basename(words[0]):
            case "sbatch":
                (comment,) = (word.partition("=")[2] for word in words if word.startswith("--comment="))
                FakeSlurm.jobs.append(Job(comment))
                return CommandEnd(0, f"{len(FakeSlurm.jobs)}\n", "")
            case "squeue":
                known = [(at, job) for at, job in enumerate(FakeSlurm.jobs, 1) if not job.forgotten]
                lines = (f"{at}\t{job.state}\tNone\t\t{job.comment}\n" for at, job in known)
                return CommandEnd(0, "".join(("JOBID\tSTATE\tREASON\tNODELIST\tCOMMENT\n", *lines)), "")
            case "scontrol":
                return CommandEnd(0, "ClusterName = lab\n", "")
        raise AssertionError(f"nobody expects {words}")
