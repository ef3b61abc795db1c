"""The queues of outgoing messages: each address has one with a thread of its own, so a dead receiver delays no other.

A message that fails is retried with growing delays, for a bounded time. A failing receiver gets no message in between,
and if it keeps failing, its oldest messages are given up. A receiver that accepts messages gets all of them, however
slowly: their number is bounded by the open events of the delivery. Many messages to one person are sent as a single
one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

from msgspec import Struct

from spool.listeners.message import MESSAGES, Message, Transport, UndeliveredError, digest

log = logging.getLogger(__name__)

_MOST_IN_ORDER = 3  # after this number of tries a message lets later ones go first
_TOO_MANY = "it keeps failing and too many messages are waiting"
_AWAY = 3  # after this number of failures in a row the receiver is more than restarting


class Patience(Struct, frozen=True):
    """Delays and limits of retries."""

    first_s: float = 2.0  # until the first retry; each later delay is doubled
    longest_s: float = 300.0
    tries: int = 15
    for_s: float = 3600.0  # a message that has failed for longer is given up
    most_waiting: int = 2_000  # for one receiver that is away; the oldest are given up
    gather_from: int = 20  # this many for one person are sent as a single message
    gather_most: int = 200
    idle_s: float = 30.0  # an idle thread ends

    def after(self, failures: int) -> float:
        """Return the delay after this number of failures in a row, at least one."""
        return float(min(self.first_s * 2 ** min(failures - 1, 30), self.longest_s))


class _Queued(Struct, eq=False):
    message: Message
    done: Callable[[], None]
    since: float  # its arrival, or the receiver's first failure after that
    tries: int = 0
    due: float = 0.0


class _Due(Struct):
    batch: list[_Queued]  # to be sent together
    stale: list[_Queued]  # to be given up


class SendQueue:
    """The messages for one address."""

    def __init__(self, transport: Transport, patience: Patience | None = None) -> None:
        self.transport = transport
        self._patience = patience or Patience()
        self._change = Condition()
        self._fresh: deque[_Queued] = deque()  # never tried, oldest first
        self._tried: list[_Queued] = []
        self._thread: Thread | None = None
        self._failures = 0  # of the receiver, in a row
        self._failing_since = 0.0
        self._rests_until = 0.0
        self._closing = False

    def put(self, message: Message, done: Callable[[], None]) -> None:
        """Send *message* in the background, and call *done* once it has arrived or is given up."""
        with self._change:
            dropped = self._too_many()
            self._fresh.append(_Queued(message, done, time.monotonic()))
            if self._thread is None and not self._closing:
                self._thread = Thread(target=self._run, name=f"to {self.transport.shown}", daemon=True)
                self._thread.start()
            self._change.notify()
        self._give_up(dropped, _TOO_MANY)

    def close(self) -> None:
        """Try the untried messages once, and leave. Those not delivered then are not done."""
        with self._change:
            self._closing = True
            self._change.notify()

    def join(self, deadline: float) -> None:
        """Wait until the thread has ended, at most until *deadline* (monotonic)."""
        thread = self._thread
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (due := self._next()) is not None:
            self._give_up(due.stale, "the message could not be sent in time")
            if due.batch:
                self._deliver(due.batch)

    def _next(self) -> _Due | None:
        """Wait for messages that are due or too old, and remove them from the queue; None: leave."""
        with self._change:
            idle_since = time.monotonic()
            while True:
                now = time.monotonic()
                due = self._take(now)
                if due.batch or due.stale:
                    return due
                waits = bool(self._fresh or self._tried)
                if self._closing or (not waits and now - idle_since >= self._patience.idle_s):
                    self._thread = None
                    return None
                until = idle_since + self._patience.idle_s
                if waits:
                    soonest = now if self._fresh else min(waiting.due for waiting in self._tried)
                    until = max(soonest, self._rests_until)
                self._change.wait(max(0.001, until - now))

    def _take(self, now: float) -> _Due:
        too_old = now - self._patience.for_s
        stale = [waiting for waiting in self._tried if waiting.since < too_old]
        if self._failures and self._failing_since < too_old:
            while self._fresh and self._fresh[0].since < too_old:
                stale.append(self._fresh.popleft())
        self._tried = [waiting for waiting in self._tried if waiting.since >= too_old]
        if now < self._rests_until:
            return _Due([], stale)
        due = [] if self._closing else [waiting for waiting in self._tried if waiting.due <= now]
        gathers = not self.transport.for_programs and len(due) + len(self._fresh) >= self._patience.gather_from
        room = self._patience.gather_most if gathers else 1
        # In order; but a message that the receiver chokes on must not block the others.
        batch = [waiting for waiting in due if waiting.tries < _MOST_IN_ORDER][:room]
        while self._fresh and len(batch) < room:
            batch.append(self._fresh.popleft())
        others = [waiting for waiting in due if waiting.tries >= _MOST_IN_ORDER]
        batch += others[: room - len(batch)]
        self._tried = [waiting for waiting in self._tried if waiting not in batch]
        return _Due(batch, stale)

    def _deliver(self, batch: list[_Queued]) -> None:
        messages = [waiting.message for waiting in batch]
        try:
            self.transport.send(messages[0] if len(messages) == 1 else digest(messages))
        except UndeliveredError as error:
            self._failed(batch, error)
        except Exception as error:
            # A foreign exception may contain anything, even the address.
            self._failed(batch, UndeliveredError(f"{type(error).__name__} in what sends it"))
        else:
            self._failures, self._rests_until = 0, 0.0
            MESSAGES.add("delivered", len(batch))
            log.debug("told %s of %s", self.transport.shown, messages[0].title)
            for waiting in batch:
                waiting.done()

    def _failed(self, batch: list[_Queued], error: UndeliveredError) -> None:
        MESSAGES.add("failed", len(batch))
        if error.for_good:
            self._give_up(batch, str(error))
            return
        now = time.monotonic()
        self._failures += 1
        if self._failures == 1:
            self._failing_since = now
            log.warning("cannot notify %s of %s: %s; trying again", self.transport.shown, batch[0].message.title, error)
        self._rests_until = now + max(
            self._patience.after(self._failures), min(error.after_s, self._patience.longest_s)
        )
        for waiting in batch:
            if not waiting.tries:
                waiting.since = max(waiting.since, self._failing_since)
            waiting.tries += 1
            waiting.due = now + self._patience.after(waiting.tries)
        self._tried += [waiting for waiting in batch if waiting.tries < self._patience.tries]
        self._give_up([waiting for waiting in batch if waiting.tries >= self._patience.tries], str(error))
        with self._change:
            dropped = self._too_many()
        self._give_up(dropped, _TOO_MANY)

    def _too_many(self) -> list[_Queued]:
        """Remove the oldest messages to a receiver that is away: others must not wait for lack of room."""
        most = self._patience.most_waiting
        if self._failures < _AWAY or len(self._fresh) < most:
            return []
        return [self._fresh.popleft() for _ in range(len(self._fresh) - most + 1 + most // 10)]

    def _give_up(self, given_up: list[_Queued], why: str) -> None:
        if not given_up:
            return
        more = f" and {len(given_up) - 1} more" if len(given_up) > 1 else ""
        log.error("gave up notifying %s of %s%s: %s", self.transport.shown, given_up[0].message.title, more, why)
        MESSAGES.add("given_up", len(given_up))
        for waiting in given_up:
            waiting.done()
