"""One dispatcher for each spool: an flock on `.lock`, held for life; spool never unlinks that file (FORMAT 1.9).

The kernel releases it when the process ends, however it ends. The descriptor is closed on exec, so no job inherits the
lock.

Another process may delete or replace `.lock`, and a second dispatcher could lock the new file. So the directory of the
spool is locked as well, and first: it cannot be replaced unnoticed. If other users may read the directory but not write
it, it stays unlocked, because any of them could otherwise lock every dispatcher out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from spool.store.disk import is_name_of, status_of

_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_POLL_S = 0.02
_PATIENCE_S = 1.0
_BEING_DELETED_S = 0.5  # how long the deletion of a whole spool may take after `.lock`


def serving(path: str) -> bool | None:
    """Whether a dispatcher serves the spool whose lock is *path*; None: one does, but `.lock` was deleted or replaced.

    Cheap for a command that runs briefly.
    """
    is_locked = _is_locked(path, os.O_RDONLY | _FILE)
    if is_locked:
        return True
    root = os.path.dirname(path)
    try:
        guarded = _may_be_guarded(os.stat(root)) and _is_locked(root, _DIRECTORY)
    except OSError:
        guarded = False
    if not guarded:
        return False
    # A member of a group that owns the spool cannot open another member's file.
    return True if is_locked is None and os.path.isfile(path) else None


def dispatcher_lives(path: str) -> bool:
    """Whether a dispatcher serves the spool whose lock is *path*."""
    return serving(path) is not False


class Lock:
    """The lock of a spool, held for the life of this process."""

    def __init__(self, path: str, wait_s: float = _PATIENCE_S) -> None:
        """Take it. A command that checks for a dispatcher has it for a moment, so taking it includes a short wait.

        Raises LockHeld if another dispatcher has it, and OSError if no file can be created there.
        """
        self.path = path
        self.held = False
        self.trouble: OSError | None = None  # why the last attempt to recreate `.lock` failed
        self._missed_at_s: float | None = None
        deadline = time.monotonic() + wait_s
        self._root = os.open(os.path.dirname(path), _DIRECTORY)
        try:
            status = os.fstat(self._root)
            if status.st_uid != os.geteuid():  # FORMAT 16; checked before any file is created there
                from spool.store.ownership import not_ours

                raise not_ours(os.path.dirname(path), status.st_uid)
            self._guarded = _may_be_guarded(status)
            if self._guarded:
                _lock(self._root, path, deadline)
            self._file = _locked_file(path, deadline)
        except BaseException:
            os.close(self._root)
            raise
        self._of_root, self._of_file = status, os.fstat(self._file)
        self.held = True

    def keep(self, *, renew: bool = True) -> bool:
        """Recreate `.lock` if it was deleted or replaced; return whether that was done now.

        Raises SpoolUnusable, after releasing the lock, if the spool's directory is gone or replaced, or if another
        dispatcher may hold the new file. An error that may be temporary is left to the next call, and `trouble`
        describes it. Without *renew* nothing is created.
        """
        root = os.path.dirname(self.path)
        try:
            status = os.stat(root)
            if not os.path.samestat(status, self._of_root):
                self._lost("another directory has taken its place")
            if status.st_uid != os.geteuid():
                self._lost("it belongs to another user now")
        except (FileNotFoundError, NotADirectoryError):
            self._lost("the directory is gone")
        except OSError:
            return False
        try:
            if os.path.samestat(os.lstat(self.path), self._of_file):
                self._missed_at_s = self.trouble = None
                return False
        except FileNotFoundError:
            if not os.path.isdir(f"{root}/queued"):
                self._lost("it is being deleted")
        except OSError:
            return False
        now = time.monotonic()
        self._missed_at_s = self._missed_at_s or now
        if self._guarded and now - self._missed_at_s < _BEING_DELETED_S:
            return False
        return renew and self._renew(now)

    def _renew(self, now: float) -> bool:
        from spool.core.errors import LockHeld

        try:
            file = _locked_file(self.path, now + _PATIENCE_S)
        except LockHeld:
            self._lost("its .lock was replaced and another dispatcher holds the new one")
        except OSError as error:
            self.trouble = error
            return False
        os.close(self._file)
        self._file, self._of_file = file, os.fstat(file)
        self._missed_at_s = self.trouble = None
        return True

    def _lost(self, why: str) -> None:
        from spool.core.errors import SpoolUnusable, cannot

        self.held = False
        raise SpoolUnusable(
            cannot("keep serving", os.path.dirname(self.path), why, remedy="active runs continue; the dispatcher exits")
        )

    def release(self) -> None:
        """Release it."""
        self.held = False
        for fd in (self._file, self._root):
            os.close(fd)


def _locked_file(path: str, deadline: float) -> int:
    while True:
        # Checked first: opening and closing a FIFO wakes every watcher of the directory, this dispatcher included.
        if (found := status_of(path)) is not None:
            _check(found, path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | _FILE, 0o600)
        try:
            _check(os.fstat(fd), path)
            _lock(fd, path, deadline)
            if is_name_of(os.fstat(fd), path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # deleted or replaced meanwhile


def _check(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FileExistsError(errno.EEXIST, "it is not a regular file", path)


def _lock(fd: int, path: str, deadline: float) -> None:
    from filelock import lock_descriptor

    from spool.core.errors import LockHeld

    while not lock_descriptor(fd, blocking=False):
        if time.monotonic() >= deadline:
            raise LockHeld(path)
        time.sleep(_POLL_S)


def _is_locked(path: str, flags: int) -> bool | None:
    """Whether a process holds the lock of *path*; None if that is unknown."""
    try:
        fd = os.open(path, flags)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _may_be_guarded(root: os.stat_result) -> bool:
    """Whether everyone who can read the directory, and so could lock it, can also write it."""
    return all(not root.st_mode & reads or root.st_mode & writes for reads, writes in ((0o40, 0o20), (0o4, 0o2)))
