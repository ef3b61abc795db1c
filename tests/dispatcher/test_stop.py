"""Who is told to end, and when."""

from __future__ import annotations

import signal
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import pytest

from spool.dispatcher import stop
from spool.machine import identity
from spool.machine.signalling import Process


class _Live:
    """As much of a run as a stop looks at."""

    key = ("x", 1)
    jid = pid = None
    spec = SimpleNamespace(kill_grace_ns=3_600_000_000_000)


@pytest.mark.parametrize("before", [True, False])
def test_what_a_shell_began_before_it_was_told_is_told_too(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    """A shell waits for its command before it runs its trap; but what began after TERM tidies up, and is let."""
    with subprocess.Popen(["sleep", "60"]) as shell, subprocess.Popen(["sleep", "60"]) as command:
        known, unseen = (Process(each.pid, identity.start_ticks(each.pid) or 0) for each in (shell, command))
        looks = iter([{known}, {known, unseen}])
        told: list[tuple[set[Process], int]] = []
        live: Any = _Live()
        monkeypatch.setattr(stop, "processes_of", lambda *_: {live: next(looks)})
        monkeypatch.setattr(stop, "send", lambda processes, number: told.append((set(processes), number)))
        monkeypatch.setattr(stop, "_parent", lambda process: shell.pid)
        at_ticks = unseen.start_ticks + before
        monkeypatch.setattr(identity, "ticks_now", lambda: at_ticks)
        stopper = stop.Stopper("/nowhere")
        stopper.add(live)
        for _ in range(2):
            time.sleep(max(0, (stopper.next_due_ns() or 0) - time.monotonic_ns()) / 1e9)
            stopper.tick()
        assert told == [({known}, signal.SIGTERM)] + [({unseen}, signal.SIGTERM)] * before
        for each in (shell, command):
            each.kill()
