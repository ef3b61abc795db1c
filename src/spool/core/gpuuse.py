"""What a run does with the GPUs that it was given, added up from one look at them to the next, and when they are idle.

A look says what was done in its last moments, and stands for the time since the look before, or since the start. Time
in which nobody looked (no dispatcher, NVML hangs) counts for nothing, so that a mean is that of the time watched.

A GPU is idle in a look that knows its utilisation, if that is at most `IDLE_PERCENT`. A run is idle while all its GPUs
are. What is unknown neither begins, ends nor prolongs that.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from spool.core.model import GpuUse, GpuWork, Spec
from spool.core.units import format_duration, show_duration

IDLE_PERCENT = 1
"""A GPU that computes in no more of the time is idle: a driver that is asked for its state does not count as work."""


class GpuWatch(Struct, frozen=True):
    """What is known of the GPUs of one run, in the order of its grant."""

    at_ns: int  # when NVML was asked last, or when the run began
    gpus: tuple[GpuUse, ...]
    idle_ns: int = 0  # for how long all of them have been idle, of the time watched
    told: int = 0  # how often that was found to be too long
    is_told: bool = False  # of the idleness that goes on
    now: tuple[GpuWork | None, ...] = ()  # what the last look has shown

    @classmethod
    def since(cls, at_ns: int, gpus: int) -> GpuWatch:
        """Return a watch on that number of GPUs that begins now."""
        return cls(at_ns, (GpuUse(),) * gpus)

    def looked(self, at_ns: int, work: Sequence[GpuWork | None], most_ns: int) -> GpuWatch:
        """Return the watch after a look at all the GPUs, which stands for no more than *most_ns*."""
        passed_ns = min(at_ns - self.at_ns, most_ns)
        if passed_ns <= 0:  # the clock was set
            return replace(self, at_ns=at_ns)
        gpus = tuple(_after(use, done, passed_ns) for use, done in zip(self.gpus, work, strict=True))
        percents = [done.percent if done is not None else None for done in work]
        watch = replace(self, at_ns=at_ns, gpus=gpus, now=tuple(work))
        if any(percent is not None and percent > IDLE_PERCENT for percent in percents):
            return replace(watch, idle_ns=0, is_told=False)
        if None in percents:
            return watch
        return replace(watch, idle_ns=self.idle_ns + passed_ns)

    def passed_over(self, at_ns: int) -> GpuWatch:
        """Return the watch after a look that says nothing of the run, as while it is suspended."""
        return replace(self, at_ns=at_ns, now=())

    def is_due(self, spec: Spec) -> bool:
        """Whether a run has left its GPUs idle for too long, and that was not told yet."""
        return spec.gpu_idle_ns is not None and self.idle_ns >= spec.gpu_idle_ns and not self.is_told

    def telling(self, *, again: bool) -> GpuWatch:
        """Return the watch once it is told that this is too long. *again*: it will be, after the same time."""
        if again:
            return replace(self, told=self.told + 1, idle_ns=0)
        return replace(self, told=self.told + 1, is_told=True)

    def words(self, spec: Spec) -> str:
        """Return that the GPUs have been idle for too long, "" if they have not."""
        if spec.gpu_idle_ns is None or self.idle_ns < spec.gpu_idle_ns:
            return ""
        which = "its GPU has been idle" if len(self.gpus) == 1 else f"its {len(self.gpus)} GPUs have been idle"
        return f"{which} for {show_duration(self.idle_ns)} (gpu_idle = {format_duration(spec.gpu_idle_ns)})"

    @property
    def known(self) -> tuple[GpuUse, ...]:
        """What the run has used of its GPUs, () if nothing is known of any."""
        seen = any(use.watched_ns or use.memory_watched_ns for use in self.gpus)
        return self.gpus if seen else ()


def _after(use: GpuUse, done: GpuWork | None, passed_ns: int) -> GpuUse:
    """Return *use* after *passed_ns* more in which *done* was done."""
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


def mean_part(gpus: Sequence[GpuUse]) -> float | None:
    """Return in how much of the time GPUs computed on average, as a part of one; None where it is known of none."""
    known = [use for use in gpus if use.mean_percent is not None]
    watched_ns = sum(use.watched_ns for use in known)
    return sum((use.mean_percent or 0.0) * use.watched_ns for use in known) / watched_ns / 100 if watched_ns else None


def unused(gpus: Sequence[GpuUse]) -> int:
    """Return how many of the GPUs were never seen to compute."""
    return sum(use.peak_percent is not None and use.peak_percent <= IDLE_PERCENT for use in gpus)


def peak_memory_bytes(gpus: Sequence[GpuUse]) -> int | None:
    """Return the most memory that was used of one GPU."""
    return max((use.peak_memory_bytes for use in gpus if use.peak_memory_bytes is not None), default=None)
