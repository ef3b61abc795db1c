"""The paths that a job file names, as they are on this machine for this run."""

from __future__ import annotations

import os
import re

from spool.core.errors import shown
from spool.dispatcher.table import Live


def home() -> str:
    """Return the home directory of whoever runs this process."""
    return os.path.expanduser("~")


_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)  # as `os.path.expandvars` reads it


def why_not_expanded(path: str) -> str | None:
    """Return why *path*, as a job file has it, names no place here: it speaks of a variable or a user there is not."""
    for match in _VARIABLE.finditer(path):
        name = match[1] or match[2] or ""
        if name not in os.environ:
            where = "where the dispatcher runs, and the job's own `env` does not count here"
            return f"{shown(match[0])} is not set {where}; set it there, or write the path out"
    place = os.path.expandvars(path)
    if place.startswith("~") and os.path.expanduser(place).startswith("~"):
        return f"there is no user {shown(place.partition('/')[0][1:])} on this machine; write the path out"
    return None


def expanded(path: str) -> str:
    """Return *path* with `~` and variables expanded; a relative one is taken from the home directory."""
    return os.path.join(home(), os.path.expanduser(os.path.expandvars(path)))


def output_path(template: str | None, live: Live) -> str | None:
    """Return where an output goes: `%n` is the job, `%r` the run, `%a` the array index, `%%` a percent sign.

    A relative path is taken from the workdir.
    """
    if template is None:
        return None
    index = str(live.spec.task.index) if live.spec.task is not None else ""
    values = {"%n": live.name, "%r": str(live.run), "%a": index, "%%": "%"}
    out, rest = [], template
    while "%" in rest:
        before, _, after = rest.partition("%")
        word = "%" + after[:1]
        out.append(before + values.get(word, word))
        rest = after[1:]
    path = "".join(out) + rest
    workdir = expanded(live.spec.workdir) if live.spec.workdir else home()
    return os.path.normpath(os.path.join(workdir, os.path.expanduser(os.path.expandvars(path))))
