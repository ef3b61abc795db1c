"""Whether this machine is shared by users who do not trust each other, and which accounts may serve it (FORMAT 17)."""

from __future__ import annotations

import os
import pwd

from msgspec import Struct

MACHINE_FILE = "/etc/spool/machine.toml"
DIRECTORY = "/run/spool"
ACCOUNT = "spool-machine"
SOCKET = "socket"


class SharedMachine(Struct, frozen=True):
    """The directory of its arbiter, and the accounts that may serve there."""

    directory: str
    servers: frozenset[int]

    @property
    def socket(self) -> str:
        """The path of the arbiter's socket."""
        return os.path.join(self.directory, SOCKET)

    @property
    def remedy(self) -> str:
        """Return what starts the arbiter."""
        if self.directory == DIRECTORY:
            return "start it with `sudo systemctl start spool-machine`"
        return f"start it with `spool machine serve {self.directory}`"


def find(setting: str, owner: str | None) -> SharedMachine | None:
    """Return the shared machine by the keys `machine` and `machine_owner`; None: it is not shared."""
    where = directory(setting)
    return SharedMachine(where, may_serve(owner)) if where is not None else None


def directory(setting: str) -> str | None:
    """Return the directory of the arbiter by the key `machine`; None: the machine is not shared.

    With "auto" only the proven absence of the machine's file means that.
    """
    if setting == "off":
        return None
    if setting != "auto":
        return os.path.normpath(os.path.expanduser(setting))
    try:
        os.stat(MACHINE_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass  # it is there, and cannot be looked at
    return DIRECTORY


def may_serve(owner: str | None) -> frozenset[int]:
    """Return the accounts whose arbiter is trusted: root, the service's, one's own, and *owner*."""
    found = {0, os.geteuid()}
    for name in (ACCOUNT, owner):
        uid = _uid_of(name) if name is not None else None
        if uid is not None:
            found.add(uid)
    return frozenset(found)


def _uid_of(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return int(name) if name.isdecimal() else None
