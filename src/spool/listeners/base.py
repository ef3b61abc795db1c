"""The Protocols of listeners: of all that receive events, and of those that also review starts and cancellations.

Listeners live in a process of their own (`python -m spool.listeners SPOOL`), so that they can never block a pass: the
dispatcher records events, and that process reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from spool.core.events import Answer, Event, EventName

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


@runtime_checkable
class Gate(Protocol):
    """A listener that also reviews each start (`submitting`) and each cancellation (`cancelling`)."""

    def asks(self, name: EventName) -> bool:
        """Whether it reviews events of that kind."""

    def ask(self, event: Event, begin: Begin) -> Answer:
        """Return its answer; call *begin* before each step. An exception counts as a no."""


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
