"""The start that is foreseen: its records lie ready, and are used only if nothing about it has changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from crash.world import Session, World
from spool.core import layout
from spool.core.layout import HELD, QUEUED


@pytest.fixture
def session(session: Session) -> Session:
    """Give a dispatcher in a world with one processor, on which `first` runs and `next` waits."""
    session.world.cpus = 1
    (session.world.root / layout.CONFIG).write_text("cpus = 1\n")
    for name, command in (("first", "hang until 2"), ("next", "hang # as submitted")):
        session.users.submit(name, command)
        session.settle()
    assert session.world.pids("first")
    return session


def _ready(world: World) -> list[Path]:
    """Return what lies ready: the directory of a job that has had no run."""
    return sorted((world.root / layout.STAGING).glob("*.run.*"))


def _script(world: World, name: str) -> Path:
    """Return that of the newest run: one whose file had changed when it was claimed was given up."""
    return max((world.root / "jobs" / name).iterdir()) / layout.WRAPPER


def _end_of_first(session: Session) -> None:
    world = session.world
    world.exit(world.pids("first")[0], 0)
    session.settle()


def test_what_starts_next_lies_ready(session: Session) -> None:
    """While it waits nobody sees it; then it is moved to where it belongs, with the grant added."""
    world = session.world
    [staged] = _ready(world)
    assert sorted(os.listdir(staged)) == sorted([layout.SPEC_COPY, layout.WRAPPER, layout.GRANT])
    assert not (world.root / "jobs" / "next").exists()
    inode = (staged / layout.WRAPPER).stat().st_ino
    _end_of_first(session)
    assert world.pids("next")
    assert _script(world, "next").stat().st_ino == inode
    assert {layout.SPEC_COPY, layout.WRAPPER, layout.GRANT} <= set(os.listdir(world.root / "jobs" / "next" / "1"))
    assert not _ready(world)


def test_what_needs_a_control_group_does_not_lie_ready(session: Session) -> None:
    """Its script names the group, which is made together with the run."""
    session.world.engine.groups = SimpleNamespace(create=None)  # type: ignore[assignment]
    session.users.submit("next", "hang", 'memory = "1M"')
    session.settle()
    assert session.now.state.queue["next"].request.memory_bytes == 1 << 20
    assert not _ready(session.world)


@pytest.mark.parametrize("looked_at", [False, True])
def test_an_edited_job_starts_as_it_was_edited(session: Session, *, looked_at: bool) -> None:
    """Whether the change was seen before the room came or not."""
    session.users.submit("next", "hang # as edited")
    if looked_at:
        session.settle()
    session.looks_at_everything = looked_at
    session.world.exit(session.world.pids("first")[0], 0)
    session.turns(3)
    session.looks_at_everything = True
    session.settle()
    assert dict(session.world.texts)["next"] == "hang # as edited"
    assert "as edited" in _script(session.world, "next").read_text()
    assert not _ready(session.world)


def test_a_job_that_comes_before_it_starts_before_it(session: Session) -> None:
    """What was ready for the other makes way, and is made again."""
    world = session.world
    before = _ready(world)
    session.users.submit("urgent", "ok", "priority = 200")
    session.settle()
    assert len(_ready(world)) == 1
    assert _ready(world) != before
    _end_of_first(session)
    assert [name for name, _ in world.texts] == ["first", "urgent", "next"]
    assert not _ready(world)


@pytest.mark.parametrize("how", ["deleted", "held", "told to wait"])
def test_nothing_stays_of_a_job_that_will_not_start(session: Session, how: str) -> None:
    """It was deleted, held or paused: the staging directory is empty again."""
    users = session.users
    if how == "deleted":
        users.path(QUEUED, "next").unlink()
    elif how == "held":
        assert users.move("next", QUEUED, HELD)
    else:
        users.submit("next", "hang", "start_after = 2100-01-01T00:00:00Z")
    session.settle()
    assert not _ready(session.world)
    _end_of_first(session)
    assert not session.world.pids("next")


def test_another_configuration_is_another_start(session: Session) -> None:
    """A prolog that was configured meanwhile is in the script."""
    (session.world.root / layout.CONFIG).write_text('cpus = 1\nprolog = "echo hello"\n')
    session.now.wakeup.reload = True
    session.settle()
    _end_of_first(session)
    assert "echo hello" in _script(session.world, "next").read_text()


def test_a_dispatcher_that_leaves_takes_it_along(session: Session) -> None:
    """Nothing is left in the staging directory for the next."""
    assert _ready(session.world)
    session.now.launcher.close()
    assert not _ready(session.world)


@pytest.mark.parametrize("swept", [None, layout.SPEC_COPY, layout.WRAPPER])
def test_what_somebody_swept_away_is_made_again(session: Session, swept: str | None) -> None:
    """Whoever empties the staging directory, or removes a part of what lies there, takes nothing from the run."""
    [staged] = _ready(session.world)
    if swept is None:
        shutil.rmtree(staged)
    else:
        (staged / swept).unlink()
    _end_of_first(session)
    assert session.world.pids("next")
    assert {layout.SPEC_COPY, layout.WRAPPER} <= set(os.listdir(_script(session.world, "next").parent))
    assert not _ready(session.world)


@pytest.mark.parametrize("there", ["nothing", "a run", "another file", "a file"])
def test_a_directory_that_was_made_meanwhile_keeps_what_it_has(session: Session, there: str) -> None:
    """Nothing that lies where the job's own directory belongs is replaced."""
    directory = session.world.root / "jobs" / "next"
    if there == "a file":
        directory.write_text("mine")
    else:
        directory.mkdir()
        if there != "nothing":
            (directory / ("1" if there == "a run" else "mine")).mkdir()
    session.survives_errors = there == "a file"
    session.world.exit(session.world.pids("first")[0], 0)
    session.turns(5)
    if there == "a file":
        assert directory.read_text() == "mine"
        assert not session.world.pids("next")
        return
    assert session.world.pids("next")
    runs = {"nothing": {"1"}, "a run": {"1", "2"}, "another file": {"1", "mine"}}
    assert set(os.listdir(directory)) == runs[there]
    assert not _ready(session.world)


def test_a_file_that_was_exchanged_for_a_while_leaves_nothing(session: Session) -> None:
    """The records say what runs, also if another file lay there while they would have been made."""
    now, queued, aside = session.now, session.users.path(QUEUED, "next"), session.world.root / "aside"
    session.looks_at_everything = False
    os.rename(queued, aside)
    queued.write_text('command = "other"\n')
    (session.world.root / layout.CONFIG).write_text('disk_floor = "0M"\nkill_grace = "9s"\n')
    now.settings.reload(force=True)  # so that it is made anew
    now.get_ahead()
    assert not _ready(session.world)
    os.rename(aside, queued)
    _end_of_first(session)
    metadir = _script(session.world, "next").parent
    assert (metadir / layout.SPEC_COPY).read_bytes() == (session.world.root / "running" / "next.toml").read_bytes()
    assert dict(session.world.texts)["next"] == "hang # as submitted"


def test_a_guess_that_fails_is_no_matter(session: Session) -> None:
    """What cannot be made ready is said when the job starts, and the dispatcher lives."""
    users, runs = session.users, session.world.root / "jobs"
    users.path(QUEUED, "next").unlink()
    (runs / "loop").symlink_to("loop")
    users.submit("loop", "hang")
    session.settle()
    assert not session.errors
    assert not _ready(session.world)
    session.world.exit(session.world.pids("first")[0], 0)
    session.survives_errors = True
    session.turns(5)  # it is tried again and again
    assert "jobs/loop: " in session.now.state.told_blocked["loop"]


@pytest.mark.parametrize("place", [QUEUED, HELD])
def test_no_guess_is_made_where_it_would_cost_much(session: Session, place: str) -> None:
    """Every decision looks at the dependencies of all."""
    for number in range(65):
        session.users.submit(f"late-{number}", "ok", 'depends_on = "never"', place=place)
    session.settle()
    assert not _ready(session.world)
    _end_of_first(session)
    assert session.world.pids("next")
