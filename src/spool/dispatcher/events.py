"""Record the events that listeners hear of in `events.jsonl`, in time, and only where somebody listens.

Each event is appended to `events.jsonl` before the last step that the next dispatcher would not do again, so that
none is lost (FORMAT 15.2). Its id is made of what happened, so that a repeat has the same. Where nobody listens, the
question costs a look into an empty set.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from spool.core.errors import NO_ROOM
from spool.core.eventnames import EventName
from spool.core.events import Event
from spool.core.model import Grant, Reservation, Result, Spec, Stop
from spool.core.units import show_size
from spool.dispatcher.confinement import Confinement, Thing
from spool.dispatcher.listener_client import ListenerClient
from spool.dispatcher.timers import Timers
from spool.formats.events import render_event
from spool.formats.listener_protocol import Ready, Reply
from spool.listeners.discovery import CAN_BE_REFUSED, FOR_JOBS, NO_SUBSCRIPTIONS, find_subscriptions, load_again
from spool.machine import identity
from spool.machine.host import user_name
from spool.state.run import ActiveRun
from spool.state.submission import JobFileVersion
from spool.state.table import JobEntry
from spool.store.config import Settings
from spool.store.disk import SpoolTrouble
from spool.store.locked_spool import LockedSpool
from spool.store.logs import Logs
from spool.version import __version__

log = logging.getLogger(__name__)

_OPENING = Thing("spool", "the events"), "open"
_EVERYTHING = frozenset(EventName) - {EventName.POLLING}  # what those may want who have not said yet
_HEAD = "/"
_KEY = re.compile(rf"{_HEAD}([a-z]+):(?:(.+):)?(-?[0-9]+)")

# What an event says in the same words as what it is about.
_OF_SPEC = ("project", "group", "tags", "executor", "request", "notify", "is_array")
_OF_RESULT = (
    *("job", "run", "attempt", "user", "project", "group", "tags", "executor"),
    *("request", "grant", "submitted_at_ns", "started_at_ns"),
)


class ConditionKind(StrEnum):
    """What it is that goes on."""

    RESERVATION = "reservation"
    GPU = "gpu"
    DISPATCHER = "dispatcher"


class OngoingCondition(Struct, frozen=True):
    """A reservation that holds, a GPU that is taken, a dispatcher that serves.

    *name* is the reservation's or the UUID of the GPU; a dispatcher has none.
    """

    kind: ConditionKind
    name: str
    since_ns: int

    @property
    def id(self) -> str:
        """What the ids of its events begin with."""
        return ":".join(filter(None, (self.kind, self.name, str(self.since_ns))))

    @property
    def key(self) -> str:
        """What the journal calls it."""
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
    """Knows who listens, and writes down what they want to hear of."""

    def __init__(
        self, spool: LockedSpool, settings: Settings, logs: Logs, confinement: Confinement, timers: Timers
    ) -> None:
        self._spool = spool
        self._settings = settings
        self._logs = logs
        self._confinement = confinement
        self._timer = timers.timer()  # of the process of the listeners
        self._client = ListenerClient(spool.root, self._answered, self._ready)
        self._subscriptions = NO_SUBSCRIPTIONS
        self._listeners: Ready | None = None
        self._wanted: frozenset[EventName] = frozenset()
        self._asked: frozenset[EventName] = frozenset()
        self._to_begin: set[str] = set()  # kinds of listeners that have no place in the events yet
        self._by_jobs = False  # whether a job has said whom to tell
        self._lines: list[bytes] = []
        self._news = False
        self._passing = True  # a file may be half moved
        self._replies: list[Reply] = []

    @property
    def wanted(self) -> frozenset[EventName]:
        """The events that somebody listens to, whatever a job says of itself."""
        return self._wanted

    @property
    def asked(self) -> frozenset[EventName]:
        """The events that need an answer before they happen."""
        return self._asked

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with those who listen."""
        return (*self._subscriptions.problems, *(self._listeners.problems if self._listeners is not None else ()))

    # Who listens.

    def open(self) -> None:
        """Find out who listens, and have them told what the last dispatcher left untold."""
        self.look()
        writer = self._logs.events
        kinds = writer.kinds()
        if kinds:
            load_again(self._spool.layout, self._spool.disk)
            if writer.unread():
                self._news = True
                self._client.listen(kinds)
            self._cut()

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`read` has something to do."""
        return self._client.fileno()

    def read(self) -> None:
        """Take in what the process of the listeners says."""
        self._client.read()

    def look(self) -> None:
        """Look who listens; what fails is looked at again with everything else."""
        with self._confinement.service("look at", "the listeners"):
            self._look()

    def _look(self) -> None:
        config, before = self._settings.config, self._subscriptions
        found = find_subscriptions(self._spool.root, config, for_jobs=self._by_jobs)
        if found.problems != before.problems:
            for problem in found.problems:
                log.warning("%s", problem)
        if found == before:
            return
        if found.silent - before.silent:
            self._listeners = None  # it will say anew what it wants
        self._begin(found.kinds)
        self._subscriptions = found  # not before: where the disk is full it is begun again
        self._settle()

    def begin_pass(self) -> None:
        """Let nobody hear of what is written from here on until :meth:`end_pass`."""
        self._passing = True
        if self._to_begin and not self._confinement.pauses(*_OPENING):
            self._begin(())

    def end_pass(self) -> None:
        """See to the process, and tell it of what is new and has come to its end."""
        try:
            with self._confinement.service("start", "the process of the listeners"):
                self._client.tick()
                if self._client.trouble is not None:  # in each pass, so that it is told for as long as it lasts
                    raise self._client.trouble
            self._passing = False
            if self._news:
                self._news = False
                self._client.more(self._logs.events.end)
                if self._logs.events.is_long:
                    self._cut()
        finally:
            self._timer.set(self._client.next_due_ns())

    def _cut(self) -> None:
        """Keep `events.jsonl` short."""
        lost = self._logs.events.cut()
        if lost:
            log.error("listeners have not read events for too long: %s of events are dropped", show_size(lost))

    def _begin(self, kinds: Iterable[str]) -> None:
        """Let listeners of these kinds hear of everything from now on; on a full disk from the first flush."""
        self._to_begin |= set(kinds)
        with self._confinement.of(*_OPENING):
            self._begin_listeners()

    def _begin_listeners(self) -> None:
        """See to it that those who are to hear of what is written next have a place in it.

        Raises SpoolTrouble while there is no room for it: nothing may be written that they would never hear of. What
        else is wrong with a listener's own place costs that listener alone.
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
                self._client.listen((kind,))
        self._confinement.done(*_OPENING)

    def _settle(self) -> None:
        """Work out what is wanted from what is known of those who listen."""
        found, ready = self._subscriptions, self._listeners
        self._wanted, self._asked = found.wants, found.asks
        if found.silent:
            self._wanted |= _EVERYTHING if ready is None else _known(ready.wants)
        if found.may_ask:
            self._asked |= CAN_BE_REFUSED if ready is None else _known(ready.asks)

    def _ready(self, ready: Ready) -> None:
        self._listeners = ready
        self._settle()

    # What happens.

    def wants(self, name: EventName, spec: Spec | None = None) -> bool:
        """Whether anybody wants to hear of that, of a job with that *spec*."""
        return name in self._wanted or (spec is not None and spec.notify is not None and name is not EventName.POLLING)

    def run(self, name: EventName, live: ActiveRun, at_ns: int, reason: str = "", *, part: str = "") -> None:
        """Record something of a run that is alive. *part* tells it from others of its name in the same run."""
        if self.wants(name, live.spec):
            self._record(self._of_run(name, live, at_ns, reason, part=part))

    def cancelling(self, live: ActiveRun, stop: Stop, at_ns: int) -> None:
        """Record that a run is about to be cancelled."""
        self.run(EventName.CANCELLING, live, at_ns, _by(stop))

    def end(self, result: Result, spec: Spec | None) -> None:
        """Record how a run, or a job that never ran, has ended."""
        name = EventName(result.outcome) if result.again is None else EventName.RETRYING
        if self.wants(name, spec):
            self._record(self._of_end(name, result, spec))

    def file(self, name: EventName, job: JobEntry, file: JobFileVersion, at_ns: int, reason: str = "") -> None:
        """Record something of a job that waits or is held."""
        if self.wants(name, file.spec):
            self._record(self._of_file(name, job, file, at_ns, reason))

    def reservation(self, name: EventName, this: OngoingCondition, at_ns: int, of: Reservation | None) -> None:
        """Record that the reservation *this* began or is over; *of* is None if its file is gone."""
        if self.wants(name):
            reason = (of.comment or "") if of is not None else "it was removed"
            facts = _fields(of, ("user", "project")) if of is not None else {}
            self._record(self._event(name, f"{this.id}:{name}", at_ns, reason, reservation=this.name, **facts))

    def condition(self, name: EventName, this: OngoingCondition, at_ns: int, reason: str = "") -> None:
        """Record something of a GPU or of the dispatcher."""
        if self.wants(name):
            gpu = this.name if this.kind is ConditionKind.GPU else None
            self._record(self._event(name, f"{this.id}:{name}", at_ns, reason, gpu=gpu))

    def _record(self, event: Event) -> None:
        """Have *event* written down by the next :meth:`flush`."""
        if event.notify is not None and not self._by_jobs:
            self._begin({FOR_JOBS})
            self._by_jobs = True
        self._lines.append(render_event(event))

    def flush(self) -> None:
        """Write down what was recorded. Call it before the step that makes it so for the next dispatcher."""
        if self._lines:
            self._begin_listeners()
            self._logs.tell(b"".join(self._lines))
            self._lines = []
            self._news = True

    def close(self) -> None:
        """Let the process tell what there is, and leave; what a pass that was cut off is about, the next one tells."""
        if self._news and not self._passing:
            self._client.more(self._logs.events.end)
        self._client.close()

    def join(self, timeout_s: float) -> None:
        """Wait until the process has left, after :meth:`close`."""
        self._client.join(timeout_s)

    # What somebody is asked about before.

    def review_start(self, job: JobEntry, file: JobFileVersion, grant: Grant, at_ns: int) -> int:
        """Have it reviewed whether a job may start; return the number of the review."""
        return self._review(replace(self._of_file(EventName.SUBMITTING, job, file, at_ns), grant=grant))

    def review_cancel(self, live: ActiveRun, stop: Stop, at_ns: int) -> int:
        """Have it reviewed whether a run may be cancelled; return the number of the review."""
        return self._review(self._of_run(EventName.CANCELLING, live, at_ns, _by(stop)))

    def forget_review(self, number: int) -> None:
        """Have no answer to a review any more."""
        self._client.forget(number)

    def take_replies(self) -> list[Reply]:
        """Return the replies that came since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def _review(self, event: Event) -> int:
        """Ask the listeners that have heard all earlier events about the job."""
        with suppress(OSError):  # what cannot be written down now is told later, and keeps nobody from being asked
            self.flush()
        return self._client.ask(event, self._logs.events.end)

    def _answered(self, reply: Reply) -> None:
        self._replies.append(reply)

    # Events, made of what the dispatcher knows.

    def _event(self, name: EventName, event_id: str, at_ns: int, reason: str, **facts: Any) -> Event:
        of_here = {"host": identity.host(), "version": __version__, "spool_dir": self._spool.root}
        return Event(id=event_id, name=name, at_ns=at_ns, reason=reason, **{**of_here, **facts})

    def _of_run(self, name: EventName, live: ActiveRun, at_ns: int, reason: str, *, part: str = "") -> Event:
        event_id = ":".join(filter(None, (live.name, str(live.run), name, part)))
        facts = _fields(live.spec, _OF_SPEC) | {
            "job": live.name,
            "run": live.run,
            "attempt": live.attempts.attempt,
            "user": live.user,
            "executor": live.executor,
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
            facts |= _fields(spec, ("notify", "is_array"))
        event_id = f"{result.job}:{result.run}:{name}"
        return self._event(name, event_id, result.ended_at_ns or 0, result.reason, **facts)

    def _of_file(self, name: EventName, job: JobEntry, file: JobFileVersion, at_ns: int, reason: str = "") -> Event:
        # The last change of the file tells the event from others of its name.
        tried = f"{job.attempts.attempt}.{job.attempts.requeues}" if name is EventName.SUBMITTING else ""
        event_id = ":".join(filter(None, (job.name, str(file.changed_at_ns), tried, name)))
        facts = {
            "job": job.name,
            "attempt": job.attempts.attempt,
            "user": user_name(file.uid),
            "submitted_at_ns": job.wait.arrived_at_ns if job.wait is not None else None,
        }
        if file.spec is not None:
            facts |= _fields(file.spec, _OF_SPEC)
        return self._event(name, event_id, at_ns, reason, **facts)


def _fields(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _known(names: Iterable[str]) -> frozenset[EventName]:
    return frozenset(name for name in EventName if name in names)


def _by(stop: Stop) -> str:
    return f"by {stop.by}" + (f": {stop.reason}" if stop.reason else "")
