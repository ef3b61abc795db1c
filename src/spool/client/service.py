"""The systemd user units that keep a dispatcher running: writing, enabling and removing them.

There are two sets: a permanent dispatcher, or a pass whenever a file is dropped and once per minute. A unit written
here is marked in its first line, with a checksum of the rest. Other units, and edited ones, are only overwritten or
removed on request.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum

from msgspec import Struct

from spool.client.autostart import UNIT
from spool.core.errors import SpoolError, cannot
from spool.core.layout import QUEUED, RUNNING, STAGING, without_here
from spool.store.disk import Disk, read_file

RESIDENT = (UNIT,)
ONCE = ("spool-once.service", "spool-once.path", "spool-once.timer")
UNITS = (*RESIDENT, *ONCE)
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "units")
"""Where the texts of units come with spool."""

_STARTED = {UNIT, "spool-once.path", "spool-once.timer"}  # the others are started by these
_MARK = re.compile(rb"# Written by `spool (?:service|machine) install` \(([0-9a-f]{16})\).*\n")
BY_USER, BY_ROOT = "spool service install", "spool machine install"
"""The commands that write units: those of a user's own manager, and that of the machine's."""

_EDITS_WITH = {BY_USER: "systemctl --user edit", BY_ROOT: "systemctl edit"}
_PROGRAM = "%h/.local/bin/spool"
_PATIENCE_S = 120  # for a command of the system


class NoServiceManager(SpoolError):  # noqa: N818  (like the errors of core/errors.py)
    """The user's service manager does not answer."""


class UnitState(StrEnum):
    """The state of a unit's file."""

    ABSENT = "absent"
    INSTALLED = "installed"
    EDITED = "edited"  # written here, and changed since
    FOREIGN = "not ours"


class Unit(Struct, frozen=True):
    """One unit: the path of its file, its text, and the folder in which it comes with spool."""

    name: str
    path: str
    text: bytes
    folder: str = FOLDER

    @property
    def state(self) -> UnitState:
        """The present state of the file."""
        return _state_of(self.path, self.folder)


def directory() -> str:
    """Return the directory of this user's units."""
    return os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "systemd", "user")


def program() -> tuple[str, ...]:
    """Return the words that start spool: its absolute path as invoked, or Python with the module."""
    called = os.path.abspath(sys.argv[0])
    beside = os.path.join(os.path.dirname(sys.executable), "spool")
    for path in (called, beside):
        if os.path.basename(path) == "spool" and os.access(path, os.X_OK) and os.path.isfile(path):
            return (path,)
    return (sys.executable, "-P", "-m", "spool")


def by_cron(root: str, words: Sequence[str], *, usual: bool) -> str:
    """Return a crontab line with the effect of the service."""
    return f"@reboot {shlex.join([*words, *([] if usual else ['--spool', root]), 'dispatch'])}"


def units(root: str, words: Sequence[str], names: Iterable[str], *, usual: bool) -> list[Unit]:
    """Return the units *names* for the spool *root*, started by *words*. *usual*: it is the default spool."""
    made = []
    for name in names:
        text = shipped(name).decode()
        text = text.replace(f"ExecStart={_PROGRAM} ", f"ExecStart={' '.join(map(word, words))} ")
        text = text.replace(f"%h/.spool/{QUEUED}", _plain(f"{root}/{QUEUED}"))
        text = text.replace(f"%h/.spool/{RUNNING}", _plain(f"{root}/{RUNNING}"))
        if not usual:
            text = text.replace("[Service]\n", f"[Service]\nEnvironment={_quoted(f'SPOOL_DIR={root}')}\n")
        made.append(Unit(name, os.path.join(directory(), name), marked(text.encode(), BY_USER)))
    return made


def require_manager() -> None:
    """Raise NoServiceManager if no service manager of this user answers."""
    code, said = _systemctl(["show-environment"])
    if code != 0:
        why = f"systemd is not running for this user ({said or 'systemctl --user failed'})"
        raise NoServiceManager(cannot("install", "the service", why))


def install(root: str, wanted: Sequence[Unit], *, force: bool) -> list[tuple[str, str]]:
    """Write the units and start them; remove ours that are not *wanted*. Return each path with the action.

    Nothing is changed if a foreign or edited file is in the way and not *force*. Raises SpoolError, OSError.
    """
    if not force:
        refuse(wanted, BY_USER)
    others = [name for name in UNITS if name not in {unit.name for unit in wanted}]
    done = [(path, "removed") for path in _removed(root, others, force=False)]
    changed = [unit for unit in wanted if read_file(unit.path) != unit.text]
    disk = Disk(os.path.join(root, STAGING))
    os.makedirs(directory(), exist_ok=True)
    for unit in changed:
        disk.put_beside(unit.path, unit.text, 0o644)
    started = [unit.name for unit in wanted if unit.name in _STARTED]
    _ask("daemon-reload")
    _ask("enable", "--now", *started)
    if again := [unit.name for unit in changed if unit.name in _STARTED]:
        _ask("try-restart", *again)  # a running unit gets the new text now
    return [*done, *((unit.path, "written" if unit in changed else "unchanged") for unit in wanted)]


def remove(root: str, *, force: bool) -> tuple[list[str], list[str]]:
    """Stop, disable and delete our units; return the removed paths, and those kept because they were edited.

    With *force* edited ones are removed as well; foreign ones stay in any case. Jobs go on.
    """
    gone = _removed(root, UNITS, force=force)
    left = [os.path.join(directory(), name) for name in UNITS]
    return gone, [path for path in left if _state_of(path) is not UnitState.ABSENT]


def lingers(user: str) -> bool:
    """Whether the service manager of *user* keeps running after the last logout."""
    return os.path.exists(f"/var/lib/systemd/linger/{user}")


def _removed(root: str, names: Iterable[str], *, force: bool) -> list[str]:
    """Disable and delete the units among *names* that are ours; with *force* also edited ones."""
    may_go = {UnitState.INSTALLED, UnitState.EDITED} if force else {UnitState.INSTALLED}
    ours = [name for name in names if _state_of(os.path.join(directory(), name)) in may_go]
    if not ours:
        return []
    _systemctl(["disable", "--now", *ours])  # the files go as well where no manager answers
    disk = Disk(os.path.join(root, STAGING))
    for name in ours:
        for target in ("default.target.wants", "timers.target.wants", "."):
            disk.discard(os.path.normpath(os.path.join(directory(), target, name)))
    _systemctl(["daemon-reload"])
    return [os.path.join(directory(), name) for name in ours]


def refuse(wanted: Iterable[Unit], by: str) -> None:
    """Raise SpoolError if a foreign or edited file is in the way of a unit."""
    for unit in wanted:
        if (state := unit.state) in (UnitState.EDITED, UnitState.FOREIGN):
            why = "it was edited" if state is UnitState.EDITED else f"it was not written by `{by}`"
            remedy = f"--force overwrites it; a drop-in (`{_EDITS_WITH[by]}`) keeps your changes"
            raise SpoolError(cannot("install", unit.name, why, where=unit.path, remedy=remedy))


def _state_of(path: str, folder: str = FOLDER) -> UnitState:
    text = read_file(path)
    if text is None:
        return UnitState.ABSENT
    if (mark := _MARK.match(text)) is None:
        return UnitState.INSTALLED if text == shipped(os.path.basename(path), folder) else UnitState.FOREIGN
    return UnitState.INSTALLED if mark[1].decode() == _sum(text[mark.end() :]) else UnitState.EDITED


def shipped(name: str, folder: str = FOLDER) -> bytes:
    """Return the file *name* as it comes with spool."""
    with open(os.path.join(folder, name), "rb") as file:
        return file.read()


def marked(text: bytes, by: str) -> bytes:
    """Return the text of a unit with the mark of the command *by* which it is written."""
    return f"# Written by `{by}` ({_sum(text)}): change it by `{_EDITS_WITH[by]}`.\n".encode() + text


def _sum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _plain(text: str) -> str:
    """Return a path quoted as the rest of a line of a unit."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    escaped = _plain(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def word(text: str) -> str:
    """Return *text* quoted as one word of `ExecStart=`."""
    text = text.replace("$", "$$")
    return _plain(text) if re.fullmatch(r"[\w@%+=:,./$-]+", text) else _quoted(text)


def _ask(*words: str) -> None:
    """Give the user's service manager an order. Raises SpoolError with its message."""
    code, said = _systemctl(words)
    if code != 0:
        raise SpoolError(
            cannot("install", "the service", f"systemctl --user {words[0]}: {said or f'exit code {code}'}")
        )


def _systemctl(words: Sequence[str]) -> tuple[int, str]:
    code, said = answer_of(("systemctl", "--user", *words))
    return code, said.rpartition("\n")[2].strip()


def answer_of(words: Sequence[str]) -> tuple[int, str]:
    """Run a command of the system, and return its exit code and its output: 127 and the reason if it cannot run."""
    try:
        done = subprocess.run(
            words,
            env=without_here(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str((error.strerror if isinstance(error, OSError) else None) or error)
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()
