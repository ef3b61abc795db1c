"""Writes the status page while a dispatcher is running: a listener that hears nothing, and looks at what changes.

It costs the dispatcher's passes nothing, and its own process no more than a small part of a processor: a page that
takes long to make is made more rarely.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from spool.core.eventnames import EventName
from spool.core.events import Event
from spool.core.layout import STAGING
from spool.core.model import SECOND_NS
from spool.formats.config import Config
from spool.listeners.base import Listener
from spool.listeners.discovery import page_path
from spool.page.content import ContentReader
from spool.page.document import render
from spool.store.disk import Disk

log = logging.getLogger(__name__)

EVERY_S = 3.0
"""How often the page is written at most."""

REFRESH_S = 15.0
"""How often it is written at least: run times go on, and a reader can tell that somebody still writes it."""

_FRESH_S = 60.0  # after this long without another, the page says that it is old
_SHARE = 50  # making it may use one part in N of a processor
_EVERYBODYS = 0o644  # who names a place outside of the spool wants it to be read there


class PageWriter(Listener):
    """Writes the page whole, in place of the one before. *config* returns the configuration in force."""

    name = "page"

    def __init__(self, root: str, config: Callable[[], Config]) -> None:
        self._root = root
        self._config = config
        self._disk = Disk(f"{root}/{STAGING}")
        self._content = ContentReader(root)
        self._complaint = ""
        self._pause_s = EVERY_S
        self._next = 0.0  # monotonic: not before
        self._due = 0.0  # monotonic: even if nothing has changed
        self._written_to: str | None = None

    def wants(self, name: EventName) -> bool:
        """Say that no event is of interest: what it shows stands in files."""
        return False

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Be done with it."""
        done()

    def tick(self) -> float | None:
        """Write the page if what it shows has changed, or is old, and its time has come."""
        path = page_path(self._config(), self._root)
        now = time.monotonic()
        if path is None or now < self._next:
            return EVERY_S if path is None else self._next - now
        if path == self._written_to and now < self._due and not self._content.changed():
            return min(self._pause_s, self._due - now)
        self._write(path)
        return self._pause_s

    def close(self) -> None:
        """Write for the last time: the dispatcher has left."""
        path = page_path(self._config(), self._root)
        if path is not None:
            self._write(path, served=False)

    def _write(self, path: str, *, served: bool = True) -> None:
        begun_ns = time.thread_time_ns()
        fresh_s = max(_FRESH_S, 4 * self._pause_s)
        text = render(self._content.read(time.time_ns(), served=served), EVERY_S, fresh_s)
        try:
            if path.startswith(f"{self._root}/"):
                self._disk.put(path, text)
            else:
                self._disk.put_beside(path, text, _EVERYBODYS)
            self._complaint, self._written_to = "", path
        except OSError as error:
            self._complain(f"cannot write the status page: {path}: {error.strerror or error}")
        self._pause_s = max(EVERY_S, _SHARE * (time.thread_time_ns() - begun_ns - self._content.aside_ns) / SECOND_NS)
        now = time.monotonic()
        self._next, self._due = now + self._pause_s, now + max(REFRESH_S, self._pause_s)

    def _complain(self, words: str) -> None:
        if words != self._complaint:
            log.error("%s", words)
        self._complaint = words
