"""`spool ls`: the jobs of a spool."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable

import click

from spool.cli import render
from spool.cli.common import complete_names, job_name, json_option, natural, viewed
from spool.cli.group import Verb, tell
from spool.core.errors import ExitCode, NoSuchJob, cannot
from spool.core.model import State
from spool.core.units import show_duration
from spool.formats.timestamps import render_instant
from spool.query.jobs import JobList, JobLister, JobRow

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
_ORDER = {
    State.RUNNING: 0, State.STARTING: 0, State.STOPPING: 0, State.QUEUED: 1, State.HELD: 2, State.INVALID: 3,
}  # fmt: skip
_BIG = 1 << 62
_SORTS: dict[str, Callable[[JobRow], object]] = {
    "name": lambda row: natural(row.name),
    "state": lambda row: (_ORDER.get(row.state, 4), row.state, natural(row.name)),
    "priority": lambda row: (-(row.priority or 0), row.submitted_at_ns or _BIG),
    "submitted": lambda row: row.submitted_at_ns or _BIG,
    "started": lambda row: row.started_at_ns or _BIG,
    "ended": lambda row: row.ended_at_ns or _BIG,
    "user": lambda row: (row.user or "", natural(row.name)),
    "cpus": lambda row: -(row.cpus or 0),
    "memory": lambda row: -(row.memory_bytes or 0),
    "gpus": lambda row: -(row.gpus or 0),
}


def _usual_order(row: JobRow) -> tuple[int, int, int, object]:
    """Return what to sort by: what ended first and the newest of it last, what runs, what waits and the next first."""
    rank = _ORDER.get(row.state, -1)
    if rank == 0:
        return rank, row.started_at_ns or _BIG, 0, natural(row.name)
    if rank > 0:
        return rank, -(row.priority or 0), row.submitted_at_ns or _BIG, natural(row.name)
    return rank, row.ended_at_ns or 0, 0, natural(row.name)


@click.command(cls=Verb)
@click.argument("names", nargs=-1, metavar="[NAMES]...", shell_complete=complete_names)
@click.option("-a", "--all", "everything", is_flag=True, help="All that ever ended, not only the last ten; each task.")
@click.option("-s", "--state", "states", multiple=True, metavar="STATE,...", help="Only jobs in this state.")
@click.option("-u", "--user", metavar="USER", help="Only this user's jobs.")
@click.option("--project", metavar="NAME", help="Only jobs of this project.")
@click.option("--tag", metavar="TAG", help="Only jobs with this tag.")
@click.option("--sort", type=click.Choice(sorted(_SORTS)), help="The order. Default: ended, running, waiting.")
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
    wanted = _states(states)
    spool = viewed(root)
    patterns = [pattern if set(pattern) & set("*?[") else job_name(pattern) for pattern in names]
    only = (lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)) if patterns else None
    ended = bool(wanted) and all(state.ended for state in wanted)
    listing = JobLister(spool).listing(everything=everything or ended, only=only)
    rows = [
        row
        for row in listing.rows
        if (not wanted or row.state in wanted)
        and (user is None or row.user == user)
        and (project is None or row.project == project)
        and (tag is None or tag in row.tags)
    ]
    rows.sort(key=_SORTS[sort] if sort is not None else _usual_order)  # type: ignore[arg-type]
    if as_json:
        render.as_json({"version": 1, "at": render_instant(listing.at_ns), "dispatcher": listing.dispatcher,
                        "paused": listing.paused, "problems": listing.problems, "jobs": rows})  # fmt: skip
    elif quiet:
        sys.stdout.writelines(f"{name}\n" for name in dict.fromkeys(row.name for row in rows))
    else:
        cells = [_cells(row, listing.at_ns) for row in rows]
        render.table(_COLUMNS, cells, [render.STATE_STYLES[row.state] for row in rows])
    _remark(listing)
    unknown = [name for name in patterns if not set(name) & set("*?[") and name not in {r.name for r in listing.rows}]
    for name in unknown:
        tell(str(NoSuchJob(cannot("list", f"job {name}", "no job of that name is in the spool"))))
    return int(ExitCode.NO_SUCH_JOB) if unknown else 0


def _states(texts: tuple[str, ...]) -> frozenset[State]:
    words = [word.strip().lower() for text in texts for word in text.split(",") if word.strip()]
    known = {state.value for state in State}
    for word in words:
        if word not in known:
            raise click.UsageError(f"there is no state {word!r}; the states are {', '.join(State)}")
    return frozenset(map(State, words))


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


def _remark(listing: JobList) -> None:
    """Say on stderr what makes the list worth less than it looks."""
    if listing.paused:
        tell("the spool is paused: nothing starts until `spool resume`")
    waits = any(not row.state.ended and row.state is not State.HELD for row in listing.rows)
    if not listing.dispatcher and waits and not listing.starting:
        tell("no dispatcher runs: what is shown is what the files say; `spool dispatch` starts one")
    elif listing.stale_ns is not None:
        tell(f"the dispatcher has been silent for {show_duration(listing.stale_ns)}; the reasons are as old")
    for problem in listing.problems:
        tell(problem)
