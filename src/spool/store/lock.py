"""One dispatcher for each spool: an flock on `.lock`, held for life; the file is never unlinked (FORMAT 1.9).

The kernel lets go of it when the process ends, however it ends. The descriptor is closed on exec, so no job
inherits the lock.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from spool.core.errors import LockHeld

if TYPE_CHECKING:
    from filelock import UnixFileLock


def dispatcher_lives(path: str) -> bool:
    """Whether some process holds the lock *path*. Without filelock, which costs a short-lived command its start."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def hold(path: str, wait_s: float = 1.0) -> UnixFileLock:
    """Take the lock for the life of this process and return it.

    A command that looks whether a dispatcher lives holds the lock for a moment, so a little waiting is part of
    taking it. Raises LockHeld if another dispatcher has it.
    """
    from filelock import Timeout, UnixFileLock

    lock = UnixFileLock(path, mode=0o600)
    try:
        lock.acquire(timeout=wait_s, poll_interval=0.02)
    except Timeout:
        raise LockHeld(path) from None
    return lock
