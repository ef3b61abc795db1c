"""The protocol of listeners, which receive events.

Listeners live in a process of their own (`python -m spool.listeners SPOOL`), so that they can never block a pass: the
dispatcher records events, and that process reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import Protocol

from spool.core.events import Event, EventName

Begin = Callable[[int], None]
"""Called before each step of a review, with the step's time limit in nanoseconds."""


class Listener(Protocol):
    """One receiver of events. Each listener has a thread of its own, which calls its methods."""

    name: str
    """Its name in the log and in its cursor."""

    def wants(self, name: EventName) -> bool:
        """Whether it receives events of that kind at all."""

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Process an event, and call *done*, from any thread, once it need not be delivered again.

        Exceptions are logged, and count as done.
        """

    def tick(self) -> float | None:
        """Do what is due; return the seconds until the next call at the latest, None: not before the next event."""
        return None

    def close(self) -> None:
        """Finish soon."""
        return


class NullSink(Listener):
    """Discards every event, so that they do not pile up for the listener *name*."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wants(self, name: EventName) -> bool:
        """Return False: no event is wanted."""
        return False

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Mark the event as done."""
        done()


class Counters:
    """Counts by word, starting at zero in each process; from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter()

    def add(self, word: str, count: int = 1) -> None:
        """Count *word*."""
        with self._lock:
            self._counts[word] += count

    def read(self) -> dict[str, int]:
        """Return all counts."""
        with self._lock:
            return dict(self._counts)


MESSAGES = Counters()
"""Messages by outcome: "delivered", "failed" (and may be tried again), "given_up"."""
