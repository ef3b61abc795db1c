"""Files that users edit at any moment: job files are read only when whole, the configuration when it changes.

A file whose writer still has it open may be cut anywhere, and a cut at the end of a line is valid TOML. The kernel
knows: a read lease is refused while any process has the file open for writing. If the file system has no leases, or the
file is another user's, a file that has not changed for a short time counts as whole.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import time
from enum import Enum

from msgspec import Struct

from spool.core import layout
from spool.core.errors import InvalidConfig, cannot
from spool.formats import config
from spool.formats.config import Config
from spool.formats.toml import MAX_BYTES
from spool.store.disk import open_if_there, remedy_for, status_of
from spool.store.glance import read_config
from spool.store.ownership import unknown_in

QUIET_NS = 300_000_000
_LEASE_LASTS_NS = 1_000_000_000  # at least; the kernel breaks a lease after /proc/sys/fs/lease-break-time, 45 s
_OTHER_KINDS = (errno.ELOOP, errno.ENXIO, errno.ENODEV)  # a link, a socket, a device
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


class ReadFailure(Enum):
    """Why a file with a valid name was not read."""

    GONE = "gone"
    NOT_OURS = "not a regular file"  # a link, a directory, a FIFO, a socket: ignored
    WRITING = "being written"
    TOO_LARGE = "larger than 1 MiB"
    UNREADABLE = "not readable"


class FileText(Struct, frozen=True):
    """A job file as read: the status of its descriptor, and its bytes."""

    status: os.stat_result
    data: bytes

    @property
    def version(self) -> tuple[int, int, int]:
        """What tells it from other files, and from other texts of it: inode, time and size."""
        return self.status.st_ino, self.status.st_mtime_ns, len(self.data)


def read_stable(path: str) -> FileText | ReadFailure:
    """Return the file *path* if it is regular and not open for writing, else why not. Never blocks.

    Raises OSError if that is unknown for now (the disk, the network file system): the last known version still counts.
    """
    try:
        fd = open_if_there(path, _open)
    except FileNotFoundError:  # a link that leads nowhere
        return ReadFailure.NOT_OURS
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):  # ignored until it is made readable
            return ReadFailure.UNREADABLE
        if error.errno in _OTHER_KINDS and not _is_regular(path):
            return ReadFailure.NOT_OURS
        raise
    if fd is None:
        return ReadFailure.GONE
    try:
        begun = time.monotonic_ns()
        keeps_out = _keep_writers_out(fd)  # first: from here on the content does not change
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return ReadFailure.NOT_OURS
        if status.st_size > MAX_BYTES:
            return ReadFailure.TOO_LARGE
        if not keeps_out and abs(time.time_ns() - status.st_mtime_ns) < QUIET_NS:
            return ReadFailure.WRITING
        data = os.read(fd, status.st_size + 1)
        while len(data) < status.st_size and (more := os.read(fd, status.st_size + 1)):
            data += more
        # The kernel delays writers by a lease, but not for ever.
        if len(data) != status.st_size or not keeps_out or time.monotonic_ns() - begun > _LEASE_LASTS_NS:
            after = os.fstat(fd)
            if (after.st_mtime_ns, after.st_size) != (status.st_mtime_ns, len(data)):
                return ReadFailure.WRITING
        return FileText(status, data)
    except BlockingIOError:
        return ReadFailure.WRITING
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(fd)


def is_open_in_editor(directory: str, name: str, marks: set[str] | None = None) -> bool:
    """Whether an editor's file in *directory* shows that the file of job *name* is open (FORMAT 2.4).

    *marks* are all possible editors' files there, if known.
    """
    if marks is None:
        return any(os.path.lexists(f"{directory}/{mark}") for mark in layout.editor_marks(name))
    return bool(marks) and not marks.isdisjoint(layout.editor_marks(name))


def in_order_of_making(directory: str) -> list[str]:
    """Return the names in a directory by inode: roughly in order of creation and of place on disk. Raises OSError."""
    with os.scandir(directory) as entries:
        return [name for _, name in sorted((entry.inode(), entry.name) for entry in entries)]


def _is_regular(path: str) -> bool:
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def _open(path: str) -> int:
    try:
        # Not updating the access time saves a fifth of the first read of a file.
        return os.open(path, _OPEN | os.O_NOATIME)
    except FileNotFoundError:
        raise
    except OSError:  # another user's file, or not supported by the file system; or the file is unreadable
        return os.open(path, _OPEN)


def _keep_writers_out(fd: int) -> bool:
    """Delay every writer until the file is closed; False if impossible. Raises BlockingIOError if there is a writer."""
    try:
        # The kernel sends a signal if the file is opened in the meantime; the default one would end this process.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        raise
    except OSError:  # no leases here, or another user's file, or not a file
        return False
    return True


_DEFAULTS = Config()


class Settings:
    """The last good `config.toml` of a spool; `problem` is the mistake in the present one, logged unless *quiet*."""

    def __init__(self, root: str, *, quiet: bool = False) -> None:
        self._root = root
        self._quiet = quiet
        self._path = f"{root}/{layout.CONFIG}"
        self.config = _DEFAULTS
        self.problem: str | None = None
        self._seen: tuple[int, ...] | None = None
        self.reload(force=True)

    def reload(self, *, force: bool = False) -> bool:
        """Read the file if it changed; return whether the configuration in force changed."""
        try:
            status = os.stat(self._path)
            seen: tuple[int, ...] = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
        except OSError as error:  # missing, or not readable now
            seen = (error.errno or 0,)
        if seen == self._seen and not force:
            return False
        self._seen = seen
        try:
            new = config.parse(read_config(self._root) or b"")
        except InvalidConfig as error:
            return self._keep(str(InvalidConfig(f"{error.what}, so {self._standing}", error.problems)))
        except OSError as error:
            self._seen = None  # the error may be temporary: the next look tries again
            why = error.strerror or str(error)
            text = cannot(
                "read", f"the configuration, so {self._standing}", why, where=self._path, remedy=remedy_for(error)
            )
            return self._keep(text)
        advice = "; ".join((*new.advice, *unknown_in(new.accept_from)))
        problem = cannot("fully use", "the configuration", advice, where=self._path) if advice else None
        self._keep(problem)
        changed, self.config = new != self.config, new
        return changed

    @property
    def _standing(self) -> str:
        """What is in force in place of a configuration that cannot be used."""
        return "the defaults apply" if self.config is _DEFAULTS else "the previous one stays in force"

    def _keep(self, problem: str | None) -> bool:
        if problem is not None and problem != self.problem and not self._quiet:
            import logging  # imported here, because a submission seldom has to warn

            logging.getLogger(__name__).warning("%s", problem)
        self.problem = problem
        return False
