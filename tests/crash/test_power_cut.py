"""The machine loses its power: what was not synced is gone, nothing runs any more, and the boot is another one."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.cuts import cuts
from crash.power import LossyDisk, Unsynced
from crash.scripts import JOBS, STARTS, STEPS
from crash.world import Session, World, ends_of, history, world_at
from spool.core import layout
from spool.dispatcher import recovery
from spool.formats import journal
from spool.formats.journal import recall
from spool.store.disk import Disk
from spool.store.spool import Spool

SEED = int(os.environ.get("POWER_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)


class Blackout:
    """A script with one power cut in it."""

    def __init__(self, world: World, cut_at: int | None, seed: int) -> None:
        self.world = world
        self.chance = random.Random(seed)
        shadow = world.root / ".shadow"
        shadow.mkdir()
        self.unsynced = Unsynced(str(shadow))
        self.cut_at = cut_at
        self.disks: list[LossyDisk] = []
        self.session = Session(world, self._disks())
        self.session.after_cut = self.lose_power
        self.session.after_turn = self.unsynced.sync_logs
        self.begun: list[tuple[str, int]] = []  # before the power cut
        self.open: set[tuple[str, int]] = set()  # what the journal says after it
        self.over: set[tuple[str, int]] = set()
        self.told: list[str] = []
        world.watchers.append(lambda _, path, __: self.unsynced.written(path))

    def _disks(self) -> Iterator[Disk]:
        self.disks.append(LossyDisk(self.world.staging, self.unsynced, self.cut_at))
        yield self.disks[0]
        while True:
            yield LossyDisk(self.world.staging, self.unsynced)

    def lose_power(self) -> None:
        """Lose what was not synced, and begin another boot."""
        self.told += self.unsynced.lose(self.chance)
        lines = list(journal.parse((self.world.root / layout.JOURNAL).read_bytes()))
        self.open = set(recall(lines).open)
        self.over = {(line.job, line.run) for line in lines if isinstance(line, journal.Over) and line.final}
        self.begun, self.world.begun = self.world.begun, []
        self.world.reboot()

    def play(self) -> None:
        """Perform the script. Between two steps minutes go by, between two passes 50 ms."""
        try:
            for step in STEPS:
                step(self.session)
                self.unsynced.sync()
                self.session.settle()
            self.session.end()
            self.session.settle()
        finally:
            self.session.end()

    def check(self) -> None:
        """Assert what no power cut may change."""
        root = self.world.root
        spool = Spool(str(root))
        lines = Counter((result.job, result.run) for result in history(root))
        assert all(count == 1 for count in lines.values()), f"a run has two lines of history: {lines}"
        began = Counter(name for name, _ in [*self.begun, *self.world.begun])
        assert began["gone"] <= 1, "a job that must not be run again was"
        for name, count in began.items():
            # One power cut may have one run of each job begun again.
            assert count <= STARTS[name] + 1, f"{name} was begun {count} times"
        for key in self.open & set(self.begun):
            assert lines[key] == 1, f"{key} had begun, the journal knew, and no line says how it ended"
        for key in self.over:
            assert lines[key] == 1, f"{key} was over, and no line says how it ended"
        places = ends_of(self.world).places
        assert places == dict.fromkeys(places, ("done",)), f"not everything has ended: {places}"
        assert set(places) == JOBS
        for name in STARTS:
            # A job that must not be run again may be on record as started when the power goes just before it is.
            assert began[name] >= 1 or name == "gone", f"{name} was never begun"
            result = spool.result(name, spool.latest_run(name) or 0)
            assert result is not None, f"nothing says how {name} ended"


def _blackout(root: Path, monkeypatch: pytest.MonkeyPatch, cut_at: int | None, seed: int) -> Blackout:
    with world_at(root, monkeypatch) as world:
        blackout = Blackout(world, cut_at, seed)
        monkeypatch.setattr(Spool, "untouched", lambda spool, *about: blackout.unsynced.untouched(spool, *about))
        try:
            blackout.play()
            blackout.check()
        except Exception as error:
            told = ", ".join(blackout.told)
            raise AssertionError(f"POWER_SEED={seed} at {cut_at}: {type(error).__name__}: {error} ({told})") from error
        finally:
            blackout.unsynced.close()
        return blackout


def test_a_power_cut_repeats_at_most_what_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thin: int) -> None:
    """At any change: a job that must not be requeued is not begun twice, the others once more at most, none is lost."""
    print(f"POWER_SEED={SEED}")
    monkeypatch.setattr(recovery, "SILENT_NS", 0)
    (whole,) = _blackout(tmp_path / "whole", monkeypatch, None, SEED).disks
    failures = []
    numbers = cuts(whole, thin, chance=random.Random(SEED))
    for number in numbers:
        try:
            _blackout(tmp_path / f"{number}", monkeypatch, number, SEED)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} of {len(numbers)}:\n" + "\n".join(failures)
