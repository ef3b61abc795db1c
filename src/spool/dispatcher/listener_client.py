"""The process of the listeners, as the dispatcher sees it: a child that may die, hang and be slow.

Nothing here waits. What was asked is asked again when the process was another one meanwhile, and counts as refused
when it has ended with it too often.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from spool.client.autostart import environment
from spool.core.events import Answer, Event
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

_PATIENCE_NS = 60 * SECOND_NS  # with the begin and the end of a step of the process, beyond what the step may take
_MUCH = 1 << 16  # of what it has not read: it need not be told of each event then
_MOST_TRIES = 3


class ListenerClient:
    """Starts the process when it is first wanted, and again when it is gone.

    *answered* is handed every reply, *ready* what each new process says of itself. *clock* is monotonic.
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
        self._wanted = False
        self._reviews = _PendingReviews()
        self._position = 0
        self._behind = False  # whether it has read so little that it was not told of the last position
        self._is_ready = False  # whether it has said who it is, and can be asked
        self._ready_due_ns = 0
        self.trouble: OSError | None = None  # why the process could not be started

    @property
    def pid(self) -> int | None:
        """The pid of the process, None while there is none."""
        return self._child.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`read` has something to do; the same for life."""
        return self._child.fileno()

    def listen(self, kinds: Iterable[str]) -> None:
        """Have a process, with listeners of these *kinds* at least."""
        self._wanted = True
        added = set(kinds) - set(self._kinds)
        if added:
            self._kinds = (*self._kinds, *sorted(added))
            self._say(Subscribe(self._kinds))

    def more(self, position: int) -> None:
        """Tell it that there are events to be read, up to *position*."""
        if position != self._position:
            self._position = position
            self._behind = self._child.backlog >= _MUCH
            if not self._behind:
                self._say(Available(position))

    def ask(self, event: Event, after: int = 0) -> int:
        """Ask whether it may be, after the events before that position; return the number of the reply."""
        number = self._reviews.add(event, after)
        self._wanted = True
        self._send_reviews()
        return number

    def forget(self, number: int) -> None:
        """Have no answer to a review any more."""
        self._reviews.forget(number)

    def next_due_ns(self) -> int | None:
        """Return when :meth:`tick` has something to do, on the monotonic clock."""
        if self._child.pid is None:
            return self._child.start_due_ns if self._wanted else None
        return self._reviews.next_due_ns() if self._is_ready else self._ready_due_ns

    def tick(self) -> None:
        """Start the process if that is due; end one that does not answer."""
        self._child.lingers()
        self._catch_up()
        if self._child.pid is not None and self._is_due():
            self.read()  # it may have said what is waited for, and we were slow ourselves
        if not self._is_due():
            return
        if self._child.pid is not None:
            log.error("the listeners' process does not answer and is killed")
            self._gone(kill=True)
        else:
            self._start()

    def read(self) -> None:
        """Take in what the process says, or that it is gone; hand it what it had no room for."""
        pid, alive = self._child.pid, self._child.is_alive
        for line in self._child.read():
            self._take(line)
        self._catch_up()
        if pid is not None and self._child.pid == pid and (not alive or self._child.has_hung_up):
            self._gone()

    def close(self) -> None:
        """Let go of it: it delivers the remaining events and exits."""
        self._child.close()

    def join(self, timeout_s: float) -> None:
        """Wait until it has left, after :meth:`close`."""
        self._child.join(timeout_s)

    def _catch_up(self) -> None:
        """Tell it of the last position once it has read all that it was told before."""
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
                self._reviews.goes_on(number, self._clock(), within_ns)
            case Reply() as reply:
                if self._reviews.done(reply.number):
                    self._answered(reply)
                self._send_reviews()
            case _:
                pass

    def _gone(self, *, kill: bool = False) -> None:
        """See to what follows from the end of the process."""
        self._child.give_up(kill=kill)
        self._is_ready = False
        log.error("the listeners' process has ended; starting another one")
        for number, event, tries in self._reviews.died():
            why = f"it crashed the listeners' process {tries} times"
            self._answered(Reply(number, Answer(no=f"hook {event.name}: {why}")))

    def _send_reviews(self) -> None:
        if self._is_ready:
            for number, event, after in self._reviews.send(self._clock()):
                self._say(Review(number, event, after))

    def _say(self, message: ToListeners) -> None:
        self._child.send(render(message))


class _Pending(Struct):
    event: Event
    after: int  # the position in the events before which it has been told of the job
    tries: int = 0
    due_ns: int | None = None  # when it must be done, or the next step begun; None: it is not open
    wanted: bool = True  # False: nobody waits for the answer any more


class _PendingReviews:
    """The reviews that are not done. Those that are open were sent. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._all: dict[int, _Pending] = {}
        self._number = 0

    def add(self, event: Event, after: int) -> int:
        """Take in what to ask, and after which position in the events; return its number."""
        self._number += 1
        self._all[self._number] = _Pending(event, after)
        return self._number

    def forget(self, number: int) -> None:
        """Have no use for an answer any more. A review that is open stays so: the process is at work on it."""
        review = self._all.get(number)
        if review is not None:
            review.wanted = False
            if review.due_ns is None:
                del self._all[number]

    def next_due_ns(self) -> int | None:
        """Return when the process must have said something of one that is open."""
        return min((one.due_ns for one in self._all.values() if one.due_ns is not None), default=None)

    def send(self, now_ns: int) -> Iterator[tuple[int, Event, int]]:
        """Yield what may be asked now; it is open then. After a death one by one, so that the guilty one is found."""
        most = 1 if any(one.tries for one in self._all.values()) else AT_ONCE
        room = most - sum(one.due_ns is not None for one in self._all.values())
        for number, review in self._all.items():
            if room <= 0:
                return
            if review.due_ns is None:
                room -= 1
                review.due_ns = now_ns + _PATIENCE_NS
                yield number, review.event, review.after

    def goes_on(self, number: int, now_ns: int, within_ns: int) -> None:
        """Know that the process has begun a step of one that is open, which may take *within_ns*."""
        if number in self._all:
            self._all[number].due_ns = now_ns + within_ns + _PATIENCE_NS

    def done(self, number: int) -> bool:
        """Be done with one; return whether somebody waits for the answer."""
        review = self._all.pop(number, None)
        return review is not None and review.wanted

    def died(self) -> Iterator[tuple[int, Event, int]]:
        """Know that the process has ended; yield those that are given up, with how often it has ended with them."""
        for number, review in list(self._all.items()):
            if review.due_ns is not None:
                review.due_ns = None
                review.tries += 1
            if not review.wanted or review.tries >= _MOST_TRIES:
                del self._all[number]
            if review.wanted and review.tries >= _MOST_TRIES:
                yield number, review.event, review.tries
