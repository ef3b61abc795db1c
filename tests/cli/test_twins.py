"""Two files of one name: each is visible, and whatever is done says to which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from calling import Command, asked, put_job
from cli.records import begin

SECOND = 'command = "second"\ncpus = 1\n'


@pytest.fixture
def twins(spool_root: Path) -> Path:
    """Have `dup` run, as far as the files tell, and a second file of its name wait."""
    begin(spool_root, "dup", 'command = "first"\n')
    return put_job(spool_root, "dup", SECOND)


def test_both_files_of_a_name_are_seen(spool: Command, twins: Path) -> None:
    """Ls has a row for each, info counts both, show has both files, and why tells which of them waits."""
    rows = asked(spool, "ls", "dup")["jobs"]
    assert [(row["name"], row["place"]) for row in rows] == [("dup", "running"), ("dup", "queued")]
    assert "running" in rows[1]["reason"]
    assert spool("ls").out.count("\ndup ") == 2
    assert spool("ls", "-q").out == "dup\n"  # a name for each job that a command is for
    assert sum(asked(spool, "info")["states"].values()) == 2
    shown = asked(spool, "show", "dup")
    assert (shown["row"]["place"], shown["file"]) == ("running", 'command = "first"\n')
    [other] = shown["others"]
    assert (other["row"]["state"], other["file"], other["path"]) == ("queued", SECOND, str(twins))
    text = spool("show", "dup").out
    assert "first" in text
    assert str(twins) in text
    assert "second" in text
    assert "queued/dup.toml" in spool("why", "dup").out


def test_a_held_file_beside_a_waiting_one_is_seen(spool: Command, spool_root: Path) -> None:
    """Of two files dropped by hand into queued/ and held/ both are listed, and why names the one that it tells of."""
    put_job(spool_root, "dup", SECOND)
    put_job(spool_root, "dup", 'command = "first"\n', "held")
    assert [row["state"] for row in asked(spool, "ls")["jobs"]] == ["queued", "held"]
    assert asked(spool, "show", "dup")["others"][0]["row"]["state"] == "held"
    assert "held/" in spool("why", "dup").out


def test_cancel_names_each_that_it_cancels(spool: Command, spool_root: Path, twins: Path) -> None:
    """A name with a run and a file that waits: the run is stopped, the file cancelled, and both are said."""
    said = spool("cancel", "dup", "--dry-run")
    assert re.findall(r"\w+ \(\w+/\)", said.out) == ["dup (running/)", "dup (queued/)"]
    said = spool("cancel", "dup")
    assert re.findall(r"\w+ \(\w+/\)", said.out) == ["dup (running/)", "dup (queued/)"]
    assert not twins.exists()
    assert (spool_root / "jobs" / "dup" / "1" / "stop").exists()


def test_a_request_names_the_file_that_it_is_for(spool: Command, spool_root: Path, twins: Path) -> None:
    """Hold, edit and release mean the one that waits, say so, and leave the run alone; requeue refuses the name."""
    beside = "; the one in running/ is unchanged\n"
    assert spool("edit", "dup", "--priority", "3").out == f"dup (queued/) changed{beside}"
    assert spool("hold", "dup").out == f"dup (queued/) held{beside}"
    assert spool("release", "dup").out == f"dup (held/) released{beside}"
    assert spool("requeue", "dup").code == 1
    assert twins.exists()


@pytest.mark.parametrize("words", [("submit", "-n", "dup", "--", "true"), ("submit", "-n", "dup", "--cpus=1", "true")])
def test_a_name_that_runs_is_not_submitted_by_mistake(
    spool: Command, spool_root: Path, twins: Path, words: tuple[str, ...]
) -> None:
    """Both ways to submit refuse it and name a name that is free; --replace has the job wait for the run's end."""
    twins.unlink()
    put_job(spool_root, "dup-2", place="done")
    said = spool(*words)
    assert (said.code, said.out, "--name dup-3 " in said.err) == (1, "", True)
    assert not twins.exists()
    assert spool("submit", "--replace", *words[1:]).code == 0
    assert twins.exists()
