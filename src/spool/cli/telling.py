"""The frame of every verb: messages on stderr, the exit code of an error, a spool and a dispatcher.

Without click, which takes longer to import than a submission takes.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from spool.client import autostart
from spool.client.submit import ensure_spool
from spool.core.errors import ExitCode, InvalidFile, SpoolError, cannot, shown
from spool.store.disk import remedy_for

if TYPE_CHECKING:
    from spool.store.spool import Spool  # imported when needed: a submission does not need it

# Errors that any file system can have; any other OSError is a bug and gets a traceback.
_EXPECTED = frozenset(
    {
        errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE,
        errno.ENFILE, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EXDEV, errno.EMLINK,
        errno.EISDIR, errno.EEXIST, errno.ENXIO, errno.ENOTEMPTY, errno.ENOMEM, errno.EAGAIN, errno.ESPIPE,
    }
)  # fmt: skip


def tell(message: str) -> None:
    """Print a message on stderr."""
    print(f"spool: {shown(message)}", file=sys.stderr)


def code_of(act: Callable[[], int]) -> int:
    """Run a verb and return its exit code; an expected error prints one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # do not fail if the terminal lacks a character
    try:
        return act()
    except InvalidFile as error:
        _tell_invalid(error)
        return int(error.exit_code)
    except SpoolError as error:
        tell(str(error))
        return int(error.exit_code)
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.errno not in _EXPECTED:
            raise
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "the disk"
        tell(cannot("use", where, error.strerror or str(error), remedy=remedy_for(error)))
        return int(ExitCode.SPOOL_UNUSABLE)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the terminal has shown ^C
        return int(ExitCode.INTERRUPTED)


def _tell_invalid(error: InvalidFile) -> None:
    """Print each problem of a file on its own line, as compilers do."""
    if len(error.problems) < 2:
        tell(str(error))
        return
    tell(f"cannot use {error.what}: it has {error.count:,} problems")
    for problem in error.problems:
        print(f"  {shown(problem.message)}", file=sys.stderr)


def made(root: str) -> Spool:
    """Return the spool at *root*, created if it does not exist. Raises SpoolUnusable."""
    if ensure_spool(root):
        tell(f"created a new spool in {root}")
    from spool.store.spool import Spool

    return Spool.open(root)


def ensure_dispatcher(root: str) -> None:
    """Start a dispatcher in the background if none is running, or say how."""
    problem = autostart.ensure(root)
    if problem is not None:
        tell(problem)
