"""What a listener is: the Protocol of all that are told of events, and of those that are also asked.

Listeners live in a process of their own (`python -m spool.listeners SPOOL`), so that nothing that they do stops a
pass: the dispatcher writes events down, and that process reads them from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from spool.core.eventnames import EventName
from spool.core.events import Answer, Event

Begin = Callable[[int], None]
"""Called before a step of what somebody waits for, with the nanoseconds that the step may take."""


class Listener(Protocol):
    """One way to tell somebody. Each listener has a thread of its own; its methods are called from that."""

    name: str
    """The word for it in the log and in the record of how far it has come."""

    def wants(self, name: EventName) -> bool:
        """Whether it receives events of that kind at all."""

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Take an event in, and call *done*, from any thread, once it needs not be told again.

        What is raised here is logged, and counts as done.
        """

    def tick(self) -> float | None:
        """Do what is due; return in how many seconds to be called again at the latest, None: not before an event."""
        return None

    def close(self) -> None:
        """Leave soon."""
        return


@runtime_checkable
class Gate(Protocol):
    """A listener that is also asked before a start (`submitting`) and before a cancel (`cancelling`)."""

    def asks(self, name: EventName) -> bool:
        """Whether it wants to be asked."""

    def ask(self, event: Event, begin: Begin) -> Answer:
        """Answer, and call *begin* before each step of that. What is raised here is a no."""


class NullSink(Listener):
    """Hears nothing: what the listener *name* is not told does not pile up."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wants(self, name: EventName) -> bool:
        """Whether it wants to hear of that: no."""
        return False

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Be done with it."""
        done()
