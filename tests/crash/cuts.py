"""Where a script is cut: which changes of the disk are tried, and all that goes wrong told together.

`thin` is a fixture: here a third of the kinds of changes have their turn, one change of each, by chance. In
`tests/long/cuts` each kind has one, and with EVERY_CUT=1 in the environment every change.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from crash.world import Session, World, world_at
from faulty import FaultyDisk, Operation
from spool.dispatcher import launcher, recovery

_NAMES = re.compile(r"^((?:jobs|queued|held|running|done)/)[^/.]+|^(\.tmp/).*|\d+")  # what differs within a kind
T = TypeVar("T")
Recorder = Any
Play = Callable[[World, Iterator[FaultyDisk]], Session]


def chosen(things: Iterable[T], kind: Callable[[T], Hashable], thin: int, chance: random.Random) -> list[T]:
    """Return one thing of every *thin*-th kind, by chance; 0: all things."""
    kinds: dict[Hashable, list[T]] = {}
    for thing in things:
        kinds.setdefault(kind(thing), []).append(thing)
    if not thin:
        return [thing for alike in kinds.values() for thing in alike]
    some = chance.sample(list(kinds), -(-len(kinds) // thin))
    return [chance.choice(kinds[each]) for each in some]


def cuts(whole: Recorder, thin: int, *, torn: bool = False, chance: random.Random | None = None) -> list[int]:
    """Return the numbers of changes of *whole* to cut at; if *torn*, of those that can leave half of what they write.

    Changes are of one kind that do the same with files of the same place, whatever job or run they belong to.
    """
    root = os.path.dirname(whole.staging)

    def kind(number: int) -> Hashable:
        done = whole.recorded[number - 1]
        paths = (os.path.relpath(path, root) for path in done.paths)
        return done.name, *(_NAMES.sub(r"\1", path) for path in paths)

    numbers = range(1, len(whole.recorded) + 1)
    if torn:
        thin = min(thin, 1)  # there are few, and each kind has its own reader
        numbers = [number for number in numbers if whole.recorded[number - 1].name in ("create", "fill", "append")]
    return sorted(chosen(numbers, kind, thin, chance or random.Random()))


def where(whole: Recorder, number: int) -> str:
    """Return which change of the disk *whole*, which nothing cut off, has that number: for people."""
    operation = whole.recorded[number - 1]
    paths = " ".join(os.path.relpath(path, whole.staging) for path in operation.paths)
    return f"at change {number}: {operation.name} {paths}"


@contextmanager
def noting(failures: list[str], about: str) -> Iterator[None]:
    """Add what goes wrong in here to *failures* and go on, so that in the end all of it is told."""
    try:
        yield
    except Exception as error:
        failures.append(f"{about}: {type(error).__name__} {error}")


def each_alike(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: Recorder,
    numbers: Sequence[int],
    played: Callable[[World, int], object],
) -> None:
    """Play a script in a world of its own for each of these changes of *whole*; whatever goes wrong is told at once."""
    failures: list[str] = []
    for number in numbers:
        with world_at(tmp_path / f"{number}", monkeypatch) as world, noting(failures, where(whole, number)):
            played(world, number)
    assert not failures, f"{len(failures)} of {len(numbers)}:\n" + "\n".join(failures)


class Alike:
    """Plays a script uncut, and then with a fault at some changes of the disk, each time in a world of its own.

    What plays it is given the world and the number of the change, None for the first time, and returns its disk.
    """

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thin: int) -> None:
        self._root, self._monkeypatch, self._thin = tmp_path, monkeypatch, thin
        for module in (launcher, recovery):  # a wrapper that was never launched, for want of room, is not waited for
            monkeypatch.setattr(module, "SILENT_NS", 0)

    def __call__(
        self, played: Callable[[World, int | None], Recorder], *, torn: bool = False, also: Iterable[int] = (),
        among: Callable[[Operation], bool] | None = None,
    ) -> None:  # fmt: skip
        """Play it. *torn*: where half of what is written can be left; *also*: at the changes of these numbers too.

        *among*: at some changes for which that is true, and at no others.
        """
        with world_at(self._root / "whole", self._monkeypatch) as world:
            whole = played(world, None)
        if among is None:
            numbers = sorted({*also, *cuts(whole, self._thin, torn=torn)})
        else:
            numbers = [at for at, done in enumerate(whole.recorded, 1) if among(done)]
            numbers = random.sample(numbers, 15 // self._thin) if self._thin else numbers
        each_alike(self._root, self._monkeypatch, whole, numbers, played)

    def cut(self, play: Play, check: Callable[[World], object], *, torn: bool = False) -> None:
        """Play it with the dispatcher killed before a change; *torn*: in the middle of one."""

        def played(world: World, number: int | None) -> FaultyDisk:
            disk = FaultyDisk(world.staging, cut_at=number, torn=torn)
            assert play(world, iter([disk])).cuts == (number is not None)
            check(world)
            return disk

        self(played, torn=torn)

    def cut_again(self, play: Play, check: Callable[[World], object], times: int) -> None:
        """Play it with cuts of those that recover, too, at places drawn by chance."""
        failures: list[str] = []
        with world_at(self._root / "whole", self._monkeypatch) as world:
            whole = FaultyDisk(world.staging)
            play(world, iter([whole]))
        for number in range(18 // self._thin if self._thin else times):
            cut, torn = [random.randint(1, whole.count)], random.random() < 0.5
            cut += [random.randint(1, 14) for _ in range(random.randint(1, 3))]
            about = f"{where(whole, cut[0])}, then {cut[1:]}, {torn=}"
            with world_at(self._root / f"{number}", self._monkeypatch) as world, noting(failures, about):
                disks = [FaultyDisk(world.staging, cut_at=at, torn=torn) for at in cut]
                assert play(world, iter(disks)).cuts >= 2
                check(world)
        assert not failures, "\n".join(failures)
