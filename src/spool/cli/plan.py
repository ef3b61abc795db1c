"""`spool plan`: what would start now, what starts later, and why it waits."""

from __future__ import annotations

import click

from spool.cli import publicjson, render
from spool.cli.common import json_option, viewed
from spool.cli.group import Verb
from spool.cli.telling import tell
from spool.core.model import Grant
from spool.core.reasons import count_of, pools_in_words
from spool.core.units import show_duration
from spool.query.explain import PlannedJob, Preview, WaitingJob, preview

_COLUMNS = (
    render.Column("#", right=True),
    render.Column("NAME", cut="middle"),
    render.Column("USER", cut="middle", drop=3),
    render.Column("PRIO", right=True, drop=2),
    render.Column("START", right=True),
    render.Column("RUNS", right=True, drop=1),
    render.Column("WHY", cut="words", least=12),
)


@click.command(cls=Verb)
@json_option
@click.pass_obj
def command(root: str, as_json: bool) -> int:
    """Show what would start now, what waits, why, and until when. Nothing is started.

    Jobs are in queue order. The scheduler itself answers, from a fresh look at the files and the machine; no dispatcher
    is needed. It carries the schedule forward: START is when a job starts if every job finishes when expected. RUNS is
    how long it may run. A ~ marks an estimate from earlier runs; `spool why` says from which. Some starts cannot be
    foreseen, such as behind a suspended run: START is ?, and WHY says why. Far ahead, START is "later".

      spool plan
      spool plan --json | jq -r '.starts[].name'
    """
    spool = viewed(root)
    found = preview(spool)
    if as_json:
        render.as_json({"version": 1, **publicjson.plain(found)})
    else:
        _print(found, partly=bool(spool.unread))
    return 0


def _print(found: Preview, *, partly: bool) -> None:
    if found.config_problem is not None:
        tell(found.config_problem)
    if found.paused:
        tell("the spool is paused: no job starts until `spool resume`")
    rows = [(each.place, _row(each, "now", _gets(each.grant)), "green") for each in found.starts]
    rows += [(each.place, _row(each, _start(each, found), _why(each)), "") for each in found.waits]
    rows.sort(key=lambda row: row[0])
    if rows:
        render.table(_COLUMNS, [row for _, row, _ in rows], [style for _, _, style in rows])
    for ended in found.ends:
        render.prose(f"{ended.name}: would end as {ended.outcome}: {ended.reason}")
    for name, why in sorted(found.left_out.items()):
        render.prose(f"{name}: left out: {why}")
    begun = found.running - found.submitted
    others = [f"{found.submitted} submitted" if found.submitted else ""]
    others += [count_of(begun, "run") + " already running" if begun else "", f"{found.held} held"]
    told = ", ".join(filter(None, [f"{len(found.starts)} would start", f"{len(found.waits)} waiting", *others]))
    render.prose(told if rows or found.ends or found.left_out or partly else f"no waiting jobs ({told})")
    if found.protected is not None:
        until = ""
        if found.protected_until_at_ns is not None:
            about = "about " if found.protected_by_guess else ""
            until = f", which could start in {about}{show_duration(max(0, found.protected_until_at_ns - found.at_ns))}"
            until += " at the earliest" if found.start_is_earliest else ""
        render.prose(f"resources are kept free for {found.protected}{until}")
    if found.start_is_earliest and rows:
        render.prose("the machine is shared, and other users' jobs may go first: each START is the earliest")
    if not found.dispatcher:
        render.prose("no dispatcher is running: `spool dispatch` starts one")


def _row(each: PlannedJob, start: str, why: str) -> list[str]:
    job, expected = each.job, each.standing.expected
    runs = f"{'~' if expected.is_guess else ''}{show_duration(expected.ns)}"
    return [str(each.place), job.name, job.user, str(job.spec.priority), start, runs, why]


def _start(each: WaitingJob, found: Preview) -> str:
    start = each.start
    if start.at_ns is None:
        return "?" if start.later_than_ns is None else "later"
    wait = start.at_ns - found.at_ns
    about = "~" if start.guessed else ""
    return f"in {about}{show_duration(wait)}" if wait > 0 else "next"


def _why(each: WaitingJob) -> str:
    """Return why a job waits, and why its start is unknown, if that is another reason."""
    known = each.start.unknown in ("", each.reason)
    return each.reason if known else f"{each.reason}; {each.start.unknown}"


def _gets(grant: Grant) -> str:
    parts = [count_of(grant.cpus, "CPU") + (f" ({grant.cpu_list})" if grant.cpu_list else "")]
    if grant.memory_bytes is not None:
        parts.append(render.size(grant.memory_bytes))
    if grant.gpu_indices:
        plural = "s" if len(grant.gpu_indices) > 1 else ""
        share = f" ({render.size(grant.gpu_memory_bytes)} of each)" if grant.gpu_memory_bytes is not None else ""
        parts.append(f"GPU{plural} {', '.join(map(str, grant.gpu_indices))}{share}")
    if grant.resources:
        parts.append(pools_in_words(grant.resources, grant.resource_indices))
    return "starts with " + ", ".join(parts)
