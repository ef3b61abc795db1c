"""The listeners: the receivers of events. The dispatcher records events and knows the listeners by name only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spool.formats.capabilities import capabilities, loaded
from spool.formats.config import Config
from spool.listeners.base import Gate, Listener

__all__ = ["RUNS_FOREIGN_CODE", "Gate", "Listener", "by_kind", "kinds"]

_WHERE = {
    "hooks": "spool.listeners.hooks:Hooks",
    "plugins": "spool.listeners.plugins:Plugins",
}


def _where() -> dict[str, str]:
    return _WHERE | {each.name: each.listener for each in capabilities() if each.listener}


def kinds() -> tuple[str, ...]:
    """Return every kind of listener; also the names of their cursors."""
    return tuple(_where())


RUNS_FOREIGN_CODE = frozenset({"hooks", "plugins"})
"""Listeners that run foreign code. Each event is noted before its delivery, so that it cannot crash them for ever."""


def by_kind(kind: str, root: str, config: Callable[[], Config], **more: Any) -> Listener:
    """Return a new listener for the spool *root*; its module is imported only now. *more* depends on the kind.

    Raises ImportError, KeyError.
    """
    made: Listener = loaded(_where()[kind])(root, config, **more)
    return made
