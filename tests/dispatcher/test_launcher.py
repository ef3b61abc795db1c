"""What a start takes from the file as it is then, and where its records go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crash.world import Session, World
from spool.core import layout


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


def _script(world: World, name: str) -> Path:
    """Return that of the newest run: one whose file had changed when it was claimed was given up."""
    return max((world.root / "jobs" / name).iterdir()) / layout.WRAPPER


def _end_of_first(session: Session) -> None:
    world = session.world
    world.exit(world.pids("first")[0], 0)
    session.settle()


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
