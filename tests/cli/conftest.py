"""Records of these tests name this very process as the wrapper of a run."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _own_process(own_process_stands_for_wrappers: None) -> None:
    """Believe them, in tests that call no command too."""
