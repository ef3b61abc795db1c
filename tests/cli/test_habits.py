"""What users of Slurm type by habit: options of sbatch, a script on stdin, options in the wrong place."""

from __future__ import annotations

import os
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from calling import Command, put_job, spawned
from cli.records import end
from spool.core.model import Grant, Request, Result, State
from support import printed_on


def queued(root: Path, name: str) -> dict[str, Any]:
    """Return a waiting job's keys."""
    return tomllib.loads((root / "queued" / f"{name}.toml").read_text())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--gpus", "0"), "--gpus is an argument of job.sh"),
        (("x", "--mem=1G", "--time", "2h"), "--mem, --time are arguments of job.sh"),
        (("--lr", "0.1", "-n", "4"), ""),
    ],
)
def test_options_after_the_script_are_named(
    spool: Command, spool_root: Path, words: tuple[str, ...], told: str
) -> None:
    """They are the script's arguments, and one line says so of those that spool would have understood."""
    Path("job.sh").write_text("#!/bin/sh\ntrue\n")
    said = spool("submit", "-n", "a", "job.sh", *words)
    assert (said.code, said.err.count("\n")) == (0, 0)
    assert told in said.err
    assert bool(said.err) == bool(told)
    assert queued(spool_root, "a")["command"][1:] == list(words)


def test_functions_are_passed_on_by_name_and_with_all(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by sbatch: `--export ALL`, and `BASH_FUNC_name%%`."""
    monkeypatch.setenv("BASH_FUNC_hello%%", "() {  echo hi\n}")
    for number, words in enumerate(("ALL", "BASH_FUNC_hello%%", "BASH_FUNC_*")):
        said = spool("submit", "-n", f"a{number}", "--export", words, "--", "true")
        assert (said.code, said.err) == (0, "")
        assert queued(spool_root, f"a{number}")["env"]["BASH_FUNC_hello%%"] == "() {  echo hi\n}"


def test_lines_are_the_tasks_of_an_array(spool: Command, spool_root: Path) -> None:
    """`--lines` makes one array; blank lines and comments are skipped, and each line is the parameter of its task."""
    Path("cmds.txt").write_text("# sweep\ntrain --lr 0.1 > a.log\n\n  train --lr {index} | tee 'b c'  \r\n   # no\n")
    said = spool("submit", "--lines", "cmds.txt", "--cpus", "2", "--set", "max_running=1")
    assert (said.code, said.err) == (0, "")
    keys = queued(spool_root, said.out.strip())
    assert said.out.startswith("cmds-")
    assert (keys["command"], keys["cpus"], keys["max_running"]) == ("{line}", 2, 1)
    assert keys["rows"] == [{"line": "train --lr 0.1 > a.log"}, {"line": "train --lr {index} | tee 'b c'"}]
    done = spawned("submit", "--lines", "-", "--name", "both", input="true\nfalse\n")
    assert (done.returncode, done.stdout) == (0, "both\n")
    assert queued(spool_root, "both")["rows"] == [{"line": "true"}, {"line": "false"}]


def test_cancel_all_takes_all(spool: Command, spool_root: Path) -> None:
    """Waiting and held jobs end, jobs in done/ stay; nothing else can be selected beside it."""
    put_job(spool_root, "a")
    put_job(spool_root, "b", place="held")
    put_job(spool_root, "c", place="done")
    assert spool("cancel", "--all", "a").code == 2
    assert spool("cancel", "--all", "--tag", "x").code == 2
    said = spool("cancel", "--all", "--dry-run")
    assert (said.code, len(said.out.splitlines())) == (0, 2)
    assert spool("cancel", "--all").code == 0
    assert sorted(os.listdir(spool_root / "done")) == ["a.toml", "b.toml", "c.toml"]
    assert "nothing to do" in spool("cancel", "--all").out


def failed(root: Path, name: str, ago_s: int) -> None:
    """Make a job that failed that long ago."""
    put_job(root, name, place="done")
    at = time.time_ns() - ago_s * 10**9
    end(root, Result(name, 1, 1, State.FAILED, "exit code 3", at, at, at, 3, request=Request(), grant=Grant(1)))


def test_requeue_takes_what_failed_since(spool: Command, spool_root: Path) -> None:
    """`--since 1h` leaves out what failed before; it needs --failed."""
    failed(spool_root, "old", 86400)
    failed(spool_root, "new", 60)
    failed(spool_root, "newer", 10)
    assert spool("requeue", "--since", "1h").code == 2
    assert spool("requeue", "--failed", "--since", "soon").code == 2
    assert spool("requeue", "--failed", "--since", "1h").code == 0
    assert sorted(os.listdir(spool_root / "queued")) == ["new.toml", "newer.toml"]


def test_more_than_what_failed_last_is_asked_for(spool: Command, spool_root: Path) -> None:
    """In a pipe it is refused with the jobs and the options; what is named, or one job, needs no question."""
    failed(spool_root, "a", 60)
    failed(spool_root, "b", 86400)
    said = spool("requeue", "--failed")
    assert (said.code, os.listdir(spool_root / "queued")) == (2, [])
    assert "a, b" in said.err
    assert spool("requeue", "--failed", "--dry-run").code == 0
    assert spool("requeue", "--failed", "b*").code == 0
    assert spool("requeue", "--failed").code == 0
    assert sorted(os.listdir(spool_root / "queued")) == ["a.toml", "b.toml"]


@pytest.mark.parametrize(("words", "answer", "code"), [((), "n", 1), ((), "y", 0), (("--yes",), "", 0)])
def test_a_terminal_is_asked(spool: Command, spool_root: Path, words: tuple[str, ...], answer: str, code: int) -> None:
    """`y` takes them all, anything else none; --yes is no question."""
    failed(spool_root, "a", 60)
    failed(spool_root, "b", 86400)
    ours, theirs = os.openpty()
    os.write(ours, f"{answer}\n".encode())
    process = spawned("requeue", "--failed", *words, stdin=theirs, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    assert process.returncode == code
    assert (b"Run 2 failed jobs again: a, b?" in printed_on(ours)) == (not words)
    assert len(os.listdir(spool_root / "queued")) == (0 if code else 2)
