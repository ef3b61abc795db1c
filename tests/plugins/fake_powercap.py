"""Counters of CPU packages as the kernel shows them, in a directory of their own."""

from __future__ import annotations

from pathlib import Path

_STARTS = """
import os
from spool.machine import host
host.POWERCAP = os.environ["FAKE_POWERCAP"]
"""


class FakePowercap:
    """A directory like `/sys/class/powercap` with packages, and the environment of a dispatcher that reads it."""

    def __init__(self, at: Path) -> None:
        self.root = at / "powercap"
        self.root.mkdir(parents=True)
        (at / "hook").mkdir()
        (at / "hook" / "sitecustomize.py").write_text(_STARTS)
        path = f"{at / 'hook'}:{Path(__file__).parents[2] / 'src'}"
        self.variables = {"FAKE_POWERCAP": str(self.root), "PYTHONPATH": path}

    def zone(self, zone: str, name: str, used_uj: int = 0, range_uj: int = 262_143_328_850) -> None:
        """Add a zone, such as `intel-rapl:0`, or change it."""
        (self.root / zone).mkdir(exist_ok=True)
        for file, text in (("name", name), ("max_energy_range_uj", str(range_uj)), ("energy_uj", str(used_uj))):
            made = self.root / zone / f".{file}"
            made.write_text(f"{text}\n")
            made.rename(self.root / zone / file)
