"""Ask hooks before a start and before a cancel, without waiting for the answer (FORMAT 15.3).

A job whose start is asked about keeps its place in the plan, and the room that it is to have, and starts in the pass
after the answer. A run whose cancel is asked about goes on.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spool.core import layout
from spool.core.events import EventName
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import SECOND_NS, Stop, StopKind
from spool.core.scheduler import Start
from spool.dispatcher import events
from spool.dispatcher.confinement import Thing
from spool.formats.listening import Reply
from spool.state.table import Job, Live
from spool.store.disk import status_of

if TYPE_CHECKING:
    from spool.dispatcher.loop import Dispatcher


log = logging.getLogger(__name__)

_ANSWER = "apply the answer of a hook to"
ASKED = "hook submitting: asked"
_GOOD_FOR_NS = 60 * SECOND_NS  # a yes; what it was given for may be over by then


@dataclass(slots=True)
class _Start:
    """A start that is asked about. `of` tells the version of the job that it is about."""

    of: tuple[object, ...]
    number: int
    reply: Reply | None = None
    at_ns: int = 0  # when the reply came, monotonic


@dataclass(slots=True)
class _Cancel:
    live: Live
    stop: Stop
    number: int


class Admission:
    """The questions that are open, and the answers that wait for their use."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._of = dispatcher
        self._events = dispatcher.events
        self._starts: dict[str, _Start] = {}
        self._cancels: dict[tuple[str, int], _Cancel] = {}
        self._allowed: set[tuple[str, int]] = set()  # runs whose cancel nobody minds

    @property
    def waiting(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._cancels) or any(start.reply is None for start in self._starts.values())

    @property
    def reviews_starts(self) -> bool:
        """Whether hooks are asked about starts, and may have texts for the wrapper."""
        return EventName.SUBMITTING in self._events.asked

    def hear(self) -> None:
        """Take in the answers that came since the last pass."""
        telling = self._events
        if not telling.settled:
            telling.settled = True
            self._settle()
        if telling.replies:
            self._forget_old()
        replies, telling.replies = telling.replies, []
        telling.replies += [reply for reply in replies if not self._take(reply)]

    def _take(self, reply: Reply) -> bool:
        """Take in one answer; return whether that is done, else it is taken again."""
        for name, start in list(self._starts.items()):
            if start.number == reply.number and not self._try(Thing.of_job(name), self._answered, name, start, reply):
                return False
        return all(
            cancel.number != reply.number or self._try(Thing.of_run(cancel.live.key), self._stop_or_keep, cancel, reply)
            for cancel in list(self._cancels.values())
        )

    def _try(self, thing: Thing, action: Callable[..., None], *about: object) -> bool:
        """Do what follows from an answer, unless that failed a moment ago; return whether it is done."""
        if self._of.confinement.pauses(thing, _ANSWER):
            return False
        with self._of.confinement.of(thing, _ANSWER) as piece:
            action(*about)
        if piece.failed and (job := self._of.state.jobs.get(thing.name)) is not None and job.live is None:
            self._of.state.block(job, self._of.confinement.why(thing.name))  # so that it keeps nobody else waiting
        return not piece.failed

    def review(self, starts: Sequence[Start], now: int) -> list[tuple[Start, Reply | None]]:
        """Return those of *starts* that nobody is to be asked about, or that were allowed; ask about the others.

        Each comes with what hooks want its wrapper to say.
        """
        if EventName.SUBMITTING not in self._events.asked:
            return [(start, None) for start in starts]
        self._texts: dict[str, Reply] = {}
        return [(start, self._texts.get(start.name)) for start in starts if self._may_start(start, now)]

    def may_stop(self, live: Live, stop: Stop) -> bool:
        """Whether the run may be stopped now; if that is to be asked first, it is asked, and goes on until then."""
        if stop.kind is not StopKind.CANCEL:
            self.forget([live])  # it ends whatever the answer is
            return True
        if EventName.CANCELLING not in self._events.asked:
            return True
        if live.key in self._allowed or f"{live.name}:{live.run}:{EventName.CANCELLING}" in self._events.known:
            return True
        live.stop, live.asking = None, True
        if live.key not in self._cancels:
            why = f"by {stop.by}" + (f": {stop.reason}" if stop.reason else "")
            event = events.of_run(EventName.CANCELLING, live, self._of.spool.root, self._of.clock(), why)
            self._cancels[live.key] = _Cancel(live, stop, self._events.ask(event))
        return False

    def forget(self, lives: Iterable[Live]) -> None:
        """Have nothing more to do with runs that are over, or about to be; a cancel nobody agreed to was none."""
        for live in lives:
            self._allowed.discard(live.key)
            cancel = self._cancels.get(live.key)
            if cancel is not None:
                with self._of.confinement.of(Thing.of_run(live.key), "take back the cancel of"):
                    self._of.spool.disk.discard(self._of.spool.layout.record(*live.key, layout.STOP))
                self._events.client.forget(cancel.number)
                self._no_longer_asked(cancel)

    # Starts.

    def _may_start(self, start: Start, now: int) -> bool:
        job = self._of.state.jobs.get(start.name)
        if job is None or job.queued is None or job.queued.spec is None or job.live is not None:
            return True  # it will not be started, and the starter knows why
        of = _version(job)
        asked = self._starts.get(start.name)
        if asked is not None and asked.of == of:
            if asked.reply is None:
                return False
            if asked.reply.no is not None:
                self._try(Thing.of_job(job.name), self._refuse, job, asked.reply.no)
                return False
            if time.monotonic_ns() - asked.at_ns < _GOOD_FOR_NS:
                del self._starts[start.name]
                self._texts[start.name] = asked.reply
                return True
        if asked is not None:
            self._events.client.forget(asked.number)
        event = events.of_file(EventName.SUBMITTING, job, job.queued, self._of.spool.root, now)
        number = self._events.ask(replace(event, grant=start.grant))
        self._starts[start.name] = _Start(of, number)
        job.asked = ASKED
        return False

    def _answered(self, name: str, start: _Start, reply: Reply) -> None:
        start.reply, start.at_ns = reply, time.monotonic_ns()
        job = self._of.state.jobs.get(name)
        self._of.state.changed()  # the plan is made anew, and what is allowed starts
        if job is not None:
            job.asked = ""
        if job is None or job.queued is None or job.live is not None or start.of != _version(job):
            del self._starts[name]
            return
        if reply.no is not None:
            self._refuse(job, reply.no)

    def _refuse(self, job: Job, why: str) -> None:
        """Hold a job that is not to start; if it cannot be held, because of its name, it stays where it is."""
        of = self._of
        if not self._of.spool.hold_because(job.name, why):
            of.state.block(job, why)
            return
        log.info("job %s is held: %s", job.name, why)
        self._starts.pop(job.name, None)
        of.scanner.examine(QUEUED, job.name)
        of.scanner.examine(HELD, job.name)

    def _forget_old(self) -> None:
        """Forget what was answered of jobs that went away meanwhile."""
        now = time.monotonic_ns()
        old = [name for name, one in self._starts.items() if one.reply is not None and now - one.at_ns > _GOOD_FOR_NS]
        for name in old:
            if name not in self._of.state.jobs:
                del self._starts[name]

    def _settle(self) -> None:
        """After a change of who is to be asked: what nobody asks about any more need not wait."""
        if EventName.SUBMITTING not in self._events.asked:
            for name in self._starts:
                if (job := self._of.state.jobs.get(name)) is not None:
                    job.asked = ""
            self._starts.clear()
        if EventName.CANCELLING not in self._events.asked:
            for cancel in list(self._cancels.values()):
                self._try(Thing.of_run(cancel.live.key), self._stop_or_keep, cancel, Reply(cancel.number))
        self._of.state.changed()

    # Cancels.

    def _stop_or_keep(self, cancel: _Cancel, reply: Reply) -> None:
        live = cancel.live
        if live.holds_room and live.key in self._of.state.live:
            if reply.no is None:
                self._allowed.add(live.key)
                self._of.stops.order(live, cancel.stop)
            else:
                self._keep(live, reply.no)
        self._no_longer_asked(cancel)

    def _no_longer_asked(self, cancel: _Cancel) -> None:
        cancel.live.asking = False
        self._cancels.pop(cancel.live.key, None)

    def _keep(self, live: Live, why: str) -> None:
        """Drop a cancel: the run goes on, its file comes back to `running/`, and a record says why."""
        spool, name = self._of.spool, live.name
        log.info("job %s run %d is not cancelled: %s", name, live.run, why)
        live.kept = why
        # Cut off before its last step this is a cancel still, and is asked about again.
        spool.put_record(name, live.run, layout.KEPT, f"{why}\n".encode())
        spool.disk.discard(spool.layout.record(name, live.run, layout.STOP))
        running = spool.layout.job_file(RUNNING, name)
        if status_of(running) is None:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                if spool.holds(live.inode, name, DONE, mtime_ns=live.mtime_ns):
                    spool.disk.move(spool.layout.job_file(DONE, name), running)
                else:
                    spool.disk.publish(running, spool.record(name, live.run, layout.SPEC_COPY) or b"")
        self._of.context.changes.runs.add(name)
        self._of.state.changed()


def _version(job: Job) -> tuple[object, ...]:
    file, wait = job.queued, job.wait
    assert file is not None
    return file.inode, file.mtime_ns, file.size, job.series, wait.arrived_at_ns if wait is not None else 0
