"""The gate of a shared machine, where the part of spool that asks the arbiter is not there, or fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.world import Session, world_at
from spool.core import layout
from spool.dispatcher import leases
from spool.machine.host import NO_ASKING, NO_ASKING_REMEDY


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Give a dispatcher on a machine that is shared, and for which no capability asks."""
    monkeypatch.setattr(leases, "only", lambda column: None)
    monkeypatch.setattr(leases, "_AGAIN_NS", 0)
    with world_at(tmp_path / "spool", monkeypatch) as world:
        (world.root / layout.CONFIG).write_text('machine = "/nowhere"\n')
        session = Session(world)
        session.users.submit("a", "hang")
        yield session
        session.end()


def test_nothing_starts_on_a_shared_machine_that_cannot_be_asked(session: Session) -> None:
    """The reason says what is missing and what to do, and once the machine is not shared the job starts."""
    session.settle()
    assert not session.world.begun
    assert session.now.planner.plan.reason("a").text == f"machine: {NO_ASKING}; {NO_ASKING_REMEDY}"
    (session.world.root / layout.CONFIG).write_text('machine = "off"\n')
    session.now.wakeup.reload = True
    session.settle()
    assert session.world.begun == [("a", 1)]


def test_what_cannot_be_loaded_is_said_and_tried_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that fails for a while keeps jobs from starting only that long."""
    asked: list[str] = []

    class Granting(leases.Leases):
        asks = True

        def __init__(self, *parts: object) -> None:
            super().__init__(parts[1], parts[2])  # type: ignore[arg-type]

    def fails(column: str) -> type[Granting]:
        asked.append(column)
        if len(asked) < 3:
            raise OSError(24, os.strerror(24))
        return Granting

    monkeypatch.setattr(leases, "only", fails)
    session.turns(1)
    assert os.strerror(24) in session.now.planner.plan.reason("a").text
    session.settle()
    assert asked == ["leases"] * 3
    assert session.world.begun == [("a", 1)]
