"""A shared machine (FORMAT 17): which accounts may serve it, and its configuration, `machine.toml`.

The keys of that file are those of the configuration of a spool and of a reservation that have a meaning for the whole
machine; they are the same rows. Only the accounts that it serves are its own.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from spool.core.errors import InvalidConfig, InvalidValue
from spool.core.gpus import overlap
from spool.core.model import Reservation
from spool.core.reasons import ranges_of
from spool.formats import config, reservation, toml
from spool.formats.capabilities import REQUIRED, Key, KeyTable
from spool.formats.config import CONFIG, QUOTA, Capacity
from spool.formats.reservation import RESERVATION
from spool.formats.validation import FileKind, Format, Kind, Kinds, Reading
from spool.machine.host import MACHINE_FILE, SHARED_DIRECTORY

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
        if self.directory == SHARED_DIRECTORY:
            return "start it with `sudo systemctl start spool-machine`"
        return f"start it with `spool machine serve {self.directory}`"


def served_in(directory: str, owner: str | None) -> SharedMachine:
    """Return the machine served in *directory*. Trusted are root, the service, one's own account, and *owner*."""
    found = {0, os.geteuid()}
    for name in filter(None, (ACCOUNT, owner)):
        try:
            found.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            found |= {int(name)} if name.isdecimal() else set()
    return SharedMachine(directory, frozenset(found))


def others_may_change(status: os.stat_result) -> bool:
    """Whether users other than root and this one can change a file or a directory."""
    return status.st_uid not in (0, os.geteuid()) or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


WHAT = "the configuration of the shared machine"

_NO_UID = (1 << 32) - 1  # what the kernel means by "no user"


def _rows(table: KeyTable, *names: str) -> tuple[Key, ...]:
    of_table = {key.name: key for key in table.keys}
    return tuple(of_table[name] for name in names)


# A row stays a row of a table.
# fmt: off

_QUOTA = KeyTable(
    "MachineQuotaTable",
    "Limits for one user. A key that is absent is taken from the defaults.",
    *_rows(QUOTA, "max_running_jobs", "max_running_gpus", "max_running_cpus", "max_running_memory"),
)

_QUOTAS = KeyTable(
    "MachineQuotasTable",
    "Limits on what users use at once, over all of their spools.",
    Key("default_user", _QUOTA, "Limits for every user; a user's own table takes precedence.", default={},
        field="policy.default_user_limits"),
    Key("users", _QUOTA, "One table per user.", many="named", default={}, field="policy.user_limits"),
)

_RESERVATION = KeyTable(
    "MachineReservationTable",
    "A GPU reservation.",
    Key("name", "label", "Its name, which no other reservation has.", default=REQUIRED),
    Key("user", "label", 'The user. "nobody" keeps the GPUs free for interactive use.', default=REQUIRED),
    Key("start", "moment", "Start: a date and time.", default=REQUIRED),
    *_rows(RESERVATION, "gpus", "duration", "end", "comment"),
)

MACHINE = KeyTable(
    "MachineFile",
    "The configuration of a machine that users share: `machine.toml`. Every key is optional; an unknown key is an "
    "error.",
    Key("users", "served users",
        'Whose jobs may run: users, groups with an `@`, and user ids as numbers, as in `["alice", "@lab", 1005]`. '
        "An account with an id below 1000 counts only if it is named itself. Default: every user with an id from 1000.",
        default=()),
    *_rows(CONFIG, "cpus", "memory", "memory_reserve", "resources", "order", "fair_share", "gpu"),
    Key("quotas", _QUOTAS, "Limits on what users use at once.", default={}),
    Key("reservations", _RESERVATION, "GPU reservations: `[[reservations]]`.", many="list", default=()),
    gone=CONFIG.gone,
)

# fmt: on


class MachineConfig(Capacity, frozen=True):
    """The values of `machine.toml`. A missing or empty file is `MachineConfig()`."""

    users: tuple[str | int, ...] = ()  # names, "@group" and user ids; (): everyone with an id from 1000
    reservations: tuple[Reservation, ...] = ()  # in the order of the file, which is their rank


def parse(data: bytes) -> MachineConfig:
    """Return the configuration in *data*. Raises only InvalidConfig, with every problem."""
    reading = FORMAT.read(data, WHAT)
    fields = config.capacity_of(reading)
    fields["reservations"] = _reservations(fields.get("reservations", ()), reading)
    FORMAT.judge(reading, data, WHAT)
    return MachineConfig(**fields)


def _reservations(tables: Sequence[dict[str, Any]], reading: Reading) -> tuple[Reservation, ...]:
    problems = reading.problems
    made: dict[str, Reservation] = {}
    for index, found in enumerate(tables):
        at = ("reservations", index)
        stated = reading.document["reservations"][index]
        name = found.get("name", "")  # that it is missing is told already
        if name and name in made:
            problems.add((*at, "name"), f"{toml.show(name)} is the name of another reservation")
        one = reservation.reservation_of({**found, "name": name, "created_at_ns": index}, stated, problems, at)
        for other in made.values():
            both = sorted(set(one.gpu_indices).intersection(other.gpu_indices))
            if both and overlap(one, other):
                gpus = f"GPU {ranges_of(both)} is" if len(both) == 1 else f"GPUs {ranges_of(both)} are"
                problems.add((*at, "gpus"), f"{gpus} reserved by {toml.show(other.name)} at the same time")
        made[name] = one
    return tuple(made.values())


def _users(listed: tuple[str | int, ...]) -> tuple[str | int, ...]:
    config.accounts(tuple(word for word in listed if isinstance(word, str)))
    users = tuple(int(word) if isinstance(word, int) or word.isdecimal() else word for word in listed)
    for uid in users:
        if isinstance(uid, int) and not 0 <= uid < _NO_UID:
            raise InvalidValue(f"{uid} is not the id of a user")
    return users


_KINDS: Kinds = {"served users": lambda key: Kind(tuple[int | str, ...], _users)}

FORMAT = Format(MACHINE, {**config.FORMAT.kinds, **reservation.FORMAT.kinds, **_KINDS}, InvalidConfig, MachineConfig())
"""The reader of the configuration of a shared machine."""

FILES = (FileKind("machine", "the configuration of a machine that users share", FORMAT, parse, MACHINE_FILE),)
"""The file, for `spool check` and the schemas."""
