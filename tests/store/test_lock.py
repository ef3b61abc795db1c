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

from spool.core.errors import ExitCode, LockHeld, SpoolUnusable
from spool.store import lock as lock_module
from spool.store.lock import Lock, dispatcher_lives, serving
from support import wait_for

HOLDER = """
import os, subprocess, sys
from spool.store.lock import Lock
lock = Lock(sys.argv[1])
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


def test_a_second_process_that_holds_the_lock_is_seen_and_refused(path: str) -> None:
    """Until it leaves it can be told, and taking it is LockHeld with its own exit code; a look makes no lock file."""
    assert not dispatcher_lives(path)
    assert not os.path.exists(path)
    with holder(path) as (process, _):
        assert dispatcher_lives(path)
        with pytest.raises(LockHeld) as caught:
            Lock(path, wait_s=0)
        assert caught.value.exit_code is ExitCode.LOCK_HELD
        end(process)
    for _ in range(3):  # and no look takes it
        assert not dispatcher_lives(path)
    Lock(path, wait_s=0).release()


def test_a_child_of_the_holder_does_not_keep_the_lock(path: str) -> None:
    """A job that outlives its dispatcher holds nothing: the next dispatcher starts while the job runs on."""
    with holder(path, SPAWNED) as (process, child):
        try:
            end(process)
            os.kill(child, 0)  # it runs
            wait_for(lambda: not dispatcher_lives(path), what="the descriptors of the child are closed by its exec")
            Lock(path, wait_s=0).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_kill_9_lets_go_of_the_lock_whose_file_is_never_unlinked(path: str) -> None:
    """The file, the user's alone, keeps its inode over kill and release: with two files two would be the only one."""
    Lock(path).release()
    before = os.stat(path)
    assert before.st_mode & 0o777 == 0o600
    with holder(path) as (process, _):
        process.kill()
        process.wait()
        assert not dispatcher_lives(path)
        Lock(path, wait_s=0).release()
    assert os.stat(path).st_ino == before.st_ino


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
        starting = pool.submit(Lock, path, wait_s=60)
        wait_for(refused.is_set)
        os.close(looking)
        lock = starting.result()
    assert dispatcher_lives(path)
    lock.release()


@pytest.mark.parametrize("make", [os.mkdir, lambda path: os.symlink("nowhere", path), os.mkfifo])
def test_what_is_no_lock_file_is_not_a_dispatcher(path: str, make: Callable[[str], None]) -> None:
    """A directory, a link or a FIFO of that name is no living dispatcher, hangs no look, and stops one."""
    make(path)
    assert not dispatcher_lives(path)
    with pytest.raises(FileExistsError, match="not a regular file"):
        Lock(path, wait_s=0)


# Somebody deletes or replaces `.lock` while a dispatcher lives.


@pytest.fixture
def spool_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the path of the lock of a spool, with no patience in whoever holds it."""
    monkeypatch.setattr(lock_module, "_BEING_DELETED_S", 0.0)
    monkeypatch.setattr(lock_module, "_PATIENCE_S", 0.0)
    (tmp_path / "spool" / "queued").mkdir(parents=True)
    (tmp_path / "spool").chmod(0o700)
    return str(tmp_path / "spool" / ".lock")


def delete(path: str) -> None:
    """Delete it."""
    os.unlink(path)


def replace(path: str) -> None:
    """Put another file in its place."""
    Path(f"{path}.new").touch()
    os.rename(f"{path}.new", path)


@pytest.mark.parametrize("harm", [delete, replace])
def test_a_lock_that_is_deleted_or_replaced_keeps_others_out_and_is_made_anew(
    spool_lock: str, harm: Callable[[str], None]
) -> None:
    """The dispatcher is still seen, no second one comes, and at its next look `.lock` is locked again."""
    with hold_in_this_process(spool_lock) as lock:
        harm(spool_lock)
        assert serving(spool_lock) is None
        assert dispatcher_lives(spool_lock)
        with pytest.raises(LockHeld):
            Lock(spool_lock, wait_s=0)
        assert serving(spool_lock) is None  # the second one has touched nothing
        assert lock.keep()
        assert serving(spool_lock) is True
        assert not lock.keep()
        with pytest.raises(LockHeld):
            Lock(spool_lock, wait_s=0)
    assert serving(spool_lock) is False


@pytest.mark.parametrize("mode", [0o700, 0o755])
@pytest.mark.parametrize("harm", [delete, replace])
def test_whoever_finds_the_new_lock_taken_leaves(spool_lock: str, harm: Callable[[str], None], mode: int) -> None:
    """Where a dispatcher that heeds only the file holds the new one, the old one leaves, with code 5."""
    os.chmod(os.path.dirname(spool_lock), mode)
    with hold_in_this_process(spool_lock) as lock:
        harm(spool_lock)
        other = os.open(spool_lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(SpoolUnusable, match="another dispatcher holds the new one") as caught:
            lock.keep()
        assert caught.value.exit_code is ExitCode.SPOOL_UNUSABLE
        assert not lock.held
        os.close(other)


def test_where_others_may_read_the_directory_the_file_is_made_anew_at_once(
    spool_lock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the lock of the directory a second dispatcher could come, so nothing is waited for.

    A lock that somebody else takes on a directory that all may read is no dispatcher, and keeps none out.
    """
    monkeypatch.setattr(lock_module, "_BEING_DELETED_S", 60.0)
    os.chmod(os.path.dirname(spool_lock), 0o755)
    with hold_in_this_process(spool_lock) as lock:
        delete(spool_lock)
        assert lock.keep()
        assert serving(spool_lock) is True
    root = os.path.dirname(spool_lock)
    os.chmod(root, 0o755)
    stranger = os.open(root, os.O_RDONLY)
    fcntl.flock(stranger, fcntl.LOCK_EX)
    assert not dispatcher_lives(spool_lock)
    with hold_in_this_process(spool_lock):
        assert dispatcher_lives(spool_lock)
    os.close(stranger)


@pytest.mark.parametrize("put", [None, "another"])
def test_a_spool_that_is_gone_is_not_served(spool_lock: str, put: str | None) -> None:
    """Moved away or deleted, also with another spool in its place, it is given up, and the other one is free."""
    root = os.path.dirname(spool_lock)
    with hold_in_this_process(spool_lock) as lock:
        os.rename(root, f"{root}.moved")
        if put is not None:
            os.makedirs(f"{root}/queued")
        with pytest.raises(SpoolUnusable, match="cannot keep serving"):
            lock.keep()
        assert not lock.held
        if put is not None:
            Lock(spool_lock, wait_s=0).release()


def test_a_spool_that_is_being_deleted_is_not_made_anew(spool_lock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While `rm -rf` is at it, nothing is put into its way, and once `queued/` is gone the dispatcher leaves."""
    monkeypatch.setattr(lock_module, "_BEING_DELETED_S", 60.0)
    root = os.path.dirname(spool_lock)
    with hold_in_this_process(spool_lock) as lock:
        delete(spool_lock)
        assert not lock.keep()
        assert not os.path.exists(spool_lock)
        os.rmdir(f"{root}/queued")
        with pytest.raises(SpoolUnusable, match="being deleted"):
            lock.keep()


@pytest.mark.parametrize("make", [os.mkdir, lambda path: os.symlink("nowhere", path), os.mkfifo])
def test_what_nobody_can_lock_is_waited_out(
    spool_lock: str, make: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With something else in the place of `.lock` the dispatcher goes on, and mends it when it can.

    A FIFO is not opened: that would wake the dispatcher that watches the directory, again and again.
    """
    with hold_in_this_process(spool_lock) as lock:
        os.unlink(spool_lock)
        make(spool_lock)
        opened: list[object] = []
        real = os.open
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", lambda path, *rest: opened.append(path) or real(path, *rest))
            assert not lock.keep()
        assert make is not os.mkfifo or not opened
        assert lock.held
        assert isinstance(lock.trouble, FileExistsError)
        (os.rmdir if os.path.isdir(spool_lock) else os.unlink)(spool_lock)
        assert lock.keep()
        assert lock.trouble is None


@contextmanager
def hold_in_this_process(path: str) -> Iterator[Lock]:
    """Hold the lock, and let go of it."""
    lock = Lock(path, wait_s=0)
    try:
        yield lock
    finally:
        lock.release()
