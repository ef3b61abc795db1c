"""`spool requeue`: run jobs again."""

from __future__ import annotations

import click

from spool.cli.common import acted, for_each, named, names_argument, opened, this_user
from spool.cli.submission import ensure_dispatcher
from spool.cli.verb import Verb
from spool.client.requests import Requests
from spool.core.layout import DONE, RUNNING


@click.command(cls=Verb)
@names_argument
@click.pass_obj
def command(root: str, names: tuple[str, ...]) -> int:
    """Run jobs again: those that run, which are stopped first, and those that have ended.

    Every earlier run keeps its directory and its output.

    By hand:
      mv done/train.toml queued/     # if it has ended
      mv running/train.toml queued/  # if it runs
    """
    spool = opened(root)
    requests = Requests(spool, this_user())
    code = for_each(named(spool, names, (RUNNING, DONE)), lambda name: acted(name, requests.requeue(name)))
    ensure_dispatcher(spool.root)
    return code
