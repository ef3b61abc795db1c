"""The dispatcher is cut off before every change of the disk in turn, and the next one carries on to the same end."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.scripts import play
from crash.world import Ends, Session, World, check, ends_of, world_at
from spool.store.disk import Disk
from spool.testing.faults import FaultyDisk

# What the script comes to when nothing is cut off: of each job where it lies, its starts, and how its runs ended.
EXPECTED = Ends(
    places={
        name: ("done",)
        for name in sorted(
            "after gone huge killed long never parked plain stopped tired tried twice wrong".split(),
        )
    },
    starts={
        "after": 1,
        "gone": 1,
        "killed": 2,
        "long": 2,
        "parked": 1,
        "plain": 2,
        "stopped": 2,
        "tired": 2,
        "tried": 3,
        "twice": 2,
        "wrong": 1,
    },
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
            except Exception as error:  # noqa: BLE001  (all of them are to be told)
                failures.append(f"{_where(whole, number)}: {type(error).__name__} {error}")
    assert not failures, f"{len(failures)} of {whole.count}:\n" + "\n".join(failures)
