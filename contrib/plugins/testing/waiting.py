"""Waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0


def wait_for(condition: Callable[[], object], what: str = "") -> None:
    """Wait until *condition* is true."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, f"waited {PATIENCE_S} s without {what or condition}"
        time.sleep(0.02)
