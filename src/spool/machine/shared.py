"""Whether this machine is shared by users who do not trust each other (FORMAT 17)."""

from __future__ import annotations

import os

MACHINE_FILE = "/etc/spool/machine.toml"
DIRECTORY = "/run/spool"

MISSING = "the part of spool that asks its arbiter is missing"
"""Why nothing starts on a shared machine where the capability that asks for leases is not there."""
REMEDY = 'install all of spool; or `machine = "off"` in config.toml starts jobs without asking'


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
