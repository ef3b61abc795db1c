"""The delivery of events to one listener, in a thread of its own, from a cursor on disk.

An event is delivered at least once: the cursor passes it when the listener is done with it. Listeners that run foreign
code get careful delivery: each try is recorded before, and an event that has crashed the process too often is skipped.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress

from spool.core.events import Event
from spool.listeners.base import Listener
from spool.store.logs import EventLine, EventReader

log = logging.getLogger(__name__)

MOST_OPEN = 10_000  # events delivered to a listener and not done yet
MOST_TRIES = 3  # of delivering an event that the process did not survive
_MISTAKE = 70  # EX_SOFTWARE of sysexits.h
_LOOK_S = 5.0  # even without a hint that there are more


class Delivery:
    """Delivers every event to one listener, from its cursor on. *careful*: record each try before it."""

    def __init__(self, listener: Listener, reader: EventReader, *, careful: bool = False) -> None:
        self._listener = listener
        self._reader = reader
        self._careful = careful
        self._wake = threading.Condition()
        self._news = True
        self._open: dict[int, None] = {}  # positions of events delivered and not done, in order
        self._read_to = reader.position
        self._limit = 0.0
        self._tries = reader.tries
        self._leave_at: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"spool-{listener.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def more(self, limit: float) -> None:
        """Deliver the events before the position *limit*; from any thread."""
        with self._wake:
            self._news = True
            self._limit = limit
            self._wake.notify_all()

    def leave(self, within_s: float) -> None:
        """Finish when all events are delivered, and after *within_s* at the latest."""
        with self._wake:
            self._leave_at = time.monotonic() + within_s
            self._wake.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it has ended."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    @property
    def position(self) -> int:
        """Every event before this position is done."""
        with self._wake:
            return next(iter(self._open), self._read_to)

    def last_about(self, job: str, position: int) -> int | None:
        """Return the position of the last undone event about *job* before *position*; None if there is none."""
        reader, last, at = self._reader.another(), None, self.position
        try:
            while at < position and (found := reader.read(at)):
                for one in found:
                    if one.at < position and one.event is not None and one.event.job == job:
                        last = one.at if self._listener.wants(one.event.name) else last
                at = found[-1].end
        except OSError:
            return None
        finally:
            reader.close()
        return last

    def wait_for(self, at: int, timeout_s: float) -> bool:
        """Wait until the event at that position is done; from any thread. Return whether it is."""
        with self._wake:
            self._wake.wait_for(lambda: self.position > at or self._leave_at is not None, timeout_s)
            return self.position > at

    def _run(self) -> None:
        try:
            while True:
                self._news = False
                told = self._tell_some()
                due_s = self._tick()
                self._save()
                if self._over(idle=not told):
                    break
                if not told:
                    self._sleep(due_s)
        except Exception:
            log.exception("the listener %s has crashed on an internal error", self._listener.name)
            os._exit(_MISTAKE)  # the dispatcher starts another process, which continues from the cursors
        with suppress(Exception):
            self._listener.close()
        self._save()
        self._reader.close()

    def _tell_some(self) -> bool:
        """Deliver the events that can be read at once; return whether there were any."""
        if len(self._open) >= MOST_OPEN:
            return False
        try:
            found = self._reader.read(self._read_to)
        except OSError as error:
            log.error("cannot read the events: %s", error.strerror)
            return False
        told = False
        for one in found:
            if self._late or one.end > self._limit:
                break
            self._tell(one)
            told = True
        return told

    def _tell(self, one: EventLine) -> None:
        event = one.event
        if event is not None and self._listener.wants(event.name):
            if self._careful and not self._may_be_told(event, one.at):
                event = None
            if event is not None:
                self._hear(event, one.at)
        with self._wake:
            self._read_to = one.end
            self._wake.notify_all()
        self._tries = 0

    def _may_be_told(self, event: Event, at: int) -> bool:
        """Record that an event is about to be delivered; False if that has ended this process too often."""
        if self._tries >= MOST_TRIES:
            log.error(
                "%s skips event %s: it has crashed the listeners' process %d times",
                self._listener.name,
                event.id,
                self._tries,
            )
            return False
        self._put(at, self._tries + 1)
        return True

    def _hear(self, event: Event, at: int) -> None:
        with self._wake:
            self._open[at] = None

        def done() -> None:
            with self._wake:
                self._open.pop(at, None)
                if self._leave_at is not None or len(self._open) == MOST_OPEN - 1:
                    self._wake.notify_all()

        try:
            self._listener.hear(event, done)
        except Exception:
            log.exception("the listener %s failed on event %s", self._listener.name, event.id)
            done()

    def _tick(self) -> float | None:
        try:
            return self._listener.tick()
        except Exception:
            log.exception("the listener %s failed", self._listener.name)
            return _LOOK_S

    @property
    def _late(self) -> bool:
        return self._leave_at is not None and time.monotonic() >= self._leave_at

    def _over(self, *, idle: bool) -> bool:
        return self._leave_at is not None and (self._late or (idle and not self._open and not self._news))

    def _sleep(self, due_s: float | None) -> None:
        wait_s = _LOOK_S if due_s is None else min(due_s, _LOOK_S)
        if self._leave_at is not None:
            wait_s = min(wait_s, self._leave_at - time.monotonic())
        with self._wake:
            over = self._leave_at is not None and not self._open
            if not self._news and not over and wait_s > 0:
                self._wake.wait(wait_s)

    def _save(self) -> None:
        position = self.position
        self._put(position, self._tries if position == self._reader.position else 0)

    def _put(self, position: int, tries: int) -> None:
        try:
            self._reader.save(position, tries)
        except OSError as error:
            log.error("cannot record the position of %s in the events: %s", self._listener.name, error.strerror)
