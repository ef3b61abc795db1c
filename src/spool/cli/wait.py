"""`spool wait`: wait until jobs have ended, and exit as they did.

Who follows a job in other ways (`run`, `log`) says by the same words that it is held and how it ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import click

from spool.cli.common import named, names_argument, opened
from spool.cli.group import Verb, tell
from spool.client.waiting import Awaited, End
from spool.core.errors import ExitCode, NoSuchJob
from spool.core.layout import HELD, QUEUED, RUNNING
from spool.core.model import State
from spool.core.names import natural
from spool.core.units import parse_duration
from spool.store.spool import Spool

POLL_S = 0.025
PATIENCE_NS = 3_000_000_000  # one that was just started in the background is there by then
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


class HoldNotices:
    """Says of jobs that are waited for that they are held, and why, each hold once: else the wait looks like a hang."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._told: set[str] = set()

    def see(self, awaited: Awaited) -> None:
        """Say on stderr that the job is held, if the last look has found it so and that is new."""
        name = awaited.name
        if not awaited.held:
            self._told.discard(name)
        elif name not in self._told:
            self._told.add(name)
            why = self._why(name)
            tell(f"job {name} is held{f': {why}' if why else ''}; `spool release {name}` lets it start")

    def _why(self, name: str) -> str:
        try:
            status = os.stat(self._spool.layout.job_file(HELD, name))
        except OSError:  # it was released this very moment
            return ""
        return self._spool.hold_reason(name, status.st_mtime_ns)


def until_ended(root: str, names: Sequence[str], *, first: bool = False, timeout_ns: int | None = None) -> int:
    """Wait for all jobs, or with *first* for one of them; say how they ended, and return the exit code."""
    spool = Spool.open(root)
    waiting: list[Awaited] = []
    codes: dict[str, int] = {}
    for name in names:
        try:
            waiting.append(Awaited(spool, name))
        except NoSuchJob as error:
            tell(str(error))
            codes[name] = int(ExitCode.NO_SUCH_JOB)
    notices = HoldNotices(spool)
    begun = time.monotonic_ns()
    warned = False
    while waiting and not (first and codes):
        for awaited in list(waiting):
            end = awaited.poll()
            notices.see(awaited)
            if end is not None:
                waiting.remove(awaited)
                codes[awaited.name] = _told(end)
                if first:
                    return codes[awaited.name]
        if not waiting:
            break
        waited_ns = time.monotonic_ns() - begun
        if timeout_ns is not None and waited_ns >= timeout_ns:
            tell(f"waited in vain for {', '.join(awaited.name for awaited in waiting[:5])}: the time is over")
            return TIMED_OUT
        if not warned and waited_ns > PATIENCE_NS:
            warned = True
            if not spool.dispatcher_lives():
                tell("no dispatcher runs, so nothing starts: `spool dispatch` is one")
        time.sleep(POLL_S)
    return next((codes[name] for name in names if codes.get(name)), 0)


def _told(end: End) -> int:
    """Say on stderr how a job ended, unless it finished, and return its exit code."""
    if end.outcome is not State.FINISHED:
        tell(told(end))
    return code_of(end.outcome, end.exit_code)


@click.command(cls=Verb)
@names_argument
@click.option(
    "--all", "wait_for_all", is_flag=True, help="Wait until all have ended: without names all that wait or run now."
)
@click.option("--any", "wait_for_any", is_flag=True, help="Wait until one of them has ended.")
@click.option("--timeout", metavar="TIME", help="Wait no longer than this; then exit with 124.")
@click.pass_obj
def command(root: str, names: tuple[str, ...], wait_for_all: bool, wait_for_any: bool, timeout: str | None) -> int:
    """Wait until jobs have ended, and exit with their code.

    0 if all finished, else the code of the first named that did not: its own for a job that failed, 124 for a time
    limit, 125 lost, 130 cancelled, 137 out of memory, 75 unschedulable, 4 an invalid file, 3 no such job.

      spool wait train && echo trained
      spool wait 'sweep_*' --timeout 2h
      spool wait --all

    Of jobs that are held, those that are named are waited for; that one is held, and why, is said once.

    By hand:
      until [ -e done/train.toml ]; do sleep 1; done
      cat jobs/train/1/result.toml
    """
    if wait_for_all and wait_for_any:
        raise click.UsageError("--all and --any exclude each other")
    if not names and not wait_for_all:
        raise click.UsageError("missing argument 'NAME...', or --all for every job that waits or runs")
    spool = opened(root)
    timeout_ns = parse_duration(timeout) if timeout is not None else None
    wanted = named(spool, names) if names else sorted({*spool.names(QUEUED), *spool.names(RUNNING)}, key=natural)
    return until_ended(spool.root, wanted, first=wait_for_any, timeout_ns=timeout_ns)
