"""The dispatcher is cut off before every change of the disk in turn, and the next one carries on to the same end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from crash.cuts import Alike
from crash.scripts import JOBS, STARTS, play
from crash.world import Ends, Session, World, check, ends_of, history, world_at
from faulty import FaultyDisk
from spool.core.layout import DONE, QUEUED, RUNNING
from spool.core.lifecycle import Exit
from spool.core.model import State
from spool.dispatcher import launcher, scanner
from spool.state.run import ActiveRun
from spool.store.spool import Spool

# What the script comes to when nothing is cut off.
EXPECTED = Ends(
    places=dict.fromkeys(JOBS, ("done",)),
    starts=STARTS,
    outcomes=dict.fromkeys(("after", "denied", "parked", "refused", "wrong"), ("finished 1.0",))
    | dict.fromkeys(("huge", "never"), ("cancelled 1.0",))
    | {
        "gone": ("lost 1.0",),
        "killed": ("lost 1.0 requeue", "finished 1.1"),
        "long": ("cancelled 1.0", "finished 1.0"),
        "plain": ("finished 1.0", "finished 1.0"),
        "stopped": ("cancelled 1.0 hold", "finished 1.0"),
        "tired": ("failed 1.0 retry", "failed 2.0"),
        "tried": ("failed 1.0 retry", "failed 2.0 retry", "finished 3.0"),
        "twice": ("cancelled 1.0 requeue", "finished 1.0"),
    },
)


def _check(world: World) -> None:
    check(world)
    assert ends_of(world) == EXPECTED


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
def test_a_cut_before_any_change_alters_nothing_in_the_end(alike: Alike, *, torn: bool) -> None:
    """Wherever the dispatcher is killed, the next one brings every job to the same end, each start made once."""
    alike.cut(play, _check, torn=torn)


def test_a_second_cut_during_the_recovery_alters_nothing_either(alike: Alike) -> None:
    """A dispatcher that is killed while it finishes what another left behind leaves nothing worse to the third."""
    alike.cut_again(play, _check, 160)


@pytest.mark.parametrize("survives", [False, True], ids=["another", "the_same"])
def test_a_full_disk_at_any_change_loses_nothing(alike: Alike, *, survives: bool) -> None:
    """A change for which there is no room is made up for once there is, by the same dispatcher or by the next one."""

    def played(world: World, number: int | None) -> FaultyDisk:
        disk = FaultyDisk(world.staging, fail_at=number, error=errno.ENOSPC)
        session = play(world, iter([disk]), survives=survives)
        assert disk.count >= (number or 0) or session.errors
        _check(world)
        return disk

    alike(played)


def test_an_end_that_was_found_is_filed_although_the_disk_was_full_for_the_next(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two runs that end at once, the second one's evidence cannot be settled at first: neither is forgotten."""
    session.survives_errors = True
    for name in ("one", "two"):
        session.users.submit(name, "ok")
    session.turns(1)
    concluder, over = session.now.supervisor.concluder, list[str]()
    conclude = concluder.conclude

    def full(live: ActiveRun, left: Exit | None = None) -> bool:
        if len(over) == 1 and not session.errors:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if found := conclude(live, left):
            over.append(live.name)
        return found

    monkeypatch.setattr(concluder, "conclude", full)
    session.settle()
    session.sweep()
    assert len(session.errors) == 1
    check(session.world)
    assert ends_of(session.world).places == {"one": ("done",), "two": ("done",)}


def test_a_start_that_is_taken_back_is_ended_although_the_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a job that never began, and whose file was deleted, the end is written down as soon as there is room."""
    monkeypatch.setattr(launcher, "SILENT_NS", 0)

    def played(number: int | None) -> FaultyDisk:
        with world_at(tmp_path / f"{number}", monkeypatch) as world:
            disk = FaultyDisk(world.staging, fail_at=number)
            session = Session(world, iter([disk]))
            session.survives_errors = True
            session.after_turn = world.launched.clear  # the wrapper never speaks
            try:
                session.users.submit("gone", "ok")
                session.turns(1)
                session.users.path(RUNNING, "gone").unlink()
                session.settle()
            finally:
                session.sweep()
            assert len(session.errors) == (number is not None)
            check(world)
            assert ends_of(world) == Ends({"gone": ("done",)}, {}, {"gone": ("cancelled 1.0",)})
        return disk

    whole = played(None)
    for number, done in enumerate(whole.recorded, 1):
        if done.paths[-1].endswith(("/jobs/gone/2", "/done/gone.toml")):
            played(number)


def test_a_cancel_of_what_waits_is_filed_however_long_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was moved to `done/` while it waited is not forgotten, as one is that stays away, before that."""
    monkeypatch.setattr(scanner, "FORGET_NS", 0)
    with world_at(tmp_path / "spool", monkeypatch) as world:
        disk = FaultyDisk(world.staging)
        session = Session(world, iter([disk]))
        session.survives_errors = True
        try:
            session.users.submit("huge", "ok", "cpus = 99")
            session.settle()
            session.users.move("huge", QUEUED, DONE)
            disk.fail_at, disk.fail_for = disk.count + 1, 5
            session.settle()
        finally:
            session.sweep()
        assert len(session.errors) == 5
        check(world)
        assert ends_of(world) == Ends({"huge": ("done",)}, {}, {"huge": ("cancelled 1.0",)})


JOB = "long"


def _alive_run(world: World) -> tuple[str, int]:
    """Return the run that lives; a cut before it was committed costs a number."""
    (process,) = world.alive.values()
    return process.name, process.run


def _suspend_twice(world: World, disk: FaultyDisk) -> Session:
    """Suspend a run, let it go on, suspend it again, and end it while it stands still; then let the next one run."""
    session = Session(world, iter([disk]))
    users = session.users
    try:
        users.submit(JOB, "hang", "requeue = true")
        session.settle()
        key = _alive_run(world)
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
        assert _alive_run(world) > key
        assert _alive_run(world) not in world.halted
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
        assert _suspend_twice(world, disk).cuts == (number is not None)
        first, last = history(world.root)
        assert (first.outcome, last.outcome) == (State.LOST, State.FINISHED)
        assert number is not None or first.suspended_ns > last.suspended_ns == 0
        return disk

    alike(played)
