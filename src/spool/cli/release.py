"""`spool release`: let held jobs run."""

from __future__ import annotations

import click

from spool.cli.common import acted, for_each, named, names_argument, opened, this_user
from spool.cli.submission import ensure_dispatcher
from spool.cli.verb import Verb
from spool.client.requests import Requests
from spool.core.layout import HELD


@click.command(cls=Verb)
@names_argument
@click.pass_obj
def command(root: str, names: tuple[str, ...]) -> int:
    """Let held jobs run.

    By hand: mv held/train.toml queued/
    """
    spool = opened(root)
    requests = Requests(spool, this_user())
    code = for_each(named(spool, names, (HELD,)), lambda name: acted(name, requests.release(name)))
    ensure_dispatcher(spool.root)
    return code
