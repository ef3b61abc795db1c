"""`spool init`, `dispatch` and `service`: create a spool, and run its dispatcher, in the foreground or by systemd."""

from __future__ import annotations

import logging
import os

import click

from spool.cli import render
from spool.cli.common import value_of
from spool.cli.group import Subverbs, Verb, unreviewed
from spool.cli.telling import made, tell
from spool.client import service
from spool.client.service import ONCE, RESIDENT
from spool.client.submit import make_spool, root_at, was_spool
from spool.core.errors import ExitCode, LockHeld, SpoolUnusable, UsageError, cannot
from spool.core.layout import without_here
from spool.core.units import parse_duration
from spool.store.disk import remedy_for
from spool.store.ownership import check_owner, this_user


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
    where = root_at(directory) if directory else root
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
    check_owner(root)  # checked before any file is created or opened there
    from spool.client.inherited import begin_as_after_login
    from spool.dispatcher.service import serve
    from spool.listeners.logformat import set_up_logging
    from spool.machine import identity

    kept = begin_as_after_login()
    os.environ.update(without_here(os.environ))  # for all programs that it starts; jobs have their own environment
    identity.keep()
    identity.take_all()
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


_HELP = unreviewed("""
Keep the dispatcher running with systemd.

It uses user units, so you need not be root. The dispatcher starts with your first login, restarts after a crash, and
`spool submit` uses it. Enable lingering, or your jobs end when you log out: `loginctl enable-linger`.

  spool service install
  spool service remove
  systemctl --user status spool.service      whether it is running
  journalctl --user -u spool.service         its log

By hand: cp the units of contrib/systemd to ~/.config/systemd/user/
""")


@click.group("service", cls=Subverbs, help=_HELP, short_help="Keep the dispatcher running with systemd.")
def keep() -> None:
    """Do nothing: the subcommands do the work."""


@keep.command("install", cls=Verb, short_help="Write, enable and start the units.")
@click.option(
    "--once", is_flag=True, help="No permanent dispatcher: one pass when a file is dropped, and one per minute."
)
@click.option("--force", is_flag=True, help="Overwrite units that you edited or wrote yourself.")
@click.option("--dry-run", is_flag=True, help="Print what would be written, and change nothing.")
@click.pass_obj
def install(root: str, once: bool, force: bool, dry_run: bool) -> int:
    """Write, enable and start the units. Running it again updates them.

    They start this installation of spool for this spool. Units that you edited stay unchanged without --force.

      spool service install --dry-run
      spool --spool /data/spool service install
    """
    usual = os.path.realpath(root) == os.path.realpath(os.path.expanduser("~/.spool"))  # for the service manager too
    words = service.program()
    wanted = service.units(root, words, ONCE if once else RESIDENT, usual=usual)
    if dry_run:
        for unit in wanted:
            render.say(f"# {unit.path} ({unit.state})")
            render.say_text(unit.text.decode() + "\n")
        return 0
    try:
        service.require_manager()
    except service.NoServiceManager as error:
        tell(f"{error}; cron can start it instead. `crontab -e`, and this line:")
        render.say(service.by_cron(root, words, usual=usual))
        return int(error.exit_code)
    done = service.install(made(root).root, wanted, force=force)
    for path, what in done:
        render.say(f"{path} {what}")
    render.say("a pass runs when a file is dropped, and once per minute" if once else "the dispatcher is running")
    if not service.lingers(this_user()):
        why = "when you log out, systemd ends the dispatcher and your jobs"
        tell(f"lingering is off: {why}; run `loginctl enable-linger`")
    return 0


@keep.command("remove", cls=Verb, short_help="Stop and remove the units.")
@click.option("--force", is_flag=True, help="Also remove units that you edited.")
@click.pass_obj
def remove(root: str, force: bool) -> int:
    """Stop the dispatcher, disable and delete the units. Running jobs continue.

    It removes only units that `spool service install` wrote; edited ones only with --force.
    """
    gone, left = service.remove(root, force=force)
    for path in gone:
        render.say(f"{path} removed")
    for path in left:
        tell(f"{path} stays: it was edited, or not written by `spool service install`; delete it yourself")
    if not gone and not left:
        render.say("not installed: nothing to do")
    return int(ExitCode.FAILED) if left else 0
