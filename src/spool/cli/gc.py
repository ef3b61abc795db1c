"""`spool gc`: remove old runs."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import click

from spool.cli import render
from spool.cli.common import json_option, own, value_of
from spool.cli.group import Verb
from spool.cli.telling import tell
from spool.client.gc import Removal, plan_removal, remove
from spool.core.errors import ExitCode, SpoolError, UsageError
from spool.core.layout import GONE_RESERVATIONS
from spool.core.reasons import count_of
from spool.core.units import parse_duration, parse_size, show_size
from spool.executors import by_name
from spool.formats.config import RetentionPolicy
from spool.store.edited import Settings
from spool.store.spool import Spool


@click.command(cls=Verb)
@click.option("--older-than", metavar="TIME", help="Remove runs that ended longer ago than this: 30d.")
@click.option("--keep-runs", metavar="N", type=click.IntRange(1), help="Keep the newest N runs of each job.")
@click.option("--max-size", metavar="SIZE", help="Remove the oldest runs until all together fit this size: 10G.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@json_option
@click.pass_obj
def command(
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
            removal = remove(spool, removal, step=step)
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
    gone: dict[str, list[tuple[str, int]]] = {}
    for old in removed.runs:
        if (executor := started.get((old.name, old.run))) is not None:
            gone.setdefault(executor, []).append((old.name, old.run))
    for executor, runs in gone.items():
        with suppress(SpoolError, ImportError):  # from another version of spool
            by_name(executor).forget(spool.root, runs)


def _print(spool: Spool, removal: Removal, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        values = {key: getattr(removal, key) for key in ("size_bytes", "runs", "jobs", "reservations", "problems")}
        render.as_json({"version": 1, "dry_run": dry_run, **values, "jobs": [name for name, _ in removal.jobs]})
        return
    if dry_run:
        for old in removal.runs:
            render.say(f"{spool.layout.metadir(old.name, old.run)}  {show_size(old.size_bytes)}")
        for name, _ in removal.jobs:
            render.say(spool.layout.job_file("done", name))
        for filename in removal.reservations:
            render.say(spool.layout.at(f"{GONE_RESERVATIONS}/{filename}"))
    verb = "would be removed" if dry_run else "removed"
    runs, jobs_gone, others = len(removal.runs), len(removal.jobs), len(removal.reservations)
    said = [f"{count_of(runs, 'run')} ({show_size(removal.size_bytes)})", count_of(jobs_gone, "record")]
    if others:
        said.append(count_of(others, "old reservation"))
    render.say(f"{', '.join(said[:-1])} and {said[-1]} {verb}")
