"""The log on stderr, of the dispatcher and of the listeners: lines with a time, or with a level for the journal."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from spool.core.errors import shown

# Line prefixes with a meaning for systemd's journal (sd-daemon(3)).
_LEVELS = {
    logging.DEBUG: "<7>",
    logging.INFO: "<6>",
    logging.WARNING: "<4>",
    logging.ERROR: "<3>",
    logging.CRITICAL: "<2>",
}


class _Lines(logging.Formatter):
    """One line for each message; with a time on a terminal or in a file, with a level for the journal."""

    def __init__(self, *, journald: bool) -> None:
        super().__init__("%(message)s" if journald else "%(asctime)s %(levelname)s %(message)s")
        self._journald = journald

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if self._journald:
            return _LEVELS.get(record.levelno, "<6>") + shown(text.replace("\n", " "))
        return shown(text, "\n\t")


class _Stderr(logging.StreamHandler[TextIO]):
    """The log on stderr. A line that its disk has no room for is lost, and no reason to print a traceback there."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def set_up_logging(level: str, *, journald: bool) -> None:
    """Send the log to stderr."""
    handler = _Stderr(sys.stderr)
    handler.setFormatter(_Lines(journald=journald))
    root = logging.getLogger("spool")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())
