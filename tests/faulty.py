"""Disks that stop before a chosen change, run out of space, or fail on some paths.

:class:`FaultyDisk` is a :class:`spool.store.disk.Disk` that performs every change for real and counts them. Run a piece
of the program over it once to count its changes, then once for each of them with the power cut there: the disk is then
as a successor would find it. :func:`every_cut` does this. A cut stands for the sudden end of the process (`kill -9`, a
reset): earlier changes have happened. When the machine itself loses power, written data may be lost as well; for that,
`recorded` shows whether the syncs are in the right places.
"""

from __future__ import annotations

import errno
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from spool.store import disk
from spool.store.disk import Disk


class PowerCut(BaseException):
    """The process is gone. Not an Exception, so that the program under test cannot catch it."""


class Operation(Struct, frozen=True):
    """One change of the disk: the primitive's name, and its paths (for a log: its path)."""

    name: str
    paths: tuple[str, ...]
    background: bool = False  # made by another thread than the one that owns the disk


class FaultyDisk(Disk):
    """A disk that fails at a chosen change.

    *cut_at*: the number, counted from 1, of the change before which the power fails; that change and all later ones
    raise :class:`PowerCut`. *fail_at*: the number of the change that raises OSError with *error* instead of happening,
    *fail_for* how many changes do so from there on; *only* restricts this to some names. *torn*: if that change writes
    data, half of it is written first.

    Only the thread that made the disk is counted: syncs of a background thread depend on timing, and a cut must not.
    After a cut a background thread's changes are silently ignored, since its process is dead.
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
        only: frozenset[str] | None = None,
    ) -> None:
        super().__init__(staging)
        self.only = only
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
        """Return the names of the primitives called, in order: by the owner, or in the background."""
        return [operation.name for operation in self.recorded if operation.background is background]

    def _happens(self, name: str, *paths: str, half: Callable[[], None] | None = None) -> bool:
        """Count and record one change; raise if the fault is here. False: skip it."""
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
        here = self.fail_at is not None and 0 <= self.count - self.fail_at < self.fail_for
        if here and (self.only is None or name in self.only):
            if self.torn and half is not None:
                half()
            raise OSError(self.error, os.strerror(self.error), paths[0])
        self.recorded.append(Operation(name, paths))
        return True


def _faulty(primitive: Callable[..., Any]) -> Callable[..., Any]:
    """Return a primitive of `Disk`, unless the fault is here; a fault may write half of its data."""
    signature = inspect.signature(primitive)

    def unless_faulty(disk: FaultyDisk, *arguments: Any, **named: Any) -> Any:
        bound = signature.bind(disk, *arguments, **named)
        given = bound.arguments
        paths = [
            _path_of(value) if name == "fd" else path_at(value, given.get(f"{name}_at" if name != "path" else "at"))
            for name, value in given.items()
            if name in ("fd", "path", "old", "new", "one", "other")
        ]

        def half() -> None:
            given["data"] = given["data"][: len(given["data"]) // 2]
            primitive(*bound.args, **bound.kwargs)

        happens = disk._happens(primitive.__name__, *paths, half=half if "data" in given else None)
        return primitive(disk, *arguments, **named) if happens else True

    return unless_faulty


for _name in (
    *("create", "fill", "append", "overwrite", "rename", "rename_new", "exchange", "link", "unlink", "mkdir", "rmdir"),
    *("chmod", "sync_file", "sync_directory", "sync_log"),
):
    setattr(FaultyDisk, _name, _faulty(getattr(Disk, _name)))


def every_cut(scenario: Callable[[int], FaultyDisk], limit: int = 1000) -> Iterator[FaultyDisk]:
    """Run *scenario* with its power cut before its first change, its second, and so on; yield each disk.

    *scenario* takes the number to cut at, does its work on a new FaultyDisk, lets PowerCut through or catches it at its
    end, and returns that disk. The last disk that is yielded is the one whose power never failed. AssertionError after
    *limit* cuts: a scenario that never ends.
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


def path_at(path: str, at: int | None) -> str:
    """Return the absolute form of *path*, which is relative to the open directory *at*."""
    return path if at is None else f"{_path_of(at)}/{path}"


def _path_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # longer than a path may be
        return f"(descriptor {fd})"


class PathFaults:
    """Makes operations of :mod:`os` on some paths fail, reading included, as on a broken file system.

    While it is `active`, every operation on a path that *concerns* returns true for is recorded in `met`, as its name
    and the path, and those chosen by `choose` fail. `renameat2` counts as "rename", and an operation on a descriptor as
    one on its path.
    """

    READING = ("open", "read", "lstat", "stat", "listdir", "scandir")
    CHANGING = ("write", "link", "rename", "unlink", "mkdir", "rmdir", "utime", "chmod")

    def __init__(self, concerns: Callable[[str], bool]) -> None:
        self._concerns = concerns
        self.active = True  # whether operations are recorded, and fail
        self.met: list[tuple[str, str]] = []
        self.raised = 0
        self._chosen: tuple[str, str] | None = None
        self._begun = False
        self._error = 0
        self._times = 0
        self._saved: dict[str, Callable[..., object]] = {}

    def choose(self, operation: str, path: str, error: int, *, times: int) -> None:
        """Let *operation* on *path* fail with the errno *error*, that many *times* after `begin`."""
        self._chosen, self._error, self._times = (operation, path), error, times

    def begin(self) -> None:
        """Activate the chosen failures."""
        self._begun = True

    def heal(self) -> None:
        """Deactivate all failures."""
        self._begun = False

    def __enter__(self) -> PathFaults:
        """Intercept every operation."""
        for name in (*self.READING, *self.CHANGING):
            self._saved[name] = getattr(os, name)
            setattr(os, name, self._checked(name, self._saved[name]))
        self._saved["renameat2"] = disk.renameat2
        disk.renameat2 = self._checked("rename", disk.renameat2)  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the operations."""
        disk.renameat2 = self._saved.pop("renameat2")  # type: ignore[assignment]
        for name, function in self._saved.items():
            setattr(os, name, function)

    def _checked(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def checked(*arguments: object, **named: object) -> object:
            about = arguments[: 2 if name in ("link", "rename") else 1]
            beside = [named.get("dir_fd"), None]
            if name in ("link", "rename"):
                beside = [named.get("src_dir_fd"), named.get("dst_dir_fd")]
            for path in map(self._path, about, beside):
                if path is not None and self._concerns(path):
                    self._meet(name, path)
            return function(*arguments, **named)

        return checked

    def _path(self, about: object, at: object = None) -> str | None:
        if isinstance(at, int) and isinstance(about, str):
            return f"{self._path(at)}/{about}"
        if isinstance(about, int):
            try:
                return str(self._saved_readlink(f"/proc/self/fd/{about}"))
            except OSError:
                return None
        return os.fsdecode(about) if isinstance(about, str | bytes | os.PathLike) else None

    _saved_readlink = staticmethod(os.readlink)

    def _meet(self, name: str, path: str) -> None:
        if not self.active:
            return
        self.met.append((name, path))
        if self._begun and self._chosen == (name, path) and self._times > 0:
            self._times -= 1
            self.raised += 1
            raise OSError(self._error, os.strerror(self._error), path)
