"""How soon work that takes time may be done again."""

from __future__ import annotations

import time

_SHARE_OF_TIME = 5


class Pace:
    """Measures a piece of work (`with pace:`), and says how long to leave it.

    What it costs is processor time. On a busy machine the same work takes many times as long once in a while, and
    that alone must not keep it from being done for long; but a slow disk must not hold up everything else either.
    """

    def __init__(self, share: int) -> None:
        """Let the work have one part in *share* of a processor, and one in five of this thread's time."""
        self._share = share
        self._begun = (0, 0)
        self.pause_ns = 0

    def __enter__(self) -> None:
        self._begun = (time.thread_time_ns(), time.monotonic_ns())

    def __exit__(self, *_: object) -> None:
        processor_ns, passed_ns = time.thread_time_ns() - self._begun[0], time.monotonic_ns() - self._begun[1]
        self.pause_ns = max(self._share * processor_ns, _SHARE_OF_TIME * passed_ns)
