"""The CPU energy of runs: estimated, recorded, shown and charged; through the real dispatcher."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plugins.fake_powercap import FakePowercap
from served import Served

_UNTIL_GO = "until [ -e go ]; do sleep 0.02; done"
_J = 1_000_000  # in µJ
_RANGE_UJ = 262_143 * _J
_CPUS = os.cpu_count() or 1


@pytest.fixture
def powercap(tmp_path: Path) -> FakePowercap:
    """Give a machine with two packages."""
    fake = FakePowercap(tmp_path / "fake")
    _used(fake, _RANGE_UJ - _J)
    return fake


def _used(fake: FakePowercap, first_uj: int) -> None:
    fake.zone("intel-rapl:0", "package-0", first_uj, _RANGE_UJ)
    fake.zone("intel-rapl:1", "package-1", 0, _RANGE_UJ)


@pytest.fixture
def spool(powercap: FakePowercap, tmp_path: Path, executor: str | None) -> Iterator[Served]:
    """Give a spool with half of the machine for each run, whose dispatcher can read the counters."""
    with Served(tmp_path / "spool", powercap.variables, executor) as served:
        (served.root / "config.toml").write_text(
            f'cpus = {_CPUS * 2}\ntariff = {{ currency = "EUR", kwh = 360_000 }}\n'  # 0.1 EUR for each joule
        )
        yield served


def _so_far(spool: Served, name: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(spool.spool("show", name, "--json").stdout)["runs"][0]["cpu_energy"]
    return found


def _go(spool: Served, name: str) -> dict[str, Any]:
    (spool.root.parent / "go").touch()
    result = spool.wait_done(name)
    assert result is not None
    return result


@pytest.mark.executors("process", "tmux")
def test_the_cpu_energy_of_a_run_is_recorded_and_costs_money(spool: Served, powercap: FakePowercap) -> None:
    """Over a wrap of the counter and the death of the dispatcher, whose absence is unknown and costs nothing."""
    spool.start()
    spool.begun("train", _UNTIL_GO, cpus=_CPUS, project="llm")
    assert _so_far(spool, "train") is None
    _used(powercap, 49 * _J)
    spool.stop()
    assert _so_far(spool, "train")["estimate_mj"] == 25_000
    spool.start()
    spool.looked()
    spool.kill()
    _used(powercap, 99 * _J)  # nobody has seen at what time
    spool.start()
    spool.looked()
    result = _go(spool, "train")
    assert result["cpu_energy_estimate_mj"] == 25_000
    assert result["cpu_energy_watched_ms"] > 0
    known = [line.get("cpu_energy_estimate_mj") for line in spool.history() if line["job"] == "train"]
    assert known == [25_000]
    assert "about 0.0069 Wh in" in spool.spool("show", "train").stdout
    seff = spool.spool("seff", "train").stdout
    assert "CPU energy" in seff
    assert "2.50 EUR" in seff
    total = json.loads(spool.spool("stats", "--json").stdout)["total"]
    assert (total["cpu_kwh_runs"], total["cost"]) == (1, 2.5)
    assert "CPU-KWH" in spool.spool("stats", "--by", "project").stdout
