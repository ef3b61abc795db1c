"""The commands over a real dispatcher, which they may start themselves."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from served import Served, alive
from spool.store.lock import dispatcher_lives
from support import PATIENCE_S, wait_for


@pytest.fixture
def auto(tmp_path: Path) -> Iterator[Served]:
    """Give a spool that nobody serves yet; a dispatcher that a command starts for it is ended."""
    spool = Served(tmp_path / "spool")
    try:
        yield spool
    finally:
        for pid in _dispatchers(spool):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not dispatcher_lives(str(spool.root / ".lock")))
        wait_for(lambda: not _dispatchers(spool))
        spool.end_runs()
        log = spool.root / "dispatcher.log"
        assert not log.exists() or "Traceback" not in log.read_text()


def _dispatchers(served: Served) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                if str(served.root).encode() in words and b"dispatch" in words and alive(int(entry)):
                    found.append(int(entry))
    return found


def _command(served: Served, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "spool", *arguments], env=served.environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _ls(served: Served, *arguments: str) -> dict[str, dict[str, Any]]:
    done = served.spool("ls", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)["jobs"]}


def test_submit_starts_a_dispatcher_and_waits_for_the_code(auto: Served) -> None:
    """`submit --wait` without a dispatcher starts one, and exits with the job's code."""
    done = auto.spool("submit", "--wait", "-n", "coded", "-c", "echo out; exit 7")
    assert done.returncode == 7, done.stderr
    assert done.stdout == "coded\n"
    assert "exit code 7" in done.stderr
    assert auto.log("coded") == "out\n"
    assert dispatcher_lives(str(auto.root / ".lock"))


def test_run_follows_the_output_and_exits_with_the_code(auto: Served) -> None:
    """`run` prints what the job prints, on the right streams, and exits with its code."""
    done = auto.spool("run", "-n", "followed", "-c", "echo one; sleep 0.1; echo two; exit 3")
    assert done.returncode == 3
    assert done.stdout == "one\ntwo\n"
    assert "failed" in done.stderr


def test_the_outputs_of_an_arrays_tasks_come_one_after_the_other(shared: Served) -> None:
    """`run` shows each when the task has ended for good, `log` all of them in their order, and both its newest run."""
    script = "echo run $SPOOL_RUN; sleep 0.2; echo of $SPOOL_ARRAY_INDEX; test $SPOOL_ARRAY_INDEX$SPOOL_RUN != 11"
    done = shared.spool("run", "-n", "sweep", "--array", "0-2", "--retry-max", "1", "--cpus", "0", "-c", script)
    assert (done.returncode, done.stderr) == (0, "spool: job sweep\n")
    blocks = sorted(done.stdout.split("==> ")[1:])
    assert blocks == [f"sweep_{index} <==\nrun {run}\nof {index}\n" for index, run in ((0, 1), (1, 2), (2, 1))]
    for words in (("log", "sweep"), ("log", "-f", "sweep")):
        assert sorted(shared.spool(*words).stdout.split("==> ")[1:]) == blocks
    last = shared.spool("log", "sweep", "-n", "1").stdout
    assert last == "".join(f"==> sweep_{index} <==\nof {index}\n" for index in range(3))
    paths = shared.spool("log", "sweep", "--path").stdout.splitlines()
    assert paths == [f"{shared.root}/jobs/sweep_{index}/{run}/log" for index, run in ((0, 1), (1, 2), (2, 1))]
    shared.drop("sweep", "echo again", cpus=0, array="1-2%1")
    shared.until(lambda: shared.spool("log", "sweep").stdout.count("again") == 2, "the outputs of the second time")
    assert "sweep_0" not in shared.spool("log", "sweep").stdout


def test_ctrl_c_of_run_cancels_the_job(shared: Served) -> None:
    """SIGINT to `run` cancels its job; the exit code is 130."""
    running = _command(shared, "run", "-n", "interrupted", "-c", "echo up; exec sleep 1000")
    assert running.stdout is not None
    assert running.stdout.readline() == "up\n"
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert shared.wait_outcome("interrupted") == "cancelled"


def test_twenty_submissions_at_once(auto: Served) -> None:
    """Twenty parallel submissions of one command get twenty names, one dispatcher, and all run once."""
    submissions = [_command(auto, "submit", "-c", "true") for _ in range(20)]
    answers = [process.communicate(timeout=PATIENCE_S) for process in submissions]
    assert [process.returncode for process in submissions] == [0] * 20, answers
    names = [out.strip() for out, _ in answers]
    assert len(set(names)) == 20
    auto.wait_done(*names)
    assert all(auto.runs(name) == [1] for name in names)
    wait_for(lambda: len(_dispatchers(auto)) == 1)


def test_log_follows_a_retry(shared: Served) -> None:
    """`log -f` goes on from the first try to the last."""
    shared.drop(
        "retried", "echo try $SPOOL_ATTEMPT; sleep 0.2; [ $SPOOL_ATTEMPT = 2 ]", retry={"max": 3, "delay": "100ms"}
    )
    shared.says("retried", "try 1")
    done = shared.spool("log", "-f", "--run", "1", "retried")
    assert done.stdout == "try 1\n"
    done = shared.spool("log", "-f", "retried")
    assert "try 2" in done.stdout
    shared.wait_done("retried")


def test_wait_for_several(shared: Served) -> None:
    """`wait` returns the code of the first that did not finish; `--any` that of the first that ended."""
    shared.drop("w-good", "true")
    shared.drop("w-bad", "exit 9", depends_on={"ended": ["w-good"]})
    shared.drop("w-long", "exec sleep 1000")
    assert shared.spool("wait", "w-good", "w-bad").returncode == 9
    assert shared.spool("wait", "--any", "w-long", "w-good").returncode == 0
    assert shared.spool("wait", "--timeout", "100ms", "w-long").returncode == 124
    assert shared.spool("wait", "no-such-job").returncode == 3
    assert shared.spool("cancel", "w-long").returncode == 0
    assert shared.spool("wait", "w-long").returncode == 130


def test_hold_release_cancel_requeue(shared: Served) -> None:
    """Each verb does what its `mv` or `rm` does, and says so."""
    shared.drop("verbs", "echo run; [ -e verbs-go ] || exec sleep 1000")
    shared.says("verbs", "run")
    done = shared.spool("hold", "verbs")
    assert (done.returncode, shared.wait_outcome("verbs")) == (0, "cancelled")
    shared.wait_place("verbs", "held")
    assert shared.spool("release", "verbs").returncode == 0
    shared.says("verbs", "run", run=2)
    (shared.root.parent / "verbs-go").touch()
    assert shared.spool("requeue", "verbs").returncode == 0
    assert shared.spool("wait", "verbs").returncode == 0
    assert shared.outcome("verbs", 3) == "finished"
    assert shared.spool("cancel", "verbs").returncode != 0
    assert shared.spool("cancel", "never-was").returncode == 3


def test_ls_shows_every_state(shared: Served) -> None:
    """`ls --json` has a row with the right word for what waits, is held, runs, is bad and has ended."""
    shared.drop("s-done", "true")
    shared.drop("s-failed", "exit 2")
    shared.wait_done("s-done", "s-failed")
    shared.drop("s-runs", "exec sleep 1000")
    shared.pid("s-runs")  # no event tells that it is no longer starting, so that the files below must come later
    shared.drop("s-held", "true", place="held")
    shared.drop("s-waits", "true", start_after="1h")
    shared.drop("s-bad", b"]")
    shared.wait_reason("s-waits", "begins")
    shared.until(lambda: shared.state()["jobs"].get("s-bad", {}).get("state") == "invalid", "s-bad")
    shared.until(lambda: shared.state()["jobs"].get("s-runs", {}).get("state") == "running", "s-runs")
    rows = _ls(shared, "s-*")
    assert {name: row["state"] for name, row in rows.items()} == {
        "s-done": "finished",
        "s-failed": "failed",
        "s-runs": "running",
        "s-held": "held",
        "s-waits": "queued",
        "s-bad": "invalid",
    }
    assert rows["s-failed"]["exit_code"] == 2
    assert "begins" in rows["s-waits"]["reason"]
    table = shared.spool("ls", "s-*")
    assert table.returncode == 0
    assert all(name in table.stdout for name in rows)
    for name in ("s-waits", "s-bad"):
        shared.path("queued", name).unlink()
    shared.path("held", "s-held").unlink()
    shared.path("running", "s-runs").unlink()
    shared.wait_done("s-runs")


_VERBS = (("ls",), ("info",), ("--help",), ("submit", "--hold", "--", "true"), ("show", "x"), ("doctor",), ("no-verb",))


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_closed_standard_descriptor_is_as_good_as_dev_null(auto: Served, closed: tuple[int, ...]) -> None:
    """Every verb does its work and exits as it does otherwise, with no traceback."""
    closing = " ".join(f"{number}>&-" for number in closed)
    lines = [f"{shlex.join([sys.executable, '-m', 'spool', *verb])} {closing}; echo $?" for verb in _VERBS]
    run = subprocess.run(
        ["sh", "-c", "\n".join(lines)],
        env=auto.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    codes = [line for line in run.stdout.splitlines() if line.isdigit()]
    assert (codes[:5], codes[6:]) == (["0", "0", "0", "0", "3"], ["2"])  # what the doctor finds is the machine's
    assert "Traceback" not in run.stderr
    assert "lost sys.stderr" not in run.stderr
    assert 2 in closed or "no-verb" in run.stderr
    assert list((auto.root / "held").glob("*.toml"))
