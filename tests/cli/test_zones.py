"""Whose zone a date and time without an offset is in: of who writes it by a command, of the machine in a file."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from calling import Command, asked, put_job
from plugins.fake_nvml import FakeNvml
from spool import Client
from spool.core.layout import DONE, HELD, QUEUED, RESERVATIONS
from spool.formats import values
from spool.query.snapshot import snapshot
from spool.store.spool import Spool
from support import zone_file

NOON = datetime(2044, 7, 1, 3, tzinfo=UTC)  # in Tokyo; 16:00 before on the clock of the machine in New York


@pytest.fixture(autouse=True)
def zones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let the user live in Tokyo, and the machine stand in New York."""
    machine = tmp_path / "localtime"
    machine.write_bytes(zone_file("EST5EDT,M3.2.0,M11.1.0"))
    monkeypatch.setattr(values, "MACHINE_ZONE", str(machine))
    monkeypatch.setenv("TZ", "JST-9")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def written(root: Path, place: str, name: str) -> datetime:
    """Return the start of a job, from its file."""
    stated = tomllib.loads((root / place / f"{name}.toml").read_text())["start_after"]
    return stated if isinstance(stated, datetime) else datetime.fromisoformat(stated)


@pytest.mark.parametrize("text", ["2044-07-01 12:00", "2044-07-01T12:00:00"])
def test_a_submission_means_the_clock_of_who_submits(spool: Command, spool_root: Path, text: str) -> None:
    """Each way to submit writes the offset, so that no other zone can change the instant."""
    toml, script = Path("file.toml"), Path("script.sh")
    toml.write_text(f'# mine\ncommand = "true"\nstart_after = "{text}"\n')
    script.write_text(f"#!/bin/sh\n#SPOOL --start-after '{text}'\n")
    assert spool("submit", "-n", "option", "--start-after", text, "--", "true").code == 0
    assert spool("submit", "-f", str(toml)).code == 0
    assert spool("submit", "-n", "script", str(script)).code == 0
    client = Client(spool_root)
    client.submit("true", name="python", start_after=text)
    client.submit("true", name="naive", start_after=datetime.fromisoformat(text))
    for name in ("option", "file", "script", "python", "naive"):
        assert written(spool_root, QUEUED, name) == NOON, name
    assert (spool_root / QUEUED / "file.toml").read_text().startswith("# mine\n")


def test_a_change_means_the_clock_of_who_changes(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `edit`, in the editor too, and `requeue`; what is not changed keeps its meaning."""
    for name in ("option", "editor", "other"):
        put_job(spool_root, name, 'command = "true"\nstart_after = "2033-01-01 00:00"\n', HELD)
    assert spool("edit", "option", "--start-after", "2044-07-01 12:00").code == 0
    for name, change in (("editor", "s/2033-01-01 00/2044-07-01 12/"), ("other", "s/true/false/")):
        monkeypatch.setenv("EDITOR", f"sed -i '{change}'")
        assert spool("edit", name).code == 0
    for name in ("again", "python"):
        put_job(spool_root, name, place=DONE)
    assert spool("requeue", "again", "--set", "start_after=2044-07-01 12:00").code == 0
    Client(spool_root).requeue("python", start_after=datetime(2044, 7, 1, 12))
    assert [written(spool_root, HELD, name) for name in ("option", "editor")] == [NOON] * 2
    assert [written(spool_root, QUEUED, name) for name in ("again", "python")] == [NOON] * 2
    assert written(spool_root, HELD, "other") == datetime(2033, 1, 1)


def test_a_reservation_and_a_period_mean_the_clock_of_who_asks(
    spool: Command, spool_root: Path, own_nvml: FakeNvml
) -> None:
    """`reserve` writes the offset; -S and -E count in the caller's zone."""
    own_nvml.gpu("GPU-0", bus=1)
    said = spool("reserve", "create", "talk", "--gpus", "1", "--start", "2044-07-01 12:00", "--end", "2044-07-01 13:00")
    assert said.code == 0, said.err
    assert tomllib.loads((spool_root / RESERVATIONS / "talk.toml").read_text())["start"] == NOON
    found = asked(spool, "stats", "--since", "2026-01-01", "--until", "2026-01-01 12:00")
    assert (found["since_at"][:13], found["until_at"][:13]) == ("2025-12-31T15", "2026-01-01T03")


def test_a_dropped_file_means_the_clock_of_the_machine(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its instant is the same to each process, whatever its TZ: the dispatcher's and that of who asks why."""
    for name, text in (("job", "2044-07-01 12:00"), ("gap", "2044-03-13 02:30"), ("twice", "2044-11-06 01:30")):
        put_job(spool_root, name, f'command = "true"\nstart_after = "{text}"\n')
    for zone in ("JST-9", "UTC", "CET-1CEST,M3.5.0,M10.5.0/3"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        queue = snapshot(Spool(str(spool_root))).view.queue
        starts = [datetime.fromtimestamp((queue[name].spec.start_after_ns or 0) // 10**9, UTC) for name in queue]
        assert sorted(starts) == [
            datetime(2044, 3, 13, 7, 30, tzinfo=UTC),  # 2:30 does not exist: 3:30
            datetime(2044, 7, 1, 16, tzinfo=UTC),
            datetime(2044, 11, 6, 5, 30, tzinfo=UTC),  # the first 1:30
        ]
    assert "begins at 2044-07-01 18:00" in spool("why", "job").out  # each in summer or winter time
    assert "begins at 2044-03-13 08:30" in spool("why", "gap").out


def test_a_machine_without_a_zone_is_in_utc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As of localtime(3)."""
    monkeypatch.setattr(values, "MACHINE_ZONE", str(tmp_path / "none"))
    assert values.instant_ns(datetime(2044, 7, 1, 3)) == int(NOON.timestamp()) * 10**9
