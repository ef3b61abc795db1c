"""Messages to the recipients that a job or the configuration names (docs/NOTIFICATIONS.md).

The listener looks up the addresses for an event, writes the message, with the end of the run's log if requested, and
puts it into the queue of each address. It warns once if other users can read secrets in an address.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from threading import Lock

from spool.core import layout
from spool.core.eventnames import EventName
from spool.core.events import Event, addressees, body, headline
from spool.core.layout import Layout
from spool.formats.config import Config
from spool.formats.events import facts
from spool.listeners.base import Listener
from spool.listeners.message import MESSAGES, PREFIX, Message, UndeliveredError, has_secret, masked
from spool.listeners.sendqueue import Patience, SendQueue
from spool.listeners.transports import transport_for
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
        self._seen: OrderedDict[str, list[Callable[[], None]] | None] = OrderedDict()  # None: done
        self._lock = Lock()
        self._complained: set[str] = set()

    def wants(self, name: EventName) -> bool:
        """Return True for all events except polling: whether a job wants those is in the event."""
        return name is not EventName.POLLING

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Send a message to each address; call *done* when the last has arrived or is given up."""
        with self._lock:
            waiting = self._seen.setdefault(event.id, [])
            if waiting is not None:
                waiting.append(done)
        if waiting is None:
            done()
        elif len(waiting) == 1:  # else it is being sent already
            try:
                self._send(event)
            except BaseException:
                self._done(event.id)
                raise

    def _send(self, event: Event) -> None:
        to = self._to(event)
        if not to:
            self._done(event.id)
            return
        left = _Countdown(len(to), lambda: self._done(event.id))
        document = facts(event)
        title = f"{PREFIX}{headline(event)}"
        texts: dict[int, str] = {}
        for queue, lines in to:
            if lines not in texts:
                texts[lines] = body(event, last_lines(event.metadir, lines) if event.metadir else "")
            queue.put(Message(event.name.value, title, texts[lines], document), left.one)

    def close(self) -> None:
        """Send untried messages for a moment. The rest is left to the next process."""
        deadline = time.monotonic() + _CLOSE_S
        for queue in self._queues.values():
            queue.close()
        for queue in self._queues.values():
            queue.join(deadline)

    def _done(self, event_id: str) -> None:
        with self._lock:
            waiting = self._seen[event_id]
            self._seen[event_id] = None
            while len(self._seen) > _REMEMBERED and next(iter(self._seen.values())) is None:
                self._seen.popitem(last=False)
        for done in waiting or ():
            done()

    def _to(self, event: Event) -> list[tuple[SendQueue, int]]:
        config = self._config()
        found: dict[str, int] = {}
        for named, lines in addressees(event, config.notify).items():
            try:
                addresses = expanded(named, config.contacts)
            except UndeliveredError as error:
                self._complain(f"cannot notify {masked(named)}: {error}")
                continue
            for address in addresses:
                found[address] = max(found.get(address, 0), lines)
        self._warn_of_readers(event, config)
        queues = []
        for address, lines in found.items():
            queue = self._queue(address, config.notifier)
            if queue is not None:
                queues.append((queue, lines))
        return queues

    def _queue(self, address: str, notifier: str | None) -> SendQueue | None:
        is_url = "://" in address
        key = (address, None if is_url else notifier)
        queue = self._queues.get(key)
        if queue is None:
            try:
                transport = transport_for(address, notifier)
            except UndeliveredError as error:
                MESSAGES.add("given_up")
                self._complain(f"cannot notify {masked(address)}: {error}")
                return None
            queue = self._queues[key] = SendQueue(transport, self._patience)
        return queue

    def _complain(self, words: str) -> None:
        if words not in self._complained:
            self._complained.add(words)
            log.error("%s", words)

    def _warn_of_readers(self, event: Event, config: Config) -> None:
        """Warn, once, if other users can read a file with secrets."""
        stated = [address for to in config.contacts.values() for address in to]
        stated += [address for rule in config.notify for address in rule.to]
        of_job = event.notify.to if event.notify is not None else ()
        for path in who_else_reads(
            self._root,
            in_config=any(map(has_secret, stated)),
            job=event.job if any(map(has_secret, of_job)) else None,
        ):
            self._complain(f"{path} holds secrets and is readable by others; chmod 600 {path}")


class _Countdown:
    """Calls a function once, after the given number of calls from any threads."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._left, self._then, self._lock = count, then, Lock()

    def one(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._then()


def expanded(named: str, contacts: Mapping[str, tuple[str, ...]], steps: int = _MOST_STEPS) -> list[str]:
    """Return the addresses of a name: itself, or those of a contact, which may name further contacts.

    Raises UndeliveredError if contacts form a circle.
    """
    if named not in contacts:
        return [named.strip()]
    if not steps:
        raise UndeliveredError("the contacts in the configuration refer to each other in a circle", for_good=True)
    return [address for to in contacts[named] for address in expanded(to, contacts, steps - 1)]


def last_lines(metadir: str, count: int) -> str:
    """Return the last *count* lines of the run's log as plain text, "" if the job has no log there."""
    data = _tail_of(f"{metadir}/{layout.JOB_LOG}") if count > 0 else b""
    lines = []
    for line in data.decode(errors="replace").rstrip("\n").split("\n")[-count:] if data else []:
        shown = _ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2]  # the visible part of a progress bar
        plain = "".join(character for character in shown if character.isprintable() or character == "\t")
        lines.append(plain if len(plain) <= _MOST_COLUMNS else f"{plain[:_MOST_COLUMNS]}...")
    return "\n".join(lines)


def _tail_of(path: str) -> bytes:
    try:
        return end_of_file(path, _MOST_LOG_BYTES)
    except OSError:
        return b""


def others_read(path: str, directory: str) -> bool:
    """Whether other users can read the file *path*, and reach it through its *directory*."""
    try:
        file, way = os.stat(path).st_mode, os.stat(directory).st_mode
    except OSError:
        return False
    return any(file & read and way & enter for read, enter in ((0o040, 0o010), (0o004, 0o001)))


def who_else_reads(root: str, *, in_config: bool, job: str | None) -> list[str]:
    """Return the files of the spool at *root*, among those said to hold secrets, that other users can read."""
    at = Layout(root)
    paths = [at.at(layout.CONFIG)] if in_config else []
    if job is not None:
        paths += [at.job_file(place, job) for place in layout.PLACES]
    return [path for path in paths if others_read(path, at.root)]
