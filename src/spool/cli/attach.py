"""`spool attach`: attach to the terminal of a job."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import click

from spool.cli import render
from spool.cli.common import name_argument, one_job, opened, own
from spool.cli.group import Verb
from spool.core.errors import NoSuchJob, SpoolError, cannot
from spool.core.lifecycle import Verdict
from spool.core.names import LOCAL_EXECUTORS, without_here
from spool.executors import by_name
from spool.machine.marks import MachineProber
from spool.store.spool import Spool


@click.command(cls=Verb)
@name_argument
@click.option("-r", "--read-only", is_flag=True, help="Read-only: the job does not receive what you type.")
@click.option("--run", type=int, metavar="N", help="The run to show. Default: the newest.")
@click.option("--dry-run", is_flag=True, help="Print the command instead of executing it.")
@click.pass_obj
def command(root: str, name: str, read_only: bool, run: int | None, dry_run: bool) -> int:
    """Attach to the terminal of a running job, to watch it and to type its input.

    Ctrl-B D detaches; the job continues. Only jobs submitted with --tmux have a terminal. It closes when the job ends,
    unless the job has keep_session = true. For a job in Slurm this opens a shell on its node, beside the job.

      spool submit --tmux --name ask -- python ask.py
      spool attach ask

    By hand: tmux -S ~/.spool/.tmux attach -t =ask/1
    """
    spool = opened(root) if read_only or dry_run else own(root)
    name = one_job(spool, name)
    argv = attach_command(spool, name, run, read_only=read_only)
    if dry_run:
        render.say(shlex.join(argv))
        return 0
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        remedy = f"`spool log -f {name}` needs no terminal"
        raise SpoolError(cannot("attach to", f"job {name}", "this is not a terminal", remedy=remedy))
    return subprocess.run(argv, env=without_here(os.environ), check=False).returncode


def attach_command(spool: Spool, name: str, run: int | None = None, *, read_only: bool = False) -> tuple[str, ...]:
    """Return the command to execute, for the newest run if none is given. Raises SpoolError if there is no terminal."""
    run = _run_of(spool, name, run)
    grant = spool.grant(name, run)
    what = f"job {name}"
    if grant is None:
        raise SpoolError(cannot("attach to", what, f"run {run} was never started"))
    try:
        if grant.executor not in LOCAL_EXECUTORS:
            _check_lives(spool, name, run)  # the session of an ended run is not kept for later
        return by_name(grant.executor).attach(spool.root, name, run, read_only=read_only)
    except SpoolError:
        _check_lives(spool, name, run)
        raise
    except ImportError as error:
        why = f"the Python package {error.name} is not installed"
        raise SpoolError(cannot("attach to", what, why)) from error


def _check_lives(spool: Spool, name: str, run: int) -> None:
    proof = spool.load(name, run, MachineProber()).proof
    if proof.verdict is Verdict.ENDED:
        why, remedy = f"run {run} has ended ({proof.outcome})", f"`spool log {name}` shows its output"
        raise SpoolError(cannot("attach to", f"job {name}", why, remedy=remedy)) from None


def _run_of(spool: Spool, name: str, run: int | None) -> int:
    runs = spool.runs(name)
    if run is not None and run not in runs:
        has = f"its runs are {', '.join(map(str, runs))}" if runs else "it has not run yet"
        raise NoSuchJob(cannot("attach to", f"run {run} of job {name}", has))
    newest = run if run is not None else spool.latest_run(name)
    if newest is None:
        if not spool.places(name):
            raise spool.no_such_job("attach to", f"job {name}", name)
        raise SpoolError(cannot("attach to", f"job {name}", "it has not run yet", remedy=f"`spool why {name}`"))
    return newest
