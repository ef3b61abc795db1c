"""A world to play in, and how much of what could be tried is tried."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.cuts import Alike
from crash.world import Session, World, world_at
from spool.dispatcher import observer


@pytest.fixture
def thin() -> int:
    """Have every third kind of change tried; `tests/long/cuts` tries them all."""
    return 3


@pytest.fixture
def alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thin: int) -> Alike:
    """Give what plays a script uncut, and with a fault at some changes of the disk."""
    return Alike(tmp_path, monkeypatch, thin)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Give a world with an empty spool, in which a missing file is taken for deleted at once."""
    monkeypatch.setattr(observer, "MISSING_NS", 0)
    with world_at(tmp_path / "spool", monkeypatch) as made:
        yield made


@pytest.fixture
def session(world: World) -> Iterator[Session]:
    """Give dispatchers of that world."""
    made = Session(world)
    yield made
    made.end()
