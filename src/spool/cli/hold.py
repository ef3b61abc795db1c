"""`spool hold`: keep jobs from running."""

from __future__ import annotations

import click

from spool.cli.common import acted, for_each, named, names_argument, opened, this_user
from spool.cli.submission import ensure_dispatcher
from spool.cli.verb import Verb
from spool.client.requests import Done, Requests
from spool.core.layout import QUEUED, RUNNING


@click.command(cls=Verb)
@names_argument
@click.pass_obj
def command(root: str, names: tuple[str, ...]) -> int:
    """Keep jobs from running until they are released.

    A job that waits keeps its place in the queue. One that runs is stopped, and begins anew when it is released.

    By hand: mv queued/train.toml held/
    """
    spool = opened(root)
    requests = Requests(spool, this_user())
    done: set[Done] = set()

    def hold(name: str) -> str:
        act = requests.hold(name)
        done.add(act.done)
        return acted(name, act)

    code = for_each(named(spool, names, (QUEUED, RUNNING)), hold)
    if Done.STOPPED_AND_HELD in done:
        ensure_dispatcher(spool.root)
    return code
