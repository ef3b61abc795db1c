"""A record of an end that cannot be understood: every command says so, and none guesses."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from calling import Command, asked, put_job
from cli.records import metadir_of
from spool.core.model import Grant, Request, Result, State
from spool.formats.run_records import render_history, render_result

KINDS = {
    "unknown word": lambda text: text.replace(b'"failed"', b'"evaporated"'),
    "cut off": lambda text: text[: text.index(b"outcome") + 4],
    "empty": lambda text: b"",
    "no text": lambda text: b"\xff\x00\xff",
}


@pytest.fixture(params=KINDS)
def ended(request: pytest.FixtureRequest, spool_root: Path) -> Result:
    """Make a job that has failed, of which the record of the end is damaged."""
    put_job(spool_root, "x", place="done")
    now, metadir = time.time_ns(), metadir_of(spool_root, "x")
    end = Result("x", 1, 1, State.FAILED, "exit code 3", now, now, now, 3, request=Request(), grant=Grant(1))
    (metadir / "result.toml").write_bytes(KINDS[request.param](render_result(end)))
    (metadir / "rc").write_text("3\n")
    return end


def test_an_end_that_cannot_be_understood_is_told_as_that(spool: Command, ended: Result) -> None:
    """`ls`, `show`, `wait`, `seff` and `requeue --failed` name the record; none calls it cancelled or running."""
    (row,) = asked(spool, "ls", "--all")["jobs"]
    assert (row["name"], row["state"]) == ("x", "invalid")
    assert "result" in row["reason"]
    shown = asked(spool, "show", "x")
    assert (shown["row"]["state"], shown["runs"][-1]["state"]) == ("invalid", "invalid")
    assert spool("wait", "x").code == 4
    assert spool("seff", "x").code != 0
    assert "`spool requeue x`" in spool("requeue", "--failed").err


def test_the_history_tells_of_an_end_whose_record_is_damaged(spool: Command, spool_root: Path, ended: Result) -> None:
    """Where its line is there, everything follows from that."""
    (spool_root / "history.jsonl").write_bytes(render_history(ended))
    (row,) = asked(spool, "ls")["jobs"]
    assert (row["state"], row["exit_code"]) == ("failed", 3)
    assert asked(spool, "show", "x")["runs"][-1]["state"] == "failed"
    assert spool("wait", "x").code == 3
    assert asked(spool, "seff", "x")["state"] == "failed"
    assert spool("requeue", "--failed", "--dry-run").code == 0


def test_a_line_of_the_history_with_an_unknown_word_is_told_in_the_list(
    spool: Command, spool_root: Path, ended: Result
) -> None:
    """The short list, too, has the job; `stats` counts the line as one that it cannot read."""
    line = render_history(ended).replace(b'"failed"', b'"evaporated"')
    (spool_root / "history.jsonl").write_bytes(line)
    (row,) = asked(spool, "ls")["jobs"]
    assert (row["name"], row["state"]) == ("x", "invalid")
    assert "evaporated" in row["reason"]
    assert "1" in (told := spool("stats").err), told
