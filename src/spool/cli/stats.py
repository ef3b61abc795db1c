"""`spool stats`: wait times, run times and usage of ended runs."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from spool.cli import render
from spool.cli.group import Verb, json_option, moment_of, viewed
from spool.cli.publicjson import plain
from spool.cli.render import tell
from spool.core.accounting import MJ_PER_KWH, By, RunFilter, Statistics, Totals
from spool.core.errors import UsageError
from spool.core.model import OUTCOMES, State
from spool.core.reasons import count_of
from spool.store.history import History

_NONE = "-"


@click.command(cls=Verb)
@click.option("--by", type=click.Choice([each.value for each in By]), help="Print one row for each.")
@click.option("--since", metavar="TIME", help='Only runs that ended since: "7d" (ago), 0:00, friday, a date.')
@click.option("--until", metavar="TIME", help="Only runs that ended before this time.")
@click.option("-u", "--user", metavar="USER", help="Only this user's runs.")
@click.option("-p", "--project", metavar="NAME", help="Only runs in this project.")
@click.option("--tag", metavar="TAG", help="Only runs of jobs with this tag.")
@json_option
@click.pass_obj
def command(
    root: str,
    by: str | None,
    since: str | None,
    until: str | None,
    user: str | None,
    project: str | None,
    tag: str | None,
    as_json: bool,
) -> int:
    """Show wait times, run times and usage of ended runs.

    A run belongs to the period in which it ended; hours and peaks count the grants within the period. CPU-H and GPU-H
    are hours times granted CPUs and GPUs. USED is the share of the granted CPU time that was used, BUSY the share of
    the time in which the granted GPUs computed, and the peaks are the most in use at one moment. SUCCESS is the share
    of jobs that finished, not counting cancelled ones: a job that finished at its second try is one success. GPU-KWH
    is the energy of GPUs, where they report it.

      spool stats --since 7d
      spool stats --by user --since 2026-01-01 --until 2026-02-01
      spool stats --by day --json | jq -r '.groups[] | [.day, .gpu_hours] | @tsv'

    By hand: the lines of history.jsonl
    """
    now_ns = time.time_ns()
    period = moment_of("--since", since, now_ns), moment_of("--until", until, now_ns)
    wanted = RunFilter(*period, user, project, tag)
    if wanted.since_at_ns is not None and wanted.until_at_ns is not None and wanted.since_at_ns >= wanted.until_at_ns:
        raise UsageError("cannot count runs: --since is not before --until")
    key = By(by) if by is not None else None
    spool = viewed(root)
    history = History(root)
    found = history.sums(wanted, key)
    if as_json:
        _print_json(found, history, wanted, key)
    elif not found.total.runs and not found.groups:
        fewer = "no ended run matches; give fewer filters, or an earlier --since"
        if not history.problems and not spool.unread:
            tell("no run has ended" if wanted == RunFilter() else fewer)
    elif key is None:
        render.pairs(_pairs(found))
    else:
        _print_table(found, key)
    _remark(found, history)
    return 0


def _remark(found: Statistics, history: History) -> None:
    """Report on stderr what is not counted."""
    if history.unreadable:
        tell(f"{count_of(history.unreadable, 'line')} of the history could not be read")
    if found.duplicates:
        tell(f"{count_of(found.duplicates, 'run')} recorded more than once in the history; each counts once")
    if found.clock_set:
        runs = count_of(found.clock_set, "run")
        tell(f"{runs} ended before the start, or centuries later, because the clock was set; their times do not count")
    for problem in history.problems:
        tell(problem)


def _print_json(statistics: Statistics, history: History, wanted: RunFilter, by: By | None) -> None:
    render.as_json(
        wanted,
        {"by": by},
        statistics,
        {
            "total": statistics.total,
            "groups": [{by: key, **plain(totals)} for key, totals in statistics.groups] if by else [],
            "unreadable_lines": history.unreadable,
            "duplicate_runs": statistics.duplicates,
            "clock_set_runs": statistics.clock_set,
            "problems": history.problems,
        },
    )


def _pairs(statistics: Statistics) -> list[tuple[str, str]]:
    total, largest = statistics.total, statistics.total.peak_memory_job
    return [
        ("runs", f"{total.runs} of {count_of(total.jobs, 'job')}"),
        ("ended", f"{render.moment(statistics.first_at_ns)} to {render.moment(statistics.last_at_ns)}"),
        ("outcomes", render.counts(total.outcomes)),
        ("success", render.percent(total.success_rate) or "(of no job)"),
        ("run again", f"{total.retries} by retry, {total.requeues} by requeue"),
        ("wait", _times(total.wait_median_ns, total.wait_p90_ns, total.wait_mean_ns)),
        ("run time", _times(total.run_time_median_ns, total.run_time_p90_ns, None)),
        ("", f"{render.duration(total.run_time_sum_ns)} in all" if total.run_time_median_ns is not None else ""),
        ("CPU hours", _cpu_hours(total)),
        ("GPU hours", _gpu_hours(total) if total.peak_gpus else ""),
        ("GPU energy", _energy(total.gpu_kwh, total.gpu_kwh_runs)),
        *((f"{name} hours", render.fine(hours)) for name, hours in total.resource_hours.items()),
        ("peak CPUs", _peak(total.peak_cpus, total.peak_cpus_at_ns)),
        ("peak GPUs", _peak(total.peak_gpus, total.peak_gpus_at_ns)),
        ("peak memory", f"{render.size(total.peak_memory_bytes)} by {largest}" if largest else ""),
    ]


def _times(median_ns: int | None, p90_ns: int | None, mean_ns: int | None) -> str:
    if median_ns is None:
        return ""
    mean = f", mean {render.duration(mean_ns)}" if mean_ns is not None else ""
    return f"median {render.duration(median_ns)}, 90% within {render.duration(p90_ns)}{mean}"


def _cpu_hours(total: Totals) -> str:
    given = f"{render.fine(total.cpu_hours)} given"
    if total.cpu_used_hours is None:
        return f"{given}; use unknown" if total.cpu_hours else ""
    known, timed = total.cpu_used_runs, total.timed_runs
    of = f" by {known} of {timed} runs; unknown for the others" if known < timed else ""
    part = f" ({render.percent(total.cpu_efficiency)})" if total.cpu_efficiency is not None else ""
    return f"{given}, {render.fine(total.cpu_used_hours)} used{of}{part}"


def _gpu_hours(total: Totals) -> str:
    given = f"{render.fine(total.gpu_hours)} given"
    if total.gpu_used_hours is None:
        return f"{given}; use unknown"
    part = f" ({render.percent(total.gpu_efficiency)})" if total.gpu_efficiency is not None else ""
    known = f"in {count_of(total.gpu_used_runs, 'run')} with known use"
    return f"{given}, {render.fine(total.gpu_used_hours)} busy{part} {known}"


def _energy(kwh: float | None, runs: int) -> str:
    if kwh is None:
        return ""
    return f"{render.energy(round(kwh * MJ_PER_KWH))} in {count_of(runs, 'run')} whose energy is known"


def _peak(count: int, at_ns: int | None) -> str:
    return f"{count}, first reached {render.moment(at_ns)}" if count else ""


def _outcome(state: State) -> Callable[[Totals], str]:
    return lambda totals: render.count(totals.outcomes.get(state.value) or None)


def _resource_hours(name: str) -> Callable[[Totals], str]:
    return lambda totals: render.fine(totals.resource_hours.get(name, 0)) if totals.resource_hours.get(name) else ""


_SHORT = {State.OUT_OF_MEMORY: "NO MEM", State.UNSCHEDULABLE: "UNSCHED", State.CANCELLED: "CANCEL"}
_DROPPED = {State.FINISHED: 45, State.FAILED: 46}
_COLUMNS: tuple[tuple[render.Column, Callable[[Totals], str]], ...] = (
    (render.Column("RUNS", right=True, drop=0), lambda each: str(each.runs)),
    *(
        (render.Column(_SHORT.get(state, state.upper()), right=True, drop=_DROPPED.get(state, 65)), _outcome(state))
        for state in OUTCOMES
    ),
    (render.Column("SUCCESS", right=True, drop=20), lambda each: render.percent(each.success_rate)),
    (render.Column("RETRIES", right=True, drop=75), lambda each: render.count(each.retries or None)),
    (render.Column("WAIT", right=True, drop=30), lambda each: render.duration(each.wait_median_ns)),
    (render.Column("90%", right=True, drop=60), lambda each: render.duration(each.wait_p90_ns)),
    (render.Column("MEAN", right=True, drop=85), lambda each: render.duration(each.wait_mean_ns)),
    (render.Column("RUN TIME", right=True, drop=35), lambda each: render.duration(each.run_time_median_ns)),
    (render.Column("90%", right=True, drop=70), lambda each: render.duration(each.run_time_p90_ns)),
    (render.Column("SUM", right=True, drop=80), lambda each: render.duration(each.run_time_sum_ns)),
    (render.Column("CPU-H", right=True, drop=10), lambda each: render.fine(each.cpu_hours)),
    (render.Column("USED", right=True, drop=50), lambda each: render.percent(each.cpu_efficiency)),
    (render.Column("GPU-H", right=True, drop=10), lambda each: render.fine(each.gpu_hours) if each.gpu_hours else ""),
    (render.Column("BUSY", right=True, drop=15), lambda each: render.percent(each.gpu_efficiency)),
    (
        render.Column("GPU-KWH", right=True, drop=18),
        lambda each: render.fine(each.gpu_kwh) if each.gpu_kwh is not None else "",
    ),
    (render.Column("MAX CPU", right=True, drop=40), lambda each: render.count(each.peak_cpus)),
    (render.Column("MAX GPU", right=True, drop=25), lambda each: render.count(each.peak_gpus or None)),
    (render.Column("MAX MEM", right=True, drop=55), lambda each: render.size(each.peak_memory_bytes)),
)


def _print_table(statistics: Statistics, by: By) -> None:
    """Print a row for each group and one for all, without columns that are empty or do not fit the terminal."""
    keys = [key if key is not None else _NONE for key, _ in statistics.groups]
    rows = [totals for _, totals in statistics.groups]
    if len(rows) > 1:
        keys.append("all")
        rows.append(statistics.total)
    outcomes = {_SHORT.get(state, state.upper()) for state in OUTCOMES} if by is By.STATE else set()
    named = dict.fromkeys(name for row in rows for name in row.resource_hours)
    more = [(render.Column(f"{name.upper()}-H", right=True, drop=55), _resource_hours(name)) for name in named]
    found = [(column, [text(row) for row in rows]) for column, text in (*_COLUMNS, *more)]
    found = [(column, texts) for column, texts in found if any(texts) and column.title not in outcomes]
    heads = [render.Column(by.upper(), cut="middle"), *(column for column, _ in found)]
    lines = [[key, *(texts[at] for _, texts in found)] for at, key in enumerate(keys)]
    render.table(heads, lines, [""] * len(statistics.groups) + ["bold"] * (len(lines) - len(statistics.groups)))
