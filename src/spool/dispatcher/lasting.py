"""What lasts, is no run's, and is told of: a reservation in force, a GPU that is taken, a dispatcher that serves.

The journal remembers it by a key, beside the keys of runs (`JOB:RUN:EVENT`). Since a job may be called `dispatcher`
too, the key begins with a slash, which no job's name does (FORMAT 1.10).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_HEAD = "/"
_KEY = re.compile(rf"{_HEAD}([a-z]+):(?:(.+):)?(-?[0-9]+)")


class Kind(StrEnum):
    """Of what kind it is."""

    RESERVATION = "reservation"
    GPU = "gpu"
    DISPATCHER = "dispatcher"


@dataclass(frozen=True, slots=True)
class Lasting:
    """One thing that lasts. *name* is the reservation's or the UUID of the GPU; a dispatcher has none."""

    kind: Kind
    name: str
    since_ns: int

    @property
    def id(self) -> str:
        """What the ids of its events begin with."""
        return ":".join(filter(None, (self.kind, self.name, str(self.since_ns))))

    @property
    def key(self) -> str:
        """What the journal calls it."""
        return _HEAD + self.id


def lasting(keys: Iterable[str], kind: Kind) -> list[Lasting]:
    """Return what is of that *kind* among the *keys* of the journal."""
    matches = (_KEY.fullmatch(key) for key in keys if key.startswith(_HEAD))
    return [Lasting(kind, match[2] or "", int(match[3])) for match in matches if match is not None and match[1] == kind]
