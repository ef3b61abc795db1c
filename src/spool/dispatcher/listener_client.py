"""The process of the listeners, as the dispatcher sees it: a child that may die, hang and be slow.

No call waits. A review is repeated when the process was replaced meanwhile, and counts as refused when the process has
died with it too often.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from msgspec import Struct

from spool.client.autostart import environment
from spool.core.events import Answer, Event, EventName
from spool.core.model import SECOND_NS
from spool.formats.listener_protocol import (
    AT_ONCE,
    Available,
    Ready,
    Reply,
    Review,
    StepBegun,
    Subscribe,
    ToListeners,
    read_by_dispatcher,
    render,
)
from spool.machine import descriptors
from spool.machine.child_process import ChildProcess

log = logging.getLogger(__name__)

_PATIENCE_NS = 60 * SECOND_NS  # for the process to begin or end a step, beyond the time limit of the step
_MUCH = 1 << 16  # unread bytes: beyond that, it need not be told of each event
_MOST_TRIES = 3


class ListenerClient:
    """Starts the process when it is first needed, and again when it is gone.

    *answered* is called with every reply, *ready* with the first message of each new process. *clock* is monotonic.
    """

    def __init__(
        self,
        root: str,
        answered: Callable[[Reply], None],
        ready: Callable[[Ready], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._answered = answered
        self._ready = ready
        self._clock = clock
        self._child = ChildProcess(("spool.listeners", root), environment, clock=clock)
        self._kinds: tuple[str, ...] = ()
        self.wanted = False  # whether there must be a process
        self._reviews: dict[int, _Pending] = {}  # unfinished, by their numbers; the open ones were sent
        self._number = 0
        self._position = 0
        self._behind = False  # whether it was not told of the last position, since too much was unread
        self._is_ready = False  # whether it has reported that it is ready for reviews
        self._ready_due_ns = 0
        self.trouble: OSError | None = None  # why the process could not be started

    @property
    def pid(self) -> int | None:
        """The pid of the process, None while there is none."""
        return self._child.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`read` has something to do; it never changes."""
        return self._child.fileno()

    def listen(self, kinds: Iterable[str]) -> None:
        """Keep a process running, with at least listeners of these *kinds*."""
        self.wanted = True
        added = set(kinds) - set(self._kinds)
        if added:
            self._kinds = (*self._kinds, *sorted(added))
            self._say(Subscribe(self._kinds))

    def more(self, position: int) -> None:
        """Report that there are events up to *position*."""
        if position != self._position:
            self._position = position
            self._behind = self._child.backlog >= _MUCH
            if not self._behind:
                self._say(Available(position))

    def ask(self, event: Event, after: int = 0) -> int:
        """Request a review of an event, after all events before position *after*; return the number of the reply."""
        self._number += 1
        self._reviews[self._number] = _Pending(event, after)
        self.wanted = True
        self._send_reviews()
        return self._number

    def forget(self, number: int) -> None:
        """Ignore the answer to a review. An open one stays open: the process is at work on it."""
        review = self._reviews.get(number)
        if review is not None:
            review.wanted = False
            if review.due_ns is None:
                del self._reviews[number]

    def next_due_ns(self) -> int | None:
        """Return when :meth:`tick` has something to do, on the monotonic clock."""
        if self._child.pid is None:
            return self._child.start_due_ns if self.wanted else None
        if not self._is_ready:
            return self._ready_due_ns
        return min((one.due_ns for one in self._reviews.values() if one.due_ns is not None), default=None)

    def tick(self) -> None:
        """Start the process if that is due; end it if it does not answer."""
        self._child.lingers()
        self._catch_up()
        if self._child.pid is not None and self._is_due():
            self.read()  # its answer may be there, if this process was slow itself
        if not self._is_due():
            return
        if self._child.pid is not None:
            log.error("the listeners' process does not answer and is killed")
            self._gone(kill=True)
        else:
            self._start()

    def read(self) -> None:
        """Read its messages, or notice that it is gone; send buffered output."""
        pid, alive = self._child.pid, self._child.is_alive
        for line in self._child.read():
            self._take(line)
        self._catch_up()
        if pid is not None and self._child.pid == pid and (not alive or self._child.has_hung_up):
            self._gone()

    def close(self) -> None:
        """Close the connection: it delivers the remaining events and exits."""
        self._child.close()

    def join(self, timeout_s: float) -> None:
        """Wait until it has exited, after :meth:`close`."""
        self._child.join(timeout_s)

    def _catch_up(self) -> None:
        """Report the last position once it has read everything sent before."""
        if self._behind and not self._child.backlog:
            self._behind = False
            self._say(Available(self._position))

    def _is_due(self) -> bool:
        due = self.next_due_ns()
        return due is not None and self._clock() >= due

    def _start(self) -> None:
        try:
            self._child.start()
        except OSError as error:
            self.trouble = error
            return
        self.trouble = None
        assert self._child.pid is not None
        descriptors.give_limit_to(self._child.pid)
        self._ready_due_ns = self._clock() + _PATIENCE_NS
        self._behind = False
        self._say(Subscribe(self._kinds))
        self._say(Available(self._position))

    def _take(self, line: bytes) -> None:
        match read_by_dispatcher(line):
            case Ready() as ready:
                self._is_ready = True
                self._ready(ready)
                self._send_reviews()
            case StepBegun(within_ns, 0):
                self._ready_due_ns = self._clock() + within_ns + _PATIENCE_NS
            case StepBegun(within_ns, number):
                if number in self._reviews:
                    self._reviews[number].due_ns = self._clock() + within_ns + _PATIENCE_NS
            case Reply() as reply:
                review = self._reviews.pop(reply.number, None)
                if review is not None and review.wanted:
                    self._answered(reply)
                self._send_reviews()
            case _:
                pass

    def _gone(self, *, kill: bool = False) -> None:
        self._child.give_up(kill=kill)
        self._is_ready = False
        log.error("the listeners' process has ended; starting another one")
        for number, review in list(self._reviews.items()):
            if review.due_ns is not None:
                review.due_ns = None
                review.tries += 1
            if not review.wanted or review.tries >= _MOST_TRIES:
                del self._reviews[number]
            if review.wanted and review.tries >= _MOST_TRIES:
                why = f"it crashed the listeners' process {review.tries} times"
                who = "a plugin" if review.event.name is EventName.QUEUED else f"hook {review.event.name}"
                self._answered(Reply(number, Answer(no=f"{who}: {why}")))

    def _send_reviews(self) -> None:
        """Send the reviews that are not open, as many as may be. After a death one by one, to find the guilty one."""
        most = 1 if any(one.tries for one in self._reviews.values()) else AT_ONCE
        room = most - sum(one.due_ns is not None for one in self._reviews.values())
        waiting = [(number, one) for number, one in self._reviews.items() if one.due_ns is None]
        for number, review in waiting[: max(0, room)] if self._is_ready else ():
            review.due_ns = self._clock() + _PATIENCE_NS
            self._say(Review(number, review.event, review.after))

    def _say(self, message: ToListeners) -> None:
        self._child.send(render(message))


class _Pending(Struct):
    event: Event
    after: int  # the position up to which it gets the events about the job first
    tries: int = 0
    due_ns: int | None = None  # when it must be done, or the next step begun; None: not open
    wanted: bool = True  # False: the answer is no longer needed
