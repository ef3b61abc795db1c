"""Deadlines: each component sets timers of its own, and the dispatcher sleeps until the first of them is due."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

Clock = Callable[[], int]
"""Returns the time on one of the clocks of the machine, in nanoseconds."""

Part = Literal[
    "files", "answers", "recovery", "ends", "suspensions", "limits", "stops", "arrays", "halt", "starts", "preemption",
    "gpu use", "paperwork", "conditions", "journal", "listeners", "gpus", "status", "machine"
]  # fmt: skip
"""A part of a pass."""

_SHARE_OF_TIME = 5


def boot_clock() -> int:
    """Return the time since boot in nanoseconds, time asleep included: the clock of time limits."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Timer:
    """One deadline of one component, or none. An early deadline costs one pass without work."""

    __slots__ = ("at_ns",)

    def __init__(self) -> None:
        self.at_ns: int | None = None

    def set(self, at_ns: int | None) -> None:
        """Set the deadline, on the clock of the timer; None: no deadline."""
        self.at_ns = at_ns

    def advance(self, at_ns: int) -> None:
        """Set the deadline unless it is earlier already."""
        if self.at_ns is None or at_ns < self.at_ns:
            self.at_ns = at_ns


class Timers:
    """The timers of a dispatcher."""

    def __init__(self) -> None:
        self._timers: list[tuple[Timer, Part, Clock, bool]] = []

    def timer(self, part: Part, clock: Clock = time.monotonic_ns, *, always: bool = False) -> Timer:
        """Return a new timer on *clock*, which calls for that *part* of a pass, and which the part clears or sets anew.

        While the spool is unusable, only those that are *always* due count.
        """
        timer = Timer()
        self._timers.append((timer, part, clock, always))
        return timer

    def due(self) -> set[Part]:
        """Return the parts whose deadlines have passed."""
        return {part for timer, part, clock, _ in self._timers if timer.at_ns is not None and timer.at_ns <= clock()}

    def due_in_ns(self, *, held_up: bool = False) -> int | None:
        """Return the time until the first deadline, 0 if one has passed; None if there is none."""
        waits = [
            timer.at_ns - clock()
            for timer, _, clock, always in self._timers
            if timer.at_ns is not None and (always or not held_up)
        ]
        return max(0, min(waits)) if waits else None


class Pace:
    """Measures a piece of work (`with pace:`), and returns how long to pause it.

    The cost is processor time. On a busy machine the same work occasionally takes many times as long, and that alone
    must not delay it for long; but a slow disk must not delay everything else either.
    """

    def __init__(self, share: int) -> None:
        """Limit the work to one part in *share* of a processor, and one in five of this thread's time."""
        self._share = share
        self._begun = (0, 0)
        self.pause_ns = 0

    def __enter__(self) -> None:
        self._begun = (time.thread_time_ns(), time.monotonic_ns())

    def __exit__(self, *_: object) -> None:
        processor_ns, passed_ns = time.thread_time_ns() - self._begun[0], time.monotonic_ns() - self._begun[1]
        self.pause_ns = max(self._share * processor_ns, _SHARE_OF_TIME * passed_ns)
