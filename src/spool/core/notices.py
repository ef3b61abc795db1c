"""Who is to be told of an event: the words of `on`, and the rules of the configuration beside a job's own wish."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from spool.core.events import Event, EventName
from spool.core.model import OUTCOMES

ENDS = frozenset(EventName(outcome) for outcome in OUTCOMES)
"""The events that say that a job is over."""

OF_NO_JOB = frozenset(
    {
        EventName.RESERVATION_STARTED,
        EventName.RESERVATION_ENDED,
        EventName.GPU_FREE,
        EventName.DISPATCHER_STARTED,
        EventName.DISPATCHER_STOPPED,
    }
)

_GROUPS = {"ended": ENDS, "retried": frozenset({EventName.RETRYING})}

# Nobody wants a message at every look.
EVENT_WORDS = (*_GROUPS, *(name.value for name in EventName if name is not EventName.POLLING))
"""What may stand in `on` of the configuration."""

JOB_WORDS = tuple(word for word in EVENT_WORDS if word not in OF_NO_JOB)
"""What may stand in `on` of a job file."""


def concerns(on: Iterable[str], name: EventName) -> bool:
    """Whether one of the words of *on* means events of that kind."""
    return any(word == name or name in _GROUPS.get(word, ()) for word in on)


@dataclass(frozen=True, slots=True)
class NotifyRule:
    """Who is told of every job, and of what. Each filter is a list of patterns, of which one must fit; empty is any."""

    to: tuple[str, ...]
    on: tuple[str, ...] = ("ended",)
    users: tuple[str, ...] = ()
    projects: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # of jobs, and of reservations
    log_lines: int = 0

    def fits(self, event: Event) -> bool:
        """Whether *event* is one that the rule asks for."""
        return (
            concerns(self.on, event.name)
            and _one_fits(self.users, event.user)
            and _one_fits(self.projects, event.project)
            and _one_fits(self.names, event.job or event.reservation)
        )


def addressees(event: Event, rules: Iterable[NotifyRule]) -> dict[str, int]:
    """Return to whom *event* is told, and how many lines of the job's log each of them wishes to see."""
    found: dict[str, int] = {}
    wish = event.notify
    if wish is not None and concerns(wish.on, event.name):
        found = dict.fromkeys(wish.to, wish.log_lines)
    for rule in rules:
        if rule.fits(event):
            for address in rule.to:
                found[address] = max(found.get(address, 0), rule.log_lines)
    return found


def _one_fits(patterns: tuple[str, ...], value: str | None) -> bool:
    return not patterns or (value is not None and any(fnmatchcase(value, pattern) for pattern in patterns))
