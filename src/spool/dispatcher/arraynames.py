"""Which jobs an array's name stands for, as dependencies ask it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spool.core.arrays import Tasks
from spool.core.model import State
from spool.dispatcher.table import Table
from spool.store.spool import Spool


class ArrayNames(Mapping[str, tuple[str, ...]]):
    """The tasks of every array that was expanded. Of one that has ended they are read when a rule first asks.

    An array that was cancelled stands for itself alone: of the tasks that were never issued nothing is on record.
    """

    def __init__(self, spool: Spool, table: Table) -> None:
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
