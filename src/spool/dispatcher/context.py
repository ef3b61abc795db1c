"""What the dispatcher's components share: the spool, its state, work queues, the journal, and contributed steps.

The journal is the dispatcher's memory on the disk: state that no job file has (places in the queue, runs that began and
are not over). A line reaches `.journal` only after the events recorded before it are in `events.jsonl`, so that
listeners receive the event of a step before the next dispatcher considers it done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct, field

from spool.core.lifecycle import Prober
from spool.core.scheduler import Start
from spool.dispatcher.confinement import Confinement
from spool.dispatcher.events import EventRecorder
from spool.dispatcher.leases import LeaseGate
from spool.dispatcher.wakeup import Clock, Timers, Wakeup
from spool.executors import Executors
from spool.formats import journal
from spool.formats.capabilities import capabilities, loaded
from spool.formats.journal import Line
from spool.state.run import ActiveRun, JobEntry, StopOrdered
from spool.state.table import SchedulerState
from spool.store.edited import Settings
from spool.store.locked_spool import LockedSpool
from spool.store.logs import Logs


class Context(Struct, frozen=True):
    """Created once by the dispatcher and passed to its components."""

    spool: LockedSpool
    settings: Settings
    state: SchedulerState
    executors: Executors
    prober: Prober
    changes: Changes
    journal: Journal
    events: EventRecorder
    confinement: Confinement
    timers: Timers
    gate: LeaseGate
    clock: Clock  # the wall clock, nanoseconds since the epoch


class Component:
    """A part of the dispatcher, with the shared objects at hand."""

    def __init__(self, context: Context) -> None:
        """Take them from *context*."""
        self._context = context
        self._spool, self._settings, self._state = context.spool, context.settings, context.state
        self._executors, self._changes, self._clock = context.executors, context.changes, context.clock
        self._journal, self._events, self._gate = context.journal, context.events, context.gate
        self._confinement, self._prober = context.confinement, context.prober


class WorkQueue:
    """Names to process, each once, in the order of arrival."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def add(self, name: str) -> None:
        """Queue *name*."""
        self.names[name] = None

    def update(self, names: Iterable[str]) -> None:
        """Queue all of *names*."""
        self.names.update(dict.fromkeys(names))

    def take(self) -> list[str]:
        """Remove and return all names; the caller must process them."""
        names, self.names = list(self.names), {}
        return names

    def done(self, name: str) -> None:
        """Remove *name*, which was processed."""
        self.names.pop(name, None)


class Changes(Struct, frozen=True):
    """Possible changes of files by users, found by the scanner."""

    runs: WorkQueue = field(default_factory=WorkQueue)  # live runs whose file in running/ changed
    strays: WorkQueue = field(default_factory=WorkQueue)  # files in running/ that belong to no live run
    vanished: WorkQueue = field(default_factory=WorkQueue)  # waiting jobs whose files went away
    suspensions: WorkQueue = field(default_factory=WorkQueue)  # names whose runs may have to be suspended, or continued
    leftovers: WorkQueue = field(default_factory=WorkQueue)  # names whose runs' commands may have left processes behind
    arrays: WorkQueue = field(default_factory=WorkQueue)  # arrays in progress whose file may have changed


class Journal:
    """Gathers lines and writes them. Failures raise SpoolTrouble, and the lines stay noted."""

    def __init__(self, logs: Logs, write_events: Callable[[], None]) -> None:
        """*write_events* writes the recorded events, and is called before every line."""
        self.logs = logs
        self._write_events = write_events
        self.lines: list[Line] = []  # noted, and not written yet

    def note(self, *lines: Line) -> None:
        """Add *lines* for the next :meth:`commit`, after those noted before."""
        self.lines += lines

    def note_place(self, job: JobEntry) -> None:
        """Note the place of a job in the queue, and its clock, if it has one."""
        if job.wait is not None:
            self.note(job.wait.line(job.name))

    def commit(self) -> None:
        """Write all recorded events and noted lines. Call it before every step that follows from them."""
        self._write_events()
        if self.lines:
            self.logs.remember(self.lines)
            self.lines = []

    def write(self, lines: Iterable[Line]) -> None:
        """Write these *lines* at once, before the noted ones."""
        self._write_events()
        self.logs.remember(lines)

    def compact(self, lines: list[Line]) -> None:
        """Replace its whole content, and all noted lines, by *lines*."""
        self.logs.compact(lines)
        self.lines = []


def all_lines(state: SchedulerState, boot_id: str) -> list[Line]:
    """Return the lines from which `recall` restores the part of *state* in no file; *boot_id* is this boot's."""
    lines: list[Line] = []
    for live in state.live.values():
        boot = (live.origin.boot_id if live.origin is not None else None) or boot_id
        lines.append(
            journal.Started(live.name, live.run, boot, live.inode, live.wait.arrived_at_ns, live.started_at_ns)
        )
        if isinstance(live.order, StopOrdered) and not live.order.recorded:
            lines.append(stopping_line(live))
    for array in state.arrays.values():
        at_ns = array.expanded_at_ns
        lines.append(journal.Started(array.name, array.run, boot_id, array.inode, array.arrived_at_ns, at_ns))
    # After the starts: a job that was moved out of running/ waits while its run is being stopped.
    lines += [job.wait.line(job.name) for job in state.jobs.values() if job.wait is not None]
    lines += [reviewed for name, reviewed in state.reviewed.items() if name in state.jobs]
    return lines


def stopping_line(live: ActiveRun) -> Line:
    """Return the journal's line for a run being stopped, which replaces its record."""
    stop = live.stop
    assert stop is not None
    return journal.Stopping(live.name, live.run, stop.kind.value, stop.by, stop.at_ns, stop.reason)


log = logging.getLogger(__name__)


class Steps(Protocol):
    """What a capability does in a pass of the dispatcher. Nothing here may wait, nor hold up a start for good."""

    @property
    def waiting(self) -> bool:
        """Whether an answer is still missing."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is an answer; it never changes."""

    def ready(self, starts: Sequence[Start]) -> list[Start]:
        """Return the starts that may go on now; the others keep their place in the plan, and come again.

        The reason of a job that waits begins with the name of the capability and a colon.
        """

    def put(self, live: ActiveRun) -> None:
        """Add to the records of a claimed run, before its launch. Raises nothing."""

    def work(self) -> bool:
        """Record the answers; return whether there were any."""

    def close(self) -> None:
        """Release everything."""


class ContributedSteps(Component):
    """The steps of all capabilities that have some."""

    def __init__(self, context: Context, wakeup: Wakeup) -> None:
        super().__init__(context)
        self._wakeup = wakeup
        self._made: dict[str, Steps] = {}  # by the capability

    @property
    def waiting(self) -> bool:
        """Whether an answer is still missing."""
        return any(steps.waiting for steps in self._made.values())

    def ready(self, starts: list[Start]) -> list[Start]:
        """Return the starts that may go on now."""
        for one in capabilities():
            if starts and one.steps and (not one.config or self._settings.config.part(one.name) is not None):
                steps = self._made.get(one.name) or self._make(one.name, one.steps)
                starts = steps.ready(starts) if steps is not None else starts
        return starts

    def _make(self, name: str, target: str) -> Steps | None:
        try:
            steps: Any = loaded(target)(self._context)
        except (ImportError, OSError) as error:  # it holds up no start
            log.warning("cannot load %s: %s", name, error)
            return None
        self._wakeup.watch_files(steps.fileno(), lambda: None)  # each pass takes in the answers
        return self._made.setdefault(name, steps)

    def put(self, live: ActiveRun) -> None:
        """Add to the records of a claimed run, before its launch."""
        for steps in self._made.values():
            steps.put(live)

    def work(self) -> bool:
        """Record the answers; return whether there were any."""
        answered = [steps.work() for steps in self._made.values()]  # each, whatever the others have
        return any(answered)

    def close(self) -> None:
        """Release everything."""
        for steps in self._made.values():
            steps.close()
