"""`spool show`: everything about a job."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from spool.cli import publicjson, render
from spool.cli.common import json_option, name_argument, one_job, opened
from spool.cli.group import Verb
from spool.core.lifecycle import exit_words
from spool.core.model import State
from spool.core.reasons import count_of, pools_in_words, ranges_of
from spool.core.runtimes import Basis
from spool.core.units import show_duration, show_size
from spool.formats.capabilities import contributed
from spool.query.details import JobDetails, RunDetails, job_details
from spool.query.tasks import ListedJob, folded

_TASK_COLUMNS = (
    render.Column("TASK", cut="middle"),
    render.Column("STATE"),
    render.Column("TIME", right=True, drop=1),
    render.Column("PARAMETERS", cut="end", drop=2),
    render.Column("REASON", cut="end"),
)
_FEW = 8  # this many tasks that failed are named each
_PARAMETERS = 3  # the column is left out if no line has any
_BASES = {
    Basis.PROGRESS: "by its progress",
    Basis.LIMIT: "by its time limit",
    Basis.GUESS: "a guess by earlier runs",
}


@click.command(cls=Verb)
@name_argument
@click.option(
    "--run", type=int, metavar="N", help="Only this run. Default: the newest in full, the others in one line each."
)
@json_option
@click.pass_obj
def command(root: str, name: str, run: int | None, as_json: bool) -> int:
    """Show everything about a job.

    The state and its reason come first, then the newest run with its times, grant and output path, and the last lines
    of the output if it failed; then the job, the tasks of an array, the file, and what `[defaults]` in the
    configuration and plugins add to it.

    By hand: cat queued/train.toml; ls jobs/train; cat jobs/train/1/result.toml
    """
    spool = opened(root)
    found = job_details(spool, one_job(spool, name), run)
    if as_json:
        render.as_json({"version": 1, **publicjson.plain(found)})
    else:
        _print(found, folded(spool, found.tasks))
    return 0


def _print(found: JobDetails, tasks: Sequence[ListedJob]) -> None:
    """Print the state, the runs, the job and last its file, which may be long."""
    now_ns, row = found.at_ns, found.row
    says_it = row.reason.startswith(row.state.value)  # "cancelled by alice"
    head = row.reason if says_it else f"{row.state}{f': {row.reason}' if row.reason else ''}"
    render.headline(f"job {found.name}", head, render.style_of_row(row))
    _print_runs(found, now_ns)
    lines = []
    if row.left is not None:
        lines.append(("time left", f"{row.left.words()}, {_BASES[row.left.basis]}"))
    if row.start is not None:
        lines.append(("expected start", row.start.words(now_ns)))
    lines += [
        ("user", row.user or ""),
        ("project", row.project or ""),
        ("tags", ", ".join(row.tags)),
        ("parameters", render.parameters(row.parameters)),
        ("metrics", render.parameters(row.metrics)),
        ("priority", render.count(row.priority)),
        ("asks for", _asks(found)),
        ("requests", found.requests),
        ("expected run time", found.expected),
        ("submitted", render.moment(row.submitted_at_ns, now_ns)),
        ("tasks", ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in found.task_counts.items())),
        ("failed tasks", _failed(found)),
        ("file", found.path or "(gone)"),
    ]
    render.say()
    render.pairs((key, value) for key, value in lines if value)
    _print_tasks(tasks)
    if found.problem:
        _say_indented("problems in the file", found.problem)
    if found.file is not None:
        _say_indented("the file", found.file)
    if found.defaults:
        sources = "[defaults] in the configuration" + (" and from plugins" if found.defaults.startswith("#") else "")
        _say_indented(f"from {sources}, not set in the file", found.defaults)
    for other in found.others:
        render.say()
        render.prose(f"another job of this name, {other.row.state}: {other.path}")
        if other.row.reason:
            render.prose(f"  {other.row.reason}")
        if other.file is not None:
            _say_indented("its file", other.file)


def _print_runs(found: JobDetails, now_ns: int) -> None:
    """Print the newest run in full, the last lines of its output if it failed, and a line for each earlier run."""
    if not found.runs:
        return
    *earlier, newest = found.runs
    render.say()
    render.say(f"run {newest.record.run}:")
    same = newest.state is found.row.state and (newest.reason == found.row.reason or newest.state is State.FINISHED)
    lines = _of_run(newest, now_ns)[2 * same :]  # the headline has said it
    render.pairs((f"  {key}", value) for key, value in lines if value)
    if found.last_lines:
        _say_indented("the last lines of its output", "\n".join(found.last_lines))
    if earlier:
        render.say()
    for run in reversed(earlier):
        render.prose(f"run {run.record.run}: {_summary(run)}")


def _print_tasks(tasks: Sequence[ListedJob]) -> None:
    """Print the tasks of an array; waiting or finished tasks that are alike share one line."""
    if not tasks:
        return
    now_ns = time.time_ns()
    rows = []
    for one in tasks:
        reason = ", ".join(filter(None, (f"{one.count} tasks" if one.count > 1 else "", one.row.reason)))
        values = render.parameters(one.row.parameters) if one.count == 1 else ""
        rows.append([one.name, one.row.state.value, render.duration(one.row.time_ns(now_ns)), values, reason])
    kept = [column for at, column in enumerate(_TASK_COLUMNS) if at != _PARAMETERS or any(row[at] for row in rows)]
    rows = [row if len(kept) == len(row) else row[:_PARAMETERS] + row[_PARAMETERS + 1 :] for row in rows]
    render.say()
    render.table(kept, rows, [render.style_of(one.row.state) for one in tasks])


def _failed(found: JobDetails) -> str:
    """Return the tasks that failed; many as in the lists: `sweep_[3,7-40]`."""
    names = found.failed_tasks
    if len(names) <= _FEW:
        return ", ".join(names)
    return f"{found.name}_[{ranges_of(int(name.rpartition('_')[2]) for name in names)}]"


def _asks(found: JobDetails) -> str:
    row = found.row
    parts = []
    if row.cpus is not None:
        parts.append(f"{row.cpus} CPU{'' if row.cpus == 1 else 's'}")
    if row.memory_bytes is not None:
        parts.append(f"{show_size(row.memory_bytes)} of memory")
    if row.gpus:
        parts.append(f"{row.gpus} GPU{'' if row.gpus == 1 else 's'}")
    if row.resources:
        parts.append(pools_in_words(row.resources))
    return ", ".join(parts)


def _summary(run: RunDetails) -> str:
    record, parts = run.record, [run.state.value if run.state is not None else "void", run.reason]
    if record.ended_at_ns is not None and (ran_ns := run.ran_ns(record.ended_at_ns)) is not None:
        parts.append(f"ran {show_duration(ran_ns)}")
    if record.again is not None:
        parts.append(f"then {'held' if record.again == 'hold' else record.again}")
    return ", ".join(part for part in parts if part)


def _of_run(run: RunDetails, now_ns: int) -> list[tuple[str, str]]:
    record, again = run.record, run.record.again or ""
    if record.again_at_ns is not None:
        again += f" not before {render.moment(record.again_at_ns)}"
    return [
        ("state", run.state.value if run.state is not None else "void"),
        ("reason", run.reason),
        ("progress", run.progress),
        ("attempt", str(record.attempt) if record.attempt > 1 or record.again else ""),
        ("requeued", count_of(record.requeues, "time") if record.requeues else ""),
        ("stop", f"{run.stop.kind} by {run.stop.by}: {run.stop.reason}".rstrip(": ") if run.stop is not None else ""),
        ("exit code", exit_words(record.exit_code).removeprefix("exit code ") if record.exit_code is not None else ""),
        ("started", render.moment(record.started_at_ns, now_ns)),
        ("ended", render.moment(record.ended_at_ns, now_ns) + (", or later" if record.end_is_bound else "")),
        ("ran", render.duration(run.ran_ns(now_ns))),
        ("suspended", _suspended(run, now_ns)),
        ("peak memory", show_size(record.peak_memory_bytes) if record.peak_memory_bytes is not None else ""),
        ("CPU time", render.cpu_time(record.cpu_time_ns)),
        *_gpu_use(run),
        *(line for _, told in contributed("told") for line in told(run)),
        ("given", _given(run)),
        ("executor", ", job ".join(filter(None, (record.executor, run.engine_id)))),
        ("node", record.node or ""),
        ("pid", str(run.pid) if run.pid is not None and record.ended_at_ns is None else ""),
        ("output", run.stdout),
        ("error output", run.stderr or ""),
        ("directory", run.metadir),
        ("again", again),
    ]


def _gpu_use(run: RunDetails) -> list[tuple[str, str]]:
    indices = run.grant.gpu_indices if run.grant is not None else ()
    idle = show_duration(run.gpu_idle_ns) if run.gpu_idle_ns else ""
    named = enumerate(run.record.gpu_use)
    lines = [(f"GPU {indices[at] if at < len(indices) else at}", render.gpu_use(use)) for at, use in named]
    return [*lines, ("GPUs idle for", idle)]


def _suspended(run: RunDetails, now_ns: int) -> str:
    ended_at_ns, since_ns = run.record.ended_at_ns, run.suspension.since_ns
    total_ns = run.suspension.total_ns(ended_at_ns or now_ns)
    if since_ns is None or ended_at_ns is not None:
        return render.duration(total_ns) if total_ns else ""
    before = f", {render.duration(total_ns)} in all" if run.suspension.before_ns else ""
    return f"since {render.moment(since_ns, now_ns)}{before}"


def _given(run: RunDetails) -> str:
    grant = run.grant
    if grant is None:
        return ""
    parts = [count_of(grant.cpus, "CPU") + (f" ({grant.cpu_list})" if grant.cpu_list else "")]
    if grant.memory_bytes is not None:
        parts.append(f"{show_size(grant.memory_bytes)} of memory")
    for at, uuid in enumerate(grant.gpu_uuids):
        index = f"GPU {grant.gpu_indices[at]}" if at < len(grant.gpu_indices) else "GPU"
        share = f", {show_size(grant.gpu_memory_bytes)} of it" if grant.gpu_memory_bytes is not None else ""
        parts.append(f"{index} ({uuid}{share})")
    if grant.gpus_elsewhere:
        parts.append(count_of(grant.gpus_elsewhere, "GPU"))
    if grant.resources:
        parts.append(pools_in_words(grant.resources, grant.resource_indices))
    return ", ".join(parts)


def _say_indented(title: str, text: str) -> None:
    render.say()
    render.say(f"{title}:")
    for line in text.rstrip().splitlines():
        render.say(f"  {line.expandtabs()}")
