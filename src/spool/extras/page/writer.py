"""Writes the status page while a dispatcher is running: a listener that ignores events and looks for itself.

It costs the dispatcher's passes nothing, and its own process only a small part of a processor: a page that takes long
to make is made less often.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from msgspec.structs import replace

from spool.core.errors import SpoolError
from spool.core.layout import STAGING
from spool.core.model import SECOND_NS
from spool.doctor import Check, Findings, Subject, good, warn
from spool.extras.page import page_path
from spool.extras.page.document import render
from spool.formats.config import Config
from spool.listeners import Listener
from spool.query.overview import Overview, OverviewReader
from spool.store.disk import Disk

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""The page is written once in this time, or less often: run times go on, and readers see that the page is alive."""

_SHARE = 50  # making it may use one part in N of a processor
_EVERYBODYS = 0o644  # a path outside of the spool is given so that others can read the page there


class PageWriter(Listener):
    """Replaces the page as a whole. *config* returns the configuration in force."""

    name = "page"

    def __init__(self, root: str, config: Callable[[], Config]) -> None:
        self._root = root
        self._config = config
        self._disk = Disk(f"{root}/{STAGING}")
        self._overviews = OverviewReader(root)
        self._seen: Overview | None = None
        self._complaint = ""
        self._pause_s = EVERY_S
        self._next = 0.0  # monotonic: the next write

    def tick(self) -> float | None:
        """Write the page if its time has come."""
        path = page_path(self._config(), self._root)
        if path is not None and time.monotonic() >= self._next:
            self._write(path)
        return max(0.0, self._next - time.monotonic()) if path is not None else EVERY_S

    def close(self) -> None:
        """Write a last time: the dispatcher has left."""
        path = page_path(self._config(), self._root)
        if path is not None:
            self._write(path, served=False)

    def _write(self, path: str, *, served: bool = True) -> None:
        begun_ns = time.thread_time_ns()
        try:
            now_ns = time.time_ns()
            seen = self._overviews.look(now_ns) or self._seen
            assert seen is not None
            view = seen.view or (self._seen.view if self._seen is not None else None)  # the machine is still the same
            self._seen = replace(seen, view=view, at_ns=now_ns)
            private = path.startswith(f"{self._root}/")
            text = render(self._seen, self._root, self._pause_s, served=served, private=private)
            if private:
                self._disk.put(path, text)
            else:
                self._disk.put_beside(path, text, _EVERYBODYS)
            complaint = ""
        except (OSError, SpoolError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            complaint = f"cannot write the status page: {path}: {why}"
            if complaint != self._complaint:
                log.error("%s", complaint)
        self._complaint = complaint
        self._pause_s = max(EVERY_S, _SHARE * (time.thread_time_ns() - begun_ns) / SECOND_NS)
        self._next = time.monotonic() + self._pause_s


def _check(subject: Subject) -> Findings:
    path = page_path(subject.config, subject.root)
    if path is None:
        return
    if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK | os.X_OK):
        yield warn(f"{path} cannot be written", "fix `status_page` in config.toml")
    else:
        yield good(f"written to {path}")


CHECKS = (Check("status page", _check),)
"""The check, as a row of the doctor's table."""
