"""The configuration in force: reloaded when it changes; a broken one is reported, and the last good one stays."""

from __future__ import annotations

import os

from spool.core import layout
from spool.core.errors import InvalidConfig, cannot
from spool.formats import config
from spool.formats.config import Config
from spool.store.disk import remedy_for
from spool.store.glance import read_config
from spool.store.ownership import unknown_in
from spool.store.spool import Spool

_DEFAULTS = Config()


def _warn(text: str) -> None:
    import logging  # imported here, because a submission seldom has to warn

    logging.getLogger(__name__).warning("%s", text)


class Settings:
    """The last good `config.toml` of a spool. `problem` describes the mistake in the present one."""

    def __init__(self, spool: Spool) -> None:
        self._root = spool.root
        self._path = spool.layout.at(layout.CONFIG)
        self.config = _DEFAULTS
        self.problem: str | None = None
        self._seen: tuple[int, ...] | None = None
        self.reload(force=True)

    def reload(self, *, force: bool = False) -> bool:
        """Read the file if it changed; return whether the configuration in force changed."""
        try:
            status = os.stat(self._path)
            seen: tuple[int, ...] = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
        except OSError as error:  # missing, or not readable now
            seen = (error.errno or 0,)
        if seen == self._seen and not force:
            return False
        self._seen = seen
        try:
            new = config.parse(read_config(self._root) or b"")
        except InvalidConfig as error:
            return self._keep(str(InvalidConfig(f"{error.what}, so {self._standing}", error.problems)))
        except OSError as error:
            self._seen = None  # the error may be temporary: the next look tries again
            why = error.strerror or str(error)
            text = cannot(
                "read", f"the configuration, so {self._standing}", why, where=self._path, remedy=remedy_for(error)
            )
            return self._keep(text)
        advice = "; ".join((*new.advice, *unknown_in(new.accept_from)))
        problem = cannot("fully use", "the configuration", advice, where=self._path) if advice else None
        if problem is not None and problem != self.problem:
            _warn(problem)
        self.problem = problem
        changed, self.config = new != self.config, new
        return changed

    @property
    def _standing(self) -> str:
        """What is in force in place of a configuration that cannot be used."""
        return "the defaults apply" if self.config is _DEFAULTS else "the previous one stays in force"

    def _keep(self, problem: str) -> bool:
        if problem != self.problem:
            _warn(problem)
        self.problem = problem
        return False
