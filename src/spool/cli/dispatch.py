"""`spool init` and `spool dispatch`: create a spool, and run its dispatcher in the foreground."""

from __future__ import annotations

import logging
import os

import click

from spool.cli import render
from spool.cli.common import value_of
from spool.cli.group import Verb
from spool.cli.telling import made
from spool.client.submit import make_spool, was_spool
from spool.core.errors import LockHeld, SpoolUnusable, UsageError, cannot
from spool.core.names import without_here
from spool.core.units import parse_duration
from spool.store.disk import remedy_for


@click.command("init", cls=Verb)
@click.argument("directory", required=False)
@click.pass_obj
def init(root: str, directory: str | None) -> int:
    """Create a spool.

    It goes to DIRECTORY, or to --spool, $SPOOL_DIR or ~/.spool. Existing files stay unchanged. Other commands create
    the spool themselves when they need it.

    By hand:
      mkdir -m 700 ~/.spool && cd ~/.spool
      mkdir -m 700 queued held running done jobs reservations .tmp
    """
    where = os.path.abspath(directory) if directory else root
    try:
        new = make_spool(where)
    except OSError as error:
        at = error.filename or where
        why = error.strerror or str(error)
        raise SpoolUnusable(cannot("make", "a spool", why, where=at, remedy=remedy_for(error))) from None
    render.say(f"created a spool in {where}" if new else f"a spool already exists in {where}")
    return 0


@click.command(cls=Verb)
@click.option("--once", is_flag=True, help="Make one pass and exit; exit at once if another dispatcher is running.")
@click.option("--until-idle", is_flag=True, help="Exit when no jobs are waiting or running, with 7 if one failed.")
@click.option("--idle-exit", metavar="TIME", help="Exit after TIME without jobs; 0s means never.")
@click.pass_obj
def command(root: str, once: bool, until_idle: bool, idle_exit: str | None) -> int:
    """Run the dispatcher, which starts jobs.

    It runs in the foreground: in a terminal, under systemd, or from cron with --once. Stopping it (Ctrl-C, TERM) does
    not stop jobs; the next dispatcher takes them over. `spool submit` and other commands start one in the background
    when needed.
    """
    if once + until_idle + (idle_exit is not None) > 1:
        raise UsageError("--once, --until-idle and --idle-exit cannot be combined; give one of them")
    from spool.store.ownership import check_owner

    check_owner(root)  # checked before any file is created or opened there
    from spool.client.inherited import begin_as_after_login
    from spool.dispatcher.service import serve
    from spool.listeners.logformat import set_up_logging
    from spool.machine import descriptors

    kept = begin_as_after_login()
    os.environ.update(without_here(os.environ))  # for all programs that it starts; jobs have their own environment
    descriptors.keep()
    descriptors.take_all()
    idle_ns = (value_of("--idle-exit", idle_exit, parse_duration) or None) if idle_exit is not None else None
    set_up_logging("info", journald="JOURNAL_STREAM" in os.environ)
    if kept:
        text = "started under %s, which this user cannot undo and every job has: start it from a fresh login instead"
        logging.getLogger("spool").warning(text, ", ".join(kept))
    if once or not was_spool(root):
        made(root)
    try:
        return serve(root, once=once, until_idle=until_idle, idle_exit_ns=idle_ns)
    except LockHeld:
        if once or idle_exit is not None:
            return 0  # the goal is met: a dispatcher serves this spool
        raise LockHeld(f"cannot dispatch {root}: another dispatcher serves it") from None
