"""`spool edit --first`, `--last` and `--before`: which priority a job gets."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from calling import Command, put_job


def _jobs(root: Path, **priorities: int | None) -> None:
    for name, priority in priorities.items():
        put_job(root, name, 'command = "true"\n' + (f"priority = {priority}\n" if priority is not None else ""))


def _priority(root: Path, name: str) -> object:
    return tomllib.loads((root / "queued" / f"{name}.toml").read_text()).get("priority")


@pytest.mark.parametrize(
    ("name", "where", "priority"),
    [
        ("low", ("--first",), 41),
        ("none", ("--first",), 41),
        ("high", ("--first",), 40),
        ("high", ("--last",), 4),
        ("low", ("--last",), 5),
        ("low", ("--before", "none"), 11),
        ("high", ("--before", "none"), 40),
        ("high", ("--before", "high"), None),
    ],
)
def test_a_job_goes_before_or_after_others(
    spool: Command, spool_root: Path, name: str, where: tuple[str, ...], priority: int | None
) -> None:
    """By one step of priority, of which one that stands there already has enough; never before itself."""
    _jobs(spool_root, high=40, none=None, low=5)
    for _ in range(2):
        said = spool("edit", name, *where)
        assert said.code == (0 if priority is not None else 1), said.err
        assert _priority(spool_root, name) == priority or priority is None


def test_a_job_is_not_placed_before_itself(spool: Command, spool_root: Path) -> None:
    """The message says so, instead of that the job does not wait."""
    _jobs(spool_root, a=None)
    said = spool("edit", "a", "--before", "a")
    assert (said.code, _priority(spool_root, "a")) == (1, None)
    assert "a job cannot be placed before itself" in said.err


def test_what_is_held_or_runs_is_no_rival_and_comments_stay(spool: Command, spool_root: Path) -> None:
    """Only waiting jobs count, and of the file nothing but the priority changes."""
    _jobs(spool_root, a=None)
    put_job(spool_root, "parked", 'command = "true"\npriority = 200\n', "held")
    put_job(spool_root, "b", '# why\ncommand = "true"  # what\n')
    assert spool("edit", "b", "--first").code == 0
    text = (spool_root / "queued" / "b.toml").read_text()
    assert text.startswith('# why\ncommand = "true"  # what\n')
    assert (_priority(spool_root, "b"), _priority(spool_root, "a")) == (11, None)


@pytest.mark.parametrize("where", ["--first", "--last"])
def test_a_job_that_is_alone_is_first_and_last(spool: Command, spool_root: Path, where: str) -> None:
    """It keeps its priority."""
    _jobs(spool_root, a=7)
    assert (spool("edit", "a", where).code, _priority(spool_root, "a")) == (0, 7)
