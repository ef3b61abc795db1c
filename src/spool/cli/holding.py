"""Saying that a job that is waited for is held, and why: without a word the wait would look like a hang."""

from __future__ import annotations

import os

from spool.cli.group import tell
from spool.client.waiting import Awaited
from spool.core.layout import HELD
from spool.store.spool import Spool


class Holds:
    """What was said of the jobs that somebody waits for: each hold once."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._told: set[str] = set()

    def see(self, awaited: Awaited) -> None:
        """Say on stderr that the job is held, if the last look has found it so and that is new."""
        name = awaited.name
        if not awaited.held:
            self._told.discard(name)
        elif name not in self._told:
            self._told.add(name)
            why = self._why(name)
            tell(f"job {name} is held{f': {why}' if why else ''}; `spool release {name}` lets it start")

    def _why(self, name: str) -> str:
        try:
            status = os.stat(self._spool.layout.job_file(HELD, name))
        except OSError:  # it was released this very moment
            return ""
        return self._spool.why_held(name, status.st_mtime_ns)
