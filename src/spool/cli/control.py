"""The verbs that ask for one thing, of jobs (`cancel hold release requeue`) or of the spool (`pause resume`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import click

from spool.cli import render
from spool.cli.common import for_each, made, named, names_argument, opened, this_user
from spool.cli.group import Verb
from spool.cli.submission import ensure_dispatcher
from spool.client.requests import Change, ChangeKind, Requests, told
from spool.core.layout import DONE, HELD, QUEUED, RUNNING

_Ask = Callable[..., tuple[Change, ...]]


def _of_jobs(*places: str, serve_if: ChangeKind | None = None) -> Callable[[_Ask], click.Command]:
    """Make a verb of a function that asks for one job; its docstring is the help. A glob means jobs in *places*.

    Afterwards a dispatcher is started; with *serve_if* only where one of the requests has come to that.
    """

    def verb(ask: _Ask) -> click.Command:
        def command(root: str, /, names: tuple[str, ...], **options: Any) -> int:
            spool = opened(root)
            requests = Requests(spool, this_user())
            done: set[ChangeKind] = set()

            def act(name: str) -> str:
                changes = ask(requests, name, **options)
                done.update(each.kind for each in changes)
                return told(name, changes)

            code = for_each(named(spool, names, places), act)
            if serve_if is None or serve_if in done:
                ensure_dispatcher(spool.root)
            return code

        update_wrapper(command, ask)  # its options and its help
        return click.command(ask.__name__, cls=Verb)(names_argument(click.pass_obj(command)))

    return verb


@_of_jobs(QUEUED, HELD, RUNNING, serve_if=ChangeKind.STOPPING)
@click.option("--reason", default="", metavar="TEXT", help="Why; kept with the run of a job that runs.")
@click.option("--dry-run", is_flag=True, help="Say what would be cancelled and change nothing.")
def cancel(requests: Requests, name: str, reason: str, dry_run: bool) -> tuple[Change, ...]:
    """Cancel jobs, whether they wait or run.

    A running job gets TERM, and KILL after its grace; its whole process tree ends. Globs are understood. Where a second
    file of a name waits for the run to end, both are cancelled; each gets its record and its line of history.

      spool cancel train
      spool cancel 'sweep_*' --dry-run

    By hand:
      mv queued/train.toml done/  # if it waits
      rm running/train.toml       # if it runs
    """
    return requests.cancel(name, reason, dry_run=dry_run)


@_of_jobs(QUEUED, RUNNING, serve_if=ChangeKind.STOPPED_AND_HELD)
def hold(requests: Requests, name: str) -> tuple[Change, ...]:
    """Keep jobs from running until they are released.

    A job that waits keeps its place in the queue. One that runs is stopped, and begins anew when it is released.

    By hand: mv queued/train.toml held/
    """
    return (requests.hold(name),)


@_of_jobs(HELD)
def release(requests: Requests, name: str) -> tuple[Change, ...]:
    """Let held jobs run.

    By hand: mv held/train.toml queued/
    """
    return (requests.release(name),)


@_of_jobs(RUNNING, DONE)
def requeue(requests: Requests, name: str) -> tuple[Change, ...]:
    """Run jobs again: those that run, which are stopped first, and those that have ended.

    Every earlier run keeps its directory and its output.

    By hand:
      mv done/train.toml queued/     # if it has ended
      mv running/train.toml queued/  # if it runs
    """
    return (requests.requeue(name),)


@click.command(cls=Verb)
@click.option("--reason", default="", metavar="TEXT", help="Why; it stands in the file `paused`.")
@click.pass_obj
def pause(root: str, reason: str) -> int:
    """Start no job until `spool resume`.

    What runs goes on, and jobs may be submitted.

    By hand: touch paused
    """
    new = Requests(made(root), this_user()).pause(reason)
    render.say("paused: nothing starts until `spool resume`" if new else "it is paused already")
    return 0


@click.command(cls=Verb)
@click.pass_obj
def resume(root: str) -> int:
    """Start jobs again after `spool pause`.

    By hand: rm paused
    """
    spool = opened(root)
    was = Requests(spool, this_user()).resume()
    render.say("jobs start again" if was else "it is not paused")
    ensure_dispatcher(spool.root)
    return 0
