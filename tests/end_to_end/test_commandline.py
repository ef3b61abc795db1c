"""The commands over a real dispatcher, which they may start themselves."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
