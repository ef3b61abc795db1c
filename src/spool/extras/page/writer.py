"""Writes the status page while a dispatcher is running: a listener that ignores events and watches for changes.

It costs the dispatcher's passes nothing, and its own process only a small part of a processor: a page that takes long
to make is made less often.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from spool.core.events import Event, EventName
from spool.core.layout import STAGING
from spool.core.model import SECOND_NS
from spool.extras.page import page_path
from spool.extras.page.content import ContentReader
from spool.extras.page.document import render
from spool.formats.config import Config
from spool.listeners import Listener
from spool.store.disk import Disk

log = logging.getLogger(__name__)

EVERY_S = 3.0
"""The page is written at most once in this time."""

REFRESH_S = 15.0
"""The page is written at least once in this time: run times go on, and readers can see that the writer is alive."""

_FRESH_S = 60.0  # after this time without another, the page says that it is old
_SHARE = 50  # making it may use one part in N of a processor
_EVERYBODYS = 0o644  # a path outside of the spool is given so that others can read the page there


class PageWriter(Listener):
    """Replaces the page as a whole. *config* returns the configuration in force."""

    name = "page"

    def __init__(self, root: str, config: Callable[[], Config]) -> None:
        self._root = root
        self._config = config
        self._disk = Disk(f"{root}/{STAGING}")
        self._content = ContentReader(root, config)
        self._complaint = ""
        self._pause_s = EVERY_S
        self._next = 0.0  # monotonic: the earliest next write
        self._due = 0.0  # monotonic: the next write even without a change
        self._written_to: str | None = None

    def wants(self, name: EventName) -> bool:
        """Return False: no event is of interest, because the content comes from files."""
        return False

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Report the event as done."""
        done()

    def tick(self) -> float | None:
        """Write the page if its content has changed or is old, and its time has come."""
        path = page_path(self._config(), self._root)
        now = time.monotonic()
        if path is None or now < self._next:
            return EVERY_S if path is None else self._next - now
        if path == self._written_to and now < self._due and not self._content.changed():
            return min(self._pause_s, self._due - now)
        self._write(path)
        return self._pause_s

    def close(self) -> None:
        """Write a last time: the dispatcher has left."""
        path = page_path(self._config(), self._root)
        if path is not None:
            self._write(path, served=False)

    def _write(self, path: str, *, served: bool = True) -> None:
        begun_ns = time.thread_time_ns()
        fresh_s = max(_FRESH_S, 4 * self._pause_s)
        ours = path.startswith(f"{self._root}/")
        text = render(self._content.read(time.time_ns(), served=served, with_output=ours), EVERY_S, fresh_s)
        try:
            if ours:
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
