"""How much of what could be tried is tried."""

from __future__ import annotations

import pytest


@pytest.fixture
def thin() -> int:
    """Have every third kind of change tried; `tests/long/cuts` tries them all."""
    return 3
