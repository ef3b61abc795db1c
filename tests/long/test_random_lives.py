"""Nothing is lost, and nothing runs twice, through whole random lives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crash.lives import SEED, Life, live_each

LIVES = int(os.environ.get("LIVES", "12"))
# A life in which the end of a submission, cancelled beside another of its name, once lost its line of history.
KNOWN = (461140811,)


def test_nothing_is_lost_and_nothing_runs_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever people do and whatever ends the dispatcher, each submission runs, and each run once."""
    live_each(tmp_path, monkeypatch, Life, (*KNOWN, *range(SEED, SEED + LIVES)), 30)
