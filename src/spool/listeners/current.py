"""The configuration in force, as the process of the listeners sees it."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from spool.core import layout
from spool.core.errors import InvalidConfig
from spool.formats import config
from spool.formats.config import Config
from spool.store.spool import read_bytes


class Current:
    """Called, it returns the last good `config.toml`; from any thread. What is wrong with it the dispatcher says."""

    def __init__(self, root: str) -> None:
        self._path = f"{root}/{layout.CONFIG}"
        self._mutex = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._config = Config()

    def __call__(self) -> Config:
        """Return what is in force now."""
        with self._mutex:
            try:
                status = os.stat(self._path)
                seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            except OSError:
                seen = None
            if seen != self._seen:
                self._seen = seen
                with suppress(InvalidConfig):
                    self._config = config.parse(read_bytes(self._path) or b"")
            return self._config
