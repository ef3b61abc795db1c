"""Record the events that listeners hear of in `events.jsonl`, in time, and only where somebody listens.

Each event is appended to `events.jsonl` before the last step that the next dispatcher would not do again, so that
none is lost (FORMAT 15.2). Where nobody listens, the question costs a look into an empty set.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import spool
from spool.core.errors import NO_ROOM
from spool.core.events import Event, EventName
from spool.core.layout import Layout
from spool.core.model import Reservation, Result, Spec
from spool.core.units import show_size
from spool.dispatcher.confinement import Confinement, Thing
from spool.dispatcher.listener_client import ListenerClient
from spool.formats import journal
from spool.formats.events import render_event
from spool.formats.listening import Hello, Reply
from spool.listeners.discovery import CAN_BE_REFUSED, FOR_JOBS, NO_SUBSCRIPTIONS, find_subscriptions, load_again
from spool.machine import identity
from spool.machine.host import user_name
from spool.state.table import Job, JobFile, Live
from spool.store.config import Settings
from spool.store.disk import SpoolTrouble
from spool.store.locked_spool import LockedSpool
from spool.store.logs import Logs

log = logging.getLogger(__name__)

_OPENING = Thing("spool", "the events"), "open"
_EVERYTHING = frozenset(EventName) - {EventName.POLLING}  # what those may want who have not said yet
_HEAD = "/"
_KEY = re.compile(rf"{_HEAD}([a-z]+):(?:(.+):)?(-?[0-9]+)")


class EventRecorder:
    """What the dispatcher tells. `wanted` are the events that somebody listens to, whatever a job says of itself."""

    def __init__(self, spool: LockedSpool, settings: Settings, logs: Logs, confinement: Confinement) -> None:
        self._confinement = confinement
        self._spool = spool
        self._settings = settings
        self._logs = logs
        self.wanted: frozenset[EventName] = frozenset()
        self.asked: frozenset[EventName] = frozenset()  # may be said no to
        self.problems: tuple[str, ...] = ()
        self.known: set[str] = set()  # ids that the journal has
        self.client = ListenerClient(spool.root, self._answered, self._greeted)
        self._standing = NO_SUBSCRIPTIONS
        self._hello: Hello | None = None
        self._to_begin: set[str] = set()  # kinds of listeners that have no place in the events yet
        self._by_jobs = False  # whether a job has said whom to tell
        self._lines: list[bytes] = []
        self.notes: list[journal.Line] = []  # what the journal is to be told, after the events are written down
        self._news = False
        self._passing = True  # a file may be half moved
        self.replies: list[Reply] = []
        self.settled = True  # False: who is to be asked has changed

    # Who listens.

    def open(self, known: Iterable[str]) -> None:
        """Find out who listens; *known* is what the journal remembers of what was told."""
        self.known = set(known)
        self.look()
        outbox = self._logs.events
        kinds = outbox.kinds()
        if kinds:
            load_again(self._spool.layout, self._spool.disk)
            if outbox.unread():
                self._news = True
                self.client.listen(kinds)
            self._cut()

    def look(self) -> None:
        """Look who listens; what fails is looked at again with everything else."""
        with self._confinement.service("look at", "the listeners"):
            self._look()

    def _look(self) -> None:
        config = self._settings.config
        found, before = find_subscriptions(self._spool.root, config, for_jobs=self._by_jobs), self._standing
        if found.problems != before.problems:
            for problem in found.problems:
                log.warning("%s", problem)
        if found == before:
            return
        if found.silent - before.silent:
            self._hello = None  # it will say anew what it wants
        self._begin(found.kinds)
        self._standing = found  # not before: where the disk is full it is begun again
        self._settle()

    def begin_pass(self) -> None:
        """Let nobody hear of what is written from here on until :meth:`tick`."""
        self._passing = True
        if self._to_begin and not self._confinement.pauses(*_OPENING):
            self._begin(())

    def tick(self) -> None:
        """At the end of a pass: see to the process, and tell it of what is new and has come to its end."""
        with self._confinement.service("start", "the process of the listeners"):
            self.client.tick()
            if self.client.trouble is not None:  # in each pass, so that it is told for as long as it lasts
                raise self.client.trouble
        self._passing = False
        if self._news:
            self._news = False
            self.client.more(self._logs.events.end)
            if self._logs.events.is_long:
                self._cut()

    def _cut(self) -> None:
        """Keep `events.jsonl` short."""
        lost = self._logs.events.cut()
        if lost:
            log.error("listeners have read nothing for so long that %s of events are thrown away", show_size(lost))

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
                self.client.listen((kind,))
        self._confinement.done(*_OPENING)

    def _settle(self) -> None:
        """Work out what is wanted from what is known of those who listen."""
        found, hello = self._standing, self._hello
        wanted, asked = frozenset[EventName](), frozenset[EventName]()
        if found.silent:
            wanted = _EVERYTHING if hello is None else frozenset(EventName(name) for name in hello.wants)
        if found.may_ask:
            asked = CAN_BE_REFUSED if hello is None else frozenset(EventName(name) for name in hello.asks)
        self.wanted, self.asked = found.wants | wanted, found.asks | asked
        self.problems = (*found.problems, *(hello.problems if hello is not None else ()))
        self.settled = False

    def _greeted(self, hello: Hello | None) -> None:
        if hello is not None:
            known = frozenset(EventName)
            self._hello = Hello(
                tuple(name for name in hello.wants if name in known),
                tuple(name for name in hello.asks if name in known),
                hello.problems,
            )
            self._settle()

    def _answered(self, reply: Reply) -> None:
        self.replies.append(reply)

    # What happens.

    def wants(self, name: EventName, spec: Spec | None = None) -> bool:
        """Whether anybody wants to hear of that, of a job with that *spec*."""
        return name in self.wanted or (spec is not None and spec.notify is not None and name is not EventName.POLLING)

    def run(self, name: EventName, live: Live, at_ns: int, reason: str = "", *, part: str = "") -> None:
        """Tell something of a run that is alive."""
        if self.wants(name, live.spec):
            self.tell(of_run(name, live, self._spool.root, at_ns, reason, part=part))

    def end(self, result: Result, spec: Spec | None) -> None:
        """Tell how a run, or a job that never ran, has ended."""
        name = EventName(result.outcome) if result.again is None else EventName.RETRYING
        if self.wants(name, spec):
            self.tell(of_end(result, spec, self._spool.root))

    def file(self, name: EventName, job: Job, file: JobFile, at_ns: int, reason: str = "") -> None:
        """Tell something of a job that waits or is held."""
        if self.wants(name, file.spec):
            self.tell(of_file(name, job, file, self._spool.root, at_ns, reason))

    def tell(self, event: Event) -> None:
        """Have *event* written down by the next :meth:`flush`."""
        if event.notify is not None and not self._by_jobs:
            self._begin({FOR_JOBS})
            self._by_jobs = True
        self._lines.append(render_event(event))

    def ask(self, event: Event) -> int:
        """Ask whether that may be, of who has heard all before about the job; return the number of the question."""
        with suppress(OSError):  # what cannot be written down now is told later, and keeps nobody from being asked
            self.flush()
        return self.client.ask(event, self._logs.events.end)

    def note(self, key: str) -> None:
        """Have the journal remember that this was told, or is so. It does after the event is written down."""
        if key not in self.known:
            self.known.add(key)
            self.notes.append(journal.Told(key))

    def forget(self, key: str) -> None:
        """Have the journal forget it."""
        if key in self.known:
            self.known.discard(key)
            self.notes.append(journal.Told(key, True))

    def take_notes(self) -> list[journal.Line]:
        """Return what the journal is to be told, which is the caller's to write from now on."""
        notes, self.notes = self.notes, []
        return notes

    def worth_remembering(self) -> list[journal.Line]:
        """Return what the next dispatcher has to know."""
        return [journal.Told(key) for key in self.known]

    def flush(self) -> None:
        """Write down what was told. Call it before the step that makes it so for the next dispatcher."""
        if self._lines:
            self._begin_listeners()
            self._logs.tell(b"".join(self._lines))
            self._lines = []
            self._news = True

    def close(self) -> None:
        """Let the process tell what there is, and leave; what a pass that was cut off is about, the next one tells."""
        if self._news and not self._passing:
            self.client.more(self._logs.events.end)
        self.client.close()


def of_run(name: EventName, live: Live, root: str, at_ns: int, reason: str = "", *, part: str = "") -> Event:
    """Return an event of a run that is alive. *part* tells it from others of its name in the same run."""
    spec = live.spec
    return Event(
        id=":".join(filter(None, (live.name, str(live.run), name, part))),
        name=name,
        at_ns=at_ns,
        host=identity.host(),
        version=spool.__version__,
        spool_dir=root,
        reason=reason,
        job=live.name,
        run=live.run,
        attempt=live.series.attempt,
        user=live.user,
        project=spec.project,
        group=spec.group,
        tags=spec.tags,
        executor=live.executor,
        request=spec.request,
        grant=live.grant,
        submitted_at_ns=live.wait.arrived_at_ns,
        started_at_ns=live.started_at_ns,
        metadir=Layout(root).metadir(live.name, live.run),
        notify=spec.notify,
    )


def of_end(result: Result, spec: Spec | None, root: str) -> Event:
    """Return the event of a run that is over, or of a job that ended without one."""
    name = EventName(result.outcome) if result.again is None else EventName.RETRYING
    return Event(
        id=f"{result.job}:{result.run}:{name}",
        name=name,
        at_ns=result.ended_at_ns or 0,
        host=result.host or identity.host(),
        version=spool.__version__,
        spool_dir=root,
        reason=result.reason,
        job=result.job,
        run=result.run,
        attempt=result.attempt,
        user=result.user,
        project=result.project,
        group=result.group,
        tags=result.tags,
        executor=result.executor,
        request=result.request,
        grant=result.grant,
        submitted_at_ns=result.submitted_at_ns,
        started_at_ns=result.started_at_ns,
        result=result,
        metadir=Layout(root).metadir(result.job, result.run),
        notify=spec.notify if spec is not None else None,
        is_array=spec is not None and spec.is_array,
    )


def of_file(name: EventName, job: Job, file: JobFile, root: str, at_ns: int, reason: str = "") -> Event:
    """Return an event of a job that waits or is held. Its file's last change tells it from others of its name."""
    spec = file.spec
    tried = f"{job.series.attempt}.{job.series.requeues}" if name is EventName.SUBMITTING else ""
    return Event(
        id=":".join(filter(None, (job.name, str(file.changed_at_ns), tried, name))),
        name=name,
        at_ns=at_ns,
        host=identity.host(),
        version=spool.__version__,
        spool_dir=root,
        reason=reason,
        job=job.name,
        attempt=job.series.attempt,
        user=user_name(file.uid),
        project=spec.project if spec else None,
        group=spec.group if spec else None,
        tags=spec.tags if spec else (),
        executor=spec.executor if spec else None,
        request=spec.request if spec else None,
        submitted_at_ns=job.wait.arrived_at_ns if job.wait is not None else None,
        notify=spec.notify if spec else None,
        is_array=spec is not None and spec.is_array,
    )


def of_reservation(name: EventName, this: Lasting, root: str, at_ns: int, of: Reservation | None) -> Event:
    """Return that the reservation *this* began or is over; *of* is None if its file is gone."""
    return Event(
        id=f"{this.id}:{name}",
        name=name,
        at_ns=at_ns,
        host=identity.host(),
        version=spool.__version__,
        spool_dir=root,
        reason=(of.comment or "") if of is not None else "it was removed",
        user=of.user if of is not None else None,
        project=of.project if of is not None else None,
        reservation=this.name,
    )


def of_spool(name: EventName, this: Lasting, root: str, at_ns: int, reason: str = "") -> Event:
    """Return an event of a GPU or of the dispatcher."""
    return Event(
        id=f"{this.id}:{name}",
        name=name,
        at_ns=at_ns,
        host=identity.host(),
        version=spool.__version__,
        spool_dir=root,
        reason=reason,
        gpu=this.name if this.kind is Kind.GPU else None,
    )


class Kind(StrEnum):
    """Of what kind it is."""

    RESERVATION = "reservation"
    GPU = "gpu"
    DISPATCHER = "dispatcher"


@dataclass(frozen=True, slots=True)
class Lasting:
    """One thing that lasts. *name* is the reservation's or the UUID of the GPU; a dispatcher has none."""

    kind: Kind
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


def lasting(keys: Iterable[str], kind: Kind) -> list[Lasting]:
    """Return what is of that *kind* among the *keys* of the journal."""
    matches = (_KEY.fullmatch(key) for key in keys if key.startswith(_HEAD))
    return [Lasting(kind, match[2] or "", int(match[3])) for match in matches if match is not None and match[1] == kind]
