"""Records of these tests name this very process as the wrapper of a run; and a clock that stands still."""

from __future__ import annotations

import time

import pytest

from spool.core.model import SECOND_NS


@pytest.fixture(autouse=True)
def _own_process(own_process_stands_for_wrappers: None) -> None:
    """Believe them, in tests that call no command too."""


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> int:
    """Stop the clock, somewhat more than three hours from now."""
    now_ns = (time.time_ns() // SECOND_NS + 30 + 180 * 60) * SECOND_NS
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    return now_ns
