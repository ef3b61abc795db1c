"""`spool dispatch`: run the dispatcher in the foreground."""

from __future__ import annotations

import logging
import os

import click

from spool.cli.common import value_of
from spool.cli.group import Verb
from spool.cli.telling import made
from spool.core.errors import LockHeld, UsageError
from spool.core.names import without_here
from spool.core.units import parse_duration


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
    from spool.client.submit import was_spool
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
