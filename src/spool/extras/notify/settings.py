"""Who gets which messages: the values of the keys, and the recipients of an event."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct, field

from spool.core.errors import InvalidValue
from spool.core.model import EVENT_WORDS, JOB_WORDS, Event, concerns
from spool.formats.toml import Path
from spool.formats.validation import Kind, PartReader, Reading
from spool.formats.values import Names, different, one_of, several, words

if TYPE_CHECKING:
    from spool.formats.config import Config

NAME = "notify"
"""The name of the capability, and of its part of both files."""

_NO_ADDRESS = 'has no recipients; set "to"'
_MOST_STEPS = 8  # steps from a contact to its address


class Notify(Struct, frozen=True):
    """Where to send notifications about the job, and for which events."""

    to: tuple[str, ...]
    on: tuple[str, ...] = ("ended",)
    log_lines: int = 0  # lines from the end of the job's log


class NotifyRule(Notify, frozen=True):
    """Notifications about all jobs. Each filter is a list of patterns, one of which must match; empty matches all."""

    users: tuple[str, ...] = ()
    projects: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # of jobs, and of reservations

    def fits(self, event: Event) -> bool:
        """Whether the rule selects *event*."""
        filters = (
            (self.users, event.user),
            (self.projects, event.project),
            (self.names, event.job or event.reservation),
        )
        return concerns(self.on, event.name) and all(
            not patterns or (value is not None and any(fnmatchcase(value, pattern) for pattern in patterns))
            for patterns, value in filters
        )


class Notifications(Struct, frozen=True):
    """The keys of the configuration."""

    notifier: str | None = None
    contacts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rules: tuple[NotifyRule, ...] = ()


def settings_of(config: Config) -> Notifications:
    """Return what *config* says of notifications."""
    found: Notifications = config.part(NAME) or Notifications()
    return found


def wish_of(event: Event) -> Notify | None:
    """Return what the job of *event* asks for, which may have been written to a file and read."""
    said = event.wishes.get(NAME)
    return Notify(tuple(said["to"]), tuple(said["on"]), said["log_lines"]) if isinstance(said, Mapping) else said


def listens(config: Config) -> bool:
    """Whether the configuration asks for messages; jobs may as well."""
    return bool(settings_of(config).rules)


def addressees(event: Event, rules: Iterable[NotifyRule]) -> dict[str, int]:
    """Return the recipients of *event*, and how many lines of the job's log each gets."""
    wish = wish_of(event)
    asked = [wish] if wish is not None and concerns(wish.on, event.name) else []
    found: dict[str, int] = {}
    for each in (*asked, *(rule for rule in rules if rule.fits(event))):
        for address in each.to:
            found[address] = max(found.get(address, 0), each.log_lines)
    return found


def expanded(named: str, contacts: Mapping[str, tuple[str, ...]], steps: int = _MOST_STEPS) -> list[str]:
    """Return the addresses of a name: itself, or those of a contact, which may name further contacts.

    Raises InvalidValue if contacts form a circle.
    """
    if named not in contacts:
        return [named.strip()]
    if not steps:
        raise InvalidValue("the contacts in the configuration refer to each other in a circle")
    return [address for to in contacts[named] for address in expanded(to, contacts, steps - 1)]


# The readers of the keys.


def _addresses(stated: Names, path: Path, reading: Reading) -> tuple[str, ...]:
    addresses = several(stated)
    if not addresses or not all(address.strip() for address in addresses):
        reading.problems.add(path[:-1] or path, _NO_ADDRESS)
    else:
        reading.problems.value(path, words, addresses, None)
    return addresses


def _events(allowed: tuple[str, ...], stated: Names, path: Path, reading: Reading) -> tuple[str, ...]:
    events = several(stated)
    if not events:
        reading.problems.add(path, "is an empty list, so nothing would be sent; name events, or leave it out")
    reading.problems.value(path, different, events, None)
    for event in events:
        reading.problems.value(path, lambda word: one_of(word, allowed), event, "")
    return events


def _contacts(tables: dict[str, Names], path: Path, reading: Reading) -> dict[str, tuple[str, ...]]:
    contacts = {name: several(to) for name, to in tables.items()}
    for name, addresses in contacts.items():
        here = (*path, name)
        if not name or "://" in name:
            reading.problems.add(here, "is an address itself and would never be looked up")
        if not addresses or not all(address.strip() for address in addresses):
            reading.problems.add(here, "needs an address")
        reading.problems.value(here, words, addresses, None)
    return contacts


def _wish(reading: Reading) -> Notify:
    if "to" not in reading.found[NAME]:
        reading.problems.add((NAME,), _NO_ADDRESS)
    found = {"to": (), **reading.found[NAME]}
    if not found.pop("tasks", True) and "task" in reading.document:
        found["on"] = ()  # the array sends the messages
    return Notify(**found)


def _settings(reading: Reading) -> Notifications:
    found = reading.found[NAME]
    for at, rule in enumerate(found.get("rules", ())):
        if "to" not in rule:
            reading.problems.add((NAME, at), _NO_ADDRESS)
    rules = tuple(NotifyRule(**{"to": (), **rule}) for rule in found.get("rules", ()))
    return Notifications(**{**found, "rules": rules})


_ADDRESSES = {"addresses": lambda key: Kind(Names, read=_addresses)}

JOB_READER = PartReader(_wish, {**_ADDRESSES, "events": lambda key: Kind(Names, read=partial(_events, JOB_WORDS))})
"""What reads the key `notify` of a job file."""

CONFIG_READER = PartReader(
    _settings,
    {
        **_ADDRESSES,
        "events": lambda key: Kind(Names, read=partial(_events, EVENT_WORDS)),
        "patterns": lambda key: Kind(Names, lambda stated: words(several(stated))),
        "contacts": lambda key: Kind(dict[str, Names], read=_contacts),
    },
)
"""What reads the keys of the configuration."""
