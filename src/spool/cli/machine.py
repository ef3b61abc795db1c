"""`spool machine`: share the machine among several users."""

from __future__ import annotations

import os
import stat

import click

from spool.cli import render
from spool.cli.group import Subverbs, Verb, unfilled
from spool.cli.telling import tell
from spool.client import machine_service, service
from spool.core.errors import InvalidConfig, SpoolUnusable, UsageError, cannot
from spool.formats import machinefile
from spool.formats.machinefile import MachineConfig
from spool.machine import shared
from spool.store.disk import Disk, read_file

_HELP = unfilled("""
Share the machine among several users, each with a spool of their own.

The users' dispatchers ask one arbiter before they start a job, so that CPUs, memory and GPUs are given out once, in a
fair order. The arbiter needs no privilege: it opens no file of a user, and starts and ends nothing.

  sudo spool machine install
  spool machine status
""")


@click.group(cls=Subverbs, help=_HELP, short_help="Share the machine among several users.")
def command() -> None:
    """Do nothing: the subcommands do the work."""


@command.command("serve", cls=Verb, short_help="Run the arbiter.")
@click.argument("directory", metavar="[DIR]", required=False)
def serve(directory: str | None) -> int:
    """Run the arbiter of a shared machine until TERM or Ctrl-C. Its log goes to stderr; runs do not depend on it.

    Without DIR it is the machine's, as `spool machine install` starts it: it serves in /run/spool, by
    /etc/spool/machine.toml. With DIR it needs neither root nor an account of its own: DIR is a directory of yours that
    only you can write to, and DIR/machine.toml may say more. The other users name both in their config.toml:

      machine = "/var/tmp/lab"
      machine_owner = "carol"

    Such an arbiter gives turns to users who trust you with turns; it does not protect them from each other.
    """
    from spool.arbiter.server import Arbiter
    from spool.listeners.logformat import set_up_logging

    path = os.path.abspath(directory) if directory is not None else shared.DIRECTORY
    if directory is None:
        if not os.path.exists(shared.MACHINE_FILE):
            why = f"{shared.MACHINE_FILE} does not exist, so no dispatcher asks there"
            raise SpoolUnusable(cannot("serve", path, why, remedy="`spool machine install` writes one"))
        config = _configuration(shared.MACHINE_FILE)
        state = machine_service.STATE_DIRECTORY
    else:
        _make_directory(path)
        config = _configuration(f"{path}/machine.toml")
        state = path
        tell(
            f"this arbiter gives turns, not protection: it counts for users whose config.toml names {path}, and no "
            "user must name it"
        )
    set_up_logging("info", journald="JOURNAL_STREAM" in os.environ)
    arbiter = Arbiter(path, config, state_directory=state)
    try:
        arbiter.open()
        arbiter.serve()
    finally:
        arbiter.close()
    return 0


@command.command("install", cls=Verb, short_help="Install the arbiter as a system service.")
@click.option("--force", is_flag=True, help="Overwrite a unit that was edited or written by hand.")
@click.option("--print", "prints", is_flag=True, help="Print the steps as a shell script, and change nothing.")
def install(force: bool, prints: bool) -> int:
    """Install the arbiter as a service of systemd, for all users of the machine. Only root can.

    It makes the account `spool-machine`, which owns nothing else, writes /etc/spool/machine.toml unless it exists, and
    starts spool-machine.service. Running jobs continue, and running dispatchers ask it from then on. Running it again
    updates and restarts the service, which loses no lease.

      spool machine install --print
      sudo spool machine install
    """
    program = service.program()
    if prints:
        render.say_text(machine_service.script(machine_service.steps(program, shared.MACHINE_FILE, force=force)))
        return 0
    try:
        machine_service.require_manager()
    except service.NoServiceManager as error:
        script = machine_service.by_hand(program, shared.ACCOUNT, shared.DIRECTORY, shared.MACHINE_FILE)
        tell(f"{error}; as root, at every boot:")
        render.say_text(script)
        return int(error.exit_code)
    if os.geteuid() != 0:
        raise UsageError(
            cannot("install", "the service", "only root can", remedy="`spool machine install --print` shows the steps")
        )
    for step in machine_service.steps(program, shared.MACHINE_FILE, force=force):
        render.say(machine_service.carry_out(step))
    render.say(f"the machine is shared: {shared.MACHINE_FILE} says among whom, `spool machine status` who has what")
    return 0


def _configuration(path: str) -> MachineConfig:
    """Return the configuration in *path*, the defaults without one. Raises OSError, InvalidConfig."""
    try:
        return machinefile.parse(read_file(path, check=_why_not_trusted) or b"")
    except InvalidConfig as error:
        raise InvalidConfig(path, error.problems) from None


def _why_not_trusted(status: os.stat_result) -> str:
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users can change it; it must belong to you or root, and be writable by its owner alone"
    return ""


def _make_directory(path: str) -> None:
    disk = Disk(path)
    if disk.ensure_directory(path):
        disk.chmod(path, 0o755)  # whatever the umask: the others connect to a socket in it
