"""Discovery of the listeners of a spool, without loading or running any of them.

Hooks are files (`hooks/EVENT` and `hooks/EVENT.d/*`, FORMAT 15); the listeners of capabilities are configured, or
requested by a job.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Collection

from msgspec import Struct, field

from spool.core import layout
from spool.core.events import EventName
from spool.formats.capabilities import contributed
from spool.formats.config import Config
from spool.store.ownership import others_write, why_not_obeyed

REVIEWED = frozenset({EventName.QUEUEING, EventName.SUBMITTING, EventName.CANCELLING})
"""What hooks review before it happens."""

_HOOK_NAMES = frozenset(name.value for name in EventName)
_HOOK_FOLDER = ".d"
_DROPPINGS = ("~", ".swp", ".swo", ".bak", ".orig", ".rej", ".tmp", ".new", ".dpkg-old", ".dpkg-new", ".dpkg-dist")


class Subscriptions(Struct, frozen=True):
    """The kinds of listeners, and what is known of the events that they want before they run."""

    kinds: frozenset[str] = frozenset()
    wants: frozenset[EventName] = frozenset()  # events that some listener always receives
    asks: frozenset[EventName] = frozenset()  # events that hooks review
    silent: frozenset[str] = frozenset()  # kinds whose wishes are unknown until they run
    problems: tuple[str, ...] = ()


NO_SUBSCRIPTIONS = Subscriptions()


def find_subscriptions(root: str, config: Config, *, by_jobs: Collection[str] = ()) -> Subscriptions:
    """Return the listeners of the spool *root*; *by_jobs*: the capabilities whose listeners some job asks for."""
    hooks = find_hooks(root)
    hooked = {EventName(name) for name in hooks.paths}
    listeners = contributed("listens")
    others = frozenset(one.name for one, listens in listeners if listens(config) or one.name in by_jobs)
    return Subscriptions(
        kinds=others | ({"hooks"} if hooked else set()),
        wants=frozenset(hooked - REVIEWED),
        asks=frozenset(hooked & REVIEWED),
        silent=others,
        problems=hooks.problems,
    )


class HookFiles(Struct, frozen=True):
    """The executables of each event in the order of running, and the problems with other files there."""

    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


NO_HOOKS = HookFiles()


def find_hooks(root: str) -> HookFiles:
    """Return the hooks of the spool at *root*."""
    directory = f"{root}/{layout.HOOKS}"
    problems: list[str] = []
    if not os.path.lexists(directory):
        return NO_HOOKS
    found: dict[str, list[str]] = {}
    if others_write(root):  # a moment later they may have put another directory there
        return HookFiles(problems=(f"{layout.HOOKS}: none of its hooks run: others can write to {root}",))
    for name, path, _ in _entries(root, directory, layout.HOOKS, problems):
        event = name.removesuffix(_HOOK_FOLDER)
        is_folder = name.endswith(_HOOK_FOLDER) and os.path.isdir(path)
        shown = f"{layout.HOOKS}/{name}"
        if event not in _HOOK_NAMES or (event != name and not is_folder):
            if is_folder or _is_executable(path):
                close = difflib.get_close_matches(event, _HOOK_NAMES, 1)
                problems.append(f"{shown}: no such event" + (f", did you mean {close[0]}?" if close else ""))
        elif is_folder:
            for _, each, below in _entries(root, path, shown, problems):
                if _may_run(root, each, below, problems):
                    found.setdefault(event, []).append(each)
        elif _may_run(root, path, shown, problems):
            found.setdefault(event, []).insert(0, path)
    return HookFiles({event: tuple(paths) for event, paths in found.items()}, tuple(problems))


def _entries(root: str, directory: str, shown: str, problems: list[str]) -> list[tuple[str, str, str]]:
    """Return name, path and display name of the entries of *directory*, sorted, without editors' backup files."""
    try:
        if not stat.S_ISDIR((status := os.stat(directory)).st_mode):
            raise NotADirectoryError(20, "it is not a directory")
        if why := _not_trusted(root, status):
            raise PermissionError(1, why)
        names = sorted(os.listdir(directory))
    except OSError as error:
        problems.append(f"{shown}: none of its hooks run: {error.strerror}")
        return []
    return [
        (name, f"{directory}/{name}", f"{shown}/{name}")
        for name in names
        if not name.startswith((".", "#")) and not name.endswith(_DROPPINGS) and name != "4913"
    ]


def _may_run(root: str, path: str, shown: str, problems: list[str]) -> bool:
    try:
        status = os.stat(path)
    except OSError as error:
        problems.append(f"{shown}: does not run: {error.strerror}")
        return False
    if not stat.S_ISREG(status.st_mode):
        why = "it is not a regular file"
    elif not os.access(path, os.X_OK):
        why = "it is not executable"
    else:
        why = _not_trusted(root, status)
    if why:
        problems.append(f"{shown}: does not run: {why}")
    return not why


def _is_executable(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _not_trusted(root: str, status: os.stat_result) -> str:
    """Return which other users could change the file with that *status*, so that it must not run; "" if none."""
    return "everyone can write to it" if status.st_mode & stat.S_IWOTH else why_not_obeyed(root, status)
