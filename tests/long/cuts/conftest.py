"""The cuts of `tests/crash` again, at each kind of change; with EVERY_CUT=1 in the environment at every change."""

from __future__ import annotations

import os

import pytest

from crash.conftest import alike

__all__ = ["alike", "thin"]


@pytest.fixture
def thin() -> int:
    """Have each kind of change tried once, or every change."""
    return 0 if "EVERY_CUT" in os.environ else 1
