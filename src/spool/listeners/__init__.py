"""The listeners: the receivers of events. The dispatcher records events and knows the listeners by name only."""

from __future__ import annotations

from collections.abc import Callable

from spool.formats.capabilities import capabilities, loaded
from spool.formats.config import Config
from spool.listeners.base import Listener

__all__ = ["Listener", "by_kind", "kinds"]


def _where() -> dict[str, str]:
    return {"hooks": "spool.listeners.hooks:Hooks"} | {
        each.name: each.listener for each in capabilities() if each.listener
    }


def kinds() -> tuple[str, ...]:
    """Return every kind of listener; also the names of their cursors."""
    return tuple(_where())


def by_kind(kind: str, root: str, config: Callable[[], Config]) -> Listener:
    """Return a new listener for the spool *root*; its module is imported only now. Raises ImportError, KeyError."""
    made: Listener = loaded(_where()[kind])(root, config)
    return made
