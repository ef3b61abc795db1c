"""One dispatcher for each spool: real processes that take the lock, die with it, and leave children behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from spool.core.errors import ExitCode, LockHeld
from spool.store.lock import dispatcher_lives, hold
from support import wait_for

HOLDER = """
import os, subprocess, sys
from spool.store.lock import hold
lock = hold(sys.argv[1])
child = {child}
print("held", child, flush=True)
sys.stdin.readline()
"""
SPAWNED = "os.posix_spawn('/bin/sleep', ['sleep', '60'], os.environ, setsid=True)"


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return the path of a lock that does not exist yet."""
    return str(tmp_path / ".lock")


@contextmanager
def holder(path: str, child: str = "0") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a second process that holds the lock until its input ends; yield it, and its child."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(child=child), path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        word, _, pid = process.stdout.readline().partition(" ")
        assert word == "held"
        yield process, int(pid)


def end(process: subprocess.Popen[str]) -> None:
    """Let a holder leave in good order."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def test_a_lock_that_was_never_taken_is_not_held(path: str) -> None:
    """Without a lock file no dispatcher lives, and asking does not make one."""
    assert not dispatcher_lives(path)
    assert not os.path.exists(path)


def test_a_second_process_that_holds_the_lock_is_seen_and_refused(path: str) -> None:
    """While another process holds the lock it can be told, and taking it is LockHeld with its own exit code."""
    with holder(path) as (process, _):
        assert dispatcher_lives(path)
        with pytest.raises(LockHeld) as caught:
            hold(path, wait_s=0)
        assert caught.value.exit_code is ExitCode.LOCK_HELD
        end(process)
    assert not dispatcher_lives(path)
    hold(path).release()


def test_kill_9_lets_go_of_the_lock(path: str) -> None:
    """The kernel releases the lock of a process that is killed; nothing stale is left to clean up."""
    with holder(path) as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not dispatcher_lives(path)
        hold(path, wait_s=0).release()


def test_a_child_of_the_holder_does_not_keep_the_lock(path: str) -> None:
    """A job that outlives its dispatcher holds nothing: the next dispatcher starts while the job runs on."""
    with holder(path, SPAWNED) as (process, child):
        try:
            end(process)
            os.kill(child, 0)  # it runs
            assert not dispatcher_lives(path)
            hold(path, wait_s=0).release()
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("leave", ["release", "kill"])
def test_the_file_is_never_unlinked(path: str, leave: str) -> None:
    """The lock file keeps its inode over release and kill: two holders of two files would both be the only one."""
    hold(path).release()
    inode = os.stat(path).st_ino
    with holder(path) as (process, _):
        assert os.stat(path).st_ino == inode
        if leave == "kill":
            process.kill()
            process.wait()
        else:
            end(process)
    assert os.stat(path).st_ino == inode
    lock = hold(path)
    lock.release()
    assert os.stat(path).st_ino == inode


def test_a_look_at_the_lock_does_not_take_it(path: str) -> None:
    """Asking whether a dispatcher lives leaves the lock free at once."""
    hold(path).release()
    for _ in range(3):
        assert not dispatcher_lives(path)
    hold(path, wait_s=0).release()


def test_a_look_that_happens_to_hold_the_lock_for_a_moment_is_waited_out(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dispatcher that starts while a command looks is refused at first, and takes the lock when the look is over."""
    looking = os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)
    fcntl.flock(looking, fcntl.LOCK_SH)
    refused = threading.Event()
    real = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        try:
            real(fd, operation)
        except BlockingIOError:
            refused.set()
            raise

    monkeypatch.setattr(fcntl, "flock", flock)
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(hold, path, wait_s=60)
        wait_for(refused.is_set)
        os.close(looking)
        lock = starting.result()
    assert dispatcher_lives(path)
    lock.release()


def test_the_lock_file_is_the_users_alone(path: str) -> None:
    """Its mode is 0600: whoever could lock it could keep every dispatcher away."""
    hold(path).release()
    assert os.stat(path).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("make", [os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_what_is_no_lock_file_is_not_a_dispatcher(path: str, make: Callable[[str], None]) -> None:
    """A directory or a dangling link of that name does not read as a living dispatcher, and does not hang the look."""
    make(path)
    assert not dispatcher_lives(path)
