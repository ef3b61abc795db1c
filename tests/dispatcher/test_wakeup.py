"""What wakes the dispatcher, the ends of processes above all, and how soon work that takes time is done again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from spool.core.lifecycle import Outlived
from spool.core.model import Grant, Spec
from spool.dispatcher import wakeup
from spool.dispatcher.loop import Dispatcher
from spool.dispatcher.wakeup import Pace, Wakeup
from spool.executors.local import LocalProcesses
from spool.machine import identity
from spool.state.run import FIRST_ATTEMPT, ActiveRun, QueueTime
from spool.store.locked_spool import LockedSpool
from support import make_spool


@pytest.fixture
def wakes() -> Iterator[Wakeup]:
    """Give the wakes of a dispatcher that has seen to all that there was at its start."""
    made = Wakeup()
    made.reload_asked()
    made.children_ended()
    yield made
    made.close()


def _live() -> ActiveRun:
    spec, grant = Spec(command="true"), Grant()
    return ActiveRun("a", 1, spec, grant, "alice", QueueTime(0), FIRST_ATTEMPT, 0, 0, 0, "tmux")


def _slept_for(wakes: Wakeup, monkeypatch: pytest.MonkeyPatch) -> float | None:
    """Return how long the next wait without a limit would sleep at most; None: until something happens."""
    slept: list[float | None] = []
    with monkeypatch.context() as patch:
        patch.setattr(wakes, "_epoll", SimpleNamespace(poll=lambda timeout: slept.append(timeout) or ()))
        wakes.wait(None)
    return slept[0]


def test_a_wrapper_that_is_gone_before_it_is_watched_has_ended(wakes: Wakeup, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no sleep before somebody has seen to that; once it is known it is no news, for nobody is to spin."""
    live = _live()
    with subprocess.Popen(["sleep", "60"]) as wrapper:
        live.launched(LocalProcesses().no_child("a", 1, identity.of_process(wrapper.pid)))
        wrapper.kill()
    wakes.children_ended()
    wakes.watch_run(live)
    assert _slept_for(wakes, monkeypatch) == 0
    assert wakes.ended_runs() == {live.key}
    live.see(Outlived())
    wakes.watch_run(live)
    assert _slept_for(wakes, monkeypatch) is None
    assert wakes.ended_runs() == set()


def test_signals_that_our_starter_blocked_arrive() -> None:
    """After `env --block-signal=CHLD spool dispatch` the end of a child is seen; the mask is as it was afterwards."""
    ours = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*ours, signal.SIGUSR1})
    try:
        wakes, local = Wakeup(), LocalProcesses()
        try:
            assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*ours, signal.SIGUSR1} == {signal.SIGUSR1}
            wakes.children_ended()
            assert list(local.reap()) == []
            run = local.child("a", 1, os.posix_spawn("/bin/true", ["true"], {}))
            os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOWAIT)
            assert wakes.children_ended()
            assert list(local.reap()) == [run]
        finally:
            wakes.close()
        assert ours <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_an_adopted_run_and_a_child_are_told_apart(wakes: Wakeup) -> None:
    """Each ends where it is looked for: the one is reaped by somebody else, the other by us."""
    local, live = LocalProcesses(), _live()
    run = local.child("job", 1, os.posix_spawnp("sleep", ["sleep", "60"], {}))
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as parent:
        wrapper = int(parent.stdout.readline())
        live.launched(local.no_child("a", 1, identity.of_process(wrapper)))
        wakes.watch_run(live)
        os.kill(wrapper, signal.SIGKILL)
        parent.wait()
        pid = run.pid or 0
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        wakes.wait(0)
        assert wakes.ended_runs() == {live.key}
        assert wakes.children_ended()
        assert list(local.reap()) == [run]


MS = 1_000_000


@pytest.mark.parametrize(
    ("processor_ms", "passed_ms", "pause_ms"),
    [
        (2, 2, 400),  # what it costs
        (2, 100, 500),  # a busy machine: not two hundred times what it took
        (2, 600, 3000),  # a disk that hangs is no reason to hang for most of the time
        (0, 0, 0),
    ],
)
def test_work_is_left_for_as_long_as_it_costs(
    monkeypatch: pytest.MonkeyPatch, processor_ms: int, passed_ms: int, pause_ms: int
) -> None:
    """Waiting for a processor or a disk counts, but a fortieth as much as using one."""
    now = SimpleNamespace(processor=5 * MS, passed=7 * MS)
    clocks = SimpleNamespace(thread_time_ns=lambda: now.processor, monotonic_ns=lambda: now.passed)
    monkeypatch.setattr(wakeup, "time", clocks)
    measured = Pace(200)
    with measured:
        now.processor += processor_ms * MS
        now.passed += passed_ms * MS
    assert measured.pause_ns == pause_ms * MS


def test_one_slow_moment_does_not_keep_the_view_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write of `state.json` that had to wait for the processor is followed by the next one soon."""
    spool = LockedSpool(str(make_spool(tmp_path / "spool")))
    made = Dispatcher(spool)
    report = made.status
    moments = iter([0, 240 * MS])
    clocks = SimpleNamespace(thread_time_ns=lambda: 0, monotonic_ns=lambda: next(moments))
    monkeypatch.setattr(wakeup, "time", clocks)
    begun = time.monotonic_ns()
    report.write(None, None, paused=False)
    ended = time.monotonic_ns()
    report.changed()
    report.write(None, None, paused=False)
    due_ns = report._timer.at_ns
    assert due_ns - ended <= 1200 * MS <= due_ns - begun
    made.close()
    spool.release()
