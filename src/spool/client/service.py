"""The systemd user unit that keeps a dispatcher running: writing, enabling and removing it.

A unit written here is marked in its first line, with a checksum of the rest. Another, or an edited one, is only
overwritten or removed on request.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from spool.client.autostart import UNIT
from spool.core.errors import SpoolError, cannot
from spool.core.layout import STAGING, without_here
from spool.store.disk import Disk, read_file

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "units")
"""Where the texts of units come with spool."""

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


def unit_of(root: str, words: Sequence[str], *, usual: bool) -> Unit:
    """Return the unit for the spool *root*, started by *words*. *usual*: it is the default spool."""
    text = shipped(UNIT).decode().replace(f"ExecStart={_PROGRAM} ", f"ExecStart={' '.join(map(word, words))} ")
    if not usual:
        text = text.replace("[Service]\n", f"[Service]\nEnvironment={_quoted(f'SPOOL_DIR={root}')}\n")
    return Unit(UNIT, os.path.join(directory(), UNIT), marked(text.encode(), BY_USER))


def require_manager() -> None:
    """Raise NoServiceManager if no service manager of this user answers."""
    code, said = _systemctl(["show-environment"])
    if code != 0:
        why = f"systemd is not running for this user ({said or 'systemctl --user failed'})"
        raise NoServiceManager(cannot("install", "the service", why))


def install(root: str, unit: Unit, *, force: bool) -> bool:
    """Write the unit and start it; return whether its file has changed.

    Nothing is changed if a foreign or edited file is in the way and not *force*. Raises SpoolError, OSError.
    """
    if not force:
        refuse(unit, BY_USER)
    changed = read_file(unit.path) != unit.text
    if changed:
        os.makedirs(directory(), exist_ok=True)
        Disk(os.path.join(root, STAGING)).put_beside(unit.path, unit.text, 0o644)
    _ask("daemon-reload")
    _ask("enable", "--now", unit.name)
    if changed:
        _ask("try-restart", unit.name)  # one that runs gets the new text now
    return changed


def remove(root: str, *, force: bool) -> str | None:
    """Stop, disable and delete our unit, and return its path; None if there is none. Jobs go on.

    Raises SpoolError if it was edited, unless *force*, and for a foreign one.
    """
    path = os.path.join(directory(), UNIT)
    state = _state_of(path)
    if state is UnitState.ABSENT:
        return None
    if state is UnitState.FOREIGN or (state is UnitState.EDITED and not force):
        raise SpoolError(cannot("remove", UNIT, _why_not(state, BY_USER), where=path, remedy="delete it yourself"))
    _systemctl(["disable", "--now", UNIT])  # the file goes as well where no manager answers
    disk = Disk(os.path.join(root, STAGING))
    disk.discard(os.path.join(directory(), "default.target.wants", UNIT))
    disk.discard(path)
    _systemctl(["daemon-reload"])
    return path


def lingers(user: str) -> bool:
    """Whether the service manager of *user* keeps running after the last logout."""
    return os.path.exists(f"/var/lib/systemd/linger/{user}")


def refuse(unit: Unit, by: str) -> None:
    """Raise SpoolError if a foreign or edited file is in the way of a unit."""
    if (state := unit.state) in (UnitState.EDITED, UnitState.FOREIGN):
        remedy = f"--force overwrites it; a drop-in (`{_EDITS_WITH[by]}`) keeps your changes"
        raise SpoolError(cannot("install", unit.name, _why_not(state, by), where=unit.path, remedy=remedy))


def _why_not(state: UnitState, by: str) -> str:
    return "it was edited" if state is UnitState.EDITED else f"it was not written by `{by}`"


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
