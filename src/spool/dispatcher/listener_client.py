"""The process of the listeners, as the dispatcher sees it: a child that may die, hang and be slow.

Nothing here waits. What is said goes into a socket that is never blocked on; what was asked is asked again when the
process was another one meanwhile, and counts as refused when it has ended with it too often.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from spool.client.autostart import environment
from spool.core.events import Event
from spool.core.model import SECOND_NS
from spool.formats.listening import AT_ONCE, Ask, Busy, Hello, Kinds, More, Reply, Told, read_said, render
from spool.machine import descriptors

log = logging.getLogger(__name__)

_PAUSE_NS, _LONGEST_PAUSE_NS = SECOND_NS // 10, 30 * SECOND_NS  # before it is started again
_WELL_NS = 60 * SECOND_NS  # a process that has lived so long was well
_MUCH = 1 << 16  # of what it has not read: it need not be told of each event then
PATIENCE_NS = 60 * SECOND_NS
"""With the beginning and the end of a step of the process, beyond what the step itself may take."""

_MOST_TRIES = 3


class ListenerClient:
    """Starts the process when it is first wanted, and again when it is gone.

    *answered* is handed every reply, *greeted* what each new process says of itself. *clock* is monotonic.
    """

    def __init__(
        self,
        root: str,
        answered: Callable[[Reply], None],
        greeted: Callable[[Hello | None], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._root = root
        self._answered = answered
        self._greeted = greeted
        self._clock = clock
        self._ready = select.epoll()
        self._process: subprocess.Popen[bytes] | None = None
        self._dying: list[subprocess.Popen[bytes]] = []  # to be waited for
        self._channel: socket.socket | None = None
        self._end: int | None = None  # readable when the process has ended
        self._in = b""
        self._out = b""
        self._kinds: tuple[str, ...] = ()
        self._wanted = False
        self._questions = PendingReviews()
        self._position = 0
        self._greeting = False  # whether the process has said who it is, and can be asked
        self._born_ns = 0
        self._greeting_due_ns = 0
        self._deaths = 0  # in a row
        self._again_ns = 0
        self.trouble: OSError | None = None  # why the process could not be started

    @property
    def pid(self) -> int | None:
        """The pid of the process, None while there is none."""
        return self._process.pid if self._process is not None else None

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`read` has something to do; the same for life."""
        return self._ready.fileno()

    def listen(self, kinds: Iterable[str]) -> None:
        """Have a process, with listeners of these *kinds* at least."""
        self._wanted = True
        added = set(kinds) - set(self._kinds)
        if added:
            self._kinds = (*self._kinds, *sorted(added))
            self._say(Kinds(self._kinds))

    def more(self, position: int) -> None:
        """Tell it that there are events to be read, up to *position*."""
        if position != self._position:
            self._position = position
            if len(self._out) < _MUCH:
                self._say(More(position))

    def ask(self, event: Event, after: int = 0) -> int:
        """Ask whether it may be, after the events before that position; return the number of the reply."""
        number = self._questions.add(event, after)
        self._wanted = True
        self._send_questions()
        return number

    def forget(self, number: int) -> None:
        """Have no answer to a question any more."""
        self._questions.forget(number)

    def next_due_ns(self) -> int | None:
        """Return when :meth:`tick` has something to do, on the monotonic clock."""
        if self._wanted and self._process is None:
            return self._again_ns
        if self._process is not None and not self._greeting:
            return self._greeting_due_ns
        return self._questions.next_due_ns()

    def tick(self) -> None:
        """Start the process if that is due; end one that does not answer."""
        self._dying = [process for process in self._dying if process.poll() is None]
        if self._process is not None and self._is_due():
            self.read()  # it may have said what is waited for, and we were slow ourselves
        if not self._is_due():
            return
        if self._process is not None:
            log.error("the process of the listeners does not answer, and is ended")
            self._process.kill()
            self._gone()
        else:
            self._start()

    def read(self) -> None:
        """Take in what the process says, or that it is gone; hand it what it had no room for."""
        channel = self._channel
        if channel is None:
            return
        # Asked before all is read: then nothing that it has said is lost.
        over = self._process is not None and self._process.poll() is not None
        with suppress(OSError):  # no more for now, or for ever
            while data := channel.recv(1 << 18):
                self._in += data
        self._write()
        *lines, self._in = self._in.split(b"\n")
        for line in lines:
            self._take(line)
        if self._channel is channel and (over or _has_ended(channel)):
            self._gone()

    def close(self) -> None:
        """Let go of it: it tells what there is to tell, and leaves."""
        if self._channel is not None:
            if self._out:
                with suppress(OSError):
                    self._channel.settimeout(0.2)
                    self._channel.sendall(self._out)
            self._hang_up()
        self._ready.close()

    def join(self, timeout_s: float) -> None:
        """Wait until it has left, after :meth:`close`."""
        for process in filter(None, (*self._dying, self._process)):
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)

    def _is_due(self) -> bool:
        due = self.next_due_ns()
        return due is not None and self._clock() >= due

    def _start(self) -> None:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            self._cannot_start(error)
            return
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "spool.listeners", self._root],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C at the dispatcher's terminal is not meant for it
                    cwd="/",
                    env=environment(),
                )
            except OSError as error:
                ours.close()
                self._cannot_start(error)
                return
        self.trouble = None
        descriptors.give_limit_to(self._process.pid)
        ours.setblocking(False)
        self._channel = ours
        self._born_ns = self._clock()
        self._greeting_due_ns = self._born_ns + PATIENCE_NS
        self._in = b""
        self._out = render(Kinds(self._kinds)) + render(More(self._position))
        self._ready.register(ours, select.EPOLLIN)
        # What a plugin has forked may hold the channel open for ever. A kernel without pidfds leaves it at that.
        with suppress(OSError):
            self._end = os.pidfd_open(self._process.pid)
            self._ready.register(self._end, select.EPOLLIN)
        self._write()

    def _cannot_start(self, error: OSError) -> None:
        self.trouble = error
        self._count_death(lived_ns=0)

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._end is not None:
            self._ready.unregister(self._end)
            os.close(self._end)
            self._end = None

    def _take(self, line: bytes) -> None:
        match read_said(line):
            case Hello() as hello:
                self._greeting = True
                self._greeted(hello)
                self._send_questions()
            case Busy(within_ns, 0):
                self._greeting_due_ns = self._clock() + within_ns + PATIENCE_NS
            case Busy(within_ns, number):
                self._questions.goes_on(number, self._clock(), within_ns)
            case Reply() as reply:
                if self._questions.answered(reply.number):
                    self._answered(reply)
                self._send_questions()
            case _:
                pass

    def _gone(self) -> None:
        """See to what follows from the end of the process."""
        self._hang_up()
        process, self._process = self._process, None
        self._greeting = False
        if process is not None:
            self._dying.append(process)  # who hangs up may live for another moment
        log.error("the process of the listeners has ended; another one is started")
        self._greeted(None)
        self._count_death(self._clock() - self._born_ns)
        for number, event, tries in self._questions.died():
            why = f"it has ended the process that asks {tries} times"
            self._answered(Reply(number, no=f"hook {event.name}: {why}"))

    def _count_death(self, lived_ns: int) -> None:
        self._deaths = 1 if lived_ns > _WELL_NS else self._deaths + 1
        self._again_ns = self._clock() + min(_PAUSE_NS << min(self._deaths - 1, 20), _LONGEST_PAUSE_NS)

    def _send_questions(self) -> None:
        if self._greeting:
            for number, event, after in self._questions.send(self._clock()):
                self._say(Ask(number, event, after))

    def _say(self, message: Told) -> None:
        if self._channel is not None:
            self._out += render(message)
            self._write()

    def _write(self) -> None:
        if self._channel is None:
            return
        late = len(self._out) >= _MUCH
        try:
            while self._out:
                self._out = self._out[self._channel.send(self._out) :]
                if late and not self._out:
                    self._out, late = render(More(self._position)), False
        except BlockingIOError:
            pass
        except OSError:  # it is gone, as the next read will tell
            self._out = b""
        wanted = select.EPOLLIN | (select.EPOLLOUT if self._out else 0)
        self._ready.modify(self._channel, wanted)


def _has_ended(channel: socket.socket) -> bool:
    """Whether there is nobody at the other end any more, and nothing left to read."""
    try:
        return not channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


@dataclass(slots=True)
class _Question:
    event: Event
    after: int  # the position in the events before which it has been told of the job
    tries: int = 0
    due_ns: int | None = None  # when it must be answered, or the next step begun; None: it is not open
    wanted: bool = True  # False: nobody waits for the answer any more


class PendingReviews:
    """The numbers of those without an answer. Those that are open were sent. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._all: dict[int, _Question] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def add(self, event: Event, after: int) -> int:
        """Take in what is to be asked, and after which position in the events; return its number."""
        self._number += 1
        self._all[self._number] = _Question(event, after)
        return self._number

    def forget(self, number: int) -> None:
        """Have no use for an answer any more. A question that is open stays so: the process is at work on it."""
        question = self._all.get(number)
        if question is not None:
            question.wanted = False
            if question.due_ns is None:
                del self._all[number]

    def next_due_ns(self) -> int | None:
        """Return when the process must have said something of one that is open."""
        return min((one.due_ns for one in self._all.values() if one.due_ns is not None), default=None)

    def send(self, now_ns: int) -> Iterator[tuple[int, Event, int]]:
        """Yield what may be asked now; it is open then. After a death one by one, so that the guilty one is found."""
        most = 1 if any(one.tries for one in self._all.values()) else AT_ONCE
        room = most - sum(one.due_ns is not None for one in self._all.values())
        for number, question in self._all.items():
            if room <= 0:
                return
            if question.due_ns is None:
                room -= 1
                question.due_ns = now_ns + PATIENCE_NS
                yield number, question.event, question.after

    def goes_on(self, number: int, now_ns: int, within_ns: int) -> None:
        """Know that the process has begun a step of one that is open, which may take *within_ns*."""
        if number in self._all:
            self._all[number].due_ns = now_ns + within_ns + PATIENCE_NS

    def answered(self, number: int) -> bool:
        """Be done with one; return whether somebody waits for the answer."""
        question = self._all.pop(number, None)
        return question is not None and question.wanted

    def died(self) -> Iterator[tuple[int, Event, int]]:
        """Know that the process has ended; yield those that are given up, with how often it has ended with them."""
        for number, question in list(self._all.items()):
            if question.due_ns is not None:
                question.due_ns = None
                question.tries += 1
            if not question.wanted or question.tries >= _MOST_TRIES:
                del self._all[number]
            if question.wanted and question.tries >= _MOST_TRIES:
                yield number, question.event, question.tries
