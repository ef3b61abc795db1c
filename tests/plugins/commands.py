"""How the tests of the commands call them: in this process, with a dispatcher or without."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from calling import Command, Said, start
from spool.cli import main
from spool.core.model import Jid
from spool.machine.processes import MachineProber
from spool.store.spool import Spool
from support import PATIENCE_S, wait_for


@pytest.fixture
def spool(
    own_process_stands_for_wrappers: None,
    spool_root: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Command:
    """Call `spool` in this process, on a spool that starts no dispatcher by itself."""
    (spool_root / "config.toml").write_text("autostart = false\n")
    # `dispatch` sends the log to this test's stderr, which is closed when the next one logs something.
    log = logging.getLogger("spool")
    monkeypatch.setattr(log, "handlers", [*log.handlers])
    monkeypatch.setattr(log, "propagate", log.propagate)
    monkeypatch.setattr(log, "level", log.level)
    monkeypatch.chdir(spool_root.parent)
    niceness = os.getpriority  # of the user, whatever that of the tests is: a submission takes it along
    monkeypatch.setattr(os, "getpriority", lambda which, who: niceness(which, who) if who else 0)

    def call(*words: object) -> Said:
        capfd.readouterr()
        code = main.run([str(word) for word in words])
        sys.stdout.flush()
        captured = capfd.readouterr()
        told = [line for line in captured.err.splitlines() if "autostart is off" not in line]
        return Said(code, captured.out, "\n".join(told))

    return call


@pytest.fixture
def dispatcher(spool_root: Path) -> Iterator[subprocess.Popen[str]]:
    """Have a dispatcher serve the spool for the length of the test."""
    process = start("dispatch")
    wait_for(Spool(str(spool_root)).dispatcher_lives)
    yield process
    process.terminate()
    process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def own_process_stands_for_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe the records of these tests, which name this very process as the wrapper of a run."""
    real = MachineProber.is_wrapper

    def is_wrapper(self: MachineProber, jid: Jid, root: str, job: str, run: int) -> bool:
        return jid.pid == os.getpid() or real(self, jid, root, job, run)

    monkeypatch.setattr(MachineProber, "is_wrapper", is_wrapper)
