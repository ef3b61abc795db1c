"""Random lives: submissions, moves, removals, kills and cuts, in an order that a seed decides."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from crash.world import Session, World, check, history, world_at
from faulty import FaultyDisk
from spool.core.layout import DONE, HELD, PLACES, QUEUED, RUNNING
from spool.dispatcher import launcher, observer, recovery
from spool.store import locked_spool
from spool.store.disk import Disk

# Other lives each time; in CI the same ones, so that a change is judged by what it changes.
_NEW = 38 if "CI" in os.environ else random.SystemRandom().randrange(1, 1 << 32)
SEED = int(os.environ.get("LIVES_SEED", "0")) or _NEW
NAMES = ("a", "b", "c", "d")
MOVES = ((RUNNING, QUEUED), (RUNNING, HELD), (DONE, QUEUED), (QUEUED, HELD), (HELD, QUEUED), (QUEUED, DONE))
COMMANDS = ("ok", "ok", "fail", "hang", "hang until 2", "fail until 2", "fail until 3")


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a dispatcher wait for nothing that may still come."""
    for module, name in (
        (observer, "MISSING_NS"),
        (recovery, "SILENT_NS"),
        (launcher, "SILENT_NS"),
        (locked_spool, "CUT_OFF_NS"),
    ):
        monkeypatch.setattr(module, name, 0)


class Life:
    """One world, and everything that is done in it."""

    def __init__(self, world: World, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = world
        self.session = Session(world, self._disks())
        self.session.after_cut = self._after_cut
        self.session.survives_errors = self.random.random() < 0.5
        self.submitted: dict[str, str] = {}  # number of the submission -> job
        self.withdrawn: set[str] = set()
        self.told: list[str] = []

    def _disks(self) -> Iterator[Disk]:
        while True:
            cut = self.random.choice((None, self.random.randint(1, 12), self.random.randint(1, 80)))
            fail = self.random.choice((None, None, self.random.randint(1, 40)))
            disk = FaultyDisk(self.world.staging, cut_at=cut, torn=self.random.random() < 0.5, fail_at=fail)
            self.told.append(f"a dispatcher to be cut off at {cut}, without room at {fail}")
            yield disk

    def _after_cut(self) -> None:
        if self.random.random() < 0.1:
            self.told.append("a reboot")
            self.world.reboot()

    # What people do.

    def _number(self, path: Path) -> str | None:
        try:
            found = re.search(r"#(\d+)", path.read_text())
        except FileNotFoundError:
            return None
        return found[1] if found else None

    def _free(self, place: str, name: str) -> bool:
        return not self.session.users.path(place, name).exists()

    def submit(self, name: str) -> None:
        """Submit a job, as the command does: not over one that waits."""
        if self._free(QUEUED, name) and self._free(HELD, name):
            number = str(len(self.submitted) + 1)
            self.submitted[number] = name
            options = [
                line for line in ("retry = { max = 1 }", "requeue = false", "cpus = 2") if self.random.random() < 0.3
            ]
            place = HELD if self.random.random() < 0.1 else QUEUED
            self.session.users.submit(name, f"{self.random.choice(COMMANDS)} #{number}", *options, place=place)

    def move(self, name: str) -> None:
        """Move a file to another directory, but over none."""
        old, new = self.random.choice(MOVES)
        source, target = self.session.users.path(old, name), self.session.users.path(new, name)
        if new != DONE and not self._free(new, name):
            return
        number = self._number(source)
        if number is None:
            return
        if new == DONE:
            self.withdrawn.add(number)
        if new == DONE or self.random.random() < 0.5:
            self.told.append(f"    {old} -> {new}")
            os.rename(source, target)
            return
        os.link(source, target)
        killed = self.random.random() < 0.3  # the command, between the two
        self.told.append(f"    {old} -> {new}" + " by half" * killed)
        if not killed:
            source.unlink()

    def remove(self, name: str) -> None:
        """Delete a file, or cancel the job that runs."""
        for place in self.random.sample((QUEUED, HELD, RUNNING), 1):
            path = self.session.users.path(place, name)
            number = self._number(path)
            if number is not None:
                self.withdrawn.add(number)
                self.told.append(f"    from {place}")
                if place == RUNNING and self.random.random() < 0.5:
                    self.session.users.cancel(name)
                else:
                    path.unlink()

    def kill(self, name: str) -> None:
        """Have a run vanish."""
        self.world.kill(name)

    def suspend(self, name: str) -> None:
        """Have a run stand still, whether there is one or not, or let it go on."""
        if self.random.random() < 0.5:
            self.session.users.suspend(name)
        else:
            self.session.users.go_on(name)

    def live(self, events: int) -> None:
        """Do so many things, and bring everything to its end."""
        for _ in range(events):
            name = self.random.choice(NAMES)
            deed = self.random.choice(
                (self.submit, self.submit, self.move, self.move, self.remove, self.kill, self.suspend)
            )
            self.told.append(f"{deed.__name__} {name}")
            deed(name)
            if self.random.random() < 0.7:
                self.session.turns(self.random.randint(1, 3))
        self.told.append("the end")
        self.session.disks = iter(())
        self.session.end()
        for _ in range(60):
            self.session.settle()
            for name in NAMES:
                self.session.users.go_on(name)
                if not self._free(HELD, name) and self._free(QUEUED, name):
                    self.session.users.move(name, HELD, QUEUED)
                for pid in self.world.pids(name):
                    self.world.exit(pid, 0)
            if not any(self.session.users.path(place, n).exists() for place in PLACES if place != DONE for n in NAMES):
                break
        self.session.settle()
        self.session.end()
        self.session.settle()

    def check(self) -> None:
        """Assert that every submission ran or was withdrawn, and what `check` asserts."""
        check(self.world)
        for place in (QUEUED, HELD):
            assert not list((self.world.root / place).glob("*.toml")), f"files are left in {place}/"
        begun = {text.partition("#")[2] for _, text in self.world.texts}
        ended = {
            self._number(self.world.root / "jobs" / result.job / str(result.run) / "job.toml")
            for result in history(self.world.root)
        }
        lost = self.submitted.keys() - begun - ended - self.withdrawn
        assert not lost, f"never begun, never ended, and nobody withdrew them: {lost}"


def live_each(root: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Life], seeds: Iterable[int], events: int) -> None:
    """Live lives of that kind, each in a world of its own, and check them; one that fails tells its seed and deeds."""
    print(f"LIVES_SEED={SEED}")
    hurry(monkeypatch)
    for number, seed in enumerate(seeds):
        with world_at(root / f"{number}", monkeypatch) as world:
            life = kind(world, seed)
            try:
                life.live(events)
                life.check()
            except BaseException as error:
                told = "\n".join(life.told)
                raise AssertionError(f"LIVES_SEED={seed} LIVES=1: {type(error).__name__}: {error}\n{told}") from error
            finally:
                life.session.end()
