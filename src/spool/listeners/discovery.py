"""Which hooks there are: `hooks/EVENT` and `hooks/EVENT.d/*` of the spool (FORMAT 15)."""

from __future__ import annotations

import difflib
import os
import stat
from dataclasses import dataclass, field

from spool.core import layout
from spool.core.events import EventName

_EVENTS = frozenset(name.value for name in EventName)
_FOLDER = ".d"
_DROPPINGS = ("~", ".swp", ".swo", ".bak", ".orig", ".rej", ".tmp", ".new", ".dpkg-old", ".dpkg-new", ".dpkg-dist")


@dataclass(frozen=True, slots=True)
class HookFiles:
    """The executables of each event in the order in which they are run, and what is wrong with what lies beside."""

    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


NONE = HookFiles()


def find_hooks(root: str) -> HookFiles:
    """Return the hooks of the spool at *root*."""
    directory = f"{root}/{layout.HOOKS}"
    problems: list[str] = []
    if not os.path.lexists(directory):
        return NONE
    found: dict[str, list[str]] = {}
    for name, path, _ in _entries(directory, layout.HOOKS, problems):
        event = name.removesuffix(_FOLDER)
        is_folder = name.endswith(_FOLDER) and os.path.isdir(path)
        shown = f"{layout.HOOKS}/{name}"
        if event not in _EVENTS or (event != name and not is_folder):
            if is_folder or _is_executable(path):
                close = difflib.get_close_matches(event, _EVENTS, 1)
                problems.append(f"{shown}: no event has that name" + (f", did you mean {close[0]}?" if close else ""))
        elif is_folder:
            for _, each, below in _entries(path, shown, problems):
                if _may_run(each, below, problems):
                    found.setdefault(event, []).append(each)
        elif _may_run(path, shown, problems):
            found.setdefault(event, []).insert(0, path)
    return HookFiles({event: tuple(paths) for event, paths in found.items()}, tuple(problems))


def _entries(directory: str, shown: str, problems: list[str]) -> list[tuple[str, str, str]]:
    """Return name, path and how to call it of what lies in *directory*, sorted, without editors' droppings."""
    try:
        if not stat.S_ISDIR((status := os.stat(directory)).st_mode):
            raise NotADirectoryError(20, "it is not a directory")
        if (why := _not_trusted(status)) is not None:
            raise PermissionError(1, why)
        names = sorted(os.listdir(directory))
    except OSError as error:
        problems.append(f"{shown}: no hook in it is run: {error.strerror}")
        return []
    return [
        (name, f"{directory}/{name}", f"{shown}/{name}")
        for name in names
        if not name.startswith((".", "#")) and not name.endswith(_DROPPINGS) and name != "4913"
    ]


def _may_run(path: str, shown: str, problems: list[str]) -> bool:
    try:
        status = os.stat(path)
    except OSError as error:
        problems.append(f"{shown}: it is not run: {error.strerror}")
        return False
    if not stat.S_ISREG(status.st_mode):
        why: str | None = "it is not a file"
    elif not os.access(path, os.X_OK):
        why = "it is not executable"
    else:
        why = _not_trusted(status)
    if why is not None:
        problems.append(f"{shown}: it is not run: {why}")
    return why is None


def _is_executable(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _not_trusted(status: os.stat_result) -> str | None:
    """Return why whoever can change the file must not decide what we run."""
    if status.st_uid not in (os.geteuid(), 0):
        return "it belongs to another user"
    if status.st_mode & stat.S_IWOTH:
        return "everybody may write it"
    return None
