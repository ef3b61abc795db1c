"""Files in `queued/` or `held/` that look like job files and are not (FORMAT 2.1): the reasons, and remedies.

spool ignores such a file. The user who put it there would wait for a job that never starts, so the commands report it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence

from msgspec import Struct

from spool.core import layout
from spool.core.errors import shown
from spool.core.names import why_not_name

_NO_JOB = (".", "#", "~")  # hidden files, and files of editors
_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory"}


class Ignored(Struct, frozen=True):
    """An ignored file. `path` is relative to the spool."""

    path: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path} is ignored: {self.why}; {self.remedy}"


def by_name(place: str, filenames: Iterable[str]) -> list[Ignored]:
    """Return the files among *filenames*, none of them a job's, whose names resemble a job's."""
    found = []
    for filename in filenames:
        if filename[-len(layout.JOB_SUFFIX) :].lower() != layout.JOB_SUFFIX or filename.startswith(_NO_JOB):
            continue
        stem, suffix = filename[: -len(layout.JOB_SUFFIX)], filename[-len(layout.JOB_SUFFIX) :]
        wrong = f"its name ends in {suffix}, not in {layout.JOB_SUFFIX}" if suffix != layout.JOB_SUFFIX else ""
        why = wrong or why_not_name(stem) or ""
        found.append(Ignored(_path(place, filename), why, "rename it"))
    return sorted(found, key=lambda each: each.path)


def by_kind(place: str, name: str, mode: int) -> Ignored | None:
    """Return an entry that has the name of a job file but, by its *mode*, is not a file; None if it is one."""
    if stat.S_ISREG(mode):
        return None
    kind = _KINDS.get(stat.S_IFMT(mode), "not a regular file")
    remedy = "put a copy of the file there" if stat.S_ISLNK(mode) else "remove it"
    return Ignored(_path(place, layout.file_of(name)), f"it is {kind}", remedy)


def in_short(found: Sequence[Ignored]) -> list[str]:
    """Return a one-line list of all of them; empty if there are none."""
    if len(found) < 2:
        return [str(each) for each in found]
    first, *others = found
    return [f"{first.path} and {len(others):,} more are ignored: {first.why}; `spool doctor` lists them"]


def without_ending(place: str, filenames: Iterable[str]) -> list[str]:
    """Return further files among *filenames*, none of them a job's, that a user may have put there."""
    ours = (layout.ERROR_SUFFIX, layout.REASON_SUFFIX, layout.SUSPENDED_SUFFIX)
    left = [name for name in filenames if not name.startswith(_NO_JOB) and not name.endswith(("~", ".swp", *ours))]
    named = [name for name in left if name[-len(layout.JOB_SUFFIX) :].lower() != layout.JOB_SUFFIX]
    return [_path(place, name) for name in sorted(named) if not name.isdecimal()]  # vim creates a file 4913 as a test


def _path(place: str, filename: str) -> str:
    path = shown(os.path.join(place, filename))
    return repr(path) if " " in path else path
