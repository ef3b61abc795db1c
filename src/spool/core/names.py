"""Names: why a text cannot be a job's (the grammar is `layout.valid_name`), their order; executors; variables."""

from __future__ import annotations

from spool.core.layout import valid_name

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_NAME_LENGTH = 100

_GLOB = frozenset("*?[")

LOCAL_EXECUTORS = ("process", "tmux")
"""The executors whose runs are on this machine, and use its resources."""

ANY_GPU_TYPE = "auto"
"""The GPU type that every GPU has."""

EXPORTED = (
    "PATH", "VIRTUAL_ENV", "CONDA_*", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_*", "TZ",
)  # fmt: skip
"""The variables that a submission copies into the job file, unless the configuration names others."""

SERVICE = "SPOOL_SERVICE"
"""The variable that marks processes of spool's own which outlive their starter and belong to no job."""

UMASK = 0o022
"""The umask after a login, and of a job that states none."""


class Limit:
    """A limit of `ulimit`: its letter there, the bytes, seconds or files per unit, and the soft one after a login."""

    def __init__(self, letter: str, unit: int, at_login: int | None = None) -> None:
        self.letter = letter
        self.unit = unit
        self.at_login = at_login  # None: unlimited


LIMITS = {
    "as": Limit("v", 1024),
    "core": Limit("c", 512, 0),
    "cpu": Limit("t", 1),
    "data": Limit("d", 1024),
    "fsize": Limit("f", 512),
    "nofile": Limit("n", 1, 1024),
    "stack": Limit("s", 1024, 8 << 20),
}
"""The limits that a job takes along from its submitter, by their names in limits.conf(5)."""


_SEARCHED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


def without_here(environment: Mapping[str, str]) -> dict[str, str]:
    """Return *environment* without the relative entries of search paths; an empty one is relative, too.

    They mean the directory where a program happens to run, and a user who may write there would choose what it runs.
    """
    found = dict(environment)
    for name in _SEARCHED:
        if name in found:
            found[name] = ":".join(entry for entry in found[name].split(":") if entry.startswith("/"))
    return found


def engine_of(executor: str | None) -> str | None:
    """Return the engine whose runs are on another machine; None if the runs of *executor* are here, or unknown."""
    return None if executor in (None, *LOCAL_EXECUTORS) else executor


def why_not_name(name: str) -> str | None:
    """Return what is wrong with *name* as a job's name, or None if nothing is."""
    if valid_name(name):
        return None
    if not name:
        return "a name has at least one character"
    if len(name) > MAX_NAME_LENGTH:
        return f"a name has at most {MAX_NAME_LENGTH} characters, this one has {len(name)}"
    foreign = next((char for char in name if not valid_name(f"a{char}")), None)
    if foreign is not None:
        return f"a name is made of A-Z a-z 0-9 . _ and -, and {foreign!a} is not allowed"
    return f"a name begins with a letter or a digit, not with {name[0]!r}"


def is_pattern(text: str) -> bool:
    """Whether a text is a glob pattern."""
    return not _GLOB.isdisjoint(text)


class NaturalOrder:
    """A sort key of last resort: the name in natural order, computed only if nothing else decides."""

    __slots__ = ("_key", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._key: tuple[str | int, ...] = ()

    def __lt__(self, other: NaturalOrder) -> bool:
        return (self._key or self._worked_out()) < (other._key or other._worked_out())

    def _worked_out(self) -> tuple[str | int, ...]:
        """Return the key, cached: a sort compares each name a dozen times."""
        self._key = natural(self._name)
        return self._key


def natural(name: str) -> tuple[str | int, ...]:
    """Return a sort key for names that puts `sweep_2` before `sweep_10`."""
    import re  # imported here because a submission, which uses other parts of this module, sorts nothing

    parts: list[str | int] = re.split(
        "([0-9]+)", f"{name}\0"
    )  # texts and numbers in turn: only like is compared with like
    parts[1::2] = map(int, parts[1::2])
    return tuple(parts)
