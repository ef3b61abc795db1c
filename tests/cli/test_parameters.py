"""The values of a task of an array, in what `ls` and `show` print."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from io import StringIO
from pathlib import Path

import pytest

from calling import Command
from cli.records import end, expand
from spool.core.model import Result, State

ARRAY = 'command = "train {lr}"\n[matrix]\nlr = [0.1, 0.2]\nnote = ["a, b"]\n'
TASK = 'command = "train {}"\n[task]\narray = "s"\nindex = {}\n'


@pytest.fixture
def expanded(spool_root: Path) -> None:
    """Make an array of two tasks, of which one waits and the other was not issued yet."""
    metadir = expand(spool_root, "s", 2, ARRAY)
    (metadir / "tasks").mkdir()
    (spool_root / "queued" / "s_0.toml").write_text(TASK.format("0.1", 0))
    (metadir / "tasks" / "s_1.toml").write_text(TASK.format("0.2", 1))


@pytest.mark.usefixtures("expanded")
def test_ls_has_the_values_of_each_task(spool: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """In JSON by their keys, in a column of CSV, and in one of the table on a terminal, but not of a pipe's."""
    found = json.loads(spool("ls", "s", "--json").out)
    assert {job["name"]: job["parameters"] for job in found["jobs"]} == {"s": {}}
    assert [job["parameters"] for job in found["tasks"]["s"]] == [
        {"lr": "0.1", "note": "a, b"},
        {"lr": "0.2", "note": "a, b"},
    ]
    rows = csv.DictReader(StringIO(spool("ls", "--csv").out))
    assert {row["name"]: row["parameters"] for row in rows} == {"s": "", "s_0": "lr=0.1, note=a, b"}
    assert "lr=0.1, note=a, b" in spool("ls", "--columns", "name,parameters").out
    assert "PARAMETERS" not in spool("ls").out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "140")
    table = spool("ls", "s").out
    assert {"LR", "NOTE"} <= {*table.split()}
    assert "PARAMETERS" not in table
    assert "PARAMETERS" in spool("ls").out


@pytest.mark.usefixtures("expanded")
def test_show_has_the_values_of_a_task_and_of_each_task_of_an_array(spool: Command, spool_root: Path) -> None:
    """An array without a matrix has no column for them."""
    assert "parameters lr=0.1, note=a, b" in " ".join(spool("show", "s_0").out.split())
    assert json.loads(spool("show", "s_0", "--json").out)["row"]["parameters"] == {"lr": "0.1", "note": "a, b"}
    shown = spool("show", "s").out
    assert "PARAMETERS" in shown
    assert "lr=0.2, note=a, b" in shown
    assert [row["parameters"]["lr"] for row in json.loads(spool("show", "s", "--json").out)["tasks"]] == ["0.1", "0.2"]
    expand(spool_root, "a", 2, 'command = "true"\narray = "0-1"\n')
    assert ("a_1" in spool("show", "a").out, "PARAMETERS" in spool("show", "a").out) == (True, False)


@pytest.mark.parametrize("place", ["running", "held"])
@pytest.mark.parametrize("is_expanded", [True, False])
def test_every_command_knows_a_task_that_is_not_issued_yet(
    spool: Command, spool_root: Path, expanded: None, is_expanded: bool, place: str
) -> None:
    """Whether its array is expanded, waits for that or is held: it has a row, and what cannot be done says why."""
    if not is_expanded:
        shutil.rmtree(spool_root / "jobs" / "s")
        place = {"running": "queued"}.get(place, place)
    (spool_root / "running" / "s.toml").rename(spool_root / place / "s.toml")
    (listed,) = json.loads(spool("ls", "s_1", "--json").out)["jobs"]
    shown = json.loads(spool("show", "s_1", "--json").out)["row"]
    assert listed == shown | {"metrics": {}}
    assert (listed["state"], listed["reason"], listed["parameters"]["lr"]) == ("queued", "not issued yet", "0.2")
    assert spool("why", "s_1").code == spool("show", "s_1").code == 0
    assert ("`spool release s`" in spool("why", "s_1").out) == (place == "held")
    for words in ("log", "seff", "hold", "edit -p 3", "cancel --state queued"):
        told = spool(*words.split(), "s_1")
        assert (told.code, "s has not issued that task yet; `spool why s_1`" in told.err) == (3, True), words
    assert "the spool has no job of that name" in spool("show", "s_2").err


def _ran(root: Path, task: str, outcome: State, code: int, *, metrics: bytes = b"", said: bytes = b"") -> None:
    (root / "queued" / f"{task}.toml").unlink(missing_ok=True)
    (root / "done" / f"{task}.toml").write_text("command = 'true'\n")
    metadir = end(root, Result(task, 1, 1, outcome, f"exit code {code}", 5, 6, 7, exit_code=code))
    (metadir / "log").write_bytes(said)
    if metrics:
        (metadir / "metrics").write_bytes(metrics)


@pytest.mark.usefixtures("expanded")
def test_one_command_says_which_value_of_a_parameter_failed(spool: Command, spool_root: Path) -> None:
    """The tasks are in the order of the values, with their last line of output, or their metrics."""
    _ran(spool_root, "s_1", State.FAILED, 3, said=b"epoch 1\nno memory\n\n")
    lines = spool("ls", "s", "--by", "lr").out.splitlines()
    assert lines[0].split() == ["LR", "NAME", "NOTE", "STATE", "EXIT", "TIME", "LAST", "LINE"]
    assert [line.split()[:2] for line in lines[1:3]] == [["0.1", "s_0"], ["0.2", "s_1"]]
    assert lines[2].endswith("no memory")
    assert lines[3] == "lr=0.2: 1 of 1 failed: s_1"
    (spool_root / "jobs" / "s_1" / "1" / "metrics").write_text("loss = 2\nloss = 0.5\n")
    lines = spool("ls", "s", "--by", "lr").out.splitlines()
    assert lines[0].split()[-1] == "LOSS"
    assert lines[2].split()[-1] == "0.5"
    said = spool("ls", "s", "--columns", "name,param:lr,metric:loss")
    assert ("0.5" in said.out, "no listed job" in said.err) == (True, False)
    said = spool("ls", "s", "--columns", "name,param:LR,metric:los")
    assert ["'LR'" in said.err, "'los'" in said.err, said.err.endswith(" loss")] == [True] * 3
    found = json.loads(spool("ls", "s", "--json").out)["tasks"]["s"]
    assert [job["metrics"] for job in found] == [{}, {"loss": "0.5"}]
    assert " lr, note" in spool("ls", "s", "--by", "nothing").err
    assert spool("ls", "s", "--columns", "name,param:").code == 2


@pytest.mark.usefixtures("expanded")
def test_metrics_of_a_run_are_bounded_and_harmless(spool: Command, spool_root: Path) -> None:
    """Whatever a job writes, at most twenty short values are shown, and a link or a pipe in its place is not read."""
    hostile = b"".join(b"k%d = %s\n" % (at, b"x" * 3000) for at in range(2000)) + b"\x1b[31m = 1\ne = \x1b]0;x\x07\n=\n"
    _ran(spool_root, "s_1", State.FINISHED, 0, metrics=hostile)
    found = json.loads(spool("show", "s_1", "--json").out)["row"]["metrics"]
    assert 0 < len(found) <= 20
    assert all(len(value) <= 40 for value in found.values())
    assert "\x1b" not in spool("show", "s_1").out
    path = spool_root / "jobs" / "s_1" / "1" / "metrics"
    for replacement in (lambda: os.mkfifo(path), lambda: path.symlink_to(spool_root / "config.toml")):
        path.unlink()
        replacement()
        assert json.loads(spool("show", "s_1", "--json").out)["row"]["metrics"] == {}
