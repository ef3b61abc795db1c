"""Nothing is lost, and nothing runs twice, through whole random lives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crash.lives import SEED, Life, hurry
from crash.world import world_at

LIVES = int(os.environ.get("LIVES", "12"))
# A life in which the end of a submission, cancelled beside another of its name, once lost its line of history.
KNOWN = (461140811,)


def live(root: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Live one life and check what it has come to."""
    with world_at(root, monkeypatch) as world:
        life = Life(world, seed)
        try:
            life.live(30)
            life.check()
        except BaseException as error:
            told = "\n".join(life.told)
            raise AssertionError(f"LIVES_SEED={seed} LIVES=1: {type(error).__name__}: {error}\n{told}") from error
        finally:
            life.session.end()


def test_nothing_is_lost_and_nothing_runs_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever people do and whatever ends the dispatcher, each submission runs, and each run once."""
    print(f"LIVES_SEED={SEED}")
    hurry(monkeypatch)
    for number, seed in enumerate((*KNOWN, *range(SEED, SEED + LIVES))):
        live(tmp_path / f"{number}", monkeypatch, seed)
