"""Where a run's output goes, read from the assignments of its `run.sh`: the script is what really opens the files."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spool.core import layout

_HOLE = "# --- assignments ---\n"
_ASSIGNMENT = re.compile(r"spool_([a-z_]+)='((?:[^']|'\\'')*)'\n")


@dataclass(frozen=True, slots=True)
class Outputs:
    """Two absolute paths. None as stdout: the executor's own; None as stderr: where stdout goes."""

    stdout: str | None
    stderr: str | None


def outputs_of(script: bytes, metadir: str) -> Outputs | None:
    """Return where the wrapper *script*, which lies in *metadir*, sends the output; None if it is no wrapper of ours.

    A log of the metadir is the one that lies beside the script: the spool may have been moved since that was written.
    """
    _, hole, rest = script.decode("utf-8", "surrogateescape").partition(_HOLE)
    values: dict[str, str] = {}
    at = 0
    while match := _ASSIGNMENT.match(rest, at):
        values[match[1]] = match[2].replace("'\\''", "'")
        at = match.end()
    if not hole or "stdout" not in values:
        return None
    stdout, stderr = values["stdout"] or None, values.get("stderr") or None
    before = values.get("metadir")
    if stdout == f"{before}/{layout.JOB_LOG}":
        stdout = f"{metadir}/{layout.JOB_LOG}"
    if stderr == f"{before}/{layout.JOB_STDERR}":
        stderr = f"{metadir}/{layout.JOB_STDERR}"
    return Outputs(stdout, stderr)
