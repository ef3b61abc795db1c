"""The counters of CPU packages as the kernel shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plugins.fake_powercap import FakePowercap
from spool.machine import host
from spool.machine.powercap import PackageCounters


@pytest.fixture
def powercap(tmp_path: Path) -> FakePowercap:
    """Give an empty directory."""
    return FakePowercap(tmp_path)


def test_packages_count_and_nothing_else(powercap: FakePowercap) -> None:
    """Parts of a package, the whole platform, and another interface to the same package do not."""
    powercap.zone("intel-rapl:0", "package-0", 5)
    powercap.zone("intel-rapl:0:0", "core", 1000)
    powercap.zone("intel-rapl:1", "psys", 1000)
    powercap.zone("intel-rapl:2", "package-1", 7, 65_532_610_987)
    powercap.zone("intel-rapl-mmio:0", "package-0", 1000)
    (powercap.root / "intel-rapl").mkdir()
    counters = PackageCounters(str(powercap.root))
    assert counters.ranges_uj == (262_143_328_850, 65_532_610_987)
    sample = counters.sample()
    assert sample.counters_uj == (5, 7)
    assert sample.boot_ns >= sample.at_ns


@pytest.mark.parametrize("text", ["", "many", "-1", "262143328851", "9" * 5000])
def test_a_counter_that_makes_no_sense_is_no_sample(powercap: FakePowercap, text: str) -> None:
    """Nor is one that is gone; the next look tries again."""
    powercap.zone("intel-rapl:0", "package-0", 5)
    counters = PackageCounters(str(powercap.root))
    (powercap.root / "intel-rapl:0" / "energy_uj").write_text(text)
    assert counters.sample() is None
    (powercap.root / "intel-rapl:0" / "energy_uj").unlink()
    assert counters.sample() is None
    powercap.zone("intel-rapl:0", "package-0", 6)
    assert counters.sample() is not None


def test_a_machine_without_usable_packages_is_refused(powercap: FakePowercap) -> None:
    """Without any, or with a range that would have to be read all the time."""
    with pytest.raises(ValueError, match=r"no package in .* has a counter with a usable range"):
        PackageCounters(str(powercap.root))
    powercap.zone("intel-rapl:0", "package-0", 0, 1_000_000)
    with pytest.raises(ValueError, match="usable range"):
        PackageCounters(str(powercap.root))


def test_one_failed_open_tells_that_none_can_be_read(powercap: FakePowercap, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is all that a dispatcher does where there are none, or where only root may read them."""
    monkeypatch.setattr(host, "POWERCAP", str(powercap.root))
    opened = list[str]()

    def refused(path: str, *_: object) -> int:
        opened.append(path)
        raise PermissionError(13, "Permission denied", path)

    assert not host.shows_cpu_energy()
    powercap.zone("intel-rapl:0", "package-0")
    assert host.shows_cpu_energy()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refused)
        assert not host.shows_cpu_energy()
    assert opened == [f"{powercap.root}/intel-rapl:0/energy_uj"]
