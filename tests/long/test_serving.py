"""The server that makes the wrappers of a dispatcher's runs, where somebody ends it."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from served import Served
from spool.machine import identity

JOBS = 60


@pytest.mark.usefixtures("installed")
def test_jobs_run_once_however_often_the_server_is_killed(served: Served, tmp_path: Path) -> None:
    """A request that it has not taken goes to the next one; for one that it may have carried out the jid decides."""
    served.serves("cpus = 4\n")
    ledger = tmp_path / "ledger"
    for number in range(JOBS):
        served.drop(f"job-{number}", f"echo {number} >> {ledger}")
    killed = 0
    while killed < 12 and len(served.history()) < JOBS:
        for pid in _servers(served):
            with suppress(ProcessLookupError):
                os.kill(pid, random.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP]))
                killed += 1
    assert killed
    served.wait_done(*(f"job-{number}" for number in range(JOBS)))
    assert Counter(ledger.read_text().split()) == Counter(map(str, range(JOBS)))
    assert {line["outcome"] for line in served.history()} == {"finished"}


def _servers(served: Served) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        stat = identity.read_stat(int(name))
        if stat is not None and stat.parent == served.process.pid and stat.state == "S":
            with suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                if words[1:2] == [b"serve"] and not words[3]:
                    found.append(int(name))
    return found
