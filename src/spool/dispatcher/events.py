"""Recording of events for listeners in `events.jsonl`, in time, and only if there are any.

Each event is appended to `events.jsonl` before the last step that the next dispatcher would not repeat, so that none is
lost (FORMAT 15.2). Its id is derived from its content, so that a repetition has the same one. Without listeners, the
check costs a look into an empty set.

The listeners are a process of their own: a child that may die, hang and be slow. No call waits for it. A review is
repeated when the process was replaced meanwhile, and counts as refused when the process has died with it too often.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import StrEnum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from spool import __version__
from spool.client.autostart import environment
from spool.core.errors import NO_ROOM
from spool.core.model import SECOND_NS, Answer, Event, EventName, Reservation, Result, Spec, Stop
from spool.core.units import show_size
from spool.dispatcher.confinement import Confinement
from spool.dispatcher.wakeup import Timers
from spool.formats.capabilities import capabilities
from spool.formats.events import (
    AT_ONCE,
    Available,
    Message,
    Ready,
    Reply,
    Review,
    StepBegun,
    Subscribe,
    read,
    render,
    render_event,
)
from spool.listeners import NO_SUBSCRIPTIONS, find_subscriptions
from spool.machine import identity
from spool.machine.helpers import ChildProcess
from spool.state.run import ActiveRun, JobEntry, JobFileVersion
from spool.store.disk import SpoolTrouble
from spool.store.edited import Settings
from spool.store.locked_spool import LockedSpool
from spool.store.logs import Logs
from spool.store.ownership import name_of

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
        self.child = ChildProcess(("spool.listeners", root), environment, clock=clock)  # closed, it delivers the rest
        self._kinds: tuple[str, ...] = ()
        self.wanted = False  # whether there must be a process
        self._reviews: dict[int, _Pending] = {}  # unfinished, by their numbers; the open ones were sent
        self._number = 0
        self._position = 0
        self._behind = False  # whether it was not told of the last position, since too much was unread
        self._is_ready = False  # whether it has reported that it is ready for reviews
        self._ready_due_ns = 0
        self.trouble: OSError | None = None  # why the process could not be started

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
            self._behind = self.child.backlog >= _MUCH
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
        if self.child.pid is None:
            return self.child.start_due_ns if self.wanted else None
        if not self._is_ready:
            return self._ready_due_ns
        return min((one.due_ns for one in self._reviews.values() if one.due_ns is not None), default=None)

    def tick(self) -> None:
        """Start the process if that is due; end it if it does not answer."""
        self.child.lingers()
        self._catch_up()
        if self.child.pid is not None and self._is_due():
            self.read()  # its answer may be there, if this process was slow itself
        if not self._is_due():
            return
        if self.child.pid is not None:
            log.error("the listeners' process does not answer and is killed")
            self._gone(kill=True)
        else:
            self._start()

    def read(self) -> None:
        """Read its messages, or notice that it is gone; send buffered output."""
        pid, alive = self.child.pid, self.child.is_alive
        for line in self.child.read():
            self._take(line)
        self._catch_up()
        if pid is not None and self.child.pid == pid and (not alive or self.child.has_hung_up):
            self._gone()

    def _catch_up(self) -> None:
        """Report the last position once it has read everything sent before."""
        if self._behind and not self.child.backlog:
            self._behind = False
            self._say(Available(self._position))

    def _is_due(self) -> bool:
        due = self.next_due_ns()
        return due is not None and self._clock() >= due

    def _start(self) -> None:
        try:
            self.child.start()
        except OSError as error:
            self.trouble = error
            return
        self.trouble = None
        assert self.child.pid is not None
        identity.give_limit_to(self.child.pid)
        self._ready_due_ns = self._clock() + _PATIENCE_NS
        self._behind = False
        self._say(Subscribe(self._kinds))
        self._say(Available(self._position))

    def _take(self, line: bytes) -> None:
        match read(line):
            case Ready() as ready:
                self._is_ready = True
                self._ready(ready)
                self._send_reviews()
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
        self.child.give_up(kill=kill)
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
                self._answered(Reply(number, Answer(no=f"hook {review.event.name}: {why}")))

    def _send_reviews(self) -> None:
        """Send the reviews that are not open, as many as may be. After a death one by one, to find the guilty one."""
        most = 1 if any(one.tries for one in self._reviews.values()) else AT_ONCE
        room = most - sum(one.due_ns is not None for one in self._reviews.values())
        waiting = [(number, one) for number, one in self._reviews.items() if one.due_ns is None]
        for number, review in waiting[: max(0, room)] if self._is_ready else ():
            review.due_ns = self._clock() + _PATIENCE_NS
            self._say(Review(number, review.event, review.after))

    def _say(self, message: Message) -> None:
        self.child.send(render(message))


class _Pending(Struct):
    event: Event
    after: int  # the position up to which it gets the events about the job first
    tries: int = 0
    due_ns: int | None = None  # when it must be done, or the next step begun; None: not open
    wanted: bool = True  # False: the answer is no longer needed


_EVERYTHING = frozenset(EventName) - {EventName.POLLING, EventName.QUEUEING}  # while their wishes are not known yet
_HEAD = "/"
_KEY = re.compile(rf"{_HEAD}([a-z]+):(?:(.+):)?(-?[0-9]+)")

# Fields that an event copies from its object.
_OF_SPEC = ("project", "group", "tags", "executor", "request", "is_array")
_OF_RESULT = (
    *("job", "run", "attempt", "user", "project", "group", "tags", "executor"),
    *("request", "grant", "submitted_at_ns", "started_at_ns"),
)


class ConditionKind(StrEnum):
    """The kinds of lasting conditions."""

    RESERVED = "reserved"
    RESERVATION = "reservation"
    GPU = "gpu"
    DISPATCHER = "dispatcher"


class OngoingCondition(Struct, frozen=True):
    """A lasting condition: a reservation that exists, or is in force, a GPU in use, a running dispatcher.

    *name* is that of the reservation or the UUID of the GPU; a dispatcher has none.
    """

    kind: ConditionKind
    name: str
    since_ns: int

    @property
    def id(self) -> str:
        """Prefix of the ids of its events."""
        return ":".join(filter(None, (self.kind, self.name, str(self.since_ns))))

    @property
    def key(self) -> str:
        """Its key in the journal."""
        return _HEAD + self.id


def conditions(keys: Iterable[str], kind: ConditionKind) -> list[OngoingCondition]:
    """Return the conditions of that *kind* among the *keys* of the journal."""
    matches = (_KEY.fullmatch(key) for key in keys if key.startswith(_HEAD))
    return [
        OngoingCondition(kind, match[2] or "", int(match[3]))
        for match in matches
        if match is not None and match[1] == kind
    ]


class EventRecorder:
    """Knows the listeners, and records the events that they want."""

    def __init__(
        self, spool: LockedSpool, settings: Settings, logs: Logs, confinement: Confinement, timers: Timers
    ) -> None:
        self._spool = spool
        self._settings = settings
        self._logs = logs
        self._confinement = confinement
        self._timer = timers.timer("listeners")  # of the process of the listeners
        self.client = ListenerClient(spool.root, lambda reply: self.replies.append(reply), self._ready)
        self._subscriptions = NO_SUBSCRIPTIONS
        self._listeners: Ready | None = None
        self.wanted: frozenset[EventName] = frozenset()  # that some listener wants, independent of job files
        self.asked: frozenset[EventName] = frozenset()  # that need a review before they happen
        self._to_begin: set[str] = set()  # kinds of listeners without a cursor yet
        self._by_jobs: set[str] = set()  # the capabilities whose listeners jobs have asked for
        self.lines: list[bytes] = []
        self.news = False
        self.replies: list[Reply] = []

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems of the listeners."""
        return (*self._subscriptions.problems, *(self._listeners.problems if self._listeners is not None else ()))

    # The listeners.

    def open(self) -> None:
        """Find the listeners, and let them receive the events that the last dispatcher left undelivered."""
        self.look()
        writer = self._logs.events
        kinds = writer.kinds()
        if kinds:
            if writer.unread():
                self.news = True
                self.client.listen(kinds)
            self._cut()

    def look(self) -> None:
        """Look for listeners; a failed look is repeated with the next look at everything."""
        with self._confinement.service("look at", "the listeners"):
            before = self._subscriptions
            found = find_subscriptions(self._spool.root, self._settings.config, by_jobs=self._by_jobs)
            if found.problems != before.problems:
                for problem in found.problems:
                    log.warning("%s", problem)
            if found != before:
                if found.silent - before.silent:
                    self._listeners = None  # it reports its wishes again
                self._begin(found.kinds)
                self._subscriptions = found  # not before: on a full disk it is begun again
                self._settle()

    def work(self) -> None:
        """Maintain the process, and let it deliver the new events, whose effects are complete at the end of a pass."""
        try:
            with self._confinement.service("start", "the process of the listeners"):
                self.client.tick()
                if self.client.trouble is not None:  # in each pass, so that it is reported while it lasts
                    raise self.client.trouble
            if self.news:
                self.news = False
                self.client.more(self._logs.events.end)
                if self._logs.events.is_long:
                    self._cut()
        finally:
            self._timer.set(self.client.next_due_ns())

    def _cut(self) -> None:
        lost = self._logs.events.cut()
        if lost:
            log.error("listeners have not read events for too long: %s of events are dropped", show_size(lost))

    def _begin(self, kinds: Iterable[str]) -> None:
        """Give new listeners of these kinds every event from now on; on a full disk from the first flush."""
        self._to_begin |= set(kinds)
        with suppress(OSError):
            self._begin_listeners()

    def _begin_listeners(self) -> None:
        """Create the cursors of new listeners.

        Raises SpoolTrouble while there is no room for them: no event may be recorded that they would miss. Any other
        problem with a listener's own cursor affects that listener only.
        """
        if not self._to_begin:
            return
        events = self._logs.events
        events.end  # noqa: B018 - opens them
        for kind in sorted(self._to_begin):
            full: OSError | None = None
            with self._confinement.service("begin", f"the listener {kind}") as piece:
                try:
                    events.begin(kind)
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        raise
                    full = error
            if full is not None:
                raise SpoolTrouble(full.errno, full.strerror, full.filename) from full
            if not piece.failed:
                self._to_begin.discard(kind)
                self.client.listen((kind,))

    def _settle(self) -> None:
        """Compute the wanted events from what is known of the listeners."""
        found, ready = self._subscriptions, self._listeners
        self.wanted, self.asked = found.wants, found.asks
        if found.silent:
            self.wanted |= _EVERYTHING if ready is None else {name for name in EventName if name in ready.wants}

    def _ready(self, ready: Ready) -> None:
        self._listeners = ready
        self._settle()

    # The events.

    def wants(self, name: EventName, spec: Spec | None = None) -> bool:
        """Whether some listener wants such an event, about a job with that *spec*."""
        return name in self.wanted or (spec is not None and name is not EventName.POLLING and bool(_wishes(spec)))

    def run(self, name: EventName, live: ActiveRun, at_ns: int, reason: str = "", *, part: str = "") -> None:
        """Record an event about a live run. *part* distinguishes events of the same name in one run."""
        if self.wants(name, live.spec):
            self._record(self._of_run(name, live, at_ns, reason, part=part))

    def end(self, result: Result, spec: Spec | None) -> None:
        """Record the end of a run, or of a job that never ran."""
        name = EventName(result.outcome) if result.again is None else EventName.RETRYING
        if self.wants(name, spec):
            self._record(self._of_end(name, result, spec))

    def file(self, name: EventName, job: JobEntry, file: JobFileVersion, at_ns: int, reason: str = "") -> None:
        """Record an event about a waiting or held job."""
        if self.wants(name, file.spec or file.unreviewed):
            self._record(self._of_file(name, job, file, at_ns, reason))

    def condition(
        self, name: EventName, this: OngoingCondition, at_ns: int, reason: str = "", of: Reservation | None = None
    ) -> None:
        """Record an event about a reservation, a GPU or the dispatcher; *of* is the reservation, if that is known."""
        if self.wants(name):
            facts: dict[str, Any] = {}
            if this.kind is ConditionKind.GPU:
                facts = {"gpu": this.name}
            elif this.kind is not ConditionKind.DISPATCHER:
                facts = {"reservation": this.name, "reserved": of}
                facts |= _fields(of, ("user", "project")) if of is not None else {}
            self._record(self._event(name, f"{this.id}:{name}", at_ns, reason, **facts))

    def _record(self, event: Event) -> None:
        """Queue *event* for the next :meth:`flush`."""
        if new := event.wishes.keys() - self._by_jobs:
            self._begin(new)
            self._by_jobs |= new
        self.lines.append(render_event(event))

    def flush(self) -> None:
        """Write the queued events. Call it before the step that makes them final for the next dispatcher."""
        if self.lines:
            self._begin_listeners()
            self._logs.tell(b"".join(self.lines))
            self.lines = []
            self.news = True

    def close(self, *, passing: bool) -> None:
        """Let the process deliver the rest and leave; the next dispatcher repeats the events of an interrupted pass."""
        if self.news and not passing:
            self.client.more(self._logs.events.end)
        self.client.child.close()

    # Reviews.

    def review_file(self, name: EventName, job: JobEntry, file: JobFileVersion, at_ns: int, **facts: Any) -> int:
        """Request a review of the start of a job, or of its file, with these *facts* too; return its number."""
        return self._review(replace(self._of_file(name, job, file, at_ns), **facts))

    def review_cancel(self, live: ActiveRun, stop: Stop, at_ns: int) -> int:
        """Request a review of the cancellation of a run; return its number."""
        return self._review(self._of_run(EventName.CANCELLING, live, at_ns, stop.by_whom))

    def apply_replies(self, apply: Callable[[Reply], bool]) -> None:
        """Call *apply* with each reply; one for which it returns False comes again."""
        self.replies = [reply for reply in self.replies if not apply(reply)]

    def _review(self, event: Event) -> int:
        """Request a review from the listeners, after all earlier events about the job."""
        with suppress(OSError):  # events that cannot be written now are delivered later, and must not prevent a review
            self.flush()
        return self.client.ask(event, self._logs.events.end)

    # Construction of events.

    def _event(self, name: EventName, event_id: str, at_ns: int, reason: str, **facts: Any) -> Event:
        of_here = {"host": identity.host(), "version": __version__, "spool_dir": self._spool.root}
        return Event(id=event_id, name=name, at_ns=at_ns, reason=reason, **{**of_here, **facts})

    def _of_run(self, name: EventName, live: ActiveRun, at_ns: int, reason: str, *, part: str = "") -> Event:
        event_id = ":".join(filter(None, (live.name, str(live.run), name, part)))
        facts = _fields(live.spec, _OF_SPEC) | {
            "wishes": _wishes(live.spec),
            "job": live.name,
            "run": live.run,
            "attempt": live.attempts.attempt,
            "user": live.user,
            "executor": live.executor,
            "engine_id": live.engine_id,
            "grant": live.grant,
            "submitted_at_ns": live.wait.arrived_at_ns,
            "started_at_ns": live.ran_from_ns,
            "metadir": self._spool.layout.metadir(live.name, live.run),
        }
        return self._event(name, event_id, at_ns, reason, **facts)

    def _of_end(self, name: EventName, result: Result, spec: Spec | None) -> Event:
        facts = _fields(result, _OF_RESULT) | {
            "host": result.host or identity.host(),
            "result": result,
            "metadir": self._spool.layout.metadir(result.job, result.run),
        }
        if spec is not None:
            facts |= {"is_array": spec.is_array, "wishes": _wishes(spec)}
        event_id = f"{result.job}:{result.run}:{name}"
        return self._event(name, event_id, result.ended_at_ns or 0, result.reason, **facts)

    def _of_file(self, name: EventName, job: JobEntry, file: JobFileVersion, at_ns: int, reason: str = "") -> Event:
        # The last change of the file distinguishes the event from others of its name.
        tried = f"{job.attempts.attempt}.{job.attempts.requeues}" if name is EventName.SUBMITTING else ""
        event_id = ":".join(filter(None, (job.name, str(file.changed_at_ns), tried, name)))
        facts = {
            "job": job.name,
            "attempt": job.attempts.attempt,
            "user": name_of(file.uid),
            "submitted_at_ns": job.wait.arrived_at_ns if job.wait is not None else None,
        }
        if (spec := file.spec or file.unreviewed) is not None:
            facts |= _fields(spec, _OF_SPEC) | {"wishes": _wishes(spec)}
        return self._event(name, event_id, at_ns, reason, **facts)


def _fields(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _wishes(spec: Spec) -> dict[str, Any]:
    """Return what a job asks of listeners, by the names of their capabilities."""
    asked = [each.name for each in capabilities() if each.for_jobs] if spec.parts else []
    return {name: wish for name in asked if (wish := spec.part(name)) is not None}
