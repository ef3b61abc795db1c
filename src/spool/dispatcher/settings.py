"""The configuration in force: read again when it changes; a broken one is reported and the last good one stays."""

from __future__ import annotations

import logging
import os

from spool.core import layout
from spool.core.errors import InvalidConfig
from spool.formats import config
from spool.formats.config import Config
from spool.store.spool import Spool, read_bytes

log = logging.getLogger(__name__)


class Settings:
    """The last good `config.toml` of a spool. `problem` says what is wrong with the one on disk now."""

    def __init__(self, spool: Spool) -> None:
        self._path = spool.layout.at(layout.CONFIG)
        self.config = Config()
        self.problem: str | None = None
        self._seen: tuple[int, int, int] | None = None
        self.reload(force=True)

    def reload(self, *, force: bool = False) -> bool:
        """Read the file if it changed; return whether what is in force changed."""
        try:
            status = os.stat(self._path)
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        except OSError:  # not there, or a link that leads nowhere, or round in a circle
            seen = None
        if seen == self._seen and not force:
            return False
        self._seen = seen
        try:
            new = config.parse(read_bytes(self._path) or b"")
        except InvalidConfig as error:
            self.problem = str(error)
            log.warning("%s; %s", error, "the defaults are in force" if force else "what was in force stays so")
            return False
        self.problem = None
        changed, self.config = new != self.config, new
        return changed

    @property
    def executor(self) -> str:
        """The executor of jobs that name none."""
        return self.config.executor

    @property
    def prolog(self) -> str | None:
        """What runs before every job."""
        return self.config.prolog

    @property
    def epilog(self) -> str | None:
        """What runs after every job."""
        return self.config.epilog
