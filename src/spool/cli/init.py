"""`spool init`: create a spool."""

from __future__ import annotations

import click

from spool.cli import render
from spool.cli.group import Verb
from spool.client.submit import make_spool
from spool.core.errors import SpoolUnusable, cannot
from spool.store.disk import remedy_for


@click.command(cls=Verb)
@click.argument("directory", required=False)
@click.pass_obj
def command(root: str, directory: str | None) -> int:
    """Create a spool.

    It goes to DIRECTORY, or to --spool, $SPOOL_DIR or ~/.spool. Existing files stay unchanged. Other commands create
    the spool themselves when they need it.

    By hand:
      mkdir -m 700 ~/.spool && cd ~/.spool
      mkdir -m 700 queued held running done jobs reservations .tmp
    """
    import os

    where = os.path.abspath(directory) if directory else root
    try:
        new = make_spool(where)
    except OSError as error:
        at = error.filename or where
        why = error.strerror or str(error)
        raise SpoolUnusable(cannot("make", "a spool", why, where=at, remedy=remedy_for(error))) from None
    render.say(f"created a spool in {where}" if new else f"a spool already exists in {where}")
    return 0
