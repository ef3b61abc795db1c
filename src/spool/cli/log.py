"""`spool log`: show or follow a job's output."""

from __future__ import annotations

import os
import sys
import time

import click

from spool.cli import render
from spool.cli.common import complete_names, job_name, opened
from spool.cli.group import Verb, tell
from spool.cli.wait import POLL_S, told
from spool.client.output import ArrayOutput, Follower, Stream, Tail, outputs
from spool.core.errors import NoSuchJob, SpoolError, cannot
from spool.core.model import State
from spool.store.spool import Spool


@click.command(cls=Verb)
@click.argument("name", shell_complete=complete_names)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended, retries too.")
@click.option("--run", "run", type=int, metavar="N", help="Of this run. Default: the newest.")
@click.option("--stderr", "errors", is_flag=True, help="The error output, where that goes to a file of its own.")
@click.option("-n", "--lines", type=click.IntRange(0), metavar="N", help="Only the last N lines.")
@click.option("--path", "only_path", is_flag=True, help="Print where the output is, not the output.")
@click.pass_obj
def command(
    root: str, name: str, follow: bool, run: int | None, errors: bool, lines: int | None, only_path: bool
) -> int:
    """Show or follow a job's output.

      spool log train -n 20
      spool log -f train      follows it across retries until the job has ended
      spool log sweep         the output of each task of an array, under its name

    By hand: cat jobs/train/1/log   or   tail -f jobs/train/1/log
    """
    spool = opened(root)
    name = job_name(name)
    stream = Stream.ERR if errors else Stream.OUT
    newest = _run_of(spool, name, run, may_wait=follow)
    tasks = None
    if newest is not None and not (follow and not only_path) and spool.array(name, newest) is not None:
        tasks = ArrayOutput(spool, name, newest, lines=lines)
    if only_path and newest is not None:
        for job, its_run in tasks.tasks() if tasks is not None else ((name, newest),):
            render.say(_path(spool, job, its_run, stream))
        return 0
    if follow:
        return _follow(Follower(spool, name, run=newest, only=run is not None, lines=lines), name, stream)
    if tasks is not None:
        for task, its_run in tasks.tasks():
            for piece in tasks.output(task, its_run):
                if piece.stream is stream:
                    sys.stdout.buffer.write(piece.data)
        return 0
    assert newest is not None
    path = _path(spool, name, newest, stream)
    if not os.path.exists(path) and spool.result(name, newest) is not None:
        why = f"run {newest} has left no such file"
        raise SpoolError(cannot("show", f"the output of job {name}", why, where=path))
    tail = Tail(path)
    if lines is not None:
        tail.skip_to_last(lines)
    while data := tail.read():
        sys.stdout.buffer.write(data)
    tail.close()
    return 0


def _follow(follower: Follower, name: str, stream: Stream) -> int:
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
    return 0


def _run_of(spool: Spool, name: str, run: int | None, *, may_wait: bool) -> int | None:
    """Return the run that is meant; None if there is none yet and that may be waited for."""
    runs = spool.runs(name)
    if run is not None:
        if run not in runs:
            has = f"its runs are {', '.join(map(str, runs))}" if runs else "it has not run yet"
            raise NoSuchJob(cannot("show", f"run {run} of job {name}", has))
        return run
    newest = spool.latest_run(name)
    if newest is None and not may_wait:
        if not spool.places(name):
            raise NoSuchJob(cannot("show", f"the output of job {name}", "no job of that name is in the spool"))
        raise SpoolError(cannot("show", f"the output of job {name}", "it has not run yet", remedy="-f waits for it"))
    return newest


def _path(spool: Spool, name: str, run: int, stream: Stream) -> str:
    where = outputs(spool, name, run)
    if stream is Stream.ERR and where.stderr is None:
        raise SpoolError(cannot("show", f"the error output of job {name}", "it goes together with the output"))
    path = where.stderr if stream is Stream.ERR else where.stdout
    assert path is not None
    return path
