"""Safe reading of small files that a job may have replaced: up to a limit, without blocking or following links.

A file that a user names may be anything: a pipe without a writer is an error, and is not waited for.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Iterator

from spool.core import layout
from spool.formats.toml import MAX_BYTES
from spool.store.disk import SpoolTrouble, of_the_spool, open_if_there, status_of

_MAX_RECORD = MAX_BYTES + 1  # one more than a TOML file may have, which proves it too long
_BLOCK = 65536
_AT_ONCE = 1 << 20


def refuse_link(path: str) -> None:
    """Raise OSError if *path*, the directory of a job or of a run, is a link: its files belong to another run."""
    try:
        status = status_of(path)
    except OSError:
        return  # the next step fails as well, and names its own file
    if status is not None and stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a link, and what lies there belongs to another run", path)


def open_record(path: str) -> int:
    """Open a file of a run. Never blocks, follows no link. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)


def _open_named(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def read_record(path: str, limit: int = _MAX_RECORD) -> bytes | None:
    """Return the content of a small file, None if it does not exist, b"" if it is not a regular file.

    Reads at most *limit* bytes, even if the file is or becomes longer. Never blocks, follows no link. Raises OSError if
    it exists and cannot be read.
    """
    found = _read_record(path, limit, with_status=False)
    return None if found is None else found[1]


def read_with_status(path: str, limit: int = 4 << 20) -> tuple[os.stat_result, bytes] | None:
    """Return status and content of a small file by one descriptor, None if it is missing or not a regular file.

    Otherwise as `read_record`. With *limit* 0, nothing is read.
    """
    found = _read_record(path, limit, with_status=True)
    if found is None or found[0] is None or not stat.S_ISREG(found[0].st_mode):
        return None
    return found[0], found[1]


def _read_record(path: str, limit: int, *, with_status: bool) -> tuple[os.stat_result | None, bytes] | None:
    """Return the content of a small file and, if asked for, its status, both of one and the same file."""
    fd = None
    try:
        fd = open_if_there(path, open_record)
        if fd is None:
            return None
        status = os.fstat(fd) if with_status else None
        return status, _read(fd, limit) if limit else b""
    except OSError as error:
        if not _is_regular(path if fd is None else fd):
            return None, b""
        error.filename = path
        raise
    finally:
        if fd is not None:
            os.close(fd)


def _is_regular(file: str | int) -> bool:
    """Whether a path or an open file is a regular file, or is missing by now."""
    status = os.fstat(file) if isinstance(file, int) else status_of(file)
    return status is None or stat.S_ISREG(status.st_mode)


def read_bytes(path: str, limit: int = _MAX_RECORD) -> bytes | None:
    """Return the content of a small file, None if it is missing or cannot be read. Follows links, never blocks."""
    try:
        fd = _open_named(path)
        try:
            return _read(fd, limit)
        finally:
            os.close(fd)
    except OSError:
        return None


def read_named(path: str, most: int) -> bytes:
    """Return at most *most* bytes of a file that a user has named; "-" is stdin.

    A pipe, such as that of `<(command)`, is read to its end; one that has no writer is an error. Raises OSError.
    """
    fd = os.dup(0) if path == "-" else os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    parts, size = list[bytes](), 0
    try:
        while size < most:
            try:
                more = os.read(fd, min(most - size, _AT_ONCE))
            except BlockingIOError:
                select.select([fd], [], [])
                continue
            if not more:
                break
            parts.append(more)
            size += len(more)
        if not parts and path != "-" and stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise OSError(errno.EPIPE, "it is a pipe without a writer", path)
    finally:
        os.close(fd)
    return b"".join(parts)


def read_whole(path: str, most: int) -> bytes:
    """Return a file that a user has named, as `read_named` does. Raises OSError also if it is longer than *most*."""
    data = read_named(path, most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", path)
    return data


def _read(fd: int, limit: int) -> bytes:
    """Return at most *limit* bytes of an open file: one call for all but the longest."""
    data = os.read(fd, min(limit, _BLOCK))
    if len(data) < _BLOCK:
        return data
    parts, size = [data], len(data)
    while size < limit and (more := os.read(fd, min(limit - size, _AT_ONCE))):
        parts.append(more)
        size += len(more)
    return b"".join(parts)


def end_of_file(path: str, most: int = _BLOCK, *, follow: bool = False) -> bytes:
    """Return the last *most* bytes of a file, b"" if it is missing or not a regular file. Never blocks.

    A link is followed only with *follow*.
    """
    try:
        fd = open_if_there(path, _open_named if follow else open_record)
    except OSError:
        if _is_regular(path):
            raise
        return b""
    if fd is None:
        return b""
    try:
        status = os.fstat(fd)
        return os.pread(fd, most, max(0, status.st_size - most)) if stat.S_ISREG(status.st_mode) else b""
    finally:
        os.close(fd)


def is_too_long(text: bytes | None) -> bool:
    """Whether *text* is the beginning of a job file that is too long (FORMAT 3.1)."""
    return text is not None and len(text) > MAX_BYTES


def history_lines(root: str) -> Iterator[bytes]:
    """Yield the lines of the accounting, newest first, without a torn last one. Raises SpoolTrouble."""
    path = f"{root}/{layout.HISTORY}"
    try:
        fd = _open_named(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SpoolTrouble(error.errno, error.strerror, path) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise SpoolTrouble(errno.EEXIST, "it is not a regular file", path)
        end = status.st_size
        tail = b""
        while end > 0:
            start = max(0, end - _AT_ONCE)
            with of_the_spool(path):
                text = os.pread(fd, end - start, start) + tail
            end = start
            lines = text.split(b"\n")
            tail = lines[0]
            yield from (line for line in reversed(lines[1:]) if line)
        if tail:
            yield tail
    finally:
        os.close(fd)
