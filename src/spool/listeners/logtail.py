"""The end of a job's log, fit for a message."""

from __future__ import annotations

import os
import re
import stat

from spool.core import layout

_MOST_BYTES = 64 << 10
_MOST_COLUMNS = 300
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def last_lines(metadir: str, count: int) -> str:
    """Return the last *count* lines of the run's log as plain text, "" if there is none: the job had another."""
    data = _end_of(f"{metadir}/{layout.JOB_LOG}") if count > 0 else b""
    lines = []
    for line in data.decode(errors="replace").rstrip("\n").split("\n")[-count:] if data else []:
        shown = _ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2]  # what a terminal would show of a progress bar
        plain = "".join(character for character in shown if character.isprintable() or character == "\t")
        lines.append(plain if len(plain) <= _MOST_COLUMNS else f"{plain[:_MOST_COLUMNS]}...")
    return "\n".join(lines)


def _end_of(path: str) -> bytes:
    try:
        # Not to hang where a job has put something else in its place.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return b""
        return os.pread(fd, _MOST_BYTES, max(0, status.st_size - _MOST_BYTES))
    except OSError:
        return b""
    finally:
        os.close(fd)
