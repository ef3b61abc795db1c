"""`spool init`, `dispatch`, `service` and `gc`: make a spool, run its dispatcher, remove old runs."""

from __future__ import annotations

import logging
import os
import shlex
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from spool.cli import render
from spool.cli.group import Subverbs, Verb, json_option, made, own, value_of
from spool.cli.render import tell
from spool.client import service
from spool.client.submit import ensure_spool, root_at, was_spool
from spool.core.errors import ExitCode, LockHeld, SpoolError, UsageError
from spool.core.layout import GONE_RESERVATIONS, SERVICE, without_here
from spool.core.reasons import count_of
from spool.core.units import parse_duration, parse_size, show_size
from spool.store.ownership import check_owner, this_user

if TYPE_CHECKING:
    from spool.client.gc import Removal
    from spool.store.spool import Spool  # imported when needed: other commands here need no runs


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
    new = ensure_spool(where)
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
    from spool.client.draft import begin_as_after_login
    from spool.dispatcher.service import serve
    from spool.listeners import set_up_logging
    from spool.machine import identity
    from spool.machine.host import reset_io_priority

    kept = begin_as_after_login()
    if SERVICE in os.environ:
        reset_io_priority()
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


@click.group("service", cls=Subverbs, short_help="Keep the dispatcher running with systemd.")
def keep() -> None:
    """Keep the dispatcher running with systemd.

    It uses a user unit, so you need not be root. The dispatcher starts with your first login, restarts after a crash,
    and `spool submit` uses it. Enable lingering, or your jobs end when you log out: `loginctl enable-linger`.

      spool service install
      spool service remove
      systemctl --user status spool.service      whether it is running
      journalctl --user -u spool.service         its log

    By hand: cp contrib/systemd/spool.service to ~/.config/systemd/user/
    """


@keep.command("install", cls=Verb, short_help="Write, enable and start the unit.")
@click.option("--force", is_flag=True, help="Overwrite a unit that you edited or wrote yourself.")
@click.option("--dry-run", is_flag=True, help="Print what would be written, and change nothing.")
@click.pass_obj
def install(root: str, force: bool, dry_run: bool) -> int:
    """Write, enable and start the unit. Running it again updates it.

    It starts this installation of spool for this spool. A unit that you edited stays unchanged without --force.

      spool service install --dry-run
      spool --spool /data/spool service install
    """
    usual = os.path.realpath(root) == os.path.realpath(os.path.expanduser("~/.spool"))  # for the service manager too
    words = service.program()
    unit = service.unit_of(root, words, usual=usual)
    if dry_run:
        render.say(f"# {unit.path} ({unit.state})")
        render.say_text(unit.text.decode() + "\n")
        return 0
    try:
        service.require_manager()
    except service.NoServiceManager as error:
        tell(f"{error}; cron can start it instead. `crontab -e`, and this line:")
        render.say(f"@reboot {shlex.join([*words, *([] if usual else ['--spool', root]), 'dispatch'])}")
        return int(error.exit_code)
    changed = service.install(made(root).root, unit, force=force)
    render.say(f"{unit.path} {'written' if changed else 'unchanged'}")
    render.say("the dispatcher is running")
    if not service.lingers(this_user()):
        why = "when you log out, systemd ends the dispatcher and your jobs"
        tell(f"lingering is off: {why}; run `loginctl enable-linger`")
    return 0


@keep.command("remove", cls=Verb, short_help="Stop and remove the unit.")
@click.option("--force", is_flag=True, help="Also remove a unit that you edited.")
@click.pass_obj
def remove(root: str, force: bool) -> int:
    """Stop the dispatcher, disable and delete the unit. Running jobs continue.

    It removes only a unit that `spool service install` wrote; an edited one only with --force.
    """
    gone = service.remove(root, force=force)
    render.say(f"{gone} removed" if gone is not None else "not installed: nothing to do")
    return 0


@click.command(cls=Verb)
@click.option("--older-than", metavar="TIME", help="Remove runs that ended longer ago than this: 30d.")
@click.option("--keep-runs", metavar="N", type=click.IntRange(1), help="Keep the newest N runs of each job.")
@click.option("--max-size", metavar="SIZE", help="Remove the oldest runs until all together fit this size: 10G.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@json_option
@click.pass_obj
def gc(
    root: str, older_than: str | None, keep_runs: int | None, max_size: str | None, dry_run: bool, as_json: bool
) -> int:
    """Remove old runs and their output, and the records of jobs that have nothing else left.

    Only jobs that have ended, and that no waiting job depends on, are affected. The history stays. --older-than also
    applies to cancelled reservations. Limits that you do
    not give come from [gc] in config.toml. A dispatcher may be running. Links are not followed, so nothing outside the
    spool is removed. If something cannot be removed, stderr says what and why, and the exit code is 1.

      spool gc --older-than 30d --dry-run
      spool gc --max-size 10G

    By hand: rm -r jobs/train/1
    """
    from spool.client.gc import plan_removal, remove_planned
    from spool.formats.config import RetentionPolicy
    from spool.store.edited import Settings

    spool = own(root)
    configured = Settings(spool.root).config.gc
    keep = RetentionPolicy(
        value_of("--older-than", older_than, parse_duration) if older_than is not None else configured.max_age_ns,
        keep_runs if keep_runs is not None else configured.max_runs,
        value_of("--max-size", max_size, parse_size) if max_size is not None else configured.max_size_bytes,
    )
    if keep == RetentionPolicy():
        remedy = "specify --older-than, --keep-runs or --max-size, or set one in [gc] of config.toml"
        raise UsageError(f"cannot clean up: no limit; {remedy}")
    with render.progress("looking") as step:
        removal = plan_removal(spool, keep, time.time_ns(), step)
    if not dry_run:
        started = _executors(spool, removal)
        with render.progress("removing") as step:
            removal = remove_planned(spool, removal, step=step)
        _close_sessions(spool, removal, started)
    for problem in removal.problems:
        tell(problem)
    _print(spool, removal, dry_run=dry_run, as_json=as_json)
    return int(ExitCode.FAILED if removal.problems else ExitCode.DONE)


def _executors(spool: Spool, removal: Removal) -> dict[tuple[str, int], str]:
    """Return the executor of each run to remove."""
    # A link's target does not belong to the job, so its files do not tell the executor.
    runs = (old for old in removal.runs if not os.path.islink(spool.layout.metadir(old.name, old.run)))
    grants = ((old.name, old.run, spool.grant(old.name, old.run)) for old in runs)
    return {(name, run): grant.executor for name, run, grant in grants if grant is not None}


def _close_sessions(spool: Spool, removed: Removal, started: dict[tuple[str, int], str]) -> None:
    """Close the terminals kept for the removed runs."""
    from spool.executors import by_name

    gone: dict[str, list[tuple[str, int]]] = {}
    for old in removed.runs:
        if (executor := started.get((old.name, old.run))) is not None:
            gone.setdefault(executor, []).append((old.name, old.run))
    for executor, runs in gone.items():
        with suppress(SpoolError, ImportError):  # from another version of spool
            by_name(executor).forget(spool.root, runs)


def _print(spool: Spool, removal: Removal, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        render.as_json({"dry_run": dry_run}, removal)
        return
    if dry_run:
        for old in removal.runs:
            render.say(f"{spool.layout.metadir(old.name, old.run)}  {show_size(old.size_bytes)}")
        for name in removal.jobs:
            render.say(spool.layout.job_file("done", name))
        for filename in removal.reservations:
            render.say(spool.layout.at(f"{GONE_RESERVATIONS}/{filename}"))
    verb = "would be removed" if dry_run else "removed"
    runs, jobs_gone, others = len(removal.runs), len(removal.jobs), len(removal.reservations)
    said = [f"{count_of(runs, 'run')} ({show_size(removal.size_bytes)})", count_of(jobs_gone, "record")]
    if others:
        said.append(count_of(others, "old reservation"))
    render.say(f"{', '.join(said[:-1])} and {said[-1]} {verb}")
