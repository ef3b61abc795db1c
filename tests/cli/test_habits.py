"""What users of Slurm type by habit: options of sbatch, a script on stdin, options in the wrong place."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from calling import Command, put_job
from support import ROOT


def queued(root: Path, name: str) -> dict[str, Any]:
    """Return a waiting job's keys."""
    return tomllib.loads((root / "queued" / f"{name}.toml").read_text())


def piped(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Call `spool submit` with *text* on a pipe as its stdin."""
    return subprocess.run(
        [sys.executable, "-m", "spool", "submit", *words],
        input=text,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )


def test_parsable_changes_nothing(spool: Command, spool_root: Path) -> None:
    """`jid=$(spool submit --parsable prep.sbatch)` is the name, which the next job can depend on."""
    said = spool("submit", "--parsable", "--name", "prep", "--", "true")
    assert (said.code, said.out, said.err) == (0, "prep\n", "")
    assert (
        spool("submit", "--name", "next", "--parsable", f"--dependency=afterok:{said.out.strip()}", "--", "true").code
        == 0
    )
    assert queued(spool_root, "next")["depends_on"] == ["prep"]
    assert "--parsable" not in spool("submit", "--help").out


def test_a_script_on_stdin_needs_no_word(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """`spool submit <<EOF` submits the script, with its lines; a text without `#!` is refused, as are a terminal's words."""
    (spool_root / "config.toml").write_text("autostart = false\n")
    done = piped("#!/bin/bash\n#SBATCH -J here -c 2\necho hi\n")
    assert (done.returncode, done.stdout) == (0, "here\n")
    assert queued(spool_root, "here")["cpus"] == 2
    done = piped("#!/usr/bin/python3\nprint(1)\n", "-n", "py", "--cpus", "3")
    assert (done.returncode, done.stdout) == (0, "py\n")
    assert queued(spool_root, "py")["script"] == "#!/usr/bin/python3\nprint(1)\n"
    for text in ("echo hi\n", ""):
        done = piped(text)
        assert (done.returncode, "write it after `--`" in done.stderr) == (2, True)
    with (tmp_path / "s.sh").open("w+") as file:
        file.write("#!/bin/sh\ntrue\n")
        file.seek(0)
        words = [sys.executable, "-m", "spool", "submit", "-n", "file", "/dev/stdin"]
        assert subprocess.run(words, stdin=file, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}).returncode == 0
    assert sorted(os.listdir(spool_root / "queued")) == ["file.toml", "here.toml", "py.toml"]


def test_singleton_is_not_needed(spool: Command, spool_root: Path) -> None:
    """It is said once, and the job has its other dependencies; a job of that name is a dependency like any other."""
    put_job(spool_root, "a")
    said = spool("submit", "-n", "b", "--dependency=singleton", "-d", "a", "--", "true")
    assert (said.code, said.err.count("not needed here")) == (0, 1)
    assert queued(spool_root, "b")["depends_on"] == ["a"]
    assert spool("submit", "-n", "c", "-d", "afterok:a,singleton", "--", "true").code == 0
    assert queued(spool_root, "c")["depends_on"] == ["a"]
    put_job(spool_root, "singleton")
    assert spool("submit", "-n", "d", "-d", "singleton", "--", "true").err == ""
    assert queued(spool_root, "d")["depends_on"] == ["singleton"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--gpus", "0"), "--gpus is an argument of job.sh, as in sbatch; write spool's options before job.sh"),
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


def test_the_name_is_no_number_of_tasks(spool: Command, spool_root: Path) -> None:
    """`-n 4` warns that it is the name."""
    said = spool("submit", "-n", "4", "--", "true")
    assert (said.code, said.out) == (0, "4\n")
    assert "-n is the name, so this job is called 4; for CPUs write --cpus 4" in said.err
