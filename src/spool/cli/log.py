"""`spool log`: show or follow a job's output."""

from __future__ import annotations

import os
import sys
import time

import click

from spool.cli import render
from spool.cli.common import name_argument, one_job, opened
from spool.cli.group import Verb
from spool.cli.telling import tell
from spool.cli.wait import POLL_S, told
from spool.client.output import Follower, Stream, output_paths, outputs, read_output, run_of
from spool.core.errors import SpoolError, cannot
from spool.core.model import State
from spool.query.explain import why_never_begun
from spool.store.spool import Spool


@click.command(cls=Verb)
@name_argument
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the job has ended, retries included.")
@click.option("--run", "run", type=int, metavar="N", help="The run to show. Default: the newest.")
@click.option("--stderr", "errors", is_flag=True, help="Show the error output, if it has a separate file.")
@click.option("-n", "--lines", type=click.IntRange(0), metavar="N", help="Only the last N lines.")
@click.option("--path", "only_path", is_flag=True, help="Print the path of the output instead.")
@click.pass_obj
def command(
    root: str, name: str, follow: bool, run: int | None, errors: bool, lines: int | None, only_path: bool
) -> int:
    """Show or follow a job's output.

      spool log train -n 20
      spool log -f train      follows it through retries until the job has ended
      spool log sweep         the output of each task of an array, under its name

    By hand: cat jobs/train/1/log   or   tail -f jobs/train/1/log
    """
    spool = opened(root)
    name = one_job(spool, name)
    stream = Stream.ERR if errors else Stream.OUT
    waits = follow and run is None and spool.latest_run(name) is None
    its_run = None if waits else _run_of(spool, name, run)
    if only_path and its_run is not None:
        for path in output_paths(spool, name, its_run, stream):
            render.say(path)
    elif follow:
        _follow(Follower(spool, name, only=run, lines=lines), name, stream)
    elif its_run is not None:
        why = why_never_begun(spool, name, its_run)
        if why and not os.path.exists(outputs(spool, name, its_run).stdout or ""):
            raise _no_output(name, why, f"`spool show {name}` says more")
        for data in read_output(spool, name, its_run, stream, lines=lines):
            sys.stdout.buffer.write(data)
    if not (errors or only_path):
        _tell_of_errors(spool, name, run)
    return 0


def _tell_of_errors(spool: Spool, name: str, run: int | None) -> None:
    """Say where the error output is, if there is some in a separate file."""
    run = spool.latest_run(name) if run is None else run
    if run is None:
        return
    is_array = spool.array(name, run) is not None
    try:
        paths = output_paths(spool, name, run, Stream.ERR) if is_array else iter((outputs(spool, name, run).stderr,))
        path = next((path for path in paths if _has_text(path)), None)
    except SpoolError:  # its tasks have no separate files
        return
    if path is not None:
        sys.stdout.flush()
        what = "the error output of its tasks is in files such as" if is_array else "its error output is in"
        tell(f"{what} {path}; `spool log --stderr {name}` shows it")


def _has_text(path: str | None) -> bool:
    try:
        return path is not None and os.path.getsize(path) > 0
    except OSError:
        return False


def _run_of(spool: Spool, name: str, run: int | None) -> int:
    """Return the selected run. Raises SpoolError, with the reason for a job that has not started."""
    if run is None and spool.latest_run(name) is None and (why := why_never_begun(spool, name)):
        raise _no_output(name, why, f"`spool why {name}` says more, -f waits for it")
    return run_of(spool, name, run)


def _no_output(name: str, why: str, remedy: str) -> SpoolError:
    return SpoolError(cannot("show", f"the output of job {name}", why, remedy=remedy))


def _follow(follower: Follower, name: str, stream: Stream) -> None:
    for piece in follower.pieces():
        if piece is None:
            sys.stdout.flush()
            time.sleep(POLL_S)
        elif not piece.data:
            tell(f"job {name}: run {piece.run}")
        elif piece.stream is stream:
            sys.stdout.buffer.write(piece.data)
    sys.stdout.flush()
    follower.close()
    end = follower.end
    if end is not None and end.outcome is not State.FINISHED:
        tell(told(end))
