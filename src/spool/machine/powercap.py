"""The counters of the energy that CPU packages of Intel and AMD consume; loaded only where they can be read.

Sources: the kernel's Documentation/power/powercap/powercap.rst and Documentation/ABI/testing/sysfs-class-powercap.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from spool.core.cpuenergy import EnergySample

_PACKAGE = re.compile(r"intel-rapl:[0-9]+")  # its parts (cores, memory) have a second number
_SHORTEST_UJ = 2_000_000_000  # a counter with a smaller range would have to be read more often than once a second


class PackageCounters:
    """The counters of all packages below the directory *powercap*. Raises OSError or ValueError without any.

    Another zone at that level, such as that of the whole platform, is not a package and does not count.
    """

    def __init__(self, powercap: str) -> None:
        zones = [zone for zone in sorted(Path(powercap).iterdir()) if _PACKAGE.fullmatch(zone.name)]
        packages = [zone for zone in zones if (zone / "name").read_text().startswith("package-")]
        self._counters = [zone / "energy_uj" for zone in packages]
        self.ranges_uj = tuple(_number(zone / "max_energy_range_uj") for zone in packages)
        if not packages or min(self.ranges_uj) < _SHORTEST_UJ:
            raise ValueError(f"no package in {powercap} has a counter with a usable range")
        self._read()

    def _read(self) -> tuple[int, ...]:
        return tuple(map(_number, self._counters))

    def sample(self) -> EnergySample | None:
        """Return a look at the counters; None if one cannot be read or shows more than its range."""
        at_ns, boot_ns = time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        try:
            found = self._read()
        except (OSError, ValueError):
            return None
        in_range = all(0 <= each <= most for each, most in zip(found, self.ranges_uj, strict=True))
        return EnergySample(at_ns, boot_ns, found) if in_range else None


def _number(path: Path) -> int:
    return int(path.read_bytes()[:32])


def cpus_of_machine() -> int:
    """Return how many CPUs the packages have in use, whichever of them this process may run on."""
    return os.cpu_count() or 1
