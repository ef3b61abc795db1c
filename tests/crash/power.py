"""A disk that loses what was not synced.

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
from collections.abc import Callable
from dataclasses import dataclass, field

from spool.store.disk import Disk
from spool.store.spool import Spool
from spool.testing.fakes import Operation, PowerCut, path_at


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


class LossyDisk(Disk):
    """Performs every change and notes how it would be lost. The power goes before change *cut_at*."""

    def __init__(self, staging: str, unsynced: Unsynced, cut_at: int | None = None) -> None:
        super().__init__(staging)
        self.unsynced = unsynced
        self.cut_at = cut_at
        self.recorded: list[Operation] = []

    def _record(self, name: str, *paths: str) -> None:
        self.recorded.append(Operation(name, paths))
        if self.cut_at is not None and len(self.recorded) >= self.cut_at:
            raise PowerCut(f"before change {len(self.recorded)}")

    def create(self, path: str, data: bytes, mode: int = 0o600) -> None:
        self._record("create", path)
        super().create(path, data, mode)
        self.unsynced.written(path)

    def append(self, fd: int, data: bytes) -> None:
        self._record("append", os.readlink(f"/proc/self/fd/{fd}"))
        status = os.fstat(fd)
        if status.st_ino not in self.unsynced.logs:
            kept = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            self.unsynced.logs[status.st_ino] = (kept, status.st_size)
        super().append(fd, data)

    def rename(self, old: str, new: str, old_at: int | None = None, new_at: int | None = None) -> None:
        self._record("rename", path_at(old, old_at), path_at(new, new_at))
        old, new = path_at(old, old_at), path_at(new, new_at)
        replaced = self.unsynced.put_aside(new) if os.path.isfile(new) else None
        super().rename(old, new)

        def undo() -> None:
            os.rename(new, old)
            if replaced is not None:
                os.rename(replaced, new)

        self.unsynced.note(new, undo)

    def rename_new(self, old: str, new: str) -> bool:
        self._record("rename_new", old, new)
        done = super().rename_new(old, new)
        if done:
            self.unsynced.note(new, lambda: os.rename(new, old))
        return done

    def link(self, old: str, new: str) -> None:
        self._record("link", old, new)
        super().link(old, new)
        self.unsynced.note(new, lambda: os.unlink(new))

    def unlink(self, path: str, at: int | None = None) -> None:
        self._record("unlink", path_at(path, at))
        path = path_at(path, at)
        kept = self.unsynced.put_aside(path)
        super().unlink(path)
        self.unsynced.note(kept, lambda: os.rename(kept, path))

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        self._record("mkdir", path)
        super().mkdir(path, mode)
        self.unsynced.note(path, lambda: shutil.rmtree(path))

    def rmdir(self, path: str, at: int | None = None) -> None:
        self._record("rmdir", path_at(path, at))
        path = path_at(path, at)
        super().rmdir(path)
        self.unsynced.note(os.path.dirname(path), lambda: os.mkdir(path))

    def sync_file(self, path: str) -> None:
        self._record("sync_file", path)
        fd = self.unsynced.contents.pop(_inode(path), None)
        if fd is not None:
            os.close(fd)

    def sync_directory(self, path: str) -> None:
        self._record("sync_directory", path)
        self.unsynced.settle()

    def sync_log(self, fd: int) -> None:
        self._record("sync_log", os.readlink(f"/proc/self/fd/{fd}"))
        status = os.fstat(fd)
        if status.st_ino in self.unsynced.logs:
            kept, _ = self.unsynced.logs[status.st_ino]
            self.unsynced.logs[status.st_ino] = (kept, status.st_size)


def _inode(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_ino
    return 0
