"""A shared machine (FORMAT 17): the arbiter that gives turns, and what a spool asks and shows of it.

Here is which accounts may serve it.
"""

from __future__ import annotations

import os
import pwd

from msgspec import Struct

from spool.machine.shared import DIRECTORY

ACCOUNT = "spool-machine"
SOCKET, STATUS = "socket", "machine.json"


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


def served_in(directory: str, owner: str | None) -> SharedMachine:
    """Return the machine served in *directory*. Trusted are root, the service, one's own account, and *owner*."""
    found = {0, os.geteuid()}
    for name in (ACCOUNT, owner):
        uid = _uid_of(name) if name is not None else None
        if uid is not None:
            found.add(uid)
    return SharedMachine(directory, frozenset(found))


def _uid_of(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return int(name) if name.isdecimal() else None
