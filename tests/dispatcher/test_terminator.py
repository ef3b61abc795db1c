"""Who is told to end, and when."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from spool.dispatcher import terminator
from spool.dispatcher.timers import Timer
from spool.executors import local
from spool.executors.local import LocalProcesses
from spool.machine import identity
from spool.machine.processes import Process


class _Live:
    """As much of a run as a stop looks at."""

    key = ("x", 1)
    spec = SimpleNamespace(kill_grace_ns=3_600_000_000_000)

    def __init__(self, look: Callable[[], set[Process]], pid: int | None = None) -> None:
        """Make a run of this machine; *look* tells which processes it has."""
        engine = LocalProcesses()
        self.handle = engine.no_child(*self.key, None) if pid is None else engine.child(*self.key, pid)
        engine.processes_of = lambda runs: {run: look() for run in runs}  # type: ignore[method-assign]


@pytest.mark.parametrize("before", [True, False])
def test_what_a_shell_began_before_it_was_told_is_told_too(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    """A shell waits for its command before it runs its trap; but what began after TERM tidies up, and is let."""
    with subprocess.Popen(["sleep", "60"]) as shell, subprocess.Popen(["sleep", "60"]) as command:
        known, unseen = (Process(each.pid, identity.start_ticks(each.pid) or 0) for each in (shell, command))
        looks = iter([{known}, {known, unseen}])
        told: list[tuple[set[Process], int]] = []
        live: Any = _Live(lambda: next(looks))
        monkeypatch.setattr(local, "send", lambda processes, number: told.append((set(processes), number)))
        monkeypatch.setattr(local, "_parent", lambda process: shell.pid)
        at_ticks = unseen.start_ticks + before
        monkeypatch.setattr(identity, "ticks_now", lambda: at_ticks)
        timer = Timer()
        stopper = terminator.Terminator(timer)
        stopper.add(live)
        for _ in range(2):
            time.sleep(max(0, (timer.at_ns or 0) - time.monotonic_ns()) / 1e9)
            stopper.tick()
        assert told == [({known}, signal.SIGTERM)] + [({unseen}, signal.SIGTERM)] * before
        for each in (shell, command):
            each.kill()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give the time that a stop sees, to be set."""
    now = [1]
    for module in (terminator, local):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=lambda: now[0], time_ns=lambda: now[0]))
    return now


def test_a_wrapper_that_always_has_another_child_is_killed_too(
    monkeypatch: pytest.MonkeyPatch, clock: list[int]
) -> None:
    """It is spared after the grace for as long as an epilog may take, and not for ever."""
    wrapper = Process(7, 1)
    children = iter(range(100, 10_000))
    live: Any = _Live(lambda: {wrapper, Process(next(children), 2)}, wrapper.pid)
    told: list[tuple[set[int], int]] = []
    monkeypatch.setattr(local, "send", lambda processes, number: told.append(({p.pid for p in processes}, number)))
    monkeypatch.setattr(local, "_parent", lambda process: 7)
    timer = Timer()
    stopper = terminator.Terminator(timer)
    stopper.add(live)
    stopper.tick()
    for after in (3_600_000_000_001, 3_601_000_000_000, 3_602_000_000_001):
        clock[0] = after
        stopper.tick()
    assert [number for _, number in told] == [signal.SIGTERM, *[signal.SIGKILL] * 3]
    assert [7 in pids for pids, _ in told] == [False, False, False, True]


def test_a_machine_that_shows_no_processes_is_asked_again(clock: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be seen is not gone: the run goes on being stopped, and it is said once."""
    seen: list[set[Process] | OSError] = [OSError(12, "Cannot allocate memory")] * 3 + [set()]

    def look() -> set[Process]:
        found = seen.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    live: Any = _Live(look)
    timer = Timer()
    stopper = terminator.Terminator(timer)
    stopper.add(live)
    gone = []
    while seen:
        gone.append(stopper.tick())
        clock[0] = timer.at_ns or clock[0]
    assert gone == [[], [], [], [live]]
    assert [record.getMessage() for record in caplog.records] == [
        "cannot find out which processes to end: Cannot allocate memory; trying again"
    ]
