"""The listeners: the receivers of events, in a process of their own (`python -m spool.listeners SPOOL`).

So they can never block a pass: the dispatcher records events and knows the listeners by name only, and that process
reads them. Finding the listeners of a spool loads and runs none of them: hooks are files (`hooks/EVENT` and
`hooks/EVENT.d/*`, FORMAT 15), and the listeners of capabilities are configured, or requested by a job.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Callable, Collection
from typing import Protocol, TextIO

from msgspec import Struct, field

from spool.core import layout
from spool.core.errors import shown
from spool.core.model import Event, EventName
from spool.formats.capabilities import capabilities, loaded
from spool.formats.config import Config
from spool.formats.validation import closest
from spool.store.ownership import others_write, why_not_obeyed


def _where() -> dict[str, str]:
    return {"hooks": "spool.listeners.hooks:Hooks"} | {
        each.name: each.listener for each in capabilities() if each.listener
    }


def kinds() -> tuple[str, ...]:
    """Return every kind of listener; also the names of their cursors."""
    return tuple(_where())


def by_kind(kind: str, root: str, config: Callable[[], Config]) -> Listener:
    """Return a new listener for the spool *root*; its module is imported only now. Raises ImportError, KeyError."""
    made: Listener = loaded(_where()[kind])(root, config)
    return made


def mistakes(kind: str, listener: Listener) -> list[str]:
    """Return what is wrong with the events that a listener wants. Raises TypeError if these are no collection."""
    if callable(listener.wants) or isinstance(listener.wants, str):
        raise TypeError('its `wants` must be a set of names of events, such as {"finished"}')
    where = _where()[kind]
    words = sorted({*listener.wants} - {*EventName})
    return [f'the listener {kind} ({where}) wants "{word}": {no_such_event(word)}' for word in words]


Begin = Callable[[int], None]
"""Called before each step of a review, with the step's time limit in nanoseconds."""


class Listener(Protocol):
    """One receiver of events. Each listener has a thread of its own, which calls its methods."""

    name: str
    """Its name in the log and in its cursor."""

    @property
    def wants(self) -> Collection[str]:
        """The names of the events that it receives, such as "finished"; a name that is none is reported."""
        return ()

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Process an event, and call *done*, from any thread, once it need not be delivered again.

        Exceptions are logged, and count as done.
        """
        done()

    def tick(self) -> float | None:
        """Do what is due; return the seconds until the next call at the latest, None: not before the next event."""
        return None

    def close(self) -> None:
        """Finish soon."""
        return


class NullSink(Listener):
    """Discards every event, so that they do not pile up for the listener *name*."""

    def __init__(self, name: str) -> None:
        self.name = name


def no_such_event(word: str) -> str:
    """Return the complaint about a word that is no event, with the one that was probably meant."""
    meant = closest(word, _HOOK_NAMES)
    return "no such event" + (f", did you mean {meant}?" if meant else "")


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
    there = [one for one in capabilities() if one.listener]
    asked = [loaded(one.listens)(config) if one.listens else config.part(one.name) is not None for one in there]
    others = frozenset(one.name for one, asks in zip(there, asked, strict=True) if asks or one.name in by_jobs)
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
            if is_folder or (os.path.isfile(path) and os.access(path, os.X_OK)):
                problems.append(f"{shown}: {no_such_event(event)}")
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


def _not_trusted(root: str, status: os.stat_result) -> str:
    """Return which other users could change the file with that *status*, so that it must not run; "" if none."""
    return "everyone can write to it" if status.st_mode & stat.S_IWOTH else why_not_obeyed(root, status)


# Line prefixes with a meaning for systemd's journal (sd-daemon(3)).
_LEVELS = {
    logging.DEBUG: "<7>",
    logging.INFO: "<6>",
    logging.WARNING: "<4>",
    logging.ERROR: "<3>",
    logging.CRITICAL: "<2>",
}


class _Lines(logging.Formatter):
    """One line for each message; with a time on a terminal or in a file, with a level for the journal."""

    def __init__(self, *, journald: bool) -> None:
        super().__init__("%(message)s" if journald else "%(asctime)s %(levelname)s %(message)s")
        self._journald = journald

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if self._journald:
            return _LEVELS.get(record.levelno, "<6>") + shown(text.replace("\n", " "))
        return shown(text, "\n\t")


class _Stderr(logging.StreamHandler[TextIO]):
    """The log on stderr. A line that its disk has no room for is lost, and no reason to print a traceback there."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def set_up_logging(level: str, *, journald: bool) -> None:
    """Send the log to stderr."""
    handler = _Stderr(sys.stderr)
    handler.setFormatter(_Lines(journald=journald))
    root = logging.getLogger("spool")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())
