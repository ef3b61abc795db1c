"""Names: why a text cannot be a job's (the grammar is `layout.valid_name`), their order; executors; variables."""

from __future__ import annotations

from spool.core.layout import valid_name

MAX_NAME_LENGTH = 100

_GLOB = frozenset("*?[")

LOCAL_EXECUTORS = ("process", "tmux")
"""The executors whose runs are on this machine, and take what it has."""

ENGINES = {"slurm": "Slurm"}
"""The executors whose runs are on another machine, and what people call each."""

EXECUTORS = (*LOCAL_EXECUTORS, *ENGINES)
"""What a job file and the configuration may name; `spool.executors` has those that exist."""

EXPORTED = (
    "PATH", "VIRTUAL_ENV", "CONDA_*", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_*", "TZ",
)  # fmt: skip
"""The variables that a submission copies into the job file, unless the configuration names others."""


def engine_title(executor: str) -> str:
    """Return what people call an engine; one that nobody knows, such as that of a later version, by its own word."""
    return ENGINES.get(executor, executor)


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
    """Whether a text is a glob, and no name."""
    return not _GLOB.isdisjoint(text)


class NaturalOrder:
    """A name as the last thing to sort by: in natural order, which is worked out only where nothing else decides."""

    __slots__ = ("_key", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._key: tuple[str | int, ...] = ()

    def __lt__(self, other: NaturalOrder) -> bool:
        return (self._key or self._worked_out()) < (other._key or other._worked_out())

    def _worked_out(self) -> tuple[str | int, ...]:
        """Return the key, and keep it: a sort compares each name a dozen times."""
        self._key = natural(self._name)
        return self._key


def natural(name: str) -> tuple[str | int, ...]:
    """Return what to sort names by, so that `sweep_2` comes before `sweep_10`."""
    import re  # here: a submission, which needs other things of this module, sorts nothing

    parts: list[str | int] = re.split(
        "([0-9]+)", f"{name}\0"
    )  # texts and numbers in turn: only like is compared with like
    parts[1::2] = map(int, parts[1::2])
    return tuple(parts)
