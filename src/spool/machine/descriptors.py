"""Descriptors: as many as this process may have, and some that are kept for what must not fail for want of one.

A dispatcher that cannot look into /proc can neither end a run nor tell whether one is over. So it holds a few
descriptors that it gives up for the moment of such a look, however many others it has open or the machine has left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable
from typing import TypeVar

from spool.core.errors import TOO_LITTLE

T = TypeVar("T")

_RESERVE = 4  # no step needs more at once
_reserve: list[int] = []
_before: list[tuple[int, int]] = []  # the limits that this process was given, once it has changed them


def keep() -> None:
    """Let no child of this process inherit what it has open beyond the first three descriptors.

    Its starter may have left a pipe or a lock open, which would be held as long as any child lives.
    """
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:  # no /proc: then nothing can be started either
        return
    for fd in map(int, names):
        if fd > 2:
            with contextlib.suppress(OSError):  # that of the listing is closed by now
                os.set_inheritable(fd, False)


def take_all() -> None:
    """Allow this process as many as it may have, and put some of them by. Its jobs get the limit that it was given."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _before:
        _before.append((soft, hard))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _put_by()


def limit_for_jobs() -> int | None:
    """Return how many descriptors a job may have, None if that is what this process may have."""
    return _before[0][0] if _before else None


def give_limit_to(pid: int) -> None:
    """Give a child of this process, which starts programs of others, the limit that this process was given."""
    if _before:
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _before[0])


def certainly(step: Callable[[], T]) -> T:
    """Do *step*, which opens and closes a few descriptors, also where there are none left but those put by."""
    try:
        return step()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE) or not _reserve:
            raise
    while _reserve:
        os.close(_reserve.pop())
    try:
        return step()
    finally:
        _put_by()


def is_shortage(error: OSError) -> bool:
    """Tell whether *error* says nothing about what was looked at: this process or the machine has too little."""
    return error.errno in TOO_LITTLE


def _put_by() -> None:
    with contextlib.suppress(OSError):
        while len(_reserve) < _RESERVE:
            _reserve.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
