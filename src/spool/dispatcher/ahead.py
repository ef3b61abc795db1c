"""The start that will probably be the next, made ready while there is nothing else to do.

When a run ends, what starts in its place has been known for long. So all of its metadir that does not depend on the
moment lies in the staging directory by then. Nobody sees it there, and if the guess was wrong it is thrown away.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from spool.core import layout
from spool.dispatcher.scripts import Scripts
from spool.executors import Executor
from spool.formats.config import Config
from spool.state.table import JobFile, Live
from spool.store.config import Settings
from spool.store.locked_spool import LockedSpool
from spool.store.spool import read_bytes


@dataclass(frozen=True, slots=True)
class Ready:
    """The part of a metadir that was made ahead, and for which start."""

    start: tuple[object, ...]
    config: Config
    staged: str
    script: bytes

    def serves(self, live: Live, file: JobFile, config: Config) -> bool:
        """Whether it is what would be made for *live* now."""
        return self.config is config and self.start == _essence(live, file)


class Ahead:
    """Has at most one start ready."""

    def __init__(self, spool: LockedSpool, settings: Settings, scripts: Scripts) -> None:
        self._spool = spool
        self._settings = settings
        self._scripts = scripts
        self._ready: Ready | None = None

    def prepare(self, live: Live, file: JobFile, executor: Executor) -> bytes | None:
        """Make the start of *live*, which is no run yet, ready; return its script. None: its file has changed.

        Raises OSError, and SpoolError for what no process can be given.
        """
        if self._ready is not None and not self._ready.serves(live, file, self._settings.config):
            self.drop()
        if self._ready is None:
            path = self._spool.layout.job_file(layout.QUEUED, live.name)
            text = read_bytes(path)
            status = os.lstat(path)
            if text is None or (status.st_ino, status.st_mtime_ns, len(text)) != (file.inode, file.mtime_ns, file.size):
                return None
            script = self._scripts.render(live, executor)
            staged = self._spool.stage({layout.SPEC_COPY: text, layout.WRAPPER: script})
            self._ready = Ready(_essence(live, file), self._settings.config, staged, script)
        return self._ready.script

    def take(self, live: Live, file: JobFile) -> Ready | None:
        """Return what is ready for the start of *live*, which is the caller's from now on."""
        if self._ready is None or not self._ready.serves(live, file, self._settings.config):
            return None
        try:
            whole = set(os.listdir(self._ready.staged)) == {layout.SPEC_COPY, layout.WRAPPER}
        except OSError:
            whole = False
        if not whole:  # somebody has swept the staging directory
            self.drop()
            return None
        ready, self._ready = self._ready, None
        return ready

    def drop(self) -> None:
        """Throw away what is ready."""
        if self._ready is not None:
            with contextlib.suppress(OSError):  # the next dispatcher sweeps it away
                self._spool.disk.remove_tree(self._ready.staged)
            self._ready = None


def _essence(live: Live, file: JobFile) -> tuple[object, ...]:
    """Return all that a start's records depend on, but for the moment and the configuration."""
    version = (file.inode, file.mtime_ns, file.size)
    return (live.name, live.run, version, live.spec, live.grant, live.series, live.executor)
