"""`spool cancel`: end jobs."""

from __future__ import annotations

import click

from spool.cli.common import for_each, named, names_argument, opened, this_user
from spool.cli.submission import ensure_dispatcher
from spool.cli.verb import Verb
from spool.client.requests import Done, Requests
from spool.core.layout import HELD, QUEUED, RUNNING


@click.command(cls=Verb)
@names_argument
@click.option("--reason", default="", metavar="TEXT", help="Why; kept with the run of a job that runs.")
@click.option("--dry-run", is_flag=True, help="Say what would be cancelled and change nothing.")
@click.pass_obj
def command(root: str, names: tuple[str, ...], reason: str, dry_run: bool) -> int:
    """Cancel jobs, whether they wait or run.

    A running job gets TERM, and KILL after its grace; its whole process tree ends. Globs are understood. Where a second
    file of a name waits for the run to end, both are cancelled; each gets its record and its line of history.

      spool cancel train
      spool cancel 'sweep_*' --dry-run

    By hand:
      mv queued/train.toml done/  # if it waits
      rm running/train.toml       # if it runs
    """
    spool = opened(root)
    requests = Requests(spool, this_user())
    done: set[Done] = set()

    def cancel(name: str) -> str:
        acts = requests.cancel(name, reason, dry_run=dry_run)
        done.update(act.done for act in acts)
        would = {Done.STOPPING: "would be stopped", Done.CANCELLED: "would be cancelled"}
        return "; ".join(act.told(name, would[act.done] if dry_run else act.done) for act in acts)

    code = for_each(named(spool, names, (QUEUED, HELD, RUNNING)), cancel)
    if Done.STOPPING in done and not dry_run:
        ensure_dispatcher(spool.root)
    return code
