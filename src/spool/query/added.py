"""The keys that plugins added to jobs that wait, from the files alone."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from spool.core import layout
from spool.core.model import JobDefaults
from spool.store.spool import Spool

if TYPE_CHECKING:
    from spool.formats.journal import Added

_MARK = b'["added",'


class AddedKeys:
    """What the journal of a spool has of them; it is read when they are first asked for."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def to(self, name: str, status: os.stat_result, defaults: JobDefaults) -> JobDefaults:
        """Return *defaults* with the keys added to that job file; the same object if there are none."""
        line = self._lines.get(name)
        if line is None or not line.keys or not line.is_for((status.st_ino, status.st_mtime_ns, status.st_size)):
            return defaults
        from spool.formats import jobfile  # few spools have plugins that add keys

        return jobfile.with_added(defaults, line.keys)

    @cached_property
    def _lines(self) -> dict[str, Added]:
        text = b""
        with suppress(OSError):  # only the owner of the spool can read it
            text = self._spool.file(layout.JOURNAL) or b""
        if _MARK not in text:
            return {}
        from spool.formats import journal

        return journal.recall(list(journal.parse(text))).added
