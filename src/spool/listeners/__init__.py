"""The listeners: the receivers of events. The dispatcher records events and knows the listeners by name only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spool.formats.capabilities import capabilities, loaded
from spool.formats.config import Config
from spool.listeners.base import Gate, Listener

__all__ = ["KINDS", "RUNS_FOREIGN_CODE", "Gate", "Listener", "by_kind"]

_WHERE = {
    "hooks": "spool.listeners.hooks:Hooks",
    "plugins": "spool.listeners.plugins:Plugins",
}

_CONTRIBUTED = {each.name: each.listener for each in capabilities() if each.listener}

KINDS = (*_WHERE, *_CONTRIBUTED)
"""Every kind of listener; also the names of their cursors."""

RUNS_FOREIGN_CODE = frozenset({"hooks", "plugins"})
"""Listeners that run foreign code. Each event is noted before its delivery, so that it cannot crash them for ever."""


def by_kind(kind: str, root: str, config: Callable[[], Config], **more: Any) -> Listener:
    """Return a new listener for the spool *root*; its module is imported only now. *more* depends on the kind.

    Raises ImportError, KeyError.
    """
    of_class = loaded(_CONTRIBUTED[kind] if kind in _CONTRIBUTED else _WHERE[kind])
    made: Listener = of_class(root, config, **more)
    return made
