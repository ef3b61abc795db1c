"""Spools whose dispatcher serves already."""

from __future__ import annotations

import pytest

from served import Served


@pytest.fixture
def live(served: Served) -> Served:
    """Give a spool of the test's own, which is served."""
    return served.start()
