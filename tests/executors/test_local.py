"""The runs of this machine, however they were started."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from spool.executors.local import LocalProcesses
from spool.machine import children, identity


def test_runs_that_end_together_are_looked_after_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left behind is read once for all that were reaped together, and anew after the next."""
    asked: list[int] = []
    monkeypatch.setattr(children, "become_subreaper", lambda on=True: on)
    monkeypatch.setattr(children, "children_of_self", lambda: asked.append(1) or frozenset())
    engine = LocalProcesses()
    engine.inherit()

    def ended(*names: str) -> set[str]:
        for name in names:
            pid = os.posix_spawn("/bin/true", ["true"], {})
            engine.child(name, 1, pid)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        reaped = list(engine.reap())
        assert not any(run.left_behind() for run in reaped)
        return {run.key[0] for run in reaped}

    assert ended("a", "b", "c") == {"a", "b", "c"}
    assert len(asked) == 1
    assert ended("d") == {"d"}
    assert len(asked) == 2


def test_a_run_whose_wrapper_is_unknown_is_not_suspended(tmp_path: Path) -> None:
    """Its wrapper could be stopped with the rest, and tmux continues a session whose first process is stopped."""
    marks = {"SPOOL_DIR": str(tmp_path), "SPOOL_JOB": "a", "SPOOL_RUN": "1"}
    program = [sys.executable, "-c", "print(flush=True); input()"]
    read, write = os.pipe()
    held, gate = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, held, 0), (os.POSIX_SPAWN_DUP2, write, 1)]
    pid = os.posix_spawn(sys.executable, program, marks, file_actions=actions)
    try:
        assert os.read(read, 1)
        engine = LocalProcesses(str(tmp_path))
        run = engine.no_child("a", 1, None)
        assert engine.suspend({run: True}) == []
        stat = identity.read_stat(pid)
        assert stat is not None
        assert stat.state != "T"
        assert engine.suspend({run: False}) == [run]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for end in (read, write, held, gate):
            os.close(end)
