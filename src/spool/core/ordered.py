"""A list that is kept in order, for more insertions than reads."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Generic, TypeVar

Entry = TypeVar("Entry", bound=tuple[object, ...])

_FEW = 8  # up to this number are inserted one by one; more are sorted together with the existing ones
_SHORT = 1_000  # inserting into a shorter list costs next to nothing


class Ordered(Generic[Entry]):
    """Entries in order. Entries added to a long list are sorted in at the next read, all of them at once.

    So 100,000 entries in any order cost one sort, instead of moving a long list for each of them.
    """

    __slots__ = ("_entries", "_late")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._late: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """Add an entry; free if it comes after all the others."""
        entries = self._entries
        if not self._late and (not entries or entries[-1] < entry):
            entries.append(entry)
        elif len(entries) <= _SHORT:
            insort(entries, entry)
        else:
            self._late.append(entry)

    def discard(self, entry: Entry) -> None:
        """Remove an entry, if present."""
        entries = self.entries
        at = bisect_left(entries, entry)
        if at < len(entries) and entries[at] == entry:
            del entries[at]

    @property
    def is_settled(self) -> bool:
        """Whether all entries are in their places."""
        return not self._late

    @property
    def entries(self) -> list[Entry]:
        """All of them, in order; for reading only. The list object never changes."""
        self.settle()
        return self._entries

    def settle(self) -> None:
        """Sort in the pending entries."""
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
