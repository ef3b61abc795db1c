"""Why spool itself has held a job: `held/NAME.toml.reason` (FORMAT 15.3), from the no until it is released."""

from __future__ import annotations

from spool.core.layout import HELD, QUEUED
from spool.state.table import JobFile
from spool.store.disk import status_of
from spool.store.locked_spool import LockedSpool


class Refusals:
    """The reasons on the disk."""

    def __init__(self, spool: LockedSpool) -> None:
        self._spool = spool

    def hold(self, name: str, why: str) -> bool:
        """Move a waiting job to `held/`, and say why there; False if another job of its name lies there."""
        disk, path = self._spool.disk, self._spool.layout.reason_file(name)
        if status_of(self._spool.layout.job_file(HELD, name)) is not None:
            return False
        # In this order a crash leaves a reason without a job, which the next look takes away.
        disk.put(path, f"{why}\n".encode())
        try:
            disk.move(self._spool.layout.job_file(QUEUED, name), self._spool.layout.job_file(HELD, name))
        except FileExistsError:
            disk.discard(path)
            return False
        except FileNotFoundError:  # it was moved or deleted meanwhile
            disk.discard(path)
        return True

    def why(self, name: str, file: JobFile) -> str:
        """Return why spool has held this version of a job's file, "" if it has not."""
        return self._spool.why_held(name, file.mtime_ns)

    def withdraw(self, name: str) -> None:
        """Take the reason away: the job is no longer held by us."""
        self._spool.disk.discard(self._spool.layout.reason_file(name))
