"""Messages to the recipients that a job or the configuration names (docs/NOTIFICATIONS.md).

The listener looks up the addresses for an event, writes the message, with the end of the run's log if requested, and
puts it into the queue of each address. It warns once if other users can read the addresses.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from spool.core import layout
from spool.core.eventnames import EventName
from spool.core.events import Event, addressees, body, headline
from spool.core.layout import Layout
from spool.formats.config import Config
from spool.formats.events import facts
from spool.listeners.base import MESSAGES, Listener
from spool.listeners.sending import (
    PREFIX,
    Message,
    Patience,
    SendQueue,
    UndeliveredError,
    masked,
    transport_for,
    why_unreachable,
)
from spool.store.reading import end_of_file

log = logging.getLogger(__name__)

_REMEMBERED = 20_000  # ids of events
_CLOSE_S = 3.0
_MOST_STEPS = 8  # steps from a contact to its address

_MOST_LOG_BYTES = 64 << 10
_MOST_COLUMNS = 300
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


class Notifier(Listener):
    """Notifies the recipients that a job or the configuration names. *config* returns the configuration in force."""

    name = "notify"

    def __init__(self, root: str, config: Callable[[], Config], *, patience: Patience | None = None) -> None:
        self._root = root
        self._config = config
        self._patience = patience
        self._queues: dict[tuple[str, str | None], SendQueue] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._complained: set[str] = set()

    def wants(self, name: EventName) -> bool:
        """Return True for all events except polling: whether a job wants those is in the event."""
        return name is not EventName.POLLING

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Send a message to each address; call *done* when the last has arrived or is given up.

        A repeat is done at once: after a crash the first one, before it in the file of events, is delivered again.
        """
        if event.id in self._seen:
            done()
            return
        self._seen[event.id] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        to = self._to(event)
        if not to:
            done()
            return
        left = list(to)

        def arrived() -> None:
            left.pop()
            if not left:  # which two threads may see: an event may be done twice
                done()

        document = facts(event)
        title = f"{PREFIX}{headline(event)}"
        texts = {lines: body(event, last_lines(event.metadir or "", lines)) for lines in {lines for _, lines in to}}
        for queue, lines in to:
            queue.put(Message(event.name.value, title, texts[lines], document), arrived)

    def close(self) -> None:
        """Send what waits, for a moment. The rest is left to the next process."""
        deadline = time.monotonic() + _CLOSE_S
        for queue in self._queues.values():
            queue.close()
        for queue in self._queues.values():
            queue.join(deadline)

    def _to(self, event: Event) -> list[tuple[SendQueue, int]]:
        config = self._config()
        found: dict[str, int] = {}
        for named, lines in addressees(event, config.notify).items():
            try:
                for address in expanded(named, config.contacts):
                    found[address] = max(found.get(address, 0), lines)
            except UndeliveredError as error:
                self._complain(f"cannot notify {masked(named)}: {error}")
        for path in readable_by_others(self._root, config, event):
            self._complain(f"{path} holds secrets and is readable by others; chmod 600 {path}")
        queues = ((self._queue(address, config.notifier), lines) for address, lines in found.items())
        return [(queue, lines) for queue, lines in queues if queue is not None]

    def _queue(self, address: str, notifier: str | None) -> SendQueue | None:
        key = (address, notifier)
        if key not in self._queues:
            try:
                self._queues[key] = SendQueue(masked(address), transport_for(address, notifier), self._patience)
            except UndeliveredError as error:
                MESSAGES.add("given_up")
                self._complain(f"cannot notify {masked(address)}: {error}")
        return self._queues.get(key)

    def _complain(self, words: str) -> None:
        if words not in self._complained:
            self._complained.add(words)
            log.error("%s", words)


def expanded(named: str, contacts: Mapping[str, tuple[str, ...]], steps: int = _MOST_STEPS) -> list[str]:
    """Return the addresses of a name: itself, or those of a contact, which may name further contacts.

    Raises UndeliveredError if contacts form a circle.
    """
    if named not in contacts:
        return [named.strip()]
    if not steps:
        raise UndeliveredError("the contacts in the configuration refer to each other in a circle")
    return [address for to in contacts[named] for address in expanded(to, contacts, steps - 1)]


def why_undelivered(named: str, config: Config, *, thoroughly: bool = False) -> str | None:
    """Return why messages to an address or contact cannot be sent, None if they can. Contacts nothing.

    *thoroughly*: ask Apprise whether it understands the address, which costs a third of a second.
    """
    try:
        for address in expanded(named, config.contacts):
            if thoroughly:
                transport_for(address, config.notifier)
            elif (why := why_unreachable(address, config.notifier)) is not None:
                return why
    except UndeliveredError as error:
        return str(error)
    return None


def last_lines(metadir: str, count: int) -> str:
    """Return the last *count* lines of the run's log as plain text, "" if the job has no log there."""
    if not metadir or count <= 0:
        return ""
    try:
        data = end_of_file(f"{metadir}/{layout.JOB_LOG}", _MOST_LOG_BYTES)
    except OSError:
        return ""
    lines = []
    for line in data.decode(errors="replace").rstrip("\n").split("\n")[-count:]:
        shown = _ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2]  # the visible part of a progress bar
        plain = "".join(character for character in shown if character.isprintable() or character == "\t")
        lines.append(plain if len(plain) <= _MOST_COLUMNS else f"{plain[:_MOST_COLUMNS]}...")
    return "\n".join(lines)


def readable_by_others(root: str, config: Config, event: Event | None = None) -> Iterator[str]:
    """Yield the files with addresses, of the configuration and of the job of *event*, that other users can read.

    A URL may hold a password or a token.
    """
    at = Layout(root)
    stated = [*config.contacts.values(), *(rule.to for rule in config.notify)]
    paths = [at.at(layout.CONFIG)] if any("://" in address for to in stated for address in to) else []
    if event is not None and event.job is not None and event.notify is not None and "://" in "".join(event.notify.to):
        paths += [at.job_file(place, event.job) for place in layout.PLACES]
    for path in paths:
        try:
            file, way = os.stat(path).st_mode, os.stat(root).st_mode
        except OSError:
            continue
        if any(file & read and way & enter for read, enter in ((0o040, 0o010), (0o004, 0o001))):
            yield path
