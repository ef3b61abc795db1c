"""The one module that writes to the disk.

Every change of a spool is one of the primitives of :class:`Disk`, and each primitive either happened or did
not; that is what lets a test cut the program off before each of them in turn. The composite operations below
them keep one promise: whatever cuts them off leaves the old text or the new, never half of one.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


class Disk:
    """The primitives, and what is made of them. *staging* is a directory of the same file system."""

    def __init__(self, staging: str) -> None:
        self.staging = staging
        self._serial = 0
        self._pid = os.getpid()

    # Primitives: each is one change that a crash can fall before or after.

    def create(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Create the file *path* with *data*; FileExistsError if there is one. A crash may leave it short."""
        fd = os.open(path, _CREATE, mode)
        try:
            _write_all(fd, data)
        except OSError:  # no room for the text, and a name without it would say something else
            _forget(path)
            raise
        finally:
            os.close(fd)

    def append(self, fd: int, data: bytes) -> None:
        """Append *data* to an open log: all of it, or nothing where the disk is full.

        A crash may leave a last line that is short.
        """
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except OSError:
                os.ftruncate(fd, os.fstat(fd).st_size - (len(data) - len(view)))
                raise

    def rename(self, old: str, new: str) -> None:
        """Rename *old* to *new*, replacing a file of that name."""
        os.rename(old, new)

    def rename_new(self, old: str, new: str) -> bool:
        """Rename *old* to *new* in one step; FileExistsError if *new* exists. False: the file system cannot."""
        from spool.store.renameat2 import rename_new

        return rename_new(old, new)

    def link(self, old: str, new: str) -> None:
        """Give *old* a second name; FileExistsError if *new* exists."""
        os.link(old, new, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        """Take a name away; FileNotFoundError if it is gone already."""
        os.unlink(path)

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        """Create a directory; FileExistsError if there is one."""
        os.mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def sync_file(self, path: str) -> None:
        """Wait until the file's content is on the disk."""
        _sync(path, os.O_RDONLY)

    def sync_directory(self, path: str) -> None:
        """Wait until the names in the directory *path* are on the disk."""
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def sync_log(self, fd: int) -> None:
        """Wait until what was appended to an open log is on the disk."""
        os.fdatasync(fd)

    # Composites.

    def staged(self, data: bytes, *, durable: bool = False) -> str:
        """Write *data* to a new file in the staging directory and return its path."""
        while True:
            path = self._fresh()
            try:
                self.create(path, data)
            except FileExistsError:  # left behind by an earlier process of this pid
                continue
            except FileNotFoundError:
                if not self.ensure_staging():
                    raise
                continue
            except OSError:
                _forget(path)
                raise
            if durable:
                try:
                    self.sync_file(path)
                except OSError:
                    _forget(path)
                    raise
            return path

    def put(self, path: str, data: bytes, *, durable: bool = False) -> None:
        """Make *path* hold *data*: the old content or the new is seen, nothing between."""
        staged = self.staged(data, durable=durable)
        try:
            self.rename(staged, path)
        except OSError:
            _forget(staged)
            raise
        if durable:
            self.sync_directory(os.path.dirname(path))

    def put_beside(self, path: str, data: bytes, mode: int) -> None:
        """Like `put`, for a file outside of the spool that has one writer: staged beside it, readable by *mode*."""
        directory, name = os.path.split(path)
        staged = f"{directory}/.{name}.new"
        self.discard(staged)
        self.create(staged, data, mode)
        try:
            os.chmod(staged, mode)  # whatever the umask
            self.rename(staged, path)
        except OSError:
            _forget(staged)
            raise

    def publish(self, path: str, data: bytes, *, durable: bool = False) -> None:
        """Make *path* appear whole; FileExistsError, and nothing changed, if it exists."""
        staged = self.staged(data, durable=durable)
        try:
            self.link(staged, path)
        finally:
            self.unlink(staged)
        if durable:
            self.sync_directory(os.path.dirname(path))

    def move(self, old: str, new: str) -> None:
        """Move a file without replacing one; FileExistsError if *new* exists, FileNotFoundError if *old* is gone.

        Where the file system cannot do that in one step it is a link and an unlink. Cut off between the two, the file
        has both names, which the next dispatcher recognises by the inode.
        """
        if self.rename_new(old, new):
            return
        try:
            self.link(old, new)
        except PermissionError:
            # The kernel lets nobody link a file of another user that he may not write (fs.protected_hardlinks).
            if os.path.lexists(new):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new) from None
            self.rename(old, new)
            return
        self.drop(old, new)

    def drop(self, path: str, other: str) -> bool:
        """Take the name *path* away if it is a second one of the file *other*; return whether it was.

        Whatever somebody puts in its place meanwhile stays: what is moved aside is looked at before it goes.
        """
        aside = self._fresh()
        try:
            found, kept = os.lstat(path), os.lstat(other)
            if not os.path.samestat(found, kept):
                return False
            self.rename(path, aside)
        except FileNotFoundError:
            return False
        if os.path.samestat(os.lstat(aside), kept):
            return self.discard(aside)
        try:
            self.move(aside, path)
        except FileExistsError:  # and somebody has put a third one there
            self.rename(aside, f"{path}.{time.time_ns()}")
        return False

    def discard(self, path: str) -> bool:
        """Take a name away if it is there; return whether it was."""
        try:
            self.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def ensure_directory(self, path: str) -> bool:
        """Create a directory unless it exists; return whether it was created."""
        try:
            self.mkdir(path)
        except FileExistsError:
            return False
        return True

    def ensure_staging(self) -> bool:
        """Create the staging directory if it is missing (FORMAT 1.8); return whether there is one now."""
        if not os.path.isdir(self.staging):
            self.ensure_directory(self.staging)
        return os.path.isdir(self.staging)

    def remove_tree(self, path: str) -> None:
        """Remove a directory with all that is in it; links are removed, never followed."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with os.scandir(fd) as entries:
                found = [(f"{path}/{entry.name}", entry.is_dir(follow_symlinks=False)) for entry in entries]
        finally:
            os.close(fd)
        for name, is_directory in found:
            if is_directory:
                self.remove_tree(name)
            else:
                self.discard(name)
        self.rmdir(path)

    def sync_directories(self, paths: Iterable[str]) -> None:
        """Sync each of *paths*; one that is gone is passed over."""
        for path in paths:
            try:
                self.sync_directory(path)
            except FileNotFoundError:
                continue

    def _fresh(self) -> str:
        self._serial += 1
        return f"{self.staging}/{self._pid}.{self._serial}"


def same_file(one: str, other: str) -> bool:
    """Whether two names are of one file."""
    try:
        return is_name_of(os.lstat(one), other)
    except OSError:
        return False


def is_name_of(status: os.stat_result, path: str) -> bool:
    """Whether *path* is a name of the file that *status* is of."""
    try:
        return os.path.samestat(status, os.lstat(path))
    except OSError:
        return False


def open_log(path: str) -> int:
    """Open an append-only log of the spool and return the descriptor."""
    return os.open(path, _APPEND, 0o600)


def disk_is_full(error: OSError) -> bool:
    """Whether *error* says that there is no room for more."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync(path: str, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(fd)


def _forget(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return
