"""`spool run`: submit a job, follow its output, exit with its code."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import sys
import termios
import time
from collections.abc import Callable
from functools import partial
from inspect import cleandoc
from typing import Any

import click

from spool.cli.common import opened, option_in, strict_option
from spool.cli.group import WordsVerb
from spool.cli.joboptions import COMMON_TITLE, key_options
from spool.cli.submission import draft_of, publish, tell_doubts
from spool.cli.submit import asked, export_option, name_option, replace_option, script_options, shell_command_option
from spool.cli.telling import made, tell
from spool.cli.wait import HoldNotices, code_of, told
from spool.client import submit as submitting
from spool.client.output import POLL_S, Follower, Stream
from spool.client.requests import Requests
from spool.client.waiting import End
from spool.core import layout
from spool.core.capability import OtherWay
from spool.core.errors import ExitCode, SpoolError, SpoolUnusable, cannot
from spool.core.model import State
from spool.formats.capabilities import contributed, loaded
from spool.store.ownership import this_user
from spool.store.spool import Spool

_WAYS: tuple[OtherWay, ...] = tuple(way for _, way in contributed("way"))


def _other_ways(function: Callable[..., int]) -> Callable[..., int]:
    """Give the verb the options of its other ways, and their part of the help."""
    for way in reversed(_WAYS):
        option = option_in(COMMON_TITLE)(way.option, "runs", default=None, flag_value=way.runs, help=way.help)
        function = option(function)
    function.__doc__ = "\n\n".join([cleandoc(function.__doc__ or ""), *(way.text for way in _WAYS)])
    return function


@click.command(cls=WordsVerb, context_settings={"allow_interspersed_args": False})
@name_option
@shell_command_option
@option_in(COMMON_TITLE)("-q", "--quiet", is_flag=True, help="Print only the job's output.")
@_other_ways
@partial(key_options, alone=dict(way.alone for way in _WAYS))
@export_option
@replace_option
@strict_option
@script_options
@click.argument("words", nargs=-1, metavar="[SCRIPT | - | -- COMMAND...]")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    replace: bool,
    quiet: bool,
    strict: bool,
    runs: str | None = None,
    **_: Any,
) -> int:
    """Submit a job, follow its output and exit with its code.

    The job's output goes to stdout and its error output to stderr; if both are the same (a terminal), there is one log.
    Its stdin is empty, like that of every job, because it may run again when nobody is there.

    Ctrl-C cancels the job; a second Ctrl-C exits at once while the job is being stopped. If the job is held, by a user
    or by a hook's veto, a message says so, and the command waits until it is released. The exit codes are those of
    `spool wait`. For an array, each task's output is shown once the task has ended.

      spool run -g 1 -- python train.py
      spool run -c 'make -j4 && make check' --cpus 4
    """
    request = asked(ctx)
    runs = runs or next((way.runs for way in _WAYS if request.values.get(way.alone[0]) == [""]), None)
    if runs is not None:
        code: int = loaded(runs)(ctx.obj, request, quiet=quiet, strict=strict, replaces=replace)
        return code
    _check_readable(ctx.obj)
    draft = draft_of(request, ctx.obj, stderr_apart=not _one_output())
    job = draft.name
    spool = made(ctx.obj) if submitting.is_ours(ctx.obj) else opened(ctx.obj)
    tell_doubts(spool.root, [draft], strict=strict)
    before = spool.latest_run(job)
    publish(spool.root, [draft], held=draft.held, replace=replace)
    if not quiet:
        tell(f"job {job}")
    if not quiet and _has_input():
        tell("the job does not read this stdin: its own is empty; let it read a file, as in -c 'sort < words'")
    return _followed(spool, job, before, quiet=quiet)


def _check_readable(root: str) -> None:
    """Raise SpoolUnusable if a job cannot be submitted to the spool at *root*, or its output cannot be read there."""
    submitting.check_submitter(root)
    jobs = layout.Layout(root).at(layout.JOBS)
    if not submitting.is_ours(root) and not os.access(jobs, os.R_OK | os.X_OK):
        why, remedy = "you may not read the output of its jobs", "`spool submit` submits a job without following it"
        raise SpoolUnusable(cannot("follow", "a job", why, where=jobs, remedy=remedy))


def _one_output() -> bool:
    """Whether stdout and stderr are one and the same file or terminal."""
    try:
        return os.path.sameopenfile(1, 2)
    except OSError:  # one of them is closed
        return True


def _has_input() -> bool:
    """Whether stdin has input that was probably meant for the job."""
    try:
        status = os.fstat(0)
        if stat.S_ISREG(status.st_mode):
            return os.lseek(0, 0, os.SEEK_CUR) < status.st_size
        if not (stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
            return False
        return fcntl.ioctl(0, termios.FIONREAD, bytes(4)) != bytes(4)
    except OSError:
        return False


def _followed(spool: Spool, job: str, before: int | None, *, quiet: bool) -> int:
    """Return the exit code of a job, followed to its end, or INTERRUPTED after a second Ctrl-C."""
    follower, notices = Follower(spool, (job,), after=before or 0), HoldNotices(spool)
    interrupts: list[int] = []
    ends = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.signal(number, lambda number, _: interrupts.append(number)) for number in ends}
    cancelled = False
    end: End | None = None
    try:
        for piece in follower.pieces():
            if interrupts and not cancelled:
                cancelled = True
                _cancel(spool, job)
            if len(interrupts) > 1:
                tell(f"exiting; job {job} is being stopped")
                return int(ExitCode.INTERRUPTED)
            if isinstance(piece, End):
                end = piece
            elif piece is None:
                sys.stdout.flush()
                if not quiet:
                    notices.see(follower.waiter.held)
                time.sleep(POLL_S)
            elif piece.data:
                out = sys.stderr if piece.stream is Stream.ERR else sys.stdout
                out.buffer.write(piece.data)
                out.flush()
            elif piece.run > 1 and not quiet:
                tell(f"job {job}: run {piece.run}")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        follower.close()
    assert end is not None
    if end.outcome is not State.FINISHED and not quiet:
        tell(told(end))
    return code_of(end.outcome, end.exit_code)


def _cancel(spool: Spool, job: str) -> None:
    tell(f"cancelling job {job} (Ctrl-C again to exit at once)")
    try:
        Requests(spool, this_user()).cancel(job, "interrupted")
    except SpoolUnusable as error:  # the spool of another user who accepts jobs
        tell(str(error))
    except SpoolError:
        return  # it has just ended
