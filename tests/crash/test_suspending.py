"""A run is suspended, goes on, and is suspended again, while the dispatcher is cut off before every change."""

from __future__ import annotations

from pathlib import Path

from crash.cuts import Alike
from crash.world import Session, World, history
from spool.core.model import State
from spool.store.spool import Spool
from spool.testing.fakes import FaultyDisk

JOB = "long"


def _run(world: World) -> tuple[str, int]:
    """Return the run that lives; a cut before it was committed costs a number."""
    (process,) = world.alive.values()
    return process.name, process.run


def _play(world: World, disk: FaultyDisk) -> Session:
    """Suspend a run, let it go on, suspend it again, and end it while it stands still; then let the next one run."""
    session = Session(world, iter([disk]))
    users = session.users
    try:
        users.submit(JOB, "hang", "requeue = true")
        session.settle()
        key = _run(world)
        for _ in range(2):
            users.suspend(JOB)
            session.settle()
            assert key in world.halted
            assert Spool(str(world.root)).suspension(*key).since_ns is not None
            users.go_on(JOB)
            session.settle()
            assert key not in world.halted
            assert Spool(str(world.root)).suspension(*key).since_ns is None
        users.suspend(JOB)
        session.settle()
        world.kill(JOB)  # lost, so that it is run again
        session.settle()
        assert _run(world) > key
        assert _run(world) not in world.halted
        assert not Path(users.layout.suspend_file(JOB)).exists()
        world.exit(world.pids(JOB)[0], 0)
        session.settle()
    finally:
        session.end()
    return session


def test_a_cut_before_any_change_suspends_no_other_run_and_none_for_ever(alike: Alike) -> None:
    """Wherever the dispatcher is killed, the file alone says whether the run stands still; the next run moves."""

    def played(world: World, number: int | None) -> FaultyDisk:
        disk = FaultyDisk(world.staging, cut_at=number)
        assert _play(world, disk).cuts == (number is not None)
        first, last = history(world.root)
        assert (first.outcome, last.outcome) == (State.LOST, State.FINISHED)
        assert number is not None or first.suspended_ns > last.suspended_ns == 0
        return disk

    alike(played)
