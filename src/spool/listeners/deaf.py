"""Who stands in for a listener that cannot be used."""

from __future__ import annotations

from collections.abc import Callable

from spool.core.events import Event, EventName


class Deaf:
    """Hears nothing: what the listener *name* is not told does not pile up."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wants(self, name: EventName) -> bool:
        """Whether it wants to hear of that: no."""
        return False

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Be done with it."""
        done()

    def tick(self) -> float | None:
        """Do nothing: there is nothing that is due by itself."""
        return None

    def close(self) -> None:
        """Leave: nothing is open."""
