"""The cuts of `tests/crash` again, at each kind of change; with EVERY_CUT=1 in the environment at every change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def thin() -> int:
    """Have each kind of change tried once, or every change."""
    return 0 if "EVERY_CUT" in os.environ else 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what cuts nothing: it is the same test again."""
    items[:] = [item for item in items if item.path.parent != HERE or "thin" in getattr(item, "fixturenames", ())]
