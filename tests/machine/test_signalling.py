"""How processes are signalled."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from spool.machine import identity, signalling
from spool.machine.signalling import Process


def test_a_signal_goes_to_the_process_that_was_meant_or_to_none() -> None:
    """The pid alone is not enough: with another start the process is not signalled."""
    with subprocess.Popen(["sleep", "60"]) as child:
        ticks = identity.start_ticks(child.pid)
        assert ticks is not None
        other, same = Process(child.pid, ticks - 1), Process(child.pid, ticks)
        assert signalling.send([other], signal.SIGKILL) == signalling.Sent(gone=frozenset({other}))
        assert child.poll() is None
        assert signalling.send([same], signal.SIGTERM) == signalling.Sent(signalled=frozenset({same}))
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert signalling.send([same], signal.SIGTERM) == signalling.Sent(gone=frozenset({same}))
        assert child.wait() == -signal.SIGTERM
    assert signalling.send([same], signal.SIGTERM) == signalling.Sent(gone=frozenset({same}))


def test_pid_1_and_this_process_are_never_signalled() -> None:
    """Whatever a scan may have said, some processes are not to be signalled."""
    mine = Process(os.getpid(), identity.start_ticks(os.getpid()) or 0)
    with subprocess.Popen(["sleep", "60"]) as child:
        spared = Process(child.pid, identity.start_ticks(child.pid) or 0)
        refused = frozenset({mine, Process(1, 0), Process(0, 0), Process(-1, 0), spared})
        assert signalling.send(refused, signal.SIGTERM, spare={child.pid}) == signalling.Sent(refused=refused)
        child.kill()


def test_without_descriptors_a_signal_still_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no pidfd can be had, the process is checked and signalled by its pid."""

    def none_left(pid: int, flags: int = 0) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    with subprocess.Popen(["sleep", "60"]) as child:
        process = Process(child.pid, identity.start_ticks(child.pid) or 0)
        assert signalling.send([process._replace(start_ticks=1)], signal.SIGKILL).signalled == frozenset()
        assert signalling.send([process], signal.SIGKILL).signalled == {process}
        assert child.wait() == -signal.SIGKILL
