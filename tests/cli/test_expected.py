"""How long jobs are expected to run, and where they stand for it: what `why`, `plan` and `show` tell."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from calling import Command, asked, put_job
from spool.core.model import Grant, Request, Result, State
from spool.formats.run_records import render_history
from spool.query import snapshot
from spool.store.ownership import this_user

S = 1_000_000_000


def ran(root: Path, name: str, seconds: int, *, user: str = "", outcome: State = State.FINISHED, cpus: int = 1) -> None:
    """Put the line of a run into the history that ended an hour ago."""
    ended = time.time_ns() - 3600 * S
    result = Result(
        name, 1, 1, outcome, "", ended - (seconds + 5) * S, ended - seconds * S, ended, user=user or this_user(),
        request=Request(cpus=cpus), grant=Grant(cpus=cpus),
    )  # fmt: skip
    with (root / "history.jsonl").open("ab") as history:
        history.write(render_history(result))


def put(root: Path, name: str, text: str = 'command = "true"\ncpus = 1\n') -> None:
    """Queue a job."""
    put_job(root, name, text)


@pytest.fixture
def full(spool_root: Path) -> Path:
    """Make a spool with one CPU and a job that nothing keeps from starting first, so that others wait."""
    (spool_root / "config.toml").write_text("cpus = 1\n")
    put(spool_root, "first", 'command = "true"\npriority = 200\n')
    return spool_root


@pytest.mark.parametrize(
    ("history", "words"),
    [
        ([("sweep_1", 100, {}), ("sweep_7", 200, {})], "about 3m20s, the median of the last 2 runs of sweep"),
        ([("sweep_1", 100, {}), ("other", 40, {})], "about 1m40s, a guess: the median of "),
        ([("sweep_1", 100, {"cpus": 2}), ("sweep_2", 100, {"outcome": State.FAILED})], "about 1m40s, a guess: "),
        (
            [("sweep_1", 300, {"user": "nobody-else"})],
            "about 5m00s, a guess: the median of everybody's last jobs; none of ",
        ),
        ([], "1h00m, the default: there are no earlier jobs to learn from"),
    ],
)
def test_what_is_learnt_is_told_with_its_source(
    spool: Command, full: Path, history: list[tuple[str, int, dict[str, object]]], words: str
) -> None:
    """Of its like, else of its user, else of everybody; what failed teaches nothing."""
    for name, seconds, more in history:
        ran(full, name, seconds, **more)  # type: ignore[arg-type]
    put(full, "sweep_3")
    assert f"expected run time: {words}" in spool("why", "sweep_3").out
    assert words in spool("show", "sweep_3").out
    planned = {job["name"]: job for job in asked(spool, "plan")["waits"]}
    assert planned["sweep_3"]["expected"].startswith(words)
    assert planned["sweep_3"]["run_is_guess"] is True


@pytest.mark.parametrize("where", ["queued", "held"])
def test_a_job_alone_is_expected_to_run_as_long_as_among_others(spool: Command, spool_root: Path, where: str) -> None:
    """`why` and `show` read the history whether one job waits, is held, or many do."""
    ran(spool_root, "other", 100)
    ran(spool_root, "other", 100)
    put_job(spool_root, "alone", 'command = "true"\ncpus = 1\n', where)
    expected = asked(spool, "show", "alone")["expected"]
    assert "1m40s" in expected
    assert asked(spool, "why", "alone")["expected"] == expected
    if where == "queued":
        planned = asked(spool, "plan")
        assert [job["expected"] for job in (*planned["starts"], *planned["waits"])] == [expected]


def test_a_stated_limit_is_what_is_expected(spool: Command, full: Path) -> None:
    """Whatever runs of its name have taken."""
    ran(full, "train", 100)
    ran(full, "train", 100)
    put(full, "train", 'command = "true"\ntime_limit = "20m"\n')
    assert asked(spool, "why", "train")["expected"].startswith("20m00s")


def test_why_tells_the_numbers_of_the_order(spool: Command, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it waits, what it is expected to run, what comes of both, and who is first."""
    ran(full, "short", 1200)
    ran(full, "short", 1200)
    put(full, "short")
    later_ns = time.time_ns() + 3 * 3600 * S
    monkeypatch.setattr(snapshot, "time", SimpleNamespace(time_ns=lambda: later_ns))
    answer = asked(spool, "why", "short")
    assert answer["score"] == pytest.approx(10, abs=0.1)
    assert (answer["behind"], answer["ahead"]) == ("first", 1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's file")
def test_who_has_used_much_reads_so_in_why(spool: Command, full: Path) -> None:
    """The factor of fair share is told where there is somebody to be fair to."""
    ran(full, "mine", 7200)
    put(full, "mine_2")
    (full / "config.toml").write_text('cpus = 1\naccept_from = ["4711"]\n')
    os.chown(full / "queued" / "first.toml", 4711, -1)
    assert "fair share \N{MULTIPLICATION SIGN}0.71" in spool("why", "mine_2").out


@pytest.mark.parametrize("old", ['starvation_after = "30m"', "time_bonus = false"])
def test_an_old_configuration_is_told_what_to_write(spool: Command, full: Path, old: str) -> None:
    """The rest of it is in force all the same."""
    (full / "config.toml").write_text(f"cpus = 3\n{old}\n")
    found = asked(spool, "info")
    assert found["cpus"] == 3
    key = old.partition(" ")[0]
    (problem,) = found["problems"]
    checked = spool("check", str(full / "config.toml"))
    assert checked.code == 0
    for said in (problem, checked.err, spool("doctor").out):
        assert f"{key} has no effect" in said
    assert "order = " in problem
