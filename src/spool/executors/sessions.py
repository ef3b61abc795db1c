"""Where the tmux server of a spool is found, and what the sessions in it are called."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from contextlib import suppress

from spool.core import layout
from spool.core.errors import SpoolError, cannot

_ELSEWHERE = "/tmp"  # noqa: S108  # for a directory of which it is looked at whose it is
_LONGEST_SOCKET = 107  # bytes: sun_path of unix(7), less its NUL


def socket_of(spool_dir: str) -> str:
    """Return the path of the server's socket: in the spool, or where its real path is too long for one, in /tmp.

    Raises SpoolError if the place in /tmp is somebody else's.
    """
    root = os.path.realpath(spool_dir)  # a spool has one server, whoever calls it what
    path = layout.Layout(root).at(layout.TERMINALS)
    if len(os.fsencode(path)) <= _LONGEST_SOCKET:
        return path
    directory = f"{_ELSEWHERE}/spool-{os.getuid()}"
    with suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        why = "the spool's path is too long for a socket, and this is not a directory of yours alone"
        raise SpoolError(cannot("use", "tmux", why, where=directory))
    return f"{directory}/{hashlib.sha256(os.fsencode(root)).hexdigest()[:24]}"


def session_of(job: str, run: int) -> str:
    """Return the name of a run's session: another one for any other run, and one that tmux does not change.

    tmux makes `_` of dots and colons. A job's name has no `~` and no `+`, so `train.v2` can be `train~v2`.
    """
    return re.sub(r"[^A-Za-z0-9_-]", lambda found: "~" if found[0] == "." else f"+{ord(found[0]):x}+", job) + f"/{run}"
