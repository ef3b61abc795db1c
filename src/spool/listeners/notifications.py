"""Messages to people and programs: a listener that sends letters in the background (docs/NOTIFICATIONS.md)."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from spool.core.events import Event, EventName
from spool.core.notices import addressees
from spool.core.wording import body, headline
from spool.formats.config import Config
from spool.formats.facts import facts
from spool.listeners.addresses import expanded, way_to
from spool.listeners.logtail import last_lines
from spool.listeners.message import PREFIX, Letter, UndeliveredError, has_secret, masked
from spool.listeners.secrecy import who_else_reads
from spool.listeners.sendqueue import Lane, Patience
from spool.listeners.tallies import LETTERS

log = logging.getLogger(__name__)

_REMEMBERED = 20_000  # ids of events
_CLOSE_S = 3.0


class Notifier:
    """Tells whoever a job or the configuration names. *config* returns the configuration in force."""

    name = "notify"

    def __init__(self, root: str, config: Callable[[], Config], *, patience: Patience | None = None) -> None:
        self._root = root
        self._config = config
        self._patience = patience
        self._lanes: dict[tuple[str, str | None], Lane] = {}
        self._seen: OrderedDict[str, list[Callable[[], None]] | None] = OrderedDict()  # None: done
        self._lock = Lock()
        self._complained: set[str] = set()

    def wants(self, name: EventName) -> bool:
        """All but the looks: which of them a job asks for is in the event."""
        return name is not EventName.POLLING

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Write a letter to each address and have it sent; *done* when the last has arrived or is given up."""
        with self._lock:
            if event.id in self._seen:
                waiting = self._seen[event.id]
                if waiting is not None:
                    waiting.append(done)
                    return
                repeated = True
            else:
                self._seen[event.id] = [done]
                repeated = False
        if repeated:
            done()
            return
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
        for lane, lines in to:
            if lines not in texts:
                texts[lines] = body(event, last_lines(event.metadir, lines) if event.metadir else "")
            lane.put(Letter(event.name.value, title, texts[lines], document), left.one)

    def tick(self) -> float | None:
        """Nothing is ever due: each address has a thread of its own."""
        return None

    def close(self) -> None:
        """Try for a moment to send what has not been tried yet. The rest is told by the next process."""
        deadline = time.monotonic() + _CLOSE_S
        for lane in self._lanes.values():
            lane.close()
        for lane in self._lanes.values():
            lane.join(deadline)

    def _done(self, event_id: str) -> None:
        with self._lock:
            waiting = self._seen[event_id]
            self._seen[event_id] = None
            while len(self._seen) > _REMEMBERED and next(iter(self._seen.values())) is None:
                self._seen.popitem(last=False)
        for done in waiting or ():
            done()

    def _to(self, event: Event) -> list[tuple[Lane, int]]:
        config = self._config()
        found: dict[str, int] = {}
        for named, lines in addressees(event, config.notify).items():
            try:
                addresses = expanded(named, config.contacts)
            except UndeliveredError as error:
                self._complain(f"cannot tell {masked(named)} of anything: {error}")
                continue
            for address in addresses:
                found[address] = max(found.get(address, 0), lines)
        self._warn_of_readers(event, config)
        lanes = []
        for address, lines in found.items():
            lane = self._lane(address, config.notifier)
            if lane is not None:
                lanes.append((lane, lines))
        return lanes

    def _lane(self, address: str, notifier: str | None) -> Lane | None:
        is_url = "://" in address
        key = (address, None if is_url else notifier)
        lane = self._lanes.get(key)
        if lane is None:
            try:
                transport = way_to(address, notifier)
            except UndeliveredError as error:
                LETTERS.add("given_up")
                self._complain(f"cannot tell {masked(address)} of anything: {error}")
                return None
            lane = self._lanes[key] = Lane(transport, self._patience)
        return lane

    def _complain(self, words: str) -> None:
        if words not in self._complained:
            self._complained.add(words)
            log.error("%s", words)

    def _warn_of_readers(self, event: Event, config: Config) -> None:
        """Say so, once, where others can read the secrets of a file."""
        stated = [address for to in config.contacts.values() for address in to]
        stated += [address for rule in config.notify for address in rule.to]
        of_job = event.notify.to if event.notify is not None else ()
        for path in who_else_reads(
            self._root,
            in_config=any(map(has_secret, stated)),
            job=event.job if any(map(has_secret, of_job)) else None,
        ):
            self._complain(f"{path} holds secrets, and others can read it; chmod 600 {path}")


class _Countdown:
    """Calls once, when so many have come, from whatever threads."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._left, self._then, self._lock = count, then, Lock()

    def one(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._then()
