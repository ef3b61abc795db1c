"""Telling the listeners what happens: whether anybody wants to hear of it, and that it is written down in time.

Each event is appended to `events.jsonl` before the last step that the next dispatcher would not do again, so that
none is lost (FORMAT 15.2). Where nobody listens, the question costs a look into an empty set.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress

from spool.core.errors import NO_ROOM
from spool.core.events import Event, EventName
from spool.core.model import Result, Spec
from spool.core.units import show_size
from spool.dispatcher import happenings
from spool.dispatcher.confinement import Confinement, Thing
from spool.dispatcher.listening import Listening
from spool.formats import journal
from spool.formats.events import render_event
from spool.formats.listening import Hello, Reply
from spool.listeners.discovery import CAN_BE_REFUSED, FOR_JOBS, NO_SUBSCRIPTIONS, find_subscriptions, load_again
from spool.state.table import Job, JobFile, Live
from spool.store.config import Settings
from spool.store.disk import SpoolTrouble
from spool.store.locked_spool import LockedSpool
from spool.store.logs import Logs

log = logging.getLogger(__name__)

_OPENING = Thing("spool", "the events"), "open"
_EVERYTHING = frozenset(EventName) - {EventName.POLLING}  # what those may want who have not said yet


class Telling:
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
        self.listening = Listening(spool.root, self._answered, self._greeted)
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
                self.listening.listen(kinds)
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
            self.listening.tick()
            if self.listening.trouble is not None:  # in each pass, so that it is told for as long as it lasts
                raise self.listening.trouble
        self._passing = False
        if self._news:
            self._news = False
            self.listening.more(self._logs.events.end)
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
                self.listening.listen((kind,))
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
            self.tell(happenings.of_run(name, live, self._spool.root, at_ns, reason, part=part))

    def end(self, result: Result, spec: Spec | None) -> None:
        """Tell how a run, or a job that never ran, has ended."""
        name = EventName(result.outcome) if result.again is None else EventName.RETRYING
        if self.wants(name, spec):
            self.tell(happenings.of_end(result, spec, self._spool.root))

    def file(self, name: EventName, job: Job, file: JobFile, at_ns: int, reason: str = "") -> None:
        """Tell something of a job that waits or is held."""
        if self.wants(name, file.spec):
            self.tell(happenings.of_file(name, job, file, self._spool.root, at_ns, reason))

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
        return self.listening.ask(event, self._logs.events.end)

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
            self.listening.more(self._logs.events.end)
        self.listening.close()
