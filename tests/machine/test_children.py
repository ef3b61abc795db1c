"""The children of this process: each end is told once, with what it has used."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from itertools import count

import pytest

from spool.machine.processes import Children


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Start eight children, which are ended afterwards."""
    pids = [os.posix_spawnp("sleep", ("sleep", "1000"), dict(os.environ)) for _ in range(8)]
    left = list(pids)
    yield left
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_all_that_end_together_are_told_each_once(started: list[int]) -> None:
    """In one call, whether a run waits for them or not; a stopped one is named, and not one that has ended."""
    children = Children()
    assert list(children.reap()) == []
    over, started[:] = started[:6], started[6:]
    for pid in over:
        os.kill(pid, signal.SIGKILL)
    os.kill(started[0], signal.SIGSTOP)
    for pid in over:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.waitid(os.P_PID, started[0], os.WSTOPPED | os.WNOWAIT)
    found = {pid: (status, usage.ru_maxrss > 0) for pid, status, usage in children.reap()}
    assert found == dict.fromkeys(over, (signal.SIGKILL, True))
    assert (children.stopped, children.due_ns) == ({started[0]}, None)
    assert list(children.reap()) == []


def test_reaping_gives_way_where_children_end_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that end faster than they are reaped do not hold up the caller: the rest is due at once."""
    ended = count(1000)
    now = count(step=10_000_000)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    monkeypatch.setattr(os, "wait4", lambda which, options: (next(ended), 0, usage))
    reaper = Children(clock=lambda: next(now))
    first = [pid for pid, _, _ in reaper.reap()]
    assert first
    assert reaper.due_ns < next(now)
    assert next(iter(reaper.reap()))[0] == first[-1] + 1
