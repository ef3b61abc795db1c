"""`spool ls`: the jobs of a spool."""

from __future__ import annotations

import sys

import click

from spool.cli import render
from spool.cli.common import complete_names, job_name, json_option, states_of, states_option, viewed
from spool.cli.group import Verb, tell
from spool.core.errors import ExitCode, NoSuchJob, cannot
from spool.core.names import is_pattern
from spool.core.units import show_duration
from spool.formats.timestamps import render_instant
from spool.query.jobs import ORDERS, JobFilter, JobList, JobRow, list_jobs

_COLUMNS = (
    render.Column("NAME"),
    render.Column("STATE"),
    render.Column("PRIO", right=True),
    render.Column("CPU", right=True),
    render.Column("MEM", right=True),
    render.Column("GPU", right=True),
    render.Column("USER"),
    render.Column("TIME", right=True),
    render.Column("REASON", wide=True),
)


@click.command(cls=Verb)
@click.argument("names", nargs=-1, metavar="[NAMES]...", shell_complete=complete_names)
@click.option("-a", "--all", "everything", is_flag=True, help="All that ever ended, not only the last ten; each task.")
@states_option
@click.option("-u", "--user", metavar="USER", help="Only this user's jobs.")
@click.option("--project", metavar="NAME", help="Only jobs of this project.")
@click.option("--tag", metavar="TAG", help="Only jobs with this tag.")
@click.option("--sort", type=click.Choice(sorted(ORDERS)), help="The order. Default: ended, running, waiting.")
@click.option("-q", "--quiet", is_flag=True, help="Only the names, one a line.")
@json_option
@click.pass_obj
def command(
    root: str,
    names: tuple[str, ...],
    everything: bool,
    states: tuple[str, ...],
    user: str | None,
    project: str | None,
    tag: str | None,
    sort: str | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """List the jobs that wait, run, or ended a short while ago. An array that has ended stands for its tasks.

    TIME is how long a job has waited, has run, or ran. NAMES may be globs.

      spool ls
      spool ls 'sweep_*' -s failed,timeout -q | xargs spool requeue

    By hand: ls queued held running done
    """
    wanted = JobFilter(tuple(map(_name, names)), states_of(states), user, project, tag)
    found = list_jobs(viewed(root), wanted, everything=everything, order=sort)
    rows = found.rows
    if as_json:
        render.as_json({"version": 1, "at": render_instant(found.at_ns), "dispatcher": found.dispatcher,
                        "paused": found.paused, "problems": found.problems, "jobs": rows})  # fmt: skip
    elif quiet:
        sys.stdout.writelines(f"{name}\n" for name in dict.fromkeys(row.name for row in rows))
    else:
        cells = [_cells(row, found.at_ns) for row in rows]
        render.table(_COLUMNS, cells, [render.STATE_STYLES[row.state] for row in rows])
    _remark(found)
    for name in found.unknown:
        tell(str(NoSuchJob(cannot("list", f"job {name}", "no job of that name is in the spool"))))
    return int(ExitCode.NO_SUCH_JOB) if found.unknown else 0


def _name(text: str) -> str:
    return text if is_pattern(text) else job_name(text)


def _cells(row: JobRow, now_ns: int) -> tuple[str, ...]:
    return (
        row.name,
        row.state.value,
        render.count(row.priority),
        render.count(row.cpus),
        render.size(row.memory_bytes),
        render.count(row.gpus or None),
        row.user or "",
        render.duration(row.time_ns(now_ns)),
        _reason(row, now_ns),
    )


def _reason(row: JobRow, now_ns: int) -> str:
    if row.ended_at_ns is None:
        again = f"attempt {row.attempt}" if row.attempt is not None and row.attempt > 1 else ""
        return "; ".join(part for part in (row.reason, again) if part)
    ago = f"{show_duration(max(0, now_ns - row.ended_at_ns))} ago"
    return f"{row.reason}, {ago}" if row.reason else ago


def _remark(found: JobList) -> None:
    """Say on stderr what makes the list worth less than it looks."""
    if found.paused:
        tell("the spool is paused: nothing starts until `spool resume`")
    if found.unserved:
        tell("no dispatcher runs: what is shown is what the files say; `spool dispatch` starts one")
    elif found.stale_ns is not None:
        tell(f"the dispatcher has been silent for {show_duration(found.stale_ns)}; the reasons are as old")
    for problem in found.problems:
        tell(problem)
