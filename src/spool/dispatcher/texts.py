"""The text of job files: what it says, and the `.error` file beside one that says nothing that can be used."""

from __future__ import annotations

import logging

from spool.core.model import Spec
from spool.dispatcher.settings import Settings
from spool.formats import jobfile
from spool.store.locked import LockedSpool

log = logging.getLogger(__name__)

_SAME_TEXT = 512  # different texts that are remembered: many jobs often have one


class Texts:
    """Reads job files for a look."""

    def __init__(self, spool: LockedSpool, settings: Settings) -> None:
        self._spool = spool
        self._settings = settings
        self._parsed: dict[bytes, Spec] = {}

    def parse(self, name: str, data: bytes) -> Spec:
        """Return what the file of job *name* says, with the configuration's values where it says nothing.

        Raises InvalidJob.
        """
        spec = self._parsed.get(data)
        if spec is None:
            spec = jobfile.parse(data, name=name, default_kill_grace_ns=self._settings.config.kill_grace_ns)
            # Of the same text under another name the same is true, but for what refers to the name.
            if spec.depends_on is None and not spec.is_array:
                if len(self._parsed) >= _SAME_TEXT:
                    self._parsed.clear()
                self._parsed[data] = spec
        return spec

    def forget(self) -> None:
        """Read every text anew: the configuration has changed."""
        self._parsed.clear()

    def complain(self, place: str, name: str, text: str) -> None:
        """Say what is wrong with a job file, in the `.error` file beside it."""
        try:
            self._spool.complain(self._spool.layout.error_file(place, name), text)
        except OSError as error:
            log.warning("cannot say what is wrong with job %s: %s", name, error.strerror)

    def withdraw_complaint(self, place: str, name: str) -> None:
        """Take the `.error` file beside a job file away."""
        try:
            self._spool.disk.discard(self._spool.layout.error_file(place, name))
        except IsADirectoryError:
            return  # a directory of that name is none of ours
        except OSError as error:  # the next look tries again
            log.warning("cannot take away what was wrong with job %s: %s", name, error.strerror)
