"""What is wrong with addresses, before anything is sent to them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from spool.core import layout
from spool.core.errors import InvalidValue
from spool.core.events import JOB_WORDS, Event
from spool.core.layout import Layout
from spool.core.model import Spec
from spool.extras.notify.sending import UndeliveredError, masked, transport_for, why_unreachable
from spool.extras.notify.settings import NAME, Notifications, expanded, settings_of, wish_of
from spool.formats.config import Config
from spool.store.glance import config_if
from spool.store.spool import Spool


def why_undelivered(named: str, settings: Notifications, *, thoroughly: bool = False) -> str | None:
    """Return why messages to an address or contact cannot be sent, None if they can. Contacts nothing.

    *thoroughly*: ask Apprise whether it understands the address, which costs a third of a second.
    """
    try:
        for address in expanded(named, settings.contacts):
            if thoroughly:
                transport_for(address, settings.notifier)
            elif (why := why_unreachable(address, settings.notifier)) is not None:
                return why
    except (InvalidValue, UndeliveredError) as error:
        return str(error)
    return None


def doubts(spec: Spec, config: Config) -> Iterator[str]:
    """Yield why messages of a job cannot be delivered. Contacts nothing."""
    for named in spec.part(NAME).to:
        if (why := why_undelivered(named, settings_of(config))) is not None:
            yield f"cannot send anything to {masked(named)}: {why}"


def readable_by_others(root: str, settings: Notifications, event: Event | None = None) -> Iterator[str]:
    """Yield the files with addresses, of the configuration and of the job of *event*, that other users can read.

    A URL may hold a password or a token.
    """
    at = Layout(root)
    stated = [*settings.contacts.values(), *(rule.to for rule in settings.rules)]
    paths = [at.at(layout.CONFIG)] if any("://" in address for to in stated for address in to) else []
    wish = wish_of(event) if event is not None else None
    if event is not None and event.job is not None and wish is not None and "://" in "".join(wish.to):
        paths += [at.job_file(place, event.job) for place in layout.PLACES]
    for path in paths:
        try:
            file, way = os.stat(path).st_mode, os.stat(root).st_mode
        except OSError:
            continue
        if any(file & read and way & enter for read, enter in ((0o040, 0o010), (0o004, 0o001))):
            yield path


def contacts(spool: Spool) -> list[str]:
    """Return the contacts in the configuration, for completion."""
    config = config_if(spool.root, b"contacts")
    return sorted(settings_of(config).contacts) if config is not None else []


def events(spool: Spool) -> tuple[str, ...]:
    """Return the events that a job can name, for completion."""
    return JOB_WORDS
