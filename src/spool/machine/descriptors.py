"""Descriptors: the limit of this process, and a reserve for steps that must not fail for lack of one.

A dispatcher that cannot read /proc can neither end a run nor tell whether one is over. So it holds a few descriptors
that it closes for the moment of such a look, in case there are no others.
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
_before: list[tuple[int, int]] = []  # the original limits of this process, once it has changed them


def keep() -> None:
    """Close inherited descriptors beyond the first three on exec, so that no child inherits them.

    The starter may have left a pipe or a lock open, which would be held while any child lives.
    """
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:  # no /proc: then nothing can be started either
        return
    for fd in map(int, names):
        if fd > 2:
            with contextlib.suppress(OSError):  # the descriptor of the listing is closed by now
                os.set_inheritable(fd, False)


def take_all() -> None:
    """Raise the limit of this process to the maximum, and reserve some descriptors. Jobs get the original limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _before:
        _before.append((soft, hard))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _put_by()


def limit_for_jobs() -> int | None:
    """Return the descriptor limit for jobs, None if it is that of this process."""
    return _before[0][0] if _before else None


def give_limit_to(pid: int) -> None:
    """Give a child of this process, which starts foreign programs, the original limit."""
    if _before:
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _before[0])


def certainly(step: Callable[[], T]) -> T:
    """Return *step*(), which opens and closes a few descriptors, using the reserve if no others are left."""
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
    """Whether *error* means a shortage of this process or the machine, and says nothing about the file."""
    return error.errno in TOO_LITTLE


def _put_by() -> None:
    with contextlib.suppress(OSError):
        while len(_reserve) < _RESERVE:
            _reserve.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
