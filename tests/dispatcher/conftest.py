"""A dispatcher in a world that is made up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.world import Session, world_at
from spool.dispatcher import observer


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Give a dispatcher in a world with an empty spool, which misses a file that is not there at once.

    Its looks give way to nothing, however slow the machine is, so that a pass is a pass.
    """
    monkeypatch.setattr(observer, "MISSING_NS", 0)
    monkeypatch.setattr(observer, "BUDGET_NS", 1 << 60)
    with world_at(tmp_path / "spool", monkeypatch) as world:
        made = Session(world)
        yield made
        made.end()
