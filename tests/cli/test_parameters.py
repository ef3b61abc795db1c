"""The values of a task of an array, in what `ls` and `show` print."""

from __future__ import annotations

import csv
import json
import sys
from io import StringIO
from pathlib import Path

import pytest

from calling import Command
from spool.formats.run_records import ArrayRecord, render_array

ARRAY = 'command = "train {lr}"\n[matrix]\nlr = [0.1, 0.2]\nnote = ["a, b"]\n'
TASK = 'command = "train {}"\n[task]\narray = "s"\nindex = {}\n'


@pytest.fixture
def expanded(spool_root: Path) -> None:
    """Make an array of two tasks, of which one waits and the other was not issued yet."""
    (spool_root / "running" / "s.toml").write_text(ARRAY)
    metadir = spool_root / "jobs" / "s" / "1"
    (metadir / "tasks").mkdir(parents=True)
    (metadir / "job.toml").write_text(ARRAY)
    (metadir / "array.toml").write_bytes(render_array(ArrayRecord("s", 1, 2, submitted_at_ns=1, expanded_at_ns=1)))
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
    assert "PARAMETERS" in table
    assert "lr=0.2, note=a, b" in table


@pytest.mark.usefixtures("expanded")
def test_show_has_the_values_of_a_task_and_of_each_task_of_an_array(spool: Command) -> None:
    """An array without a matrix has no column for them."""
    assert "parameters lr=0.1, note=a, b" in " ".join(spool("show", "s_0").out.split())
    assert json.loads(spool("show", "s_0", "--json").out)["row"]["parameters"] == {"lr": "0.1", "note": "a, b"}
    shown = spool("show", "s").out
    assert "PARAMETERS" in shown
    assert "lr=0.2, note=a, b" in shown
    assert [row["parameters"]["lr"] for row in json.loads(spool("show", "s", "--json").out)["tasks"]] == ["0.1", "0.2"]


def test_show_of_an_array_of_indices_has_no_column_for_values(spool: Command, spool_root: Path) -> None:
    """Its tasks have their index in their names."""
    metadir = spool_root / "jobs" / "a" / "1"
    metadir.mkdir(parents=True)
    text = 'command = "true"\narray = "0-1"\n'
    (spool_root / "running" / "a.toml").write_text(text)
    (metadir / "job.toml").write_text(text)
    (metadir / "array.toml").write_bytes(render_array(ArrayRecord("a", 1, 2, submitted_at_ns=1, expanded_at_ns=1)))
    shown = spool("show", "a").out
    assert "a_1" in shown
    assert "PARAMETERS" not in shown
