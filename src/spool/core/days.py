"""Intervals of time by calendar day."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

from spool.core.model import SECOND_NS

Day = tuple[str, int, int]
"""A day: its name, its first instant, and that of the next."""

_DAY_NS = 24 * 3600 * SECOND_NS
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Days:
    """Which day an instant is of; days are 23 to 25 hours long where clocks are put forward and back.

    *look* returns an instant's day by the clock that is meant: its name, its begin and its end.
    """

    def __init__(self, look: Callable[[int], Day]) -> None:
        self._look = look
        self._last: Day = ("", 0, 0)
        self._known: dict[int, list[Day]] = {}  # by day since 1970 in UTC

    def of(self, at_ns: int) -> str:
        """Return the day, "2026-01-31"."""
        return self._day(at_ns)[0]

    def parts(self, start_at_ns: int, end_at_ns: int) -> Iterator[Day]:
        """Yield the part of an interval within each day that it touches."""
        while start_at_ns < end_at_ns:
            name, _, until = self._day(start_at_ns)
            until = min(until, end_at_ns)
            yield name, start_at_ns, until
            start_at_ns = until

    def _day(self, at_ns: int) -> Day:
        if self._last[1] <= at_ns < self._last[2]:
            return self._last
        near = self._known.setdefault(at_ns // _DAY_NS, [])
        found = next((day for day in near if day[1] <= at_ns < day[2]), None)
        if found is None:
            name, start, end = self._look(at_ns)
            found = (name, min(start, at_ns), max(end, at_ns + 1))  # where a midnight is skipped
            near.append(found)
        self._last = found
        return found


def utc_day(at_ns: int) -> Day:
    """Return the day in UTC."""
    start = at_ns - at_ns % _DAY_NS
    return (_EPOCH + timedelta(microseconds=start // 1000)).date().isoformat(), start, start + _DAY_NS
