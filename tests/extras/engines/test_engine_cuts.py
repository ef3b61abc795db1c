"""Runs of an engine, with the dispatcher killed before each change that it makes on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash.cuts import noting, where
from crash.world import Session, World, ends_of, world_at
from extras.engines import fake_slurm
from extras.engines.fake_slurm import FakeSlurm
from faulty import FaultyDisk
from spool.core.layout import DONE
from spool.extras.engines import engine


@pytest.fixture(autouse=True)
def _slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine.LANGUAGES, "slurm", f"{fake_slurm.__name__}:FakeLanguage")
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
