"""What the name in a dependency stands for: how that job has ended, and which tasks an array has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress

from spool.core.arrays import Tasks
from spool.core.model import SECOND_NS, State
from spool.state.table import SchedulerState
from spool.store.spool import Spool

FEW = 4096
"""How many names are remembered although no job depends on them."""


class ArrayNames(Mapping[str, tuple[str, ...]]):
    """The tasks of every array that was expanded. Of one that has ended they are read when a rule first asks.

    An array that was cancelled stands for itself alone: of the tasks that were never issued nothing is on record.
    """

    def __init__(self, spool: Spool, table: SchedulerState) -> None:
        self._spool = spool
        self._table = table
        self._known: dict[str, tuple[str, ...]] = {}  # () for what is no array

    def __getitem__(self, name: str) -> tuple[str, ...]:
        array = self._table.arrays.get(name)
        if array is not None:
            return array.names
        if name in self._table.jobs:  # it waits, is held or runs, and is no array in progress
            raise KeyError(name)
        known = self._known.get(name)
        if known is None:
            if len(self._known) >= FEW + 2 * len(self._table.queue.watch.names()):
                self._known.clear()  # what still matters is read again
            known = self._known[name] = self._read(name)
        if not known:
            raise KeyError(name)
        return known

    def __iter__(self) -> Iterator[str]:
        """Only `get` is asked for by the rules."""
        return iter(self._table.arrays)

    def __len__(self) -> int:
        return len(self._table.arrays)

    def forget(self, name: str) -> None:
        """Forget what a name was that has begun again."""
        self._known.pop(name, None)

    def _read(self, name: str) -> tuple[str, ...]:
        try:
            return self._recorded(name)
        except OSError:
            return ()  # its outcome cannot be read either, and that is told

    def _recorded(self, name: str) -> tuple[str, ...]:
        spool = self._spool
        run = spool.latest_run(name)
        if run is None or spool.array(name, run) is None:
            return ()
        result = spool.result(name, run)
        if result is not None and result.outcome is State.CANCELLED:
            return ()
        spec = spool.spec(name, run)
        return Tasks(name, spec).names() if spec is not None else ()


class OutcomeIndex(Mapping[str, State]):
    """The newest outcome of each job that has ended, read from its records when a rule first asks."""

    def __init__(
        self,
        spool: Spool,
        standing: Callable[[str], State | None] = lambda _: None,
        reading: Callable[[str], AbstractContextManager[object]] = lambda _: suppress(OSError),
        matters: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """*standing* knows of names that have not ended though no queue has them, and what they do.

        A record that cannot be read is as one that is not there yet. The records of a job are read inside
        `with reading(name)`, which ends that work where an error comes up, and may tell of it. *matters* says whether a
        waiting job depends on a name; what is known of others is not kept for ever.
        """
        self._spool = spool
        self._reading = reading
        self._standing = standing
        self._matters = matters
        self._known: dict[str, State] = {}
        self._missing: dict[str, int] = {}
        self._most = FEW  # names that are kept before those that matter are known

    def __getitem__(self, name: str) -> State:
        if (state := self._standing(name)) is not None:
            return state
        state = self._known.get(name)
        if state is None:
            # A name that nobody has seen is asked for at every pass; the disk is not.
            if self._missing.get(name, 0) > time.monotonic_ns():
                raise KeyError(name)
            self._forget_some()
            state = self._read(name)
            if state is None:
                self._missing[name] = time.monotonic_ns() + 5 * SECOND_NS
                raise KeyError(name)
            self._known[name] = state
        return state

    def __iter__(self):  # type: ignore[no-untyped-def]
        """Only `get` is asked for by the rules."""
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def record(self, name: str, state: State) -> None:
        """Take in that a job has ended for good."""
        self._forget_some()
        self._known[name] = state
        self._missing.pop(name, None)

    def _forget_some(self) -> None:
        """Forget the names that no waiting job depends on, once there are many: their records tell the same."""
        if len(self._known) + len(self._missing) < self._most:
            return
        matters = self._matters
        self._known = {name: state for name, state in self._known.items() if matters(name)}
        self._missing = {name: at_ns for name, at_ns in self._missing.items() if matters(name)}
        self._most = FEW + 2 * (len(self._known) + len(self._missing))

    def forget(self, name: str) -> None:
        """Forget what a job was that waits or runs again."""
        self._known.pop(name, None)

    def _read(self, name: str) -> State | None:
        result = None
        with self._reading(name):
            run = self._spool.latest_run(name)
            result = self._spool.result(name, run) if run is not None else None
        return result.outcome if result is not None and result.again is None else None
