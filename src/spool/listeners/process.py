"""The process of the listeners: a thread for each, one for messages of the dispatcher, some for its reviews.

An event is delivered at least once: a listener's cursor, on disk, passes it when the listener is done with it.
Hooks get careful delivery: each try is recorded before, and an event that has crashed the process too often is skipped.

Whatever a listener does, the dispatcher goes on. If this process ends, another one is started and continues from the
cursors. While the process of an earlier dispatcher still delivers the last events, this one delays its deliveries, but
not its reviews. It reads the configuration by itself.

The dispatcher's messages come on its standard input, a socket, which also takes the answers. If the standard input is
not a socket (when started by hand), it delivers the existing events and leaves at the end of that input. Processes
started by listeners have an empty standard input, and no access to the socket.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from contextlib import suppress

from spool.core import layout
from spool.core.layout import Layout
from spool.core.model import SECOND_NS, Answer, Event, EventName
from spool.formats import capabilities
from spool.formats.config import Config
from spool.formats.events import AT_ONCE, Available, Ready, Reply, Review, StepBegun, Subscribe, read, render
from spool.listeners import Begin, Listener, NullSink, by_kind, hooks, kinds, mistakes, set_up_logging
from spool.listeners.hooks import OrphanReaper
from spool.machine.helpers import Workers
from spool.machine.processes import become_subreaper
from spool.store import edited
from spool.store.disk import Disk
from spool.store.logs import EventLine, EventReader, cursors

log = logging.getLogger(__name__)

MOST_OPEN = 10_000  # events delivered to a listener and not done yet
MOST_TRIES = 3  # of delivering an event that the process did not survive
_MISTAKE = 70  # EX_SOFTWARE of sysexits.h
_LOOK_S = 5.0  # even without a hint that there are more


class Delivery:
    """Delivers every event to one listener, from its cursor on. *careful*: record each try before it."""

    def __init__(self, listener: Listener, reader: EventReader, *, careful: bool = False) -> None:
        self._listener = listener
        self._reader = reader
        self._careful = careful
        self._wake = threading.Condition()
        self._news = True
        self._open: dict[int, None] = {}  # positions of events delivered and not done, in order
        self._read_to = reader.position
        self._limit = 0.0
        self._tries = reader.tries
        self._leave_at: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"spool-{listener.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def more(self, limit: float) -> None:
        """Deliver the events before the position *limit*; from any thread."""
        with self._wake:
            self._news = True
            self._limit = limit
            self._wake.notify_all()

    def leave(self, within_s: float) -> None:
        """Finish when all events are delivered, and after *within_s* at the latest."""
        with self._wake:
            self._leave_at = time.monotonic() + within_s
            self._wake.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it has ended."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    @property
    def position(self) -> int:
        """Every event before this position is done."""
        with self._wake:
            return next(iter(self._open), self._read_to)

    def last_about(self, job: str, position: int) -> int | None:
        """Return the position of the last undone event about *job* before *position*; None if there is none."""
        reader, last, at = self._reader.another(), None, self.position
        try:
            while at < position and (found := reader.read(at)):
                for one in found:
                    if one.at < position and one.event is not None and one.event.job == job:
                        last = one.at if one.event.name in self._listener.wants else last
                at = found[-1].end
        except OSError:
            return None
        finally:
            reader.close()
        return last

    def wait_for(self, at: int, timeout_s: float) -> bool:
        """Wait until the event at that position is done; from any thread. Return whether it is."""
        with self._wake:
            self._wake.wait_for(lambda: self.position > at or self._leave_at is not None, timeout_s)
            return self.position > at

    def _run(self) -> None:
        try:
            while True:
                self._news = False
                told = self._tell_some()
                due_s = self._tick()
                self._save()
                if self._leave_at is not None and (self._late or not (told or self._open or self._news)):
                    break
                if not told:
                    self._sleep(due_s)
        except Exception:
            log.exception("the listener %s has crashed on an internal error", self._listener.name)
            os._exit(_MISTAKE)  # the dispatcher starts another process, which continues from the cursors
        with suppress(Exception):
            self._listener.close()
        self._save()
        self._reader.close()

    def _tell_some(self) -> bool:
        """Deliver the events that can be read at once; return whether there were any."""
        if len(self._open) >= MOST_OPEN:
            return False
        try:
            found = self._reader.read(self._read_to)
        except OSError as error:
            log.error("cannot read the events: %s", error.strerror)
            return False
        told = False
        for one in found:
            if self._late or one.end > self._limit:
                break
            self._tell(one)
            told = True
        return told

    def _tell(self, one: EventLine) -> None:
        event = one.event
        if event is not None and event.name in self._listener.wants:
            if self._careful and not self._may_be_told(event, one.at):
                event = None
            if event is not None:
                self._hear(event, one.at)
        with self._wake:
            self._read_to = one.end
            self._wake.notify_all()
        self._tries = 0

    def _may_be_told(self, event: Event, at: int) -> bool:
        """Record that an event is about to be delivered; False if that has ended this process too often."""
        if self._tries >= MOST_TRIES:
            log.error(
                "%s skips event %s: it has crashed the listeners' process %d times",
                self._listener.name,
                event.id,
                self._tries,
            )
            return False
        self._put(at, self._tries + 1)
        return True

    def _hear(self, event: Event, at: int) -> None:
        with self._wake:
            self._open[at] = None

        def done() -> None:
            with self._wake:
                self._open.pop(at, None)
                if self._leave_at is not None or len(self._open) == MOST_OPEN - 1:
                    self._wake.notify_all()

        try:
            self._listener.hear(event, done)
        except Exception:
            log.exception("the listener %s failed on event %s", self._listener.name, event.id)
            done()

    def _tick(self) -> float | None:
        try:
            return self._listener.tick()
        except Exception:
            log.exception("the listener %s failed", self._listener.name)
            return _LOOK_S

    @property
    def _late(self) -> bool:
        return self._leave_at is not None and time.monotonic() >= self._leave_at

    def _sleep(self, due_s: float | None) -> None:
        wait_s = _LOOK_S if due_s is None else min(due_s, _LOOK_S)
        if self._leave_at is not None:
            wait_s = min(wait_s, self._leave_at - time.monotonic())
        with self._wake:
            over = self._leave_at is not None and not self._open
            if not self._news and not over and wait_s > 0:
                self._wake.wait(wait_s)

    def _save(self) -> None:
        position = self.position
        self._put(position, self._tries if position == self._reader.position else 0)

    def _put(self, position: int, tries: int) -> None:
        try:
            self._reader.save(position, tries)
        except OSError as error:
            log.error("cannot record the position of %s in the events: %s", self._listener.name, error.strerror)


_LEAVE_S = 10.0  # plus the time limit of one hook: how long it outlives its dispatcher to deliver the rest
_BEAT_S = 1.0
_LOCK = ".lock"  # beside the cursors: held by the delivering process
_LONGEST_NO = 500  # characters
_FIRST_OWN = 3  # descriptors before it are the standard ones


def main() -> None:
    """Serve the spool named by the only argument, and end this process."""
    if len(sys.argv) == 2:
        set_up_logging("info", journald="JOURNAL_STREAM" in os.environ)
        _ListenerProcess(os.path.realpath(sys.argv[1]), _own_input()).run()
        code = 0
    else:
        sys.stderr.write("usage: python -m spool.listeners SPOOL\n")
        code = 2
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)  # a listener that hangs in a thread cannot delay the exit


def _own_input() -> int:
    """Replace the standard input for this process and its children; return the new descriptor of the original."""
    channel = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)
    return channel


class _ListenerProcess:
    def __init__(self, root: str, channel: int) -> None:
        self._root = root
        self._layout = Layout(root)
        self._channel = channel
        capabilities.search()
        logging.getLogger(edited.__name__).setLevel(logging.ERROR)  # the dispatcher reports mistakes in config.toml
        self._settings, self._reading = edited.Settings(root), threading.Lock()
        self._disk = Disk(f"{root}/{layout.STAGING}")
        self._listeners: dict[str, Listener] = {}
        self._deliveries: dict[str, Delivery] = {}
        self._lock: int | None = None
        self._wanted = set(cursors(self._layout))
        self._problems: list[str] = []
        self._orphans = OrphanReaper(root)
        self._writing = threading.Lock()
        self._position = 0.0  # events before it may be delivered
        self._is_socket = stat.S_ISSOCK(os.fstat(channel).st_mode)
        if not self._is_socket:
            self._position = math.inf
        self._asked, self._workers = hooks.Hooks(root), Workers(AT_ONCE)
        self._text = b""

    def run(self) -> None:
        # Orphans of hooks come to this process, and not to the dispatcher.
        hooks.inherits_orphans = become_subreaper()
        stop = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(stop[1], warn_on_full_buffer=False)
        self._make()
        ready = select.poll()
        ready.register(self._channel, select.POLLIN)
        ready.register(stop[0], select.POLLIN)
        leaving = False
        while not leaving:
            for fd, _ in ready.poll(_BEAT_S * 1000):
                if fd != self._channel or not self._hear():
                    leaving = True
            self._go_on()
        self._leave()

    def _config(self) -> Config:
        """Return the configuration in force; from any thread."""
        with self._reading:
            self._settings.reload()
            return self._settings.config

    # Messages of the dispatcher.

    def _hear(self) -> bool:
        """Handle pending messages; False if the other end is closed."""
        try:
            data = os.read(self._channel, 1 << 18)
        except OSError:
            return False
        if not data:
            return False
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            match read(line):
                case Subscribe(kinds):
                    self._wanted |= set(kinds)
                    self._make()
                case Review() as review:
                    self._go_on()  # a listener receives the events about a job before it reviews it
                    self._workers.put(self._answer, review)
                case Available(position):
                    self._position = position
                case _:
                    pass
        for delivery in self._deliveries.values():
            delivery.more(self._position)
        return True

    def _answer(self, review: Review) -> None:
        """Ask the hooks about a new job, a start or a cancellation, several at a time."""
        event = review.event

        def begin(within_ns: int) -> None:
            self._say(render(StepBegun(within_ns, review.number)))

        try:
            self._catch_up(event.job, review.after, begin)
            answer = self._asked.ask(event, begin)
        except Exception as error:
            log.exception("cannot ask the hooks about %s", event.id)
            answer = Answer(no=f"hook {event.name}: {type(error).__name__}: {error}")
        if answer.no is not None:
            answer = Answer(no=" ".join(answer.no.split())[:_LONGEST_NO] or "no reason given")
        self._say(render(Reply(review.number, answer)))

    def _catch_up(self, job: str | None, position: int, begin: Begin) -> None:
        """Wait until the hooks have received all about *job* before *position*, no longer than one hook may take."""
        delivery = self._deliveries.get("hooks")  # none while an earlier process delivers its last events
        if delivery is not None and job is not None and (last := delivery.last_about(job, position)) is not None:
            begin(hooks.LIMIT_NS)
            if not delivery.wait_for(last, hooks.LIMIT_NS / SECOND_NS):
                log.warning("hooks are asked about job %s before they have received all earlier events of it", job)

    def _say(self, line: bytes) -> None:
        if not self._is_socket:
            return
        # The process that asked may be gone.
        with self._writing, suppress(OSError), socket.socket(fileno=os.dup(self._channel)) as channel:
            channel.sendall(line)

    # The listeners.

    def _make(self) -> None:
        """Create missing listeners and stop unwanted ones, and report the present ones."""
        for kind in kinds():
            if kind in self._wanted and kind not in self._listeners:
                self._listeners[kind] = self._made(kind)
        others = [listener for kind, listener in self._listeners.items() if kind != "hooks"]
        self._say(
            render(
                Ready(
                    wants=tuple(name for name in EventName if any(name in listener.wants for listener in others)),
                    problems=tuple(self._problems),
                )
            )
        )

    def _made(self, kind: str) -> Listener:
        try:
            made = by_kind(kind, self._root, self._config)
            for problem in mistakes(kind, made):
                self._complain(problem)
            return made
        except ImportError as error:
            problem = f"the listener {kind} is not available: {error}"
        except Exception as error:
            log.exception("cannot start the listener %s", kind)
            problem = f"cannot start the listener {kind}: {error}"
        self._complain(problem)
        return NullSink(kind)

    def _complain(self, problem: str) -> None:
        log.error("%s", problem)
        self._problems.append(problem)

    def _go_on(self) -> None:
        if self._lock is None and self._take_lock():
            self._orphans.end_strangers()
        if self._lock is not None:
            for kind, listener in self._listeners.items():
                if kind not in self._deliveries and kind in cursors(self._layout):
                    reader = EventReader(self._root, kind, self._disk)
                    delivery = Delivery(listener, reader, careful=kind == "hooks")
                    delivery.more(self._position)
                    try:
                        delivery.start()
                        self._deliveries[kind] = delivery
                    except RuntimeError as error:  # no thread to spare: again at the next beat
                        log.warning("cannot start the listener %s: %s; trying again", kind, error)
                        reader.close()
        self._orphans.reap()

    def _take_lock(self) -> bool:
        directory = self._layout.at(layout.CURSORS)
        if not os.path.isdir(directory):
            return False
        fd = os.open(f"{directory}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not shared by a child
        except OSError:
            os.close(fd)
            return False
        self._lock = fd
        return True

    def _leave(self) -> None:
        """Deliver the rest, for a limited time."""
        within_s = _LEAVE_S + hooks.LIMIT_NS / SECOND_NS
        deadline = time.monotonic() + within_s
        while self._lock is None and time.monotonic() < deadline:
            self._go_on()
            if self._lock is None:
                time.sleep(0.05)
        self._go_on()
        for delivery in self._deliveries.values():
            delivery.leave(_LEAVE_S)
        for delivery in self._deliveries.values():
            while not delivery.join(min(0.2, max(0.0, deadline - time.monotonic()))):
                self._orphans.reap()
                if time.monotonic() >= deadline:
                    break
        self._orphans.end_all()
