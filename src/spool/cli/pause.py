"""`spool pause`: start nothing."""

from __future__ import annotations

import click

from spool.cli import render
from spool.cli.common import made, this_user
from spool.cli.verb import Verb
from spool.client.requests import Requests


@click.command(cls=Verb)
@click.option("--reason", default="", metavar="TEXT", help="Why; it stands in the file `paused`.")
@click.pass_obj
def command(root: str, reason: str) -> int:
    """Start no job until `spool resume`.

    What runs goes on, and jobs may be submitted.

    By hand: touch paused
    """
    new = Requests(made(root), this_user()).pause(reason)
    render.say("paused: nothing starts until `spool resume`" if new else "it is paused already")
    return 0
