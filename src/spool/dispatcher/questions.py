"""The questions that the process of the listeners is to answer: which are open, and how long that is still in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spool.core.events import Event
from spool.core.model import SECOND_NS
from spool.formats.listening import AT_ONCE

PATIENCE_NS = 60 * SECOND_NS
"""With the beginning and the end of a step of the process, beyond what the step itself may take."""

_MOST_TRIES = 3


@dataclass(slots=True)
class _Question:
    event: Event
    after: int  # the position in the events before which it has been told of the job
    tries: int = 0
    due_ns: int | None = None  # when it must be answered, or the next step begun; None: it is not open
    wanted: bool = True  # False: nobody waits for the answer any more


class Questions:
    """The numbers of those without an answer. Those that are open were sent. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._all: dict[int, _Question] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def add(self, event: Event, after: int) -> int:
        """Take in what is to be asked, and after which position in the events; return its number."""
        self._number += 1
        self._all[self._number] = _Question(event, after)
        return self._number

    def forget(self, number: int) -> None:
        """Have no use for an answer any more. A question that is open stays so: the process is at work on it."""
        question = self._all.get(number)
        if question is not None:
            question.wanted = False
            if question.due_ns is None:
                del self._all[number]

    def next_due_ns(self) -> int | None:
        """Return when the process must have said something of one that is open."""
        return min((one.due_ns for one in self._all.values() if one.due_ns is not None), default=None)

    def send(self, now_ns: int) -> Iterator[tuple[int, Event, int]]:
        """Yield what may be asked now; it is open then. After a death one by one, so that the guilty one is found."""
        most = 1 if any(one.tries for one in self._all.values()) else AT_ONCE
        room = most - sum(one.due_ns is not None for one in self._all.values())
        for number, question in self._all.items():
            if room <= 0:
                return
            if question.due_ns is None:
                room -= 1
                question.due_ns = now_ns + PATIENCE_NS
                yield number, question.event, question.after

    def goes_on(self, number: int, now_ns: int, within_ns: int) -> None:
        """Know that the process has begun a step of one that is open, which may take *within_ns*."""
        if number in self._all:
            self._all[number].due_ns = now_ns + within_ns + PATIENCE_NS

    def answered(self, number: int) -> bool:
        """Be done with one; return whether somebody waits for the answer."""
        question = self._all.pop(number, None)
        return question is not None and question.wanted

    def died(self) -> Iterator[tuple[int, Event, int]]:
        """Know that the process has ended; yield those that are given up, with how often it has ended with them."""
        for number, question in list(self._all.items()):
            if question.due_ns is not None:
                question.due_ns = None
                question.tries += 1
            if not question.wanted or question.tries >= _MOST_TRIES:
                del self._all[number]
            if question.wanted and question.tries >= _MOST_TRIES:
                yield number, question.event, question.tries
