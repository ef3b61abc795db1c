"""`spool move`: put a waiting job before, or after, the other jobs of its user."""

from __future__ import annotations

import click

from spool.cli.common import for_each, named, names_argument, opened
from spool.cli.group import Verb
from spool.client.requests import Requests
from spool.core.errors import SpoolError, cannot
from spool.core.layout import QUEUED
from spool.formats import jobfile
from spool.query.selection import priorities_to_move
from spool.store.ownership import this_user


@click.command(cls=Verb)
@names_argument
@click.option("--first", is_flag=True, help="Move it before the user's other waiting jobs.")
@click.option("--last", is_flag=True, help="Move it after them.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing.")
@click.pass_obj
def command(root: str, /, names: tuple[str, ...], first: bool, last: bool, dry_run: bool) -> int:
    """Put a waiting job before your other jobs, or after them.

    This changes the job's priority: to one above the highest of its user's other waiting jobs, or one below the lowest.
    Priority counts across users, so the job also passes other users' jobs of a lower priority. Several jobs keep the
    order in which you name them. A job that goes first still waits for room, and smaller jobs can start before it.

      spool move train --first
      spool move 'sweep_*' --last

    By hand: set priority = 11 in queued/train.toml
    """
    if first == last or not names:
        raise click.UsageError("name jobs, and give either --first or --last")
    where = "first" if first else "last"
    spool = opened(root)
    requests = Requests(spool, this_user())
    chosen = named(spool, names, (QUEUED,))
    moved = priorities_to_move(spool, chosen, first=first)

    def act(name: str) -> str:
        text = spool.job_text(QUEUED, name)
        if text is None:
            if not spool.places(name) and not spool.runs(name):
                raise spool.no_such_job("move", f"job {name}", name)
            raise SpoolError(
                cannot("move", f"job {name}", "it is not waiting", remedy=f"`spool show {name}` says more")
            )
        priority = moved.get(name)
        if priority is None:
            raise SpoolError(cannot("move", f"job {name}", "its file is not valid", remedy=f"`spool edit {name}`"))
        new = jobfile.edited(text, {"priority": priority}, name=name)
        if new == text:
            return f"{name} is already {where}: priority {priority}"
        if dry_run:
            return f"{name} would go {where}: priority {priority}"
        requests.replace(name, QUEUED, text, new)
        return f"{name} goes {where}: priority {priority}"

    return for_each(chosen, act)
