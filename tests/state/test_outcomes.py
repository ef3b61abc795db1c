"""What is remembered of names, and what is read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from spool.core.model import Result, State
from spool.formats.history import render_result
from spool.state import outcomes
from spool.state.outcomes import OutcomeIndex
from spool.store.spool import Spool
from support import make_spool


def ended(root: Path, name: str, outcome: State) -> None:
    """Write the record of a job that has ended."""
    metadir = root / "jobs" / name / "1"
    metadir.mkdir(parents=True)
    (metadir / "result.toml").write_bytes(render_result(Result(name, 1, 1, outcome, "")))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let little be remembered that does not matter."""
    monkeypatch.setattr(outcomes, "FEW", 10)


@pytest.mark.usefixtures("few")
def test_no_more_names_are_remembered_than_jobs_depend_on(tmp_path: Path) -> None:
    """However many jobs end, only the names that matter and a few more are remembered; the rest is read again."""
    make_spool(tmp_path / "spool")
    spool = Spool(str(tmp_path / "spool"))
    matters = {f"job{number}" for number in range(0, 1000, 100)}
    index = OutcomeIndex(spool, matters=matters.__contains__)
    for number in range(1000):
        index.record(f"job{number}", State.FAILED)
        index.get(f"missing{number}")
        assert len(index) + len(index._missing) <= 10 + 2 * len(matters) + 1
    assert all(index[name] is State.FAILED for name in matters)  # of these no record is there
    ended(tmp_path / "spool", "job1", State.FINISHED)
    assert index["job1"] is State.FINISHED


@pytest.mark.usefixtures("few")
def test_names_that_matter_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many names as jobs depend on stay known, so that no pass reads their records again."""
    make_spool(tmp_path / "spool")
    spool = Spool(str(tmp_path / "spool"))
    names = [f"job{number}" for number in range(200)]
    for name in names:
        ended(tmp_path / "spool", name, State.FINISHED)
    index = OutcomeIndex(spool, matters=lambda _: True)
    assert all(index[name] is State.FINISHED for name in names)
    monkeypatch.setattr(Spool, "result", None)
    assert all(index[name] is State.FINISHED for name in names)
