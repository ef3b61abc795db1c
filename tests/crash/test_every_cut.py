"""The dispatcher is cut off before every change of the disk in turn, and the next one carries on to the same end."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.scripts import JOBS, STARTS, play
from crash.world import Ends, Session, World, check, ends_of, world_at
from spool.dispatcher import recover, start
from spool.store.disk import Disk
from spool.testing.faults import FaultyDisk

# What the script comes to when nothing is cut off.
EXPECTED = Ends(
    places=dict.fromkeys(JOBS, ("done",)),
    starts=STARTS,
    outcomes={
        "after": ("finished 1.0",),
        "gone": ("lost 1.0",),
        "huge": ("cancelled 1.0",),
        "killed": ("lost 1.0 requeue", "finished 1.1"),
        "long": ("cancelled 1.0", "finished 1.0"),
        "never": ("cancelled 1.0",),
        "parked": ("finished 1.0",),
        "plain": ("finished 1.0", "finished 1.0"),
        "stopped": ("cancelled 1.0 hold", "finished 1.0"),
        "tired": ("failed 1.0 retry", "failed 2.0"),
        "tried": ("failed 1.0 retry", "failed 2.0 retry", "finished 3.0"),
        "twice": ("cancelled 1.0 requeue", "finished 1.0"),
        "wrong": ("finished 1.0",),
    },
)
# Every how many-th cut the suite tries, beginning at a random one; CUT_STRIDE=1 tries them all.
STRIDE = int(os.environ.get("CUT_STRIDE", "9"))


def _played(world: World, disks: Iterator[Disk]) -> Session:
    session = Session(world, disks)
    try:
        play(session)
    finally:
        session.end()
    return session


def _staging(world: World) -> str:
    return str(world.root / ".tmp")


def _assert_as_expected(world: World, where: str) -> None:
    try:
        check(world)
        assert ends_of(world) == EXPECTED
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from error


def _length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    """Return the disk of a script that nothing cut off."""
    # A wrapper that was prepared and never launched, for want of room, is not waited for.
    monkeypatch.setattr(start, "SILENT_NS", 0)
    monkeypatch.setattr(recover, "SILENT_NS", 0)
    with world_at(tmp_path / "whole", monkeypatch) as world:
        disk = FaultyDisk(_staging(world))
        _played(world, iter([disk]))
        _assert_as_expected(world, "without a cut")
    return disk


def _where(disk: FaultyDisk, number: int) -> str:
    operation = disk.recorded[number - 1]
    return f"at change {number}: {operation.name} {' '.join(os.path.relpath(p, disk.staging) for p in operation.paths)}"


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
def test_a_cut_before_any_change_alters_nothing_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, torn: bool
) -> None:
    """Wherever the dispatcher is killed, the next one brings every job to the same end, each start made once."""
    whole = _length(tmp_path, monkeypatch)
    failures = []
    for number in range(random.randint(1, STRIDE), whole.count + 1, STRIDE):
        if torn and whole.recorded[number - 1].name not in ("create", "append"):
            continue
        with world_at(tmp_path / f"{number}", monkeypatch) as world:
            disk = FaultyDisk(_staging(world), cut_at=number, torn=torn)
            try:
                session = _played(world, iter([disk]))
                assert session.cuts == 1
                _assert_as_expected(world, _where(whole, number))
            except Exception as error:  # all of them are to be told
                failures.append(f"{_where(whole, number)}: {type(error).__name__} {error}")
    assert not failures, f"{len(failures)} of {whole.count}:\n" + "\n".join(failures)


def test_a_second_cut_during_the_recovery_alters_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dispatcher that is killed while it finishes what another left behind leaves nothing worse to the third."""
    whole = _length(tmp_path, monkeypatch)
    failures = []
    for pair in range(max(1, 160 // STRIDE)):
        first = random.randint(1, whole.count)
        then = [random.randint(1, 12) for _ in range(random.randint(1, 3))]
        torn = random.random() < 0.5
        with world_at(tmp_path / f"{pair}", monkeypatch) as world:
            disks = [FaultyDisk(_staging(world), cut_at=cut, torn=torn) for cut in (first, *then)]
            try:
                session = _played(world, iter(disks))
                assert session.cuts >= 2
                _assert_as_expected(world, _where(whole, first))
            except Exception as error:
                failures.append(f"{_where(whole, first)}, then {then}, {torn=}: {type(error).__name__} {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("survives", [False, True], ids=["another", "the_same"])
def test_a_full_disk_at_any_change_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, survives: bool
) -> None:
    """A change for which there is no room is made up for once there is, by the same dispatcher or by the next one."""
    whole = _length(tmp_path, monkeypatch)
    failures = []
    for number in range(random.randint(1, STRIDE), whole.count + 1, STRIDE):
        with world_at(tmp_path / f"{number}", monkeypatch) as world:
            disk = FaultyDisk(_staging(world), fail_at=number, error=errno.ENOSPC)
            session = Session(world, iter([disk]))
            session.survives_errors = survives
            try:
                play(session)
                assert disk.fail_at is not None
                assert disk.count >= disk.fail_at or session.errors
                _assert_as_expected(world, _where(whole, number))
            except Exception as error:
                failures.append(f"{_where(whole, number)}: {type(error).__name__} {error}")
            finally:
                session.end()
    assert not failures, f"{len(failures)} of {whole.count}:\n" + "\n".join(failures)
