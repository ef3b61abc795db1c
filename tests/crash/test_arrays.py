"""An array's dispatcher is cut off before every change of the disk: no task is lost, and none begins twice."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from crash.cuts import Alike
from crash.events import events, nobody_reads, repeated, want_everything
from crash.world import Session, World, ends_of, history, world_at
from faulty import FaultyDisk
from spool.core import layout
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import Result
from spool.dispatcher import arrays, confinement
from spool.store.disk import Disk
from spool.store.spool import Spool

TASKS = [f"sweep_{index}" for index in range(5)]


def _run(session: Session) -> None:
    """Expand five tasks, and run them."""
    session.users.submit("sweep", "ok # {index}", 'array = "0-4"')
    session.settle()


def _twice(session: Session) -> None:
    """Run an array, and run it again from `done/`."""
    _run(session)
    session.users.move("sweep", DONE, QUEUED)
    session.settle()


def _cancel(session: Session) -> None:
    """Delete the file of an array of which two tasks run, and one is held."""
    session.users.submit("sweep", "hang # {index}", 'array = "0-4"')
    session.settle()
    session.users.move("sweep_4", QUEUED, HELD)
    session.turns(1)
    session.users.path(RUNNING, "sweep").unlink(missing_ok=True)
    _see_it_missing(session)


def _hold(session: Session) -> None:
    """Hold an array at once, let it go on, and end what hangs."""
    session.users.submit("sweep", "ok # {index}", 'array = "0-4"')
    session.users.submit("sweep_3", "ok # foreign", place=HELD)
    for _ in range(6):
        session.turns(1)
        if session.users.move("sweep", RUNNING, HELD):
            break
    session.turns(2)
    session.users.move("sweep", HELD, QUEUED)
    session.settle()
    session.users.move("sweep_3", HELD, DONE)
    session.settle()


def _see_it_missing(session: Session) -> None:
    """Go on until a deletion has been believed."""
    for _ in range(400):
        session.settle()
        if session.users.path(DONE, "sweep").exists():
            return
        now = session.now
        for array in now.state.arrays.values():
            if array.missing_ns is not None:
                array.missing_ns = 1
    raise AssertionError("the array was not cancelled")


def _check(world: World) -> Result:
    """Assert what holds of the end of every array, and return how this one ended."""
    assert not world.alive
    spool = Spool(str(world.root))
    lines = Counter((result.job, result.run) for result in history(world.root))
    assert all(count == 1 for count in lines.values()), lines
    assert not [job for job, _ in lines if job == "sweep"], "an array is no run"
    for place in (QUEUED, RUNNING, HELD):
        assert not list((world.root / place).glob("*.toml")), place
    assert not [name for name in os.listdir(world.root / layout.STAGING) if not name.startswith("user.")]
    run = spool.latest_run("sweep")
    assert run is not None
    result = spool.result("sweep", run)
    assert result is not None
    return result


def _check_run(world: World, times: int = 1) -> None:
    result = _check(world)
    assert (result.outcome, result.reason) == ("finished", "5 of 5 finished")
    assert sorted(world.texts) == [(task, f"ok # {index}") for index, task in enumerate(TASKS) for _ in range(times)]


def _check_cancel(world: World) -> None:
    result = _check(world)
    assert result.outcome == "cancelled"
    starts = Counter(world.begun)
    assert all(count == 1 for count in starts.values())
    outcomes = ends_of(world).outcomes
    assert {task: outcomes[task] for task in TASKS} == dict.fromkeys(TASKS, ("cancelled 1.0",))


Play = Callable[[Session], None]
Check = Callable[[World], object]
PLAYS: list[tuple[Play, Check]] = [
    (_run, _check_run),
    (_twice, partial(_check_run, times=2)),
    (_cancel, _check_cancel),
    (_hold, _check_run),
]
NAMES = ["run", "twice", "cancel", "hold"]


def test_tasks_that_a_power_cut_emptied_are_written_again(session: Session) -> None:
    """After a reboot a task of no content, issued or not, is made again of the array's file."""
    session.users.submit("sweep_4", "ok # foreign", place=HELD)
    rows = [f'{{ does = "{word}" }}' for word in ("hang until 2", "hang until 2", "ok", "ok", "ok")]
    session.users.submit("sweep", "{does} # {index}", f"rows = [{', '.join(rows)}]")
    session.turns(3)
    tasks = session.world.root / "jobs" / "sweep" / "1" / layout.TASKS
    assert [path.name for path in tasks.iterdir()] == ["sweep_4.toml"]
    session.end()
    session.world.reboot()
    for path in (tasks / "sweep_4.toml", session.users.path(QUEUED, "sweep_3")):
        path.write_bytes(b"")
    session.users.move("sweep_4", HELD, DONE)
    session.settle()
    assert ("sweep_3", "ok # 3") in session.world.texts
    assert ("sweep_4", "ok # 4") in session.world.texts


@pytest.mark.parametrize(("play", "check"), PLAYS, ids=NAMES)
def test_a_cut_before_any_change_alters_nothing_in_the_end(alike: Alike, play: Play, check: Check) -> None:
    """Wherever the dispatcher is killed, the array comes to the same end."""

    def played(world: World, number: int | None) -> FaultyDisk:
        disk = FaultyDisk(world.staging, cut_at=number)
        session = Session(world, iter([disk]))
        try:
            play(session)
        finally:
            session.end()
        check(world)
        return disk

    alike(played)


def _played_while_full(
    world: World, play: Play, *, fail_at: int | None = None, fail_for: int = 1
) -> tuple[FaultyDisk, Session]:
    """Perform *play* on a disk that is full for a while; everything is told, and the same dispatcher goes on."""
    disk = FaultyDisk(world.staging, fail_at=fail_at, fail_for=fail_for, error=errno.ENOSPC)
    session = Session(world, iter([disk]))
    session.survives_errors = True
    try:
        play(session)
    finally:
        session.sweep()
    return disk, session


@pytest.fixture
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what could not be written tried again in the next pass, and a listener that no process tells."""
    nobody_reads(monkeypatch)
    want_everything(monkeypatch)
    monkeypatch.setattr(arrays, "_TRY_AGAIN_NS", 0)


@pytest.mark.usefixtures("nobody_waits")
@pytest.mark.parametrize(("play", "check"), PLAYS, ids=NAMES)
def test_a_full_disk_at_any_change_is_made_up_for(alike: Alike, play: Play, check: Check) -> None:
    """The same dispatcher brings the array to the same end once there is room, and tells of each end once."""

    def played(world: World, number: int | None) -> FaultyDisk:
        disk, session = _played_while_full(world, play, fail_at=number)
        check(world)
        ended = [event for event in events(world) if event.result is not None]
        assert {event.job for event in ended} >= {"sweep", *TASKS}
        if session.dispatchers == 1:
            assert not repeated(world)
        return disk

    alike(played)


class _NowhereToFile(Disk):
    """A disk on which one task's file cannot be moved to `done/` for now."""

    def rename_new(self, old: str, new: str) -> bool:
        if old.endswith(f"/{QUEUED}/sweep_2.toml") and f"/{DONE}/" in new:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), old)
        return super().rename_new(old, new)


def test_a_task_whose_end_is_on_record_never_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled task whose file cannot be moved yet does not take the room of those that were stopped."""
    with world_at(tmp_path / "spool", monkeypatch) as world:
        session = Session(world, iter([_NowhereToFile(world.staging)]))
        session.survives_errors = True
        try:
            session.users.submit("sweep", "hang # {index}", 'array = "0-4"')
            session.settle()
            with monkeypatch.context() as patience:
                for name in ("FIRST_PAUSE_NS", "LONGEST_PAUSE_NS"):
                    patience.setattr(confinement, name, 1 << 60)
                session.users.move("sweep", RUNNING, DONE)
                session.turns(6)
            assert session.errors
            assert not world.alive
            assert {name for name, _ in world.begun} == {"sweep_0", "sweep_1"}
            session.end()
            session.settle()
        finally:
            session.end()
        _check_cancel(world)


# Of a play what is hit: the last change of that name which is about a path that ends so.
_FULL = {
    "a task is issued": (_run, _check_run, "rename_new", "/tasks/sweep_2.toml"),
    "its end is told": (_run, _check_run, "append", "/events.jsonl"),
    "its end is remembered": (_run, _check_run, "append", "/.journal"),
    "a task that waits is cancelled": (_cancel, _check_cancel, "rename_new", "/queued/sweep_2.toml"),
    "what was not issued is dropped": (_cancel, _check_cancel, "rename", "/1/tasks"),
}
_TRIES = 3


@pytest.mark.usefixtures("nobody_waits")
@pytest.mark.parametrize(("play", "check", "name", "path"), _FULL.values(), ids=_FULL)
def test_a_disk_that_stays_full_delays_an_array_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, play: Play, check: Check, name: str, path: str
) -> None:
    """What the dispatcher could not do it does when there is room: it forgets nothing because it has tried."""
    with world_at(tmp_path / "whole", monkeypatch) as world:
        whole, _ = _played_while_full(world, play)
    changes = enumerate(whole.recorded, 1)
    number = max(at for at, done in changes if done.name == name and done.paths[0].endswith(path))
    with world_at(tmp_path / "full", monkeypatch) as world:
        _, session = _played_while_full(world, play, fail_at=number, fail_for=_TRIES)
        assert len(session.errors) > 1
        check(world)
        assert session.dispatchers == 1
        assert not repeated(world)
