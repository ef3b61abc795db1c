"""What a dispatcher counts while it lives, for `state.json` and the metrics: its passes and its troubles."""

from __future__ import annotations

import logging
from bisect import bisect_left

from spool.core.model import SECOND_NS
from spool.formats.state import PassesView

_MS = SECOND_NS // 1000
BOUNDS_NS = (_MS, 3 * _MS, 10 * _MS, 30 * _MS, 100 * _MS, 300 * _MS, SECOND_NS, 3 * SECOND_NS, 10 * SECOND_NS)


class Counts(logging.Handler):
    """Counts passes, and, as a handler of the log, errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors = 0
        self._counts = [0] * (len(BOUNDS_NS) + 1)
        self._sum_ns = 0
        self._last_ns = 0

    def passed(self, took_ns: int) -> None:
        """Count a pass."""
        self._counts[bisect_left(BOUNDS_NS, took_ns)] += 1
        self._sum_ns += took_ns
        self._last_ns = took_ns

    def emit(self, record: logging.LogRecord) -> None:
        """Count an error."""
        self.errors += 1

    def passes(self) -> PassesView:
        """Return what is known of the passes."""
        return PassesView(
            count=sum(self._counts),
            sum_ns=self._sum_ns,
            last_ns=self._last_ns,
            bounds_ns=BOUNDS_NS,
            counts=tuple(self._counts),
        )
