"""The paths that a job file names, as they are on this machine for this run."""

from __future__ import annotations

import os

from spool.state.table import Live


def home() -> str:
    """Return the home directory of whoever runs this process."""
    return os.path.expanduser("~")


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
