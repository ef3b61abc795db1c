"""The energy of CPU packages, from samples of their counters, and the part of it that a run is estimated to have used.

A package's counter wraps around, after some minutes at full power. So an interval between two samples counts only if it
is too short for a second wrap, and if the packages can have consumed that much in it: otherwise a counter was reset.
An interval in which the machine slept does not count either. What does not count is unknown, not 0.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from spool.core.model import NOT_SUSPENDED, SECOND_NS, CpuEnergy, Suspension

_MOST_EVERY_NS = 30 * SECOND_NS
_LAG_NS = SECOND_NS // 10  # how far a counter may be behind
_ASLEEP_NS = SECOND_NS  # a longer difference between the two clocks is a sleep


class EnergySample(Struct, frozen=True):
    """One look at the counters of all packages."""

    at_ns: int  # on the monotonic clock
    boot_ns: int  # the same moment on the clock since boot, which counts time asleep too
    counters_uj: tuple[int, ...]


class EnergyMeter(Struct, frozen=True):
    """What the packages have consumed together, over all intervals that count.

    A package is taken to consume at most 1 kW, which is 1 µJ/ns: a range in µJ is also the shortest time in ns in which
    its counter can wrap around.
    """

    ranges_uj: tuple[int, ...]  # where each counter wraps around
    last: EnergySample | None = None
    total_uj: int = 0
    known_ns: int = 0  # the intervals that count, together

    @property
    def every_ns(self) -> int:
        """The time from one sample to the next while runs go on."""
        return min(_MOST_EVERY_NS, *(most_uj // 2 for most_uj in self.ranges_uj))

    def after(self, sample: EnergySample | None) -> EnergyMeter:
        """Return the meter after *sample*; None: the counters could not be read."""
        if sample is None or self.last is None:
            return replace(self, last=sample)
        passed_ns = sample.at_ns - self.last.at_ns
        asleep_ns = sample.boot_ns - self.last.boot_ns - passed_ns
        pairs = zip(self.last.counters_uj, sample.counters_uj, self.ranges_uj, strict=True)
        used_uj = [now - before if now >= before else now + most - before for before, now, most in pairs]
        counts = 0 < passed_ns < min(self.ranges_uj) and asleep_ns < _ASLEEP_NS
        if not counts or max(used_uj) > passed_ns + _LAG_NS:
            return replace(self, last=sample)
        return replace(self, last=sample, total_uj=self.total_uj + sum(used_uj), known_ns=self.known_ns + passed_ns)


class EnergyShare(Struct, frozen=True):
    """A run's part of what a meter shows: its granted CPUs, of those of the machine."""

    cpus: int
    of: int
    total_uj: int  # of the meter, when it was last counted
    known_ns: int
    suspension: Suspension = NOT_SUSPENDED  # of the run, at that moment

    def counted(
        self, meter: EnergyMeter, suspension: Suspension, before: CpuEnergy | None
    ) -> tuple[EnergyShare, CpuEnergy | None]:
        """Return the share from now on, and the energy of the run so far, *before* included.

        Time since the last count in which the run was suspended, if only for a part of it, does not count.
        """
        share = replace(self, total_uj=meter.total_uj, known_ns=meter.known_ns, suspension=suspension)
        passed_ns = meter.known_ns - self.known_ns
        if not passed_ns or suspension.since_ns is not None or suspension != self.suspension:
            return share, before
        used_mj = (meter.total_uj - self.total_uj) * self.cpus // max(self.of, self.cpus) // 1000
        known = before or CpuEnergy(0, 0)
        return share, CpuEnergy(known.estimate_mj + used_mj, known.watched_ns + passed_ns)
