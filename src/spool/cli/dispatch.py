"""`spool dispatch`: the dispatcher in the foreground."""

from __future__ import annotations

import os

import click

from spool.cli.common import made
from spool.cli.group import Verb
from spool.core.errors import LockHeld, UsageError
from spool.core.units import parse_duration


@click.command(cls=Verb)
@click.option("--once", is_flag=True, help="Make one pass and leave; leave at once if another dispatcher lives.")
@click.option("--until-idle", is_flag=True, help="Leave when nothing waits or runs.")
@click.option("--idle-exit", metavar="TIME", help="Leave after so long without jobs; 0s is never.")
@click.pass_obj
def command(root: str, once: bool, until_idle: bool, idle_exit: str | None) -> int:
    """Run the dispatcher, which starts the jobs.

    In the foreground: for a terminal, for systemd, for cron with --once. Ending it (Ctrl-C, TERM) ends no job; the
    next one takes them over. `spool submit` and others start one in the background by themselves.
    """
    if once + until_idle + (idle_exit is not None) > 1:
        raise UsageError("cannot combine --once, --until-idle and --idle-exit; give one of them")
    from spool.client.submit import was_spool
    from spool.dispatcher.service import serve
    from spool.listeners.logformat import set_up_logging
    from spool.machine import descriptors

    descriptors.keep()
    descriptors.take_all()
    idle_ns = (parse_duration(idle_exit) or None) if idle_exit is not None else None
    set_up_logging("info", journald="JOURNAL_STREAM" in os.environ)
    if once or not was_spool(root):
        made(root)
    try:
        return serve(root, once=once, until_idle=until_idle, idle_exit_ns=idle_ns)
    except LockHeld:
        if once or idle_exit is not None:
            return 0  # what was wanted is there: somebody serves this spool
        raise LockHeld(f"cannot dispatch {root}: another dispatcher serves it") from None
