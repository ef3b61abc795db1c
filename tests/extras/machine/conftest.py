"""An arbiter for a test to drive, in passes that are short."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from extras.machine.talk import HOUR_NS, MACHINE, Driven, driven
from plugins.fake_nvml import FakeNvml
from spool.extras.machine import arbiter as server


@pytest.fixture
def place() -> Iterator[Path]:
    """Give a directory below /tmp that every user can reach."""
    base = Path(tempfile.mkdtemp(prefix="spool-arbiter-", dir="/tmp"))
    base.chmod(0o755)
    yield base / "run"
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a pass in which nothing happens be a short one; no spool is away, however long a test takes for a step."""
    monkeypatch.setattr(server, "_AWAY_NS", HOUR_NS)
    monkeypatch.setattr(server, "_TELL_EVERY_S", 0.05)
    monkeypatch.setattr(server, "_LOOK_EVERY_S", 0.05)


@pytest.fixture
def at_once(brisk: None, monkeypatch: pytest.MonkeyPatch) -> None:  # what it sets is set anew
    """Let the arbiter look after leases, and write, in every pass; a spool is away as soon as its dispatcher is."""
    monkeypatch.setattr(server, "_AWAY_NS", 0)
    monkeypatch.setattr(server, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(server, "_TELL_EVERY_S", 0.01)


@pytest.fixture
def machine(brisk: None, place: Path) -> Iterator[Driven]:
    """Give an arbiter of four CPUs, 4 GiB and two licences."""
    with driven(place, MACHINE) as found:
        yield found


@pytest.fixture
def nvml(own_nvml: FakeNvml) -> FakeNvml:
    """Give a driver with two GPUs that the arbiter asks."""
    for bus, uuid in enumerate(("GPU-a", "GPU-b")):
        own_nvml.gpu(uuid, bus=bus)
    return own_nvml
