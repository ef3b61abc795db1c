"""Reservations, kept by the real dispatcher on four GPUs of a real library in the place of NVIDIA's."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from plugins.fake_nvml import FakeNvml
from served import Served

SLEEPS = ["sleep", "600"]


@pytest.fixture
def gpus(fake_nvml: FakeNvml, tmp_path: Path) -> Iterator[Served]:
    """Give a spool with four GPUs, whose dispatcher wakes for events and for what is due, and for nothing else."""
    for at in range(4):
        fake_nvml.gpu(f"GPU-{at}", bus=at + 1)
    with Served(tmp_path / "spool", fake_nvml.variables) as spool:
        (spool.root / "config.toml").write_text('cpus = 64\nlook_every = "1h"\n')
        yield spool


def reserve(spool: Served, name: str, gpus: int | list[int], start: datetime, end: datetime, who: str) -> Path:
    """Write a reservation as a person does: elsewhere, then `mv`."""
    staged = spool.root / ".tmp" / name
    staged.write_text(f"{who}\ngpus = {gpus}\nstart = {start.isoformat()}\nend = {end.isoformat()}\n")
    return staged.rename(spool.root / "reservations" / f"{name}.toml")


def running(spool: Served, *names: str) -> list[str]:
    """Return those of the jobs that run."""
    return [name for name in names if spool.places(name) == ["running"]]


def test_two_of_four_jobs_start_beside_a_reservation_of_two_gpus(gpus: Served) -> None:
    """Four jobs of one GPU while any two are kept for somebody else: two start, and the others are told for whom."""
    now = datetime.now(UTC)
    reserve(gpus, "demo", 2, now - timedelta(hours=1), now + timedelta(hours=1), 'user = "alice"')
    names = [f"one-{at}" for at in range(4)]
    for name in names:
        gpus.drop(name, SLEEPS, gpus=1)
    gpus.start()
    gpus.until(lambda: len(running(gpus, *names)) == 2, "two that run")
    waiting = sorted(set(names) - set(running(gpus, *names)))
    for name in waiting:
        assert "alice" in gpus.wait_reason(name, "reserved")
    gpus.looked()
    assert len(running(gpus, *names)) == 2


def test_the_end_of_a_reservation_starts_the_next_job(gpus: Served) -> None:
    """No event comes and no look is due: the job starts when the reservation ends, not before, by that alone."""
    end = datetime.now(UTC) + timedelta(seconds=4)
    reserve(gpus, "demo", 4, end - timedelta(hours=1), end, 'user = "nobody"')
    gpus.start()
    gpus.drop("next", "date +%s.%N", gpus=1)
    assert "reserved" in gpus.wait_reason("next", "reserved")
    gpus.wait_done("next")
    begun = datetime.fromtimestamp(float(gpus.log("next")), UTC)
    assert begun >= end
    print(f"its first line came {(begun - end).total_seconds() * 1e3:.1f} ms after the end of the reservation")


def test_its_beginning_keeps_out_what_would_run_into_it(gpus: Served) -> None:
    """Before a reservation of all GPUs a short job starts, a long one and one without a limit wait and are told why."""
    start = datetime.now(UTC) + timedelta(hours=1)
    reserve(gpus, "talk", 4, start, start + timedelta(hours=1), 'user = "alice"')
    gpus.drop("endless", SLEEPS, gpus=1, priority=20)
    gpus.drop("long", SLEEPS, gpus=1, time_limit="2h", priority=20)
    gpus.drop("short", SLEEPS, gpus=1, time_limit="10m")
    gpus.start()
    gpus.wait_place("short", "running")
    for name in ("endless", "long"):
        assert "alice" in gpus.wait_reason(name, "reserved")
        assert gpus.places(name) == ["queued"]


def test_those_it_is_for_may_use_it(gpus: Served) -> None:
    """A job of the project starts on a GPU that is kept for it; three are free then, and another job of three waits."""
    now = datetime.now(UTC)
    reserve(gpus, "paper", [0, 1], now - timedelta(hours=1), now + timedelta(hours=1), 'project = "paper"')
    gpus.drop("other", SLEEPS, gpus=3, priority=20)
    gpus.drop("ours", SLEEPS, gpus=1, project="paper")
    gpus.start()
    gpus.wait_place("ours", "running")
    assert any(f'gpu_uuids = ["GPU-{at}"]' in (gpus.record("ours", "grant.toml") or "") for at in (0, 1))
    gpus.looked()
    assert "paper" in gpus.wait_reason("other", "reserved")


def test_what_runs_when_it_begins_is_left_alone(gpus: Served) -> None:
    """A job that was there before goes on over the beginning of a reservation, and its GPU comes back to that."""
    gpus.start()
    gpus.drop("before", SLEEPS, gpus=4)
    gpus.wait_place("before", "running")
    now = datetime.now(UTC)
    reserve(gpus, "demo", 2, now, now + timedelta(hours=1), 'user = "alice"')
    gpus.drop("after", SLEEPS, gpus=3)
    gpus.until(lambda: gpus.reason("after"), "a reason")
    gpus.looked()
    assert running(gpus, "before", "after") == ["before"]
    gpus.path("running", "before").unlink()
    gpus.wait_done("before")
    assert "alice" in gpus.wait_reason("after", "reserved")


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


def test_a_reservation_that_is_edited_was_not_cancelled(gpus: Served) -> None:
    """An editor takes the file away and puts another in its place."""
    now = datetime.now(UTC)
    path = reserve(gpus, "demo", 4, now, now + timedelta(hours=1), 'user = "nobody"')
    gpus.start()
    gpus.looked()
    aside = path.rename(gpus.root / ".tmp" / "aside")
    time.sleep(0.2)
    aside.rename(path)
    path.write_text(path.read_text() + 'comment = "later"\n')
    time.sleep(1.5)
    gpus.looked()
    assert not (gpus.root / ".reservations").exists()


def test_a_job_of_four_gpus_starts_among_a_stream_of_small_ones(gpus: Served) -> None:
    """Jobs of one GPU come and come, and the one that needs them all starts in its turn."""
    gpus.start()
    small = [f"small-{at:02d}" for at in range(40)]
    for name in small[:4]:
        gpus.drop(name, ["sleep", "0.3"], gpus=1, time_limit="1m")
    gpus.drop("big", ["sleep", "0.3"], gpus=4, time_limit="1m")
    for name in small[4:]:
        gpus.drop(name, ["sleep", "0.3"], gpus=1, time_limit="1m")
    gpus.wait_done("big", *small)
    starts = {line["job"]: line["started_at"] for line in gpus.history()}
    assert starts["big"] < max(starts[name] for name in small)
