"""Reservations, kept by the real dispatcher on four GPUs of a real library in the place of NVIDIA's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from plugins.fake_nvml import FakeNvml
from served import HOUR_NS, LOOKS, Served

SLEEPS = ["sleep", "600"]


@pytest.fixture
def gpus(fake_nvml: FakeNvml, tmp_path: Path) -> Iterator[Served]:
    """Give a spool with four GPUs, whose dispatcher wakes for events and for what is due, and for nothing else."""
    for at in range(4):
        fake_nvml.gpu(f"GPU-{at}", bus=at + 1)
    with Served(tmp_path / "spool", fake_nvml.variables) as spool:
        (spool.root / "config.toml").write_text("cpus = 64\n")
        spool.changes[LOOKS] = HOUR_NS
        yield spool


def reserve(spool: Served, name: str, gpus: int | list[int], start: datetime, end: datetime, who: str) -> Path:
    """Write a reservation as a person does: elsewhere, then `mv`."""
    staged = spool.root / ".tmp" / name
    staged.write_text(f"{who}\ngpus = {gpus}\nstart = {start.isoformat()}\nend = {end.isoformat()}\n")
    return staged.rename(spool.root / "reservations" / f"{name}.toml")


def test_the_end_of_a_reservation_starts_the_next_job(gpus: Served) -> None:
    """No event comes and no look is due: the job starts when the reservation ends, not before, by that alone."""
    now, hour = datetime.now(UTC), timedelta(hours=1)
    reserve(gpus, "demo", 4, now - hour, now + hour, 'user = "nobody"')
    gpus.start()
    gpus.drop("next", "date +%s.%N", gpus=1)
    assert "reserved" in gpus.wait_reason("next", "reserved")
    end = datetime.now(UTC) + timedelta(seconds=3)
    reserve(gpus, "demo", 4, now - hour, end, 'user = "nobody"')
    gpus.wait_done("next")
    begun = datetime.fromtimestamp(float(gpus.log("next")), UTC)
    assert begun >= end
    print(f"its first line came {(begun - end).total_seconds() * 1e3:.1f} ms after the end of the reservation")


@pytest.mark.parametrize("how", ["command", "file"])
def test_cancelling_it_starts_what_waited(gpus: Served, how: str) -> None:
    """`spool reserve cancel`, or `rm`, frees the GPUs at once."""
    gpus.start()
    made = gpus.spool("reserve", "create", "demo", "--gpus", "4", "--duration", "2h", "--nobody")
    assert made.returncode == 0, made.stderr
    gpus.drop("next", SLEEPS, gpus=1)
    gpus.wait_reason("next", "reserved")
    listed = gpus.spool("reserve", "list", "--json")
    assert json.loads(listed.stdout)["reservations"][0]["name"] == "demo", listed.stdout
    if how == "command":
        assert gpus.spool("reserve", "cancel", "demo").returncode == 0
    else:
        (gpus.root / "reservations" / "demo.toml").unlink()
    gpus.wait_place("next", "running")
    kept = gpus.root / ".reservations"
    gpus.until(lambda: kept.is_dir() and list(kept.iterdir()), "what the reservation said")
    listed = gpus.spool("reserve", "list", "--all", "--json")
    rows = json.loads(listed.stdout)["reservations"]
    assert [(row["name"], row["state"], row["gpu_count"]) for row in rows] == [("demo", "cancelled", 4)]
