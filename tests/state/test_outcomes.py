"""What is remembered of names, and what is read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from spool.core.model import Dependencies, Result, Spec, State, Waiting
from spool.formats.run_records import render_history, render_result
from spool.state import load
from spool.state.load import OutcomeIndex
from spool.state.table import SchedulerState
from spool.store.spool import Spool
from support import make_spool


def ended(spool: Spool, name: str, outcome: State) -> None:
    """Write the record of a job that has ended."""
    metadir = Path(spool.root, "jobs", name, "1")
    metadir.mkdir(parents=True)
    (metadir / "result.toml").write_bytes(render_result(Result(name, 1, 1, outcome, "")))


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """Give an empty spool."""
    return Spool(str(make_spool(tmp_path / "spool")))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let little be remembered that does not matter."""
    monkeypatch.setattr(load, "FEW", 10)


@pytest.mark.usefixtures("few")
def test_no_more_names_are_remembered_than_jobs_depend_on(spool: Spool) -> None:
    """However many jobs end, only the names that matter and a few more are remembered; the rest is read again."""
    matters = {f"job{number}" for number in range(0, 1000, 100)}
    index = OutcomeIndex(spool, matters=matters.__contains__)
    for number in range(1000):
        index.record(f"job{number}", State.FAILED)
        index.get(f"missing{number}")
        assert len(index) + len(index._missing) <= 10 + 2 * len(matters) + 1
    assert all(index[name] is State.FAILED for name in matters)  # of these no record is there
    ended(spool, "job1", State.FINISHED)
    assert index["job1"] is State.FINISHED


@pytest.mark.usefixtures("few")
def test_names_that_matter_are_read_once(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many names as jobs depend on stay known, so that no pass reads their records again."""
    names = [f"job{number}" for number in range(200)]
    for name in names:
        ended(spool, name, State.FINISHED)
    index = OutcomeIndex(spool, matters=lambda _: True)
    assert all(index[name] is State.FINISHED for name in names)
    monkeypatch.setattr(Spool, "result", None)
    assert all(index[name] is State.FINISHED for name in names)


def test_the_newest_line_of_the_history_answers_for_a_name_without_records(spool: Spool) -> None:
    """Unless that run was not the last of its job, or jobs of an array's tasks' names were never removed as one."""
    lines = [
        Result("x", 1, 1, State.FAILED, ""),
        Result("x", 2, 2, State.FINISHED, ""),
        Result("goes-on", 1, 1, State.FAILED, "", again="retry"),
        Result("many_0", 1, 1, State.FINISHED, ""),
        Result("many_1", 1, 1, State.CANCELLED, ""),
        Result("alone_1", 1, 1, State.FINISHED, ""),
    ]
    history = Path(spool.root, "history.jsonl")
    history.write_bytes(b"".join(map(render_history, lines)) + b"half a li")
    Path(spool.root, "jobs", ".last-runs.json").write_text('{"many":1}\n')
    index = OutcomeIndex(spool)
    asked = ("x", "goes-on", "many", "many_0", "alone", "alone_1", "never")
    found = {name: index.get(name) for name in asked}
    assert {name: state for name, state in found.items() if state is not None} == {
        "x": State.FINISHED,
        "many": State.FAILED,
        "many_0": State.FINISHED,
        "alone_1": State.FINISHED,
    }


def test_the_history_is_read_once_for_all_that_jobs_depend_on(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many names were never seen; and a job that ends later is known by its end."""
    table = SchedulerState()
    for number in range(20):
        depends = Dependencies(all=(f"never{number}",))
        table.queue.put(Waiting(f"job{number}", Spec("true", depends_on=depends), "ann", number))
    reads = []
    history = Spool.history
    monkeypatch.setattr(Spool, "history", lambda self: reads.append(self) or history(self))
    index = OutcomeIndex(spool, table, matters=lambda _: True)
    assert [index.get(f"never{number}") for number in range(20)] == [None] * 20
    index.record("never3", State.FINISHED)
    assert (index["never3"], len(reads)) == (State.FINISHED, 1)
