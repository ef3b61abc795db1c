"""What only watching shows: the GPU usage of a run, its idle GPUs, and the last half hour of a spool.

A look shows the last moments, and stands for the time since the previous look, or since the start. Time without looks
(no dispatcher, NVML hangs) does not count, so a mean covers the watched time only.

A GPU is idle in a look that knows its utilisation, if that is at most `IDLE_PERCENT`. A run is idle while all its GPUs
are. Unknown utilisation neither begins, ends nor prolongs idleness.

Energy is the difference of two looks at a counter of the GPU. It counts across a time without looks, because the
counter does, and not from a counter that has gone back, as after the driver was loaded again.

The dispatcher notes what it knows anyway, in steps of half a minute. An unknown step is None: no dispatcher was
running, or no job had the GPUs watched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from spool.core.model import SECOND_NS, GpuUse, GpuWork, Spec
from spool.core.units import format_duration, show_duration

IDLE_PERCENT = 1
"""Utilisation up to this counts as idle: a driver that answers a query shows a little."""


class GpuWatch(Struct, frozen=True):
    """The measured usage of the GPUs of one run, in the order of its grant."""

    at_ns: int  # the last NVML query, or the begin of the run
    gpus: tuple[GpuUse, ...]
    idle_ns: int = 0  # how long all of them have been idle, within the watched time
    told: int = 0  # how often that was reported as too long
    is_told: bool = False  # whether the current idleness was reported
    now: tuple[GpuWork | None, ...] = ()  # results of the last look
    counters_mj: tuple[int | None, ...] = ()  # of the energy of each GPU, at that look

    @classmethod
    def since(cls, at_ns: int, gpus: int) -> GpuWatch:
        """Return a watch on that number of GPUs that begins now."""
        return cls(at_ns, (GpuUse(),) * gpus)

    def looked(self, at_ns: int, work: Sequence[GpuWork | None], most_ns: int) -> GpuWatch:
        """Return the watch after a look at all the GPUs, which stands for at most *most_ns*."""
        passed_ns = min(at_ns - self.at_ns, most_ns)
        if passed_ns <= 0:  # the clock was set
            return replace(self, at_ns=at_ns, counters_mj=())
        before = self.counters_mj or (None,) * len(work)
        gpus = tuple(
            _consumed(_after(use, done, passed_ns), done, counter_mj, at_ns - self.at_ns)
            for use, done, counter_mj in zip(self.gpus, work, before, strict=True)
        )
        counters = tuple(done.counter_mj if done is not None else None for done in work)
        percents = [done.percent if done is not None else None for done in work]
        watch = replace(self, at_ns=at_ns, gpus=gpus, now=tuple(work), counters_mj=counters)
        if any(percent is not None and percent > IDLE_PERCENT for percent in percents):
            return replace(watch, idle_ns=0, is_told=False)
        if None in percents:
            return watch
        return replace(watch, idle_ns=self.idle_ns + passed_ns)

    def passed_over(self, at_ns: int) -> GpuWatch:
        """Return the watch after a look that says nothing about the run, as while it is suspended."""
        return replace(self, at_ns=at_ns, now=(), counters_mj=())

    def is_due(self, spec: Spec) -> bool:
        """Whether the GPUs have been idle for too long and that was not reported yet."""
        return spec.gpu_idle_ns is not None and self.idle_ns >= spec.gpu_idle_ns and not self.is_told

    def telling(self, *, again: bool) -> GpuWatch:
        """Return the watch after such a report. With *again* it is repeated after the same time."""
        if again:
            return replace(self, told=self.told + 1, idle_ns=0)
        return replace(self, told=self.told + 1, is_told=True)

    def words(self, spec: Spec) -> str:
        """Describe the idleness if it has lasted too long, else ""."""
        if spec.gpu_idle_ns is None or self.idle_ns < spec.gpu_idle_ns:
            return ""
        which = "its GPU has been idle" if len(self.gpus) == 1 else f"its {len(self.gpus)} GPUs have been idle"
        return f"{which} for {show_duration(self.idle_ns)} (gpu_idle = {format_duration(spec.gpu_idle_ns)})"

    @property
    def known(self) -> tuple[GpuUse, ...]:
        """The usage of each GPU, () if nothing is known."""
        seen = any(use.watched_ns or use.memory_watched_ns or use.energy_watched_ns for use in self.gpus)
        return self.gpus if seen else ()


def _after(use: GpuUse, done: GpuWork | None, passed_ns: int) -> GpuUse:
    """Return *use* after *passed_ns* more with the activity *done*."""
    if done is not None and done.percent is not None:
        watched_ns = use.watched_ns + passed_ns
        before = use.mean_percent or 0.0
        use = replace(
            use,
            watched_ns=watched_ns,
            mean_percent=before + (done.percent - before) * passed_ns / watched_ns,
            peak_percent=max(use.peak_percent or 0, done.percent),
        )
    if done is not None and done.memory_bytes is not None:
        watched_ns = use.memory_watched_ns + passed_ns
        mean = use.mean_memory_bytes or 0
        use = replace(
            use,
            memory_watched_ns=watched_ns,
            mean_memory_bytes=mean + (done.memory_bytes - mean) * passed_ns // watched_ns,
            peak_memory_bytes=max(use.peak_memory_bytes or 0, done.memory_bytes),
        )
    return use


def _consumed(use: GpuUse, done: GpuWork | None, before_mj: int | None, passed_ns: int) -> GpuUse:
    """Return *use* after *passed_ns* more that began with the counter at *before_mj*."""
    if done is None or done.counter_mj is None or before_mj is None or done.counter_mj < before_mj:
        return use
    energy_mj = (use.energy_mj or 0) + (done.counter_mj - before_mj) // max(done.sharers, 1)
    return replace(use, energy_mj=energy_mj, energy_watched_ns=use.energy_watched_ns + passed_ns)


def energy_mj(gpus: Sequence[GpuUse]) -> int | None:
    """Return the energy of the GPUs together, as far as it is known; None if it is for none."""
    known = [use.energy_mj for use in gpus if use.energy_mj is not None]
    return sum(known) if known else None


def mean_part(gpus: Sequence[GpuUse]) -> float | None:
    """Return the mean share of time in which the GPUs computed, 0 to 1; None if it is unknown for all."""
    known = [use for use in gpus if use.mean_percent is not None]
    watched_ns = sum(use.watched_ns for use in known)
    return sum((use.mean_percent or 0.0) * use.watched_ns for use in known) / watched_ns / 100 if watched_ns else None


def unused(gpus: Sequence[GpuUse]) -> int:
    """Return how many of the GPUs were never seen to compute."""
    return sum(use.peak_percent is not None and use.peak_percent <= IDLE_PERCENT for use in gpus)


def peak_memory_bytes(gpus: Sequence[GpuUse]) -> int | None:
    """Return the peak memory used on any one GPU."""
    return max((use.peak_memory_bytes for use in gpus if use.peak_memory_bytes is not None), default=None)


STEP_NS = 30 * SECOND_NS
STEPS = 60


class RecentUse(Struct, frozen=True, kw_only=True):
    """How busy each GPU was in each of the last steps, the newest last; `until_ns` is the end of that."""

    step_ns: int = STEP_NS
    until_ns: int = 0
    gpus: dict[str, tuple[int | None, ...]] = field(default_factory=dict)  # by UUID: the mean utilisation in percent

    def as_of(self, now_ns: int) -> RecentUse:
        """Return it with the later steps up to *now_ns*, which are unknown."""
        if not self.until_ns or self.step_ns <= 0:
            return self  # nothing was noted
        missing = min(max(0, -((self.until_ns - now_ns) // self.step_ns)), STEPS)
        return RecentUse(
            step_ns=self.step_ns,
            until_ns=self.until_ns + missing * self.step_ns,
            gpus={uuid: (*percents, *[None] * missing)[-STEPS:] for uuid, percents in self.gpus.items()},
        )


class RecentRecorder:
    """Notes that. What an earlier dispatcher has noted is kept."""

    def __init__(self) -> None:
        self.use = RecentUse()  # what was noted so far
        self._sums: dict[str, tuple[int, int]] = {}  # of the newest step: the sum of the percentages, their number

    def resume(self, before: RecentUse) -> None:
        """Begin with what an earlier dispatcher has noted."""
        if before.step_ns == STEP_NS:
            gpus = {uuid: of[-STEPS:] for uuid, of in before.gpus.items()}
            self.use = RecentUse(until_ns=before.until_ns, gpus=gpus)

    def note(self, at_ns: int, percents: Mapping[str, int | None]) -> None:
        """Note the utilisation of each GPU, by UUID, in a look at *at_ns*."""
        self._go_on(at_ns)
        gpus = dict(self.use.gpus)
        for uuid, percent in percents.items():
            if percent is not None:
                total, looks = self._sums.get(uuid, (0, 0))
                self._sums[uuid] = total, looks = total + percent, looks + 1
                gpus[uuid] = (*gpus.get(uuid, ())[:-1], round(total / looks))
        self.use = replace(self.use, gpus=gpus)

    def _go_on(self, now_ns: int) -> None:
        """Begin the step of *now_ns*, unless it has begun."""
        before, end_ns = self.use, (now_ns // STEP_NS + 1) * STEP_NS
        if end_ns < before.until_ns - STEP_NS:  # the clock was set back
            before = RecentUse()
        elif end_ns <= before.until_ns:
            return
        gpus = before.as_of(end_ns).gpus
        known = {uuid: of for uuid, of in gpus.items() if any(percent is not None for percent in of)}
        self.use, self._sums = RecentUse(until_ns=end_ns, gpus=known), {}


def in_cells(numbers: Sequence[int | None], cells: int) -> list[float | None]:
    """Return the newest of *numbers* as *cells* numbers, each the mean of as many steps; an unknown one is None."""
    each = max(1, STEPS // cells)
    padded = [*[None] * (cells * each), *numbers][-cells * each :]
    groups = [
        [number for number in padded[at : at + each] if number is not None] for at in range(0, cells * each, each)
    ]
    return [sum(group) / len(group) if group else None for group in groups]
