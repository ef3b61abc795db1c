"""What a run reports of itself: its progress, its metrics, and the last line of its output."""

from __future__ import annotations

import os
import re
import stat

from spool.client.output import outputs
from spool.core import layout
from spool.formats.wire import metrics_in, one_line
from spool.store.spool import Spool

_TAIL = 8192  # bytes at the end of an output to search
_MOST = 24  # characters of a text
_BAR = re.compile(rb"(?<![\d.,])(100|\d{1,2})(?:[.,]\d+)? ?%\|")  # as tqdm draws it: " 37%|###7      | 37/100"


def progress_of(spool: Spool, name: str, run: int) -> str:
    """Return the progress of a run, "" if unknown. A text that the run has written takes precedence over a bar."""
    word = one_line(spool.record(name, run, layout.PROGRESS) or b"")
    if word:
        return word if len(word) <= _MOST else f"{word[: _MOST - 1]}…"
    where = outputs(spool, name, run)
    metadir = spool.layout.metadir(name, run)
    for path in (where.stderr, where.stdout):
        percentages = _BAR.findall(_tail(path, metadir)) if path is not None else []
        if percentages:
            return f"{percentages[-1].decode()}%"
    return ""


def metrics_of(spool: Spool, name: str, run: int) -> tuple[tuple[str, str], ...]:
    """Return the metrics that a run has written, the last value of each, in the order of their keys' first lines.

    Only the last few KiB of the file count.
    """
    return metrics_in(spool.record_end(name, run, layout.METRICS))


def last_line_of(spool: Spool, name: str, run: int) -> str:
    """Return the last line of a run's output that is not blank, as it is in a terminal after carriage returns."""
    where, metadir = outputs(spool, name, run), spool.layout.metadir(name, run)
    text = _tail(where.stdout, metadir) if where.stdout is not None else b""
    lines = text.decode("utf-8", "replace").replace("\r", "\n").splitlines()
    return next((found for line in reversed(lines) if (found := one_line(line))), "")


def _tail(path: str, metadir: str) -> bytes:
    """Return the end of a run's output; b"" for a file that was last written before the run began."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            begun_ns = os.stat(f"{metadir}/{layout.WRAPPER}").st_mtime_ns if not path.startswith(f"{metadir}/") else 0
            if not stat.S_ISREG(status.st_mode) or status.st_mtime_ns < begun_ns:
                return b""
            return os.pread(fd, _TAIL, max(0, status.st_size - _TAIL))
        finally:
            os.close(fd)
    except OSError:
        return b""
