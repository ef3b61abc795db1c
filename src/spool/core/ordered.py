"""A list that is kept in order, for readers that come more rarely than entries do."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Generic, TypeVar

Entry = TypeVar("Entry", bound=tuple[object, ...])

_FEW = 8  # up to this number are inserted one by one; more are sorted together with the existing ones
_SHORT = 1_000  # a list that is no longer is moved aside at hardly any cost


class Ordered(Generic[Entry]):
    """Entries in order. What is added to a long list is put into its place when somebody looks, all of it at once.

    So 100,000 that come in any order cost one sort, and not a long list moved aside for each of them.
    """

    __slots__ = ("_entries", "_late")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._late: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """Add an entry; where it comes after all the others, at no cost."""
        entries = self._entries
        if not self._late and (not entries or entries[-1] < entry):
            entries.append(entry)
        elif len(entries) <= _SHORT:
            insort(entries, entry)
        else:
            self._late.append(entry)

    def discard(self, entry: Entry) -> None:
        """Take an entry out, if it is there."""
        entries = self.entries
        at = bisect_left(entries, entry)
        if at < len(entries) and entries[at] == entry:
            del entries[at]

    @property
    def is_settled(self) -> bool:
        """Whether all are in their places."""
        return not self._late

    @property
    def entries(self) -> list[Entry]:
        """All of them, in order; for reading only. It is the same list for life."""
        self.settle()
        return self._entries

    def settle(self) -> None:
        """Put what was added into its place."""
        late = self._late
        if not late:
            return
        if len(late) < _FEW:
            for entry in late:
                insort(self._entries, entry)
        else:
            self._entries.extend(late)
            self._entries.sort()
        late.clear()
