"""The shared objects of the dispatcher's components: the spool, its state, and the places for facts."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from spool.dispatcher.confinement import Confinement
from spool.dispatcher.events import EventRecorder
from spool.dispatcher.journal import Journal
from spool.dispatcher.leases import LeaseGate
from spool.dispatcher.timers import Clock, Timers
from spool.executors import Executors
from spool.state.table import SchedulerState
from spool.store.config import Settings
from spool.store.locked_spool import LockedSpool


class Context(Struct, frozen=True):
    """Created once by the dispatcher and passed to its components."""

    spool: LockedSpool
    settings: Settings
    state: SchedulerState
    executors: Executors
    changes: Changes
    journal: Journal
    events: EventRecorder
    confinement: Confinement
    timers: Timers
    gate: LeaseGate
    clock: Clock  # the wall clock, nanoseconds since the epoch


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
