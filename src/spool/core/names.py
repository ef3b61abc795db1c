"""The names of jobs, and why a text cannot be one (the grammar is `layout.valid_name`); the names of executors."""

from __future__ import annotations

import re

from spool.core.layout import valid_name

MAX_NAME_LENGTH = 100

_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")

LOCAL_EXECUTORS = ("process", "tmux")
"""The executors whose runs are on this machine, and take what it has."""

EXECUTORS = (*LOCAL_EXECUTORS, "slurm")
"""What a job file and the configuration may name; of these `spool.executors` has those that there are."""


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
        return f"a name is made of A-Z a-z 0-9 . _ and -, and {foreign.group()!a} is none of them"
    return f"a name begins with a letter or a digit, not with {name[0]!r}"
