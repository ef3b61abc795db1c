"""`spool wait`: wait for jobs to end, and exit with their code.

`run` and `log` use the same messages for a held job and for how a job ended.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from spool.cli import render
from spool.cli.common import named, names_argument, opened, value_of
from spool.cli.group import Verb
from spool.cli.telling import tell
from spool.client.waiting import End, Waiter
from spool.core.errors import ExitCode, SpoolError
from spool.core.layout import HELD, QUEUED, RUNNING, natural
from spool.core.model import SECOND_NS, State
from spool.core.units import parse_duration
from spool.store.spool import Spool

if TYPE_CHECKING:
    from spool.query.outlook import WaitStatus, WaitWatch

_TURN_S = 0.25  # how often to look for holds and to refresh the bar
_BAR_AFTER_NS = 500_000_000  # no bar for jobs that end at once
_BAR_EVERY_NS = 1_000_000_000
TIMED_OUT = 124  # as in coreutils' timeout


_CODES = {
    State.FINISHED: 0,
    State.TIMEOUT: TIMED_OUT,
    State.LOST: 125,
    State.PREEMPTED: 143,
    State.CANCELLED: int(ExitCode.INTERRUPTED),
    State.OUT_OF_MEMORY: 137,
    State.UNSCHEDULABLE: 75,
    State.INVALID: int(ExitCode.INVALID_FILE),
}


def code_of(outcome: State, exit_code: int | None) -> int:
    """Return the exit code for a job that ended with *outcome*; a failed one's is its own."""
    if outcome is State.FAILED and exit_code:
        return exit_code
    return _CODES.get(outcome, int(ExitCode.FAILED))


def told(end: End) -> str:
    """Return how a job ended as one line."""
    if end.outcome is State.INVALID:
        return end.reason
    if end.reason.startswith(end.outcome):  # "cancelled by alice"
        return f"job {end.name}: {end.reason}"
    return f"job {end.name}: {end.outcome}{f': {end.reason}' if end.reason else ''}"


class HoldNotices:
    """Reports each hold of an awaited job once, with the reason: otherwise the wait looks like a hang."""

    def __init__(self, spool: Spool, say: Callable[[str], None] = tell) -> None:
        self._spool = spool
        self._say = say
        self._told: set[str] = set()

    def see(self, held: Set[str]) -> None:
        """Report on stderr that the jobs *held* are held, each that the last call did not have."""
        new, self._told = held - self._told, set(held)
        for name in sorted(new, key=natural):
            why = self._why(name)
            self._say(f"job {name} is held{f': {why}' if why else ''}; `spool release {name}` lets it start")

    def _why(self, name: str) -> str:
        try:
            status = os.stat(self._spool.layout.job_file(HELD, name))
        except OSError:  # it has just been released
            return ""
        return self._spool.hold_reason(name, status.st_mtime_ns)


class _Bar:
    """Shows the jobs' progress on a terminal, and the expected end of the last one."""

    def __init__(self, spool: Spool, names: Sequence[str]) -> None:
        self._line = render.StatusLine()
        self._watch: WaitWatch | None = None
        if self._line.lively:
            from spool.query.outlook import WaitWatch  # imported here: it imports half of the program

            self._watch = WaitWatch(spool, names)
        self._after_ns = time.monotonic_ns() + _BAR_AFTER_NS

    def step(self) -> None:
        """Refresh, if due."""
        begun = time.monotonic_ns()
        if self._watch is None or begun < self._after_ns:
            return
        now_ns = time.time_ns()
        with suppress(OSError, SpoolError):  # the wait itself reports reading errors
            self._draw(self._watch.look(now_ns), now_ns)
        now = time.monotonic_ns()
        self._after_ns = now + max(_BAR_EVERY_NS, 20 * (now - begun))

    def tell(self, message: str) -> None:
        """Print a message on stderr without the bar in between."""
        self._line.clear()
        tell(message)

    def close(self) -> None:
        """Remove the bar."""
        self._line.clear()

    def _draw(self, status: WaitStatus, now_ns: int) -> None:
        left = [f"ends in about {render.duration(status.end_at_ns - now_ns)}"] if status.end_at_ns is not None else []
        if (row := status.only) is not None:
            since = f"for {render.duration(row.time_ns(now_ns))}" if row.time_ns(now_ns) is not None else ""
            said = " ".join(filter(None, (row.state.value.replace("_", " "), since)))
            why = row.reason if row.state in (State.QUEUED, State.HELD, State.SUBMITTED) else ""
            self._line.draw(", ".join(filter(None, (f"{row.name}: {said}", row.progress, *left, why))))
            return
        words = [f"{status.ended} of {status.total} done", f"{status.running} running"]
        words += [f"{status.submitted} submitted"] if status.submitted else []
        words += [f"{status.bad} not finished"] if status.bad else []
        self._line.draw(", ".join([*words, *left]), part=status.ended / max(1, status.total))


def until_ended(root: str, names: Sequence[str], *, first: bool = False, timeout_ns: int | None = None) -> int:
    """Wait for all jobs, or with *first* for one of them; report how they ended, and return the exit code."""
    spool = Spool.open(root)
    bar = _Bar(spool, names)
    try:
        return _until_ended(spool, names, bar, first=first, timeout_ns=timeout_ns)
    except KeyboardInterrupt:
        bar.tell("interrupted: no job was cancelled; `spool cancel` does that")
        raise
    finally:
        bar.close()


def _until_ended(spool: Spool, names: Sequence[str], bar: _Bar, *, first: bool, timeout_ns: int | None) -> int:
    waiter = Waiter(spool)
    codes: dict[str, int] = {}
    for name, error in waiter.add(names).items():
        tell(str(error))
        codes[name] = int(ExitCode.NO_SUCH_JOB)
    notices = HoldNotices(spool, bar.tell)
    until = math.inf if timeout_ns is None else time.monotonic() + timeout_ns / SECOND_NS
    warned = False
    turn_s = 0.0  # holds are told and the bar is drawn before the first wait
    while waiter and not (first and codes):
        left_s = max(0.0, until - time.monotonic())
        for end in sorted(waiter.wait(min(left_s, turn_s)), key=lambda end: names.index(end.name)):
            codes[end.name] = _told(end, bar.tell)
            if first:
                return codes[end.name]
        notices.see(waiter.held)
        if waiter and left_s == 0:
            bar.tell(f"timed out waiting for {', '.join(sorted(waiter.names, key=names.index)[:5])}")
            return TIMED_OUT
        if not warned and waiter.is_unserved:
            warned = True
            bar.tell("no dispatcher is running, so no job starts: run `spool dispatch`")
        bar.step()
        turn_s = _TURN_S
    return next((codes[name] for name in names if codes.get(name)), 0)


def _told(end: End, say: Callable[[str], None]) -> int:
    """Report on stderr how a job ended, unless it finished, and return its exit code."""
    if end.outcome is not State.FINISHED:
        say(told(end))
    return code_of(end.outcome, end.exit_code)


@click.command(cls=Verb)
@names_argument
@click.option(
    "--all",
    "wait_for_all",
    is_flag=True,
    help="Wait for all to end; without names, for all jobs that are waiting or running now.",
)
@click.option("--any", "wait_for_any", is_flag=True, help="Wait for one of them to end.")
@click.option("--timeout", metavar="TIME", help="Wait at most this long, then exit with 124.")
@click.pass_obj
def command(root: str, names: tuple[str, ...], wait_for_all: bool, wait_for_any: bool, timeout: str | None) -> int:
    """Wait for jobs to end, and exit with their code.

    The exit code is 0 if all finished, otherwise that of the first named job that did not: its own code if it failed,
    124 for a time limit, 125 lost, 130 cancelled, 137 out of memory, 143 preempted, 75 unschedulable, 4 an invalid
    file, 3 no such job.

      spool wait train && echo trained
      spool wait 'sweep_*' --timeout 2h
      spool wait --all

    On a terminal a line shows how many have ended, and when the last is expected to end.

    If a named job is held, a message says so and why, and the command keeps waiting.

    By hand:
      until [ -e done/train.toml ]; do sleep 1; done
      cat jobs/train/1/result.toml
    """
    if wait_for_all and wait_for_any:
        raise click.UsageError("--all and --any cannot be combined")
    if not names and not wait_for_all:
        raise click.UsageError("missing argument 'NAME...', or --all for all waiting and running jobs")
    spool = opened(root)
    timeout_ns = value_of("--timeout", timeout, parse_duration) if timeout is not None else None
    wanted = named(spool, names) if names else sorted({*spool.names(QUEUED), *spool.names(RUNNING)}, key=natural)
    return until_ended(spool.root, wanted, first=wait_for_any, timeout_ns=timeout_ns)
