"""`spool resume`: start jobs again."""

from __future__ import annotations

import click

from spool.cli import render
from spool.cli.common import opened, this_user
from spool.cli.submission import ensure_dispatcher
from spool.cli.verb import Verb
from spool.client.requests import Requests


@click.command(cls=Verb)
@click.pass_obj
def command(root: str) -> int:
    """Start jobs again after `spool pause`.

    By hand: rm paused
    """
    spool = opened(root)
    was = Requests(spool, this_user()).resume()
    render.say("jobs start again" if was else "it is not paused")
    ensure_dispatcher(spool.root)
    return 0
