"""A disk that loses its power, or its room, before a chosen change.

:class:`FaultyDisk` is a :class:`spool.store.disk.Disk` that performs every change for real and counts them. Run a
piece of the program over it once to learn how many changes it makes, then once for each of them with the power
cut there: what then lies on the disk is what a successor would find. :func:`every_cut` does just that.

A cut stands for the sudden end of the process (`kill -9`, a reset): what was done before it has happened. That
written data may be lost too when the machine itself loses power is what `recorded` is for: it shows whether
the syncs stand where they must.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spool.store.disk import Disk


class PowerCut(BaseException):
    """The process is no more. Not an Exception, so that nothing in the program under test can live on."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of the disk: the primitive's name, and the paths it was about (of a log: its path)."""

    name: str
    paths: tuple[str, ...]
    background: bool = False  # made by another thread than the one that owns the disk


class FaultyDisk(Disk):
    """A disk that fails at a chosen change.

    *cut_at*: the number, counted from 1, of the change before which the power goes; that change and all after it
    raise :class:`PowerCut`. *fail_at*: the number of the change that raises OSError with *error* instead of
    happening, and with *fail_for* so many from there on. *torn*: where the change that is hit writes data, half of it
    is written first.

    Only the thread that made the disk is counted: what a background thread syncs depends on timing, and a cut
    must not. After a cut a background thread's changes are passed over in silence, as of a process that is dead.
    """

    def __init__(
        self,
        staging: str,
        *,
        cut_at: int | None = None,
        torn: bool = False,
        fail_at: int | None = None,
        fail_for: int = 1,
        error: int = errno.ENOSPC,
    ) -> None:
        super().__init__(staging)
        self.cut_at = cut_at
        self.torn = torn
        self.fail_at = fail_at
        self.fail_for = fail_for
        self.error = error
        self.count = 0
        self.recorded: list[Operation] = []
        self._owner = threading.get_ident()

    @property
    def is_cut(self) -> bool:
        """Whether the power is gone."""
        return self.cut_at is not None and self.count >= self.cut_at

    def names(self, *, background: bool = False) -> list[str]:
        """Return the names of the primitives that were called, in order: the owner's, or the background's."""
        return [operation.name for operation in self.recorded if operation.background is background]

    def create(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Create a file, unless the fault is here."""
        if self._happens("create", path, half=lambda: super(FaultyDisk, self).create(path, _half(data), mode)):
            super().create(path, data, mode)

    def append(self, fd: int, data: bytes) -> None:
        """Append to a log, unless the fault is here."""
        if self._happens("append", _path_of(fd), half=lambda: super(FaultyDisk, self).append(fd, _half(data))):
            super().append(fd, data)

    def rename(self, old: str, new: str) -> None:
        """Rename, unless the fault is here."""
        if self._happens("rename", old, new):
            super().rename(old, new)

    def rename_new(self, old: str, new: str) -> bool:
        """Rename without replacing, unless the fault is here."""
        return super().rename_new(old, new) if self._happens("rename_new", old, new) else True

    def link(self, old: str, new: str) -> None:
        """Give a second name, unless the fault is here."""
        if self._happens("link", old, new):
            super().link(old, new)

    def unlink(self, path: str) -> None:
        """Take a name away, unless the fault is here."""
        if self._happens("unlink", path):
            super().unlink(path)

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        """Create a directory, unless the fault is here."""
        if self._happens("mkdir", path):
            super().mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        """Remove a directory, unless the fault is here."""
        if self._happens("rmdir", path):
            super().rmdir(path)

    def sync_file(self, path: str) -> None:
        """Sync a file, unless the fault is here."""
        if self._happens("sync_file", path):
            super().sync_file(path)

    def sync_directory(self, path: str) -> None:
        """Sync a directory, unless the fault is here."""
        if self._happens("sync_directory", path):
            super().sync_directory(path)

    def sync_log(self, fd: int) -> None:
        """Sync a log, unless the fault is here."""
        if self._happens("sync_log", _path_of(fd)):
            super().sync_log(fd)

    def _happens(self, name: str, *paths: str, half: Callable[[], None] | None = None) -> bool:
        """Count and record one change; raise if the fault is here. False: pass it over."""
        if threading.get_ident() != self._owner:
            if not self.is_cut:
                self.recorded.append(Operation(name, paths, background=True))
            return not self.is_cut
        was_cut = self.is_cut
        self.count += 1
        if self.is_cut:
            if self.torn and half is not None and not was_cut:
                half()
            raise PowerCut(f"power cut before change {self.count}: {name} {' '.join(paths)}")
        if self.fail_at is not None and 0 <= self.count - self.fail_at < self.fail_for:
            if self.torn and half is not None:
                half()
            raise OSError(self.error, os.strerror(self.error), paths[0])
        self.recorded.append(Operation(name, paths))
        return True


def every_cut(scenario: Callable[[int], FaultyDisk], limit: int = 1000) -> Iterator[FaultyDisk]:
    """Run *scenario* with its power cut before its first change, its second, and so on; yield each disk.

    *scenario* takes the number to cut at, does its work on a new FaultyDisk, lets PowerCut through or catches it
    at its end, and returns that disk. The last disk that is yielded is the one whose power lasted to the end.
    AssertionError after *limit* cuts: a scenario that never comes to its end.
    """
    for number in range(1, limit + 1):
        disk = scenario(number)
        yield disk
        if not disk.is_cut:
            return
    raise AssertionError(f"the scenario still made changes after {limit} cuts")


def cut_off(action: Callable[[], object]) -> bool:
    """Perform *action*; return whether its power was cut."""
    try:
        action()
    except PowerCut:
        return True
    return False


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")
