"""Runs of an engine, with the dispatcher killed before each change that it makes on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from crash.cuts import noting, where
from crash.world import Session, World, ends_of, world_at
from faulty import FaultyDisk
from spool.core.layout import DONE
from spool.core.model import SECOND_NS
from spool.extras.commands import Command, CommandEnd
from spool.extras.engines import engine
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


@pytest.fixture(autouse=True)
def _slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine.LANGUAGES, "slurm", f"{__name__}:FakeLanguage")
    monkeypatch.setattr(engine, "ClusterEngine", FakeSlurm)


def _play(world: World, disk: FaultyDisk, *, forgotten: bool) -> Session:
    """Hand a job over, cancel it in Slurm before it begins, and let it end.

    *forgotten*: Slurm forgets it while no dispatcher lives, once that is written down.
    """
    FakeSlurm.jobs.clear()
    session = Session(world, iter([disk]))
    try:
        session.users.submit("x", "true", 'executor = "slurm"')
        while not FakeSlurm.jobs:
            session.turns(1)
        session.turns(3)
        (job,) = FakeSlurm.jobs
        job.state = "CANCELLED"

        def cut() -> None:
            job.forgotten = forgotten and b"cancelled" in (world.root / "jobs" / "x" / "1" / "engine").read_bytes()

        session.after_cut = cut
        session.turns(20)
    finally:
        session.end()
    return session


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_slurm_cancelled_before_it_began_is_cancelled_wherever_the_dispatcher_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, forgotten: bool
) -> None:
    """A void jid says only that it never begins. The job is not handed over again, even if Slurm has forgotten it."""
    with world_at(tmp_path / "whole", monkeypatch) as world:
        whole = FaultyDisk(world.staging)
        _play(world, whole, forgotten=False)
    failures: list[str] = []
    for number in range(1, whole.count + 1):
        with world_at(tmp_path / f"{number}", monkeypatch) as world, noting(failures, where(whole, number)):
            _play(world, FaultyDisk(world.staging, cut_at=number), forgotten=forgotten)
            ends = ends_of(world)
            assert (ends.places["x"], ends.outcomes["x"]) == ((DONE,), ("cancelled 1.0",))
            assert len(FakeSlurm.jobs) == 1
    assert not failures, f"{len(failures)} of {whole.count}:\n" + "\n".join(failures)
