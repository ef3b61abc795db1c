"""What every component of the dispatcher works with: the spool, what is known of it, and where facts are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from spool.dispatcher.confinement import Confinement
from spool.dispatcher.events import EventRecorder
from spool.dispatcher.journal import Journal
from spool.dispatcher.timers import Clock, Timers
from spool.executors import Executors
from spool.state.table import SchedulerState
from spool.store.config import Settings
from spool.store.locked_spool import LockedSpool


class Context(Struct, frozen=True):
    """Made once by the dispatcher and handed to its components."""

    spool: LockedSpool
    settings: Settings
    state: SchedulerState
    executors: Executors
    changes: Changes
    journal: Journal
    events: EventRecorder
    confinement: Confinement
    timers: Timers
    clock: Clock  # the wall clock, nanoseconds since the epoch


class WorkQueue:
    """Names to be seen to, each once, in the order in which they came."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add(self, name: str) -> None:
        """Have *name* seen to."""
        self._names[name] = None

    def update(self, names: Iterable[str]) -> None:
        """Have all of *names* seen to."""
        self._names.update(dict.fromkeys(names))

    def take(self) -> list[str]:
        """Return all names; they are the caller's to see to from now on."""
        names, self._names = list(self._names), {}
        return names

    def done(self, name: str) -> None:
        """Take note that *name* was seen to."""
        self._names.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        """Iterate over what is there now; what comes meanwhile waits for the next time."""
        return iter(list(self._names))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __bool__(self) -> bool:
        return bool(self._names)


class Changes(Struct, frozen=True):
    """What users may have done to files, found by the scanner."""

    runs: WorkQueue = field(default_factory=WorkQueue)  # live runs whose file in running/ changed
    strays: WorkQueue = field(default_factory=WorkQueue)  # files in running/ that belong to no live run
    vanished: WorkQueue = field(default_factory=WorkQueue)  # waiting jobs whose files went away
    suspensions: WorkQueue = field(default_factory=WorkQueue)  # names whose run may be to suspend, or to go on
    arrays: WorkQueue = field(default_factory=WorkQueue)  # arrays in progress whose file may have changed
