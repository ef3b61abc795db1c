"""The machine loses its power: what was not synced is gone, nothing runs any more, and the boot is another one.

The model is a file system with a journal (ext4, xfs, btrfs): of the changes of names, those after some moment are
lost, never one before a sync of a directory; of each file that was not synced, the content may be whole, cut short or
empty; of a log, everything up to its last sync is kept, and after that as much as chance will have it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from crash.cuts import cuts
from crash.scripts import JOBS, STARTS, STEPS
from crash.world import Session, World, ends_of, history, world_at
from faulty import FaultyDisk, path_at
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


@dataclass
class Unsynced:
    """What would be lost; kept over the lives of several dispatchers of one boot."""

    shadow: str  # a directory of the same file system for what is unlinked
    undo: list[tuple[Callable[[], None], int]] = field(default_factory=list)  # how, and of which inode
    times: list[int] = field(default_factory=list)
    settled: int = 0  # so many changes of names are on the disk
    contents: dict[int, int] = field(default_factory=dict)  # inode -> a descriptor
    logs: dict[int, tuple[int, int]] = field(default_factory=dict)  # inode -> a descriptor, and how much is synced
    changed_at: dict[int, tuple[int, int]] = field(default_factory=dict)  # inode -> as it is, and as it would be
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def note(self, path: str, undo: Callable[[], None]) -> None:
        """Note that a name was changed, and how that is undone."""
        self.undo.append((undo, _inode(path)))
        self.times.append(time.time_ns())

    def written(self, path: str) -> None:
        """Note that a file was made."""
        self.note(path, lambda: os.unlink(path))
        self.contents[_inode(path)] = os.open(path, os.O_RDWR)

    def put_aside(self, path: str) -> str:
        """Keep a file that is about to lose its name."""
        kept = f"{self.shadow}/{next(self._numbers)}"
        os.link(path, kept, follow_symlinks=False)
        return kept

    def settle(self) -> None:
        """All names are on the disk."""
        self.settled = len(self.undo)

    def sync(self) -> None:
        """Everything is on the disk, as it is half a minute later."""
        self.settle()
        self.sync_logs()
        for fd in self.contents.values():
            os.close(fd)
        self.contents.clear()

    def close(self) -> None:
        """Let go of every file."""
        for fd in (*self.contents.values(), *(fd for fd, _ in self.logs.values())):
            os.close(fd)
        self.contents.clear()
        self.logs.clear()

    def sync_logs(self) -> None:
        """All that was appended is on the disk, as it is 50 ms later."""
        for inode, (fd, _) in self.logs.items():
            self.logs[inode] = (fd, os.fstat(fd).st_size)

    def lose(self, chance: random.Random) -> list[str]:
        """Lose the power; return what was lost, in words."""
        told = []
        keep = chance.choice((self.settled, len(self.undo), chance.randint(self.settled, len(self.undo))))
        told.append(f"{len(self.undo) - keep} changes of names")
        for undo, _ in reversed(self.undo[keep:]):
            undo()
        for fd in self.contents.values():
            size = os.fstat(fd).st_size
            os.ftruncate(fd, chance.choice((size, size, 0, 0, size // 2)))
            os.close(fd)
        for fd, synced in self.logs.values():
            size = os.fstat(fd).st_size
            kept = chance.choice((synced, size, chance.randint(min(synced, size), size)))
            told.append(f"{size - kept} bytes of a log")
            os.ftruncate(fd, kept)
            os.close(fd)
        self._remember_times(keep)
        self.undo.clear()
        self.times.clear()
        self.contents.clear()
        self.logs.clear()
        self.settled = 0
        return told

    def _remember_times(self, keep: int) -> None:
        """Note what the times of the files would be: the undoing has changed them."""
        would: dict[int, int] = {}
        for (_, inode), at_ns in zip(self.undo, self.times, strict=True):
            would.setdefault(inode, at_ns - 1)  # it was there before the first change that is known
        for (_, inode), at_ns in list(zip(self.undo, self.times, strict=True))[:keep]:
            would[inode] = at_ns
        root = os.path.dirname(self.shadow)
        for directory, _, names in os.walk(root):
            for name in names:
                status = os.lstat(f"{directory}/{name}")
                if status.st_ino in would:
                    self.changed_at[status.st_ino] = (status.st_ctime_ns, would[status.st_ino])

    def untouched(self, spool: Spool, inode: int, name: str, place: str, since_ns: int) -> bool:
        """Stand in for `Spool.untouched`, with the times that a real power cut would have left."""
        try:
            status = os.lstat(spool.layout.job_file(place, name))
        except OSError:
            return False
        is_now, would_be = self.changed_at.get(status.st_ino, (0, 0))
        changed = would_be if status.st_ctime_ns == is_now else status.st_ctime_ns
        return status.st_ino == inode and changed <= since_ns


class LossyDisk(FaultyDisk):
    """Performs every change and notes how it would be lost. The power goes before change *cut_at*."""

    def __init__(self, staging: str, unsynced: Unsynced, cut_at: int | None = None) -> None:
        super().__init__(staging, cut_at=cut_at)
        self.unsynced = unsynced

    def create(self, path: str, data: bytes, mode: int = 0o600) -> None:
        super().create(path, data, mode)
        self.unsynced.written(path)

    def append(self, fd: int, data: bytes) -> None:
        status = os.fstat(fd)
        if status.st_ino not in self.unsynced.logs:
            kept = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            self.unsynced.logs[status.st_ino] = (kept, status.st_size)
        super().append(fd, data)

    def rename(self, old: str, new: str, old_at: int | None = None, new_at: int | None = None) -> None:
        old, new = path_at(old, old_at), path_at(new, new_at)
        replaced = self.unsynced.put_aside(new) if os.path.isfile(new) else None
        super().rename(old, new)

        def undo() -> None:
            os.rename(new, old)
            if replaced is not None:
                os.rename(replaced, new)

        self.unsynced.note(new, undo)

    def rename_new(self, old: str, new: str) -> bool:
        done = super().rename_new(old, new)
        if done:
            self.unsynced.note(new, lambda: os.rename(new, old))
        return done

    def link(self, old: str, new: str) -> None:
        super().link(old, new)
        self.unsynced.note(new, lambda: os.unlink(new))

    def unlink(self, path: str, at: int | None = None) -> None:
        path = path_at(path, at)
        kept = self.unsynced.put_aside(path)
        super().unlink(path)
        self.unsynced.note(kept, lambda: os.rename(kept, path))

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        super().mkdir(path, mode)
        self.unsynced.note(path, lambda: shutil.rmtree(path))

    def rmdir(self, path: str, at: int | None = None) -> None:
        path = path_at(path, at)
        super().rmdir(path)
        self.unsynced.note(os.path.dirname(path), lambda: os.mkdir(path))

    def sync_file(self, path: str) -> None:
        super().sync_file(path)
        fd = self.unsynced.contents.pop(_inode(path), None)
        if fd is not None:
            os.close(fd)

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        self.unsynced.settle()

    def sync_log(self, fd: int) -> None:
        super().sync_log(fd)
        status = os.fstat(fd)
        if status.st_ino in self.unsynced.logs:
            kept, _ = self.unsynced.logs[status.st_ino]
            self.unsynced.logs[status.st_ino] = (kept, status.st_size)


def _inode(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_ino
    return 0
