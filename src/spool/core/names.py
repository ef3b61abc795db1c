"""The names of jobs: why a text cannot be one (the grammar is `layout.valid_name`), their order; those of executors."""

from __future__ import annotations

import re

from spool.core.layout import valid_name

MAX_NAME_LENGTH = 100

_GLOB = frozenset("*?[")
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")

LOCAL_EXECUTORS = ("process", "tmux")
"""The executors whose runs are on this machine, and take what it has."""

ENGINES = {"slurm": "Slurm"}
"""The executors whose runs are on another machine, and what people call each."""

EXECUTORS = (*LOCAL_EXECUTORS, *ENGINES)
"""What a job file and the configuration may name; `spool.executors` has those that exist."""


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
    foreign = _FOREIGN.search(name)
    if foreign is not None:
        return f"a name is made of A-Z a-z 0-9 . _ and -, and {foreign.group()!a} is not allowed"
    return f"a name begins with a letter or a digit, not with {name[0]!r}"


def is_pattern(text: str) -> bool:
    """Whether a text is a glob, and no name."""
    return not _GLOB.isdisjoint(text)


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return what to sort names by, so that `sweep_2` comes before `sweep_10`."""
    parts: list[tuple[int, int, str]] = []
    digits = ""
    for char in f"{name}\0":
        if char.isascii() and char.isdigit():
            digits += char
            continue
        if digits:
            parts.append((0, int(digits), ""))
            digits = ""
        parts.append((1, 0, char))
    return parts
