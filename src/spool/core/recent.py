"""The last half hour of a spool: how long its queue was, and how busy each GPU, for those who look at it.

The dispatcher notes what it knows anyway, in steps of half a minute. An unknown step is None: no dispatcher was
running, or no job had the GPUs watched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from spool.core.model import SECOND_NS

STEP_NS = 30 * SECOND_NS
STEPS = 60


class RecentUse(Struct, frozen=True, kw_only=True):
    """Numbers for each of the last steps, the newest last; `until_ns` is the end of that."""

    step_ns: int = STEP_NS
    until_ns: int = 0
    queued: tuple[int | None, ...] = ()  # the most jobs that were in the queue
    gpus: dict[str, tuple[int | None, ...]] = field(default_factory=dict)  # by UUID: the mean utilisation in percent

    def as_of(self, now_ns: int, queued: int | None) -> RecentUse:
        """Return it with the later steps up to *now_ns*: in these the queue was as now, the rest is unknown."""
        if not self.until_ns or self.step_ns <= 0:
            return self  # nothing was noted
        missing = min(max(0, -((self.until_ns - now_ns) // self.step_ns)), STEPS)
        return RecentUse(
            step_ns=self.step_ns,
            until_ns=self.until_ns + missing * self.step_ns,
            queued=_after(self.queued, [queued] * missing),
            gpus={uuid: _after(percents, [None] * missing) for uuid, percents in self.gpus.items()},
        )


class RecentRecorder:
    """Notes them. What an earlier dispatcher has noted is kept."""

    def __init__(self) -> None:
        self._use = RecentUse()
        self._waiting: int | None = None  # noted last
        self._sums: dict[str, tuple[int, int]] = {}  # of the newest step: the sum of the percentages, their number

    def resume(self, before: RecentUse) -> None:
        """Begin with what an earlier dispatcher has noted."""
        if before.step_ns == STEP_NS:
            gpus = {uuid: of[-STEPS:] for uuid, of in before.gpus.items()}
            self._use = RecentUse(until_ns=before.until_ns, queued=before.queued[-STEPS:], gpus=gpus)

    def note_queue(self, now_ns: int, waiting: int) -> None:
        """Note how many jobs are in the queue."""
        self._go_on(now_ns)
        self._waiting, queued = waiting, self._use.queued
        newest = queued[-1] if queued else None
        self._use = replace(self._use, queued=(*queued[:-1], max(waiting, newest or 0)))

    def note_gpus(self, at_ns: int, percents: Mapping[str, int | None]) -> None:
        """Note the utilisation of each GPU, by UUID, in a look at *at_ns*."""
        self._go_on(at_ns)
        gpus = dict(self._use.gpus)
        for uuid, percent in percents.items():
            if percent is not None:
                total, looks = self._sums.get(uuid, (0, 0))
                self._sums[uuid] = total, looks = total + percent, looks + 1
                gpus[uuid] = (*gpus.get(uuid, ())[:-1], round(total / looks))
        self._use = replace(self._use, gpus=gpus)

    def noted(self) -> RecentUse:
        """Return what was noted so far."""
        return self._use

    def _go_on(self, now_ns: int) -> None:
        """Begin the step of *now_ns*, unless it has begun."""
        before, end_ns = self._use, (now_ns // STEP_NS + 1) * STEP_NS
        if end_ns < before.until_ns - STEP_NS:  # the clock was set back
            before = RecentUse()
        elif end_ns <= before.until_ns:
            return
        if not before.queued and not before.gpus:
            before = RecentUse(until_ns=end_ns - STEP_NS)
        use = before.as_of(end_ns, self._waiting)
        gpus = {uuid: of for uuid, of in use.gpus.items() if any(percent is not None for percent in of)}
        self._use, self._sums = replace(use, until_ns=end_ns, gpus=gpus), {}


def _after(numbers: Sequence[int | None], more: Sequence[int | None]) -> tuple[int | None, ...]:
    return (*numbers, *more)[-STEPS:]


def in_cells(numbers: Sequence[int | None], cells: int) -> list[float | None]:
    """Return the newest of *numbers* as *cells* numbers, each the mean of as many steps; an unknown one is None."""
    each = max(1, STEPS // cells)
    padded = [*[None] * (cells * each), *numbers][-cells * each :]
    groups = [
        [number for number in padded[at : at + each] if number is not None] for at in range(0, cells * each, each)
    ]
    return [sum(group) / len(group) if group else None for group in groups]
