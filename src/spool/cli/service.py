"""`spool service`: keep the dispatcher running with systemd."""

from __future__ import annotations

import os

import click

from spool.cli import render
from spool.cli.group import Subverbs, Verb, unfilled
from spool.cli.telling import made, tell
from spool.client import service
from spool.client.service import ONCE, RESIDENT
from spool.core.errors import ExitCode
from spool.store.ownership import this_user

_HELP = unfilled("""
Keep the dispatcher running with systemd.

It uses user units, so you need not be root. The dispatcher starts with your first login, restarts after a crash, and
`spool submit` uses it. Enable lingering, or your jobs end when you log out: `loginctl enable-linger`.

  spool service install
  spool service remove
  systemctl --user status spool.service      whether it is running
  journalctl --user -u spool.service         its log

By hand: cp the units of contrib/systemd to ~/.config/systemd/user/
""")


@click.group(cls=Subverbs, help=_HELP, short_help="Keep the dispatcher running with systemd.")
def command() -> None:
    """Do nothing: the subcommands do the work."""


@command.command("install", cls=Verb, short_help="Write, enable and start the units.")
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
    usual, words = _is_usual(root), service.program()
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
    _advise_lingering()
    return 0


@command.command("remove", cls=Verb, short_help="Stop and remove the units.")
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


def _is_usual(root: str) -> bool:
    """Whether *root* is the default spool, also for the service manager."""
    return os.path.realpath(root) == os.path.realpath(os.path.expanduser("~/.spool"))


def _advise_lingering() -> None:
    if not service.lingers(this_user()):
        tell(
            "lingering is off: when you log out, systemd ends the dispatcher and your jobs; run `loginctl "
            "enable-linger`"
        )
