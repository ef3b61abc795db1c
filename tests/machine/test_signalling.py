"""How processes are signalled."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from types import SimpleNamespace

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


def test_parents_are_signalled_before_their_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that is told late sees its program end first, and goes on to its next command."""
    told = []

    def opened(pid: int, flags: int = 0) -> int:
        told.append(pid)
        return pidfd_open(pid, flags)

    pidfd_open = os.pidfd_open
    nest = "exec sleep 60"
    for _ in range(7):
        nest = f"echo $$; sh -c {shlex.quote(nest)}; :"
    shells = subprocess.Popen(["sh", "-c", nest], stdout=subprocess.PIPE, text=True, start_new_session=True)
    with shells:
        try:
            assert shells.stdout is not None
            chain = [int(shells.stdout.readline()) for _ in range(7)]
            meant = frozenset(Process(pid, identity.start_ticks(pid) or 0) for pid in chain)
            monkeypatch.setattr(os, "pidfd_open", opened)
            for processes in (meant, sorted(meant), sorted(meant, reverse=True)):
                assert signalling.send(processes, signal.SIGCONT).signalled == meant
                assert told == chain
                told.clear()
        finally:
            os.killpg(shells.pid, signal.SIGKILL)


@pytest.mark.parametrize("around", [{2: 3, 3: 2}, {2: 2, 3: 3}, {}])
def test_a_circle_of_parents_is_no_endless_one(monkeypatch: pytest.MonkeyPatch, around: dict[int, int]) -> None:
    """Pids that came back between two looks may seem to be each other's parents; nobody is left out."""

    def read_stat(pid: int) -> SimpleNamespace | None:
        return SimpleNamespace(parent=around[pid], dead=False, start_ticks=0) if pid in around else None

    monkeypatch.setattr(signalling, "read_stat", read_stat)
    both = frozenset({Process(2, 1), Process(3, 1)})  # of another start, and so signalled in no case
    assert signalling.send(both, signal.SIGTERM).gone == both


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
