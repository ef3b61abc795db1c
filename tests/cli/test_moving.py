"""`spool move`: which priority a job gets, and what it is told that cannot be moved."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from calling import Command, put_job
from spool.query.selection import priorities_to_move
from spool.store.spool import Spool


def _jobs(root: Path, **priorities: int | None) -> None:
    for name, priority in priorities.items():
        put_job(root, name, 'command = "true"\n' + (f"priority = {priority}\n" if priority is not None else ""))


def _priority(root: Path, name: str) -> object:
    return tomllib.loads((root / "queued" / f"{name}.toml").read_text()).get("priority")


@pytest.mark.parametrize(
    ("names", "where", "said"),
    [
        (("low",), "first", "low goes first: priority 41\n"),
        (("low", "none"), "first", "low goes first: priority 42\nnone goes first: priority 41\n"),
        (("high",), "first", "high is already first: priority 40\n"),
        (("high",), "last", "high goes last: priority 4\n"),
        (("high", "low"), "last", "high goes last: priority 9\nlow goes last: priority 8\n"),
        (("low",), "last", "low is already last: priority 5\n"),
    ],
)
def test_a_job_goes_before_or_after_all_others_of_its_user(
    spool: Command, spool_root: Path, names: tuple[str, ...], where: str, said: str
) -> None:
    """By one step of priority, in the order in which they are named; `--dry-run` says so and changes nothing."""
    _jobs(spool_root, high=40, none=None, low=5)
    before = {name: _priority(spool_root, name) for name in names}
    assert spool("move", *names, f"--{where}", "--dry-run").out == said.replace(" goes ", " would go ")
    assert {name: _priority(spool_root, name) for name in names} == before
    assert spool("move", *names, f"--{where}").out == said
    again = re.sub(" (goes|is already) ", " is already ", said)
    assert spool("move", *names, f"--{where}").out == again


def test_what_is_held_or_runs_is_no_rival_and_comments_stay(spool: Command, spool_root: Path) -> None:
    """Only waiting jobs count, and of the file nothing but the priority changes."""
    _jobs(spool_root, a=None)
    put_job(spool_root, "parked", 'command = "true"\npriority = 200\n', "held")
    put_job(spool_root, "b", '# why\ncommand = "true"  # what\n')
    assert spool("move", "b", "--first").out == "b goes first: priority 11\n"
    text = (spool_root / "queued" / "b.toml").read_text()
    assert text.startswith('# why\ncommand = "true"  # what\n')
    assert _priority(spool_root, "a") is None


def test_a_job_that_is_alone_is_first_and_last(spool_root: Path) -> None:
    """It keeps its priority."""
    _jobs(spool_root, a=7)
    for first in (True, False):
        assert priorities_to_move(Spool(str(spool_root)), ["a"], first=first) == {"a": 7}
