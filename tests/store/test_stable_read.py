"""A job file is read only when it is whole: real writers, and everything that is not a file."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spool.formats.toml import MAX_BYTES
from spool.store import edited
from spool.store.disk import read_file
from spool.store.edited import FileText, ReadFailure, read_stable
from spool.store.reading import read_record
from support import wait_for

TEXT = b'command = "true"\n'
LONG_AGO_S = 1_000_000_000
NOBODY = 65534


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Make a job file that has not changed for years."""
    path = tmp_path / "job.toml"
    path.write_bytes(TEXT)
    age(path)
    return path


def age(path: Path) -> None:
    """Let *path* look unchanged for years."""
    os.utime(path, (LONG_AGO_S, LONG_AGO_S))


def no_leases(monkeypatch: pytest.MonkeyPatch, error: int = errno.EINVAL) -> None:
    """Let leases be refused as a network file system refuses them."""
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETLEASE:
            raise OSError(error, os.strerror(error))
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


def read(path: object) -> bytes | ReadFailure:
    """Return what a look finds: the whole text, or why there is none."""
    found = read_stable(str(path))
    return found.data if isinstance(found, FileText) else found


def opening_fails(monkeypatch: pytest.MonkeyPatch, error: int, flag: int = -1) -> None:
    """Let no file be opened, or none with that flag."""
    real = os.open

    def refuse(path: str, flags: int, *rest: int) -> int:
        if flag < 0 or flags & flag:
            raise OSError(error, os.strerror(error))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)


def test_a_file_that_nobody_writes_is_read_with_its_identity(file: Path) -> None:
    """A closed file is read at once, with what tells it from every other."""
    seen = read_stable(str(file))
    assert isinstance(seen, FileText)
    status = file.stat()
    assert (seen.data, seen.version) == (TEXT, (status.st_ino, status.st_mtime_ns, len(TEXT)))
    assert (seen.status.st_uid, seen.status.st_ctime_ns) == (os.getuid(), status.st_ctime_ns)


@pytest.mark.parametrize("mode", ["r+b", "ab"])
def test_a_file_that_this_process_has_open_for_writing_is_not_whole(file: Path, mode: str) -> None:
    """Old or not, a file that is open for writing may still change; closed, it is whole without a quiet time."""
    with file.open(mode) as opened:
        assert read(file) is ReadFailure.WRITING
        opened.write(TEXT)
    assert read(file) == (TEXT if mode == "r+b" else TEXT * 2)


def test_a_writer_in_another_process_is_seen_until_it_closes(file: Path) -> None:
    """A real second process that writes line by line: not whole while it has the file open, whole when it ends."""
    writer = subprocess.Popen(
        ["/bin/sh", "-c", 'exec >> "$1"; echo "# one"; echo ready >&2; read line; echo "# two"', "sh", file],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with writer:
        assert writer.stderr is not None
        assert writer.stderr.readline() == b"ready\n"
        age(file)
        assert read(file) is ReadFailure.WRITING
        writer.communicate()
    assert read(file) == TEXT + b"# one\n# two\n"


def test_a_writable_mapping_counts_as_a_writer(file: Path) -> None:
    """A file that is mapped for writing is being written, although its descriptor is closed."""
    with file.open("r+b") as opened:
        mapping = mmap.mmap(opened.fileno(), 0)
    assert read(file) is ReadFailure.WRITING
    mapping.close()
    assert read(file) == TEXT


def test_a_writer_that_comes_while_we_read_does_not_end_us(file: Path) -> None:
    """Writers that open the file again and again, while we take leases on it: the kernel's notice kills nobody."""
    assert signal.getsignal(signal.SIGIO) is signal.SIG_DFL
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            with file.open("r+b") as opened:
                opened.write(TEXT)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        answers = {type(read_stable(str(file))) for _ in range(300)}
    finally:
        stop.set()
        thread.join()
    assert answers <= {FileText, ReadFailure}


def test_readers_are_in_nobodys_way_and_no_lease_outlives_the_reading(file: Path) -> None:
    """A pager keeps no job from starting; after it was read, a file can be opened for writing without waiting."""
    with file.open("rb"):
        assert read(file) == TEXT
    os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))  # EWOULDBLOCK if a lease were left


def test_a_fifo_cannot_hang_us(tmp_path: Path) -> None:
    """A FIFO without a writer, and one with, are none of spool's business, and opening them does not block."""
    path = tmp_path / "fifo.toml"
    os.mkfifo(path)
    assert read(path) is ReadFailure.NOT_OURS
    with open(os.open(path, os.O_RDWR), "r+b", buffering=0) as fifo:
        fifo.write(TEXT)
        assert read(path) is ReadFailure.NOT_OURS
        assert fifo.read(100) == TEXT  # and nothing was taken out of it


@pytest.mark.parametrize("target", ["job.toml", "nowhere", "link.toml", "/dev/zero", "socket", "directory"])
def test_what_is_no_file_is_not_ours(file: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """A link is not followed, to a good file, to nothing, to itself or to a device; a socket is passed over."""
    link = file.parent / "link.toml"
    monkeypatch.chdir(file.parent)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        if target == "socket":
            listener.bind(link.name)
        elif target == "directory":
            link.mkdir()
        else:
            link.symlink_to(target)
        assert read(link) is ReadFailure.NOT_OURS
    assert read(file.parent / "gone.toml") is ReadFailure.GONE


def test_a_huge_file_is_refused_by_its_size_and_not_read(tmp_path: Path) -> None:
    """A terabyte of nothing is TOO_LARGE at once; exactly the limit is still read, and so is nothing at all."""
    path = tmp_path / "huge.toml"
    path.touch()
    for size in (0, 1 << 40, MAX_BYTES + 1, MAX_BYTES):
        os.truncate(path, size)
        assert read(path) == (bytes(size) if size <= MAX_BYTES else ReadFailure.TOO_LARGE)


@pytest.mark.parametrize("mode", [0o000, 0o200])
def test_a_file_that_may_not_be_read_is_left_alone(mode: int) -> None:
    """A file without permission to read is UNREADABLE; made readable, it is read."""
    with shared_directory() as directory:
        path = Path(directory) / "secret.toml"
        path.write_bytes(TEXT)
        age(path)
        if os.geteuid() == 0:
            os.chown(path, NOBODY, -1)
        path.chmod(mode)
        with without_privileges():
            assert read(path) is ReadFailure.UNREADABLE
        path.chmod(0o600)
        with without_privileges():
            assert read(path) == TEXT


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_file_that_there_is_no_room_to_open_is_not_taken_for_another_thing(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """It raises: taken for somebody else's business it would leave the queue."""
    with monkeypatch.context() as patch:
        opening_fails(patch, error)
        with pytest.raises(OSError, match=os.strerror(error)):
            read(file)
    assert read(file) == TEXT


@pytest.mark.parametrize("error", [errno.EPERM, errno.EINVAL, errno.ENOTSUP])
def test_where_the_time_of_access_cannot_be_kept_a_file_is_read_all_the_same(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Another user's file, and a file system that does not know how, are read as ever; what is gone is gone."""
    opening_fails(monkeypatch, error, os.O_NOATIME)
    assert read(file) == TEXT
    assert read(file.parent) is ReadFailure.NOT_OURS
    assert read(f"{file}.gone") is ReadFailure.GONE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_another_users_file_is_whole_after_a_quiet_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives no lease on another user's file: what was written just now waits, what is old is read."""
    with shared_directory() as directory:
        path = Path(directory) / "theirs.toml"
        path.write_bytes(TEXT)
        path.chmod(0o644)
        now = path.stat().st_mtime_ns
        monkeypatch.setattr(time, "time_ns", lambda: now)
        with without_privileges():
            assert read(path) is ReadFailure.WRITING
        age(path)
        with without_privileges():
            assert read(path) == TEXT


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EACCES, errno.ENOTSUP, errno.ENOLCK])
def test_without_leases_a_file_is_whole_once_it_has_been_quiet(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Where the file system has no leases: a file changed within the quiet time is not whole, afterwards it is."""
    no_leases(monkeypatch, error)
    now = file.stat().st_mtime_ns
    for passed, whole_by_then in [
        (0, False),
        (edited.QUIET_NS - 1, False),
        (edited.QUIET_NS, True),
        (1 << 60, True),
        (-3600 * 10**9, True),  # of a server whose clock is ahead: only the near past and future wait
    ]:
        monkeypatch.setattr(time, "time_ns", lambda passed=passed: now + passed)
        assert read(file) == (TEXT if whole_by_then else ReadFailure.WRITING)


@pytest.mark.parametrize("change", ["grown", "rewritten", "after the lease"])
def test_a_file_that_changes_while_it_is_read_is_not_whole(
    file: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Grown or rewritten between the first look and the last, the bytes that were read are not used.

    Nor if it was stopped for so long in the middle that the kernel has let a writer in: a lease proves nothing then.
    """
    if change == "after the lease":
        clock = iter((0, 60 * 10**9))
        monkeypatch.setattr(fcntl, "fcntl", lambda *_: 0)
        monkeypatch.setattr(time, "monotonic_ns", lambda: next(clock))
    else:
        no_leases(monkeypatch)
    real = os.read

    def changing(fd: int, size: int) -> bytes:
        data = real(fd, size)
        file.write_bytes(data * 2 if change == "grown" else data.upper())
        return data

    monkeypatch.setattr(os, "read", changing)
    assert read(file) is ReadFailure.WRITING


def test_short_reads_are_put_together(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that gives a few bytes at a time still gives the whole file."""
    real = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: real(fd, 7))
    assert read(file) == TEXT


def test_a_growing_file_is_whole_only_when_it_has_stopped(tmp_path: Path) -> None:
    """Against a process that writes 200 lines one by one, every text that is ever read is the whole of it."""
    path = tmp_path / "grows.toml"
    script = (
        "import sys\n"
        "with open(sys.argv[1], 'w', buffering=1) as file:\n"
        "    for number in range(200):\n"
        "        print(f'# line {number}', file=file)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, path]) as writer:
        wait_for(path.exists)
        answers = []
        while writer.poll() is None:
            answers.append(read(path))
        answers.append(read(path))
    texts = {*answers} - {b"", *ReadFailure}  # created and not yet open, as far as a reader can tell
    assert [text.count(b"\n") for text in texts] == [200]


def test_no_descriptor_is_left_open(file: Path, tmp_path: Path) -> None:
    """Whatever the answer, the file is closed again."""
    os.mkfifo(tmp_path / "fifo.toml")
    before = len(os.listdir("/proc/self/fd"))
    with file.open("ab"):
        for name in ("job.toml", "fifo.toml", "gone.toml", "."):
            read_stable(str(tmp_path / name))
    assert len(os.listdir("/proc/self/fd")) == before


@contextmanager
def without_privileges() -> Iterator[None]:
    """Be an ordinary user for a moment, where the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def shared_directory() -> Iterator[str]:
    """Make a directory that an ordinary user can reach."""
    with tempfile.TemporaryDirectory(prefix="spool-tests-") as directory:
        os.chmod(directory, 0o755)
        yield directory


@pytest.mark.parametrize("read", [read_stable, read_record, read_file])
def test_a_file_that_is_made_just_after_it_was_missed_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[str], FileText | bytes]
) -> None:
    """A wrapper writes its `jid` at any moment: a look that came too early for it is no trouble of the disk."""
    path, real = tmp_path / "jid", os.open
    path.with_name("new").write_bytes(TEXT)
    age(path.with_name("new"))

    def just_before(of: str, *arguments: int) -> int:
        try:
            return real(of, *arguments)
        finally:
            if of == str(path) and not path.exists():
                path.with_name("new").rename(path)

    monkeypatch.setattr(os, "open", just_before)
    found = read(str(path))
    assert (found.data if isinstance(found, FileText) else found) == TEXT
