"""The runs of this machine, however they were started."""

from __future__ import annotations

import os

import pytest

from spool.executors.local import LocalProcesses
from spool.machine import children


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
