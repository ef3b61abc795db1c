"""How wrappers are started. The dispatcher asks for an executor by its name and knows none of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from spool.core.errors import InvalidValue, cannot
from spool.executors.base import Executor, Launch, Started

__all__ = ["NAMES", "Executor", "Launch", "Started", "by_name", "problem_with"]

_WHERE = {
    "process": ("spool.executors.process", "ProcessExecutor"),
    "tmux": ("spool.executors.tmux", "TmuxExecutor"),
}

NAMES = tuple(_WHERE)
"""Every executor that a job file or the configuration may name."""


def by_name(name: str) -> Executor:
    """Return a new executor of that name; its module is imported only now. Raises InvalidValue for other names."""
    if name not in _WHERE:
        remedy = f"use one of {', '.join(NAMES)}"
        raise InvalidValue(cannot("use", f"executor {name!r}", "there is none of that name", remedy=remedy))
    module, of_class = _WHERE[name]
    made: Executor = getattr(import_module(module), of_class)()
    return made


def problem_with(name: str, executor: Callable[[str], Executor] = by_name) -> str | None:
    """Return why the executor *name* cannot start anything here, None if it can."""
    try:
        return executor(name).unavailable()
    except InvalidValue:
        return f"this version of spool has no executor {name!r}"
    except ImportError as error:
        return f"the Python package {error.name} is not installed"
