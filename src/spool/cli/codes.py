"""The exit code that stands for how a job ended; the table is in `spool.cli.main`."""

from __future__ import annotations

from spool.client.waiting import End
from spool.core.errors import ExitCode
from spool.core.model import State

TIMED_OUT = 124  # as coreutils' timeout says it

_CODES = {
    State.FINISHED: 0,
    State.TIMEOUT: TIMED_OUT,
    State.LOST: 125,
    State.CANCELLED: 130,
    State.OUT_OF_MEMORY: 137,
    State.UNSCHEDULABLE: 75,
    State.INVALID: int(ExitCode.INVALID_FILE),
}


def code_of(outcome: State, exit_code: int | None) -> int:
    """Return the exit code for a job that ended with *outcome*; a failed one's is its own."""
    if outcome is State.FAILED:
        return exit_code or 1
    return _CODES[outcome]


def told(end: End) -> str:
    """Return how a job ended as a line for people."""
    if end.outcome is State.INVALID:
        return end.reason
    if end.reason.startswith(end.outcome):  # "cancelled by alice"
        return f"job {end.name}: {end.reason}"
    return f"job {end.name}: {end.outcome}{f': {end.reason}' if end.reason else ''}"
