"""How much was told to whom, counted over all threads of the listeners' process for the metrics."""

from __future__ import annotations

from collections import Counter
from threading import Lock


class Tallies:
    """Counts by word. They begin at nothing with the process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter()

    def add(self, word: str, count: int = 1) -> None:
        """Count *word*."""
        with self._lock:
            self._counts[word] += count

    def read(self) -> dict[str, int]:
        """Return all counts."""
        with self._lock:
            return dict(self._counts)


LETTERS = Tallies()
"""Letters by what became of them: "delivered", "failed" (and may be tried again), "given_up"."""
