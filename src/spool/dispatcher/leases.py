"""The gate between plan and launch on a machine that several users share: a start needs a lease (FORMAT 17).

Here is the gate alone. Who grants leases is a capability's to know (`Capability.leases`), which is loaded once the
machine is shared; without it nothing starts there. On a machine that is not shared nothing here does anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from spool.core.gpus import as_if_alone
from spool.core.model import SECOND_NS, Machine
from spool.core.scheduler import Plan, Start
from spool.dispatcher.wakeup import Timer, Timers, Wakeup
from spool.formats.capabilities import only
from spool.formats.state import SharedView
from spool.machine.host import NO_ASKING, NO_ASKING_REMEDY, shared_directory
from spool.state.run import ActiveRun
from spool.state.table import SchedulerState
from spool.state.world import on_shared
from spool.store.edited import Settings
from spool.store.locked_spool import LockedSpool

log = logging.getLogger(__name__)

_AGAIN_NS = SECOND_NS  # before loading is tried again


class Leases:
    """The leases of this spool's runs. These here ask no arbiter: no start needs a lease, or none can have one.

    `view` is what is known of the arbiter, None if the machine is not shared. `news` says that a lease came since the
    plan was carried out, `jumped` that a start is ready that the plan does not have.
    """

    asks = False
    """Whether an arbiter is asked for leases."""

    def __init__(self, settings: Settings, state: SchedulerState, view: SharedView | None = None) -> None:
        self._settings = settings
        self._state = state
        self.view = view
        self.news = False
        self.jumped = False

    def look(self, directory: str) -> None:
        """Find out who may be asked in the *directory* of the arbiter: at first, and when that may have changed."""

    def close(self) -> None:
        """Leave. Runs go on, and keep their leases; unused leases are given back."""

    # What a pass asks.

    @property
    def has_work(self) -> bool:
        """Whether there is something to say, to the arbiter or about it."""
        return bool(self._state.over)

    def work(self) -> bool:
        """Send every message that waits, and stay connected; return whether the reasons of jobs have changed."""
        self._state.take_over()  # no arbiter is told that their leases are over
        return False

    @property
    def asking(self) -> bool:
        """Whether an answer is missing that should come at once."""
        return False

    @property
    def holds_more(self) -> bool:
        """Whether there are asks, or unused leases."""
        return False

    def machine(self, machine: Machine) -> Machine:
        """Return *machine* with the totals of the arbiter, and with why it grants nothing."""
        return machine if self.view is None else on_shared(machine, self._settings.config, self.view)

    def planned(self, machine: Machine) -> Machine:
        """Return *machine* as it is planned on: the other users, and their processes, are the arbiter's to judge."""
        return machine if self.view is None else as_if_alone(machine)

    def startable(self, starts: Sequence[Start], plan: Plan | None = None) -> list[Start]:
        """Return those of *starts*, all of *plan*, that need no lease or have one; ask for the others."""
        return [each for each in starts if self.view is None or self._state.queue[each.name].elsewhere is not None]

    def line_up(self, plan: Plan | None) -> None:
        """Ask for what is next in line behind the starts of *plan*, while there is nothing else to do."""

    def reason(self, name: str) -> str:
        """Return why the start of the job *name* waits for a lease; "" if it does not."""
        return ""

    # What becomes of the leases.

    def begin(self, lives: Iterable[ActiveRun]) -> set[tuple[str, int]]:
        """Tell the arbiter that *lives*, whose leases are on the disk, begin now; return those that must not."""
        return set()

    def used(self, live: ActiveRun) -> None:
        """Record that a lease belongs to a run from now on: it is over with it."""


class LeaseGate:
    """Finds out whether the machine is shared, and has the `leases` that follow from it."""

    def __init__(
        self, spool: LockedSpool, settings: Settings, state: SchedulerState, timers: Timers, wakeup: Wakeup
    ) -> None:
        """Look at nothing yet."""
        self._spool = spool
        self._settings = settings
        self._state = state
        self._wakeup = wakeup
        self._timer: Timer = timers.timer("machine", always=True)
        self._place: tuple[str | None, ...] = ()  # what the last look has found
        self._try_again = False
        self.leases = Leases(settings, state)

    @property
    def is_shared(self) -> bool:
        """Whether a start needs a lease."""
        return self.leases.view is not None

    def look(self, *, anew: bool = False) -> None:
        """Find out whether the machine is shared: at the start, and when that may have changed. *anew*: ask for all."""
        config = self._settings.config
        directory = shared_directory(config.machine)
        place = config.machine, config.machine_owner, directory
        if place == self._place and not anew:
            return
        self._place = place
        if directory is None:
            if self.is_shared:
                self._replace(Leases(self._settings, self._state))
            return
        if not self.leases.asks:
            self._replace(self._asking(directory))
        self.leases.look(directory)

    def work(self) -> bool:
        """Do what is due; return whether the reasons of jobs have changed."""
        if self._try_again:
            self.look(anew=True)
        return self.leases.work()

    def _replace(self, leases: Leases) -> None:
        self._timer.set(time.monotonic_ns() + _AGAIN_NS if self._try_again else None)
        if leases.asks or leases.view != self.leases.view:  # else there is no news
            if leases.view is not None:
                log.warning("no job can start on this shared machine: %s", leases.view.problem)
            self.leases.close()
            self.leases = leases
            self._state.changed()

    def _asking(self, directory: str) -> Leases:
        """Return the leases of a shared machine: those of the capability that knows whom to ask, or none."""
        problem, remedy, self._try_again = NO_ASKING, NO_ASKING_REMEDY, False
        try:
            made = only("leases")
        except (ImportError, OSError) as error:
            made, problem, self._try_again = None, f"{NO_ASKING}: {error}", True
        if made is not None:
            leases = made(self._spool, self._settings, self._state, self._timer, self._wakeup)
            assert isinstance(leases, Leases)
            return leases
        return Leases(self._settings, self._state, SharedView(directory=directory, problem=problem, remedy=remedy))
