"""What every component of the dispatcher works with: the spool, what is known of it, and where facts are written."""

from __future__ import annotations

from dataclasses import dataclass

from spool.dispatcher.changes import Changes
from spool.dispatcher.confinement import Confinement
from spool.dispatcher.events import EventRecorder
from spool.dispatcher.journal import Journal
from spool.dispatcher.timers import Clock, Timers
from spool.executors import Executors
from spool.state.table import SchedulerState
from spool.store.config import Settings
from spool.store.locked_spool import LockedSpool


@dataclass(frozen=True, slots=True)
class Context:
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
