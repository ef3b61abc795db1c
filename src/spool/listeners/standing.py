"""Who listens to a spool, found out without loading any of them."""

from __future__ import annotations

from dataclasses import dataclass

from spool.core.events import EventName
from spool.formats.config import Config
from spool.listeners.discovery import find_hooks
from spool.listeners.installed import plugins_installed

FOR_JOBS = "notify"
"""The kind of listener that a job file can ask for by itself."""

CAN_BE_REFUSED = frozenset({EventName.SUBMITTING, EventName.CANCELLING})


@dataclass(frozen=True, slots=True)
class Standing:
    """The kinds of listeners there are, and what is known of their wishes before one of them is asked."""

    kinds: frozenset[str] = frozenset()
    wants: frozenset[EventName] = frozenset()  # what is to be told in any case
    asks: frozenset[EventName] = frozenset()  # what is to be asked in any case
    silent: frozenset[str] = frozenset()  # kinds that only say themselves what they want to hear of
    may_ask: bool = False  # one of those may want to be asked
    problems: tuple[str, ...] = ()


NOBODY = Standing()


def standing(root: str, config: Config, *, for_jobs: bool) -> Standing:
    """Return who listens to the spool *root*; *for_jobs*: a job has said whom to tell."""
    hooks = find_hooks(root)
    hooked = {EventName(name) for name in hooks.paths}
    silent = {
        "plugins": plugins_installed(),
        FOR_JOBS: bool(config.notify) or for_jobs,
        "metrics": bool(config.metrics),
    }
    others = frozenset(kind for kind, listens in silent.items() if listens)
    return Standing(
        kinds=others | ({"hooks"} if hooked else set()),
        wants=frozenset(hooked - CAN_BE_REFUSED),
        asks=frozenset(hooked & CAN_BE_REFUSED),
        silent=others,
        may_ask="plugins" in others,
        problems=hooks.problems,
    )
