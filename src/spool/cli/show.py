"""`spool show`: everything about a job and a run of it. `spool seff`: what it asked for and what it used."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import click
from msgspec import Struct
from msgspec.structs import replace

from spool.cli import render
from spool.cli.group import JobArgument, Verb, carried_out, json_option, name_argument, one_job, opened, run_named
from spool.core.errors import UsageError
from spool.core.layout import JOBS
from spool.core.lifecycle import exit_words
from spool.core.model import Grant, State
from spool.core.reasons import count_of, pools_in_words, ranges_of
from spool.core.sizes import Advice, Efficiency, Spread, Summary
from spool.core.units import format_duration, format_size, show_duration, show_size
from spool.formats.capabilities import contributed
from spool.query.details import ArrayEfficiency, JobDetails, RunDetails, RunEfficiency, compare, job_details
from spool.query.listing import ListedJob, folded
from spool.query.rows import JobRow

_TASK_COLUMNS = (
    render.Column("TASK", cut="middle"),
    render.Column("STATE"),
    render.Column("TIME", right=True, drop=1),
    render.Column("PARAMETERS", cut="end", drop=2, optional=True),
    render.Column("REASON", cut="end"),
)
_FEW = 8  # this many tasks that failed are named each


@click.command(cls=Verb)
@click.argument("name", cls=JobArgument, metavar="NAME[/RUN]")
@click.argument("other", cls=JobArgument, metavar="[NAME[/RUN]]", required=False)
@click.option(
    "--run", type=int, metavar="N", help="Only this run. Default: the newest in full, the others in one line each."
)
@json_option
@click.pass_obj
def command(root: str, name: str, other: str | None, run: int | None, as_json: bool) -> int:
    """Show everything about a job, or what differs between two jobs or runs.

    The state and its reason come first, then the newest run with its times, grant and output path, and the last lines
    of the output if it failed; then the job, the tasks of an array, the file, and what `[defaults]` in the
    configuration adds to it and hooks set in it. Two names compare the newest runs, or those that they name.

      spool show train
      spool show train/1 train/4

    By hand: cat queued/train.toml; ls jobs/train; cat jobs/train/1/result.toml
    """
    if other is not None:
        if run is not None:
            raise UsageError(f"--run is for one job; write `spool show {run_named(name)[0]}/{run} {other}`")
        return carried_out("diff", one=name, other=other, as_json=as_json)
    spool = opened(root)
    job, of_name = run_named(name)
    found = job_details(spool, one_job(spool, job), of_name if run is None else run)
    if as_json:
        render.as_json(found)
    else:
        _print(found, folded(spool, found.tasks.rows))
    return 0


def _print(found: JobDetails, tasks: Sequence[ListedJob]) -> None:
    """Print the state, the runs, the job and last its file, which may be long."""
    now_ns, row = found.at_ns, found.row
    render.headline(f"job {found.name}", render.with_reason(row.state, row.reason), render.style_of_row(row))
    _print_runs(found, now_ns)
    lines = [
        ("time left", row.left.told() if row.left is not None else ""),
        ("expected start", row.start.words(now_ns) if row.start is not None else ""),
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
        ("tasks", render.counts(found.tasks.counts).replace("_", " ")),
        ("tasks", f"{found.to_expand}, none issued yet" if found.to_expand else ""),
        ("failed tasks", _failed(found)),
        ("file", found.path or ("" if row.state is State.QUEUED else "(gone)")),
    ]
    render.say()
    render.pairs(lines)
    _print_tasks(tasks)
    render.indented("problems in the file", found.problem)
    render.indented("the file", found.file)
    completed = found.defaults.splitlines()
    by_hooks = [line.removeprefix("# ") for line in completed if line.startswith("#")]
    render.indented("set by hooks, whatever the file says", "\n".join(by_hooks))
    rest = "\n".join(completed[len(by_hooks) :])
    render.indented("from [defaults] in the configuration, not set in the file", rest)
    for other in found.others:
        render.say()
        render.prose(f"another job of this name, {other.row.state}: {other.path}")
        if other.row.reason:
            render.prose(f"  {other.row.reason}")
        render.indented("its file", other.file)


def _print_runs(found: JobDetails, now_ns: int) -> None:
    """Print the newest run in full, the last lines of its output if it failed, and a line for each earlier run."""
    if not found.runs:
        return
    *earlier, newest = found.runs
    render.say()
    render.say(f"run {newest.record.run}:")
    same = newest.state is found.row.state and (newest.reason == found.row.reason or newest.state is State.FINISHED)
    lines = _of_run(newest, now_ns)[2 * same :]  # the headline has said it
    render.pairs((f"  {key}", value) for key, value in lines)
    render.indented("the last lines of its output", "\n".join(found.last_lines))
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
    render.say()
    render.table(_TASK_COLUMNS, rows, [render.style_of(one.row.state) for one in tasks])


def _failed(found: JobDetails) -> str:
    """Return the tasks that failed; many as in the lists: `sweep_[3,7-40]`."""
    names = found.tasks.failed
    if len(names) <= _FEW:
        return ", ".join(names)
    return f"{found.name}_[{ranges_of(int(name.rpartition('_')[2]) for name in names)}]"


def _asks(found: JobDetails) -> str:
    row = found.row
    cpus = count_of(row.cpus, "CPU") if row.cpus is not None else ""
    gpus = count_of(row.gpus, "GPU") if row.gpus else ""
    return ", ".join(filter(None, (cpus, _memory_of(row), gpus, pools_in_words(row.resources.items()))))


def _memory_of(it: JobRow | Grant) -> str:
    return f"{show_size(it.memory_bytes)} of memory" if it.memory_bytes is not None else ""


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
    share = f", {show_size(grant.gpu_memory_bytes)} of it" if grant.gpu_memory_bytes is not None else ""
    indices = (f"GPU {index}" for index in grant.gpu_indices)
    gpus = (f"{index} ({uuid}{share})" for index, uuid in zip_longest(indices, grant.gpu_uuids, fillvalue="GPU"))
    elsewhere = count_of(grant.gpus_elsewhere, "GPU") if grant.gpus_elsewhere else ""
    return render.granted(grant, _memory_of(grant), *gpus, elsewhere)


_UNKNOWN = "unknown"


@click.command(cls=Verb)
@name_argument(places=(JOBS,))
@click.option("--run", type=click.IntRange(1), metavar="N", help="The run to show. Default: the newest.")
@json_option
@click.pass_obj
def seff(root: str, name: str, run: int | None, as_json: bool) -> int:
    """Compare what a job requested with what it used, and suggest what to request next time.

    For an array, all of its tasks together. A running job is shown so far. Some values may be unknown: the CPU time of
    a run that outlived its dispatcher, the peak memory of a run that was smaller than the dispatcher itself, and GPU
    use that NVML does not report or that was not sampled in time.

    The last line is for the next job file: peak memory plus 20%, as many CPUs as were busy, and 1.5 times the run time.

      spool seff train
      spool seff train --run 2
      spool seff sweep --json | jq .advice.memory_bytes

    By hand: cat jobs/train/1/result.toml
    """
    spool = opened(root)
    found = compare(spool, one_job(spool, name), run)
    if as_json:
        render.as_json(*_json(found))
    else:
        render.pairs(_use_of_run(found) if isinstance(found, RunEfficiency) else _of_array(found))
    return 0


def _json(found: RunEfficiency | ArrayEfficiency) -> tuple[Struct | Mapping[str, object], ...]:
    if isinstance(found, ArrayEfficiency):
        return {"job": found.job, "array": True}, found.summary
    job, used = {"job": found.used.record.job, "array": False}, found.used
    state = {"so_far": not used.ended, "memory_now_bytes": found.memory_now_bytes, "auto": found.auto}
    return job, used, state, found.compared, {"runs": found.runs}


def _use_of_run(found: RunEfficiency) -> list[tuple[str, str]]:
    used, compared = found.used, found.compared
    record, gpus = used.record, used.grant.gpu_count
    is_auto = bool(found.auto) and record.request.memory_auto
    so_far = "" if used.ended else " so far"
    others = f" of {len(found.runs)}" if len(found.runs) > 1 else ""
    lines = [("job", f"{record.job}, run {record.run}{others}, {used.state}{', so far' if so_far else ''}")]
    if not used.started:
        return [*lines, ("", "; ".join(compared.advice.notes))]
    return [
        *lines,
        ("CPUs", f"{used.grant.cpus} given, {_busy(compared.cpus_used, compared.cpu_efficiency)}"),
        ("CPU time", render.cpu_time(record.cpu_time_ns) + so_far if record.cpu_time_ns is not None else _UNKNOWN),
        ("memory", _memory(found)),
        ("GPUs", _gpus(used.grant, compared) + so_far if gpus else ""),
        *(
            (f"GPU {at} of {gpus}" if gpus > 1 else "its GPU", render.gpu_use(use))
            for at, use in enumerate(record.gpu_use, 1)
        ),
        ("time", _time(used.run_time_ns, used.time_limit_ns, compared.time_limit_used) + so_far),
        # One size: that which the next run gets by itself, or else what to write into the file.
        *_next_time(replace(compared.advice, memory_bytes=None) if is_auto else compared.advice),
        ("auto", found.auto if is_auto else ""),
    ]


def _busy(cpus: float | None, part: float | None) -> str:
    if cpus is None:
        return f"used {_UNKNOWN}"
    return f"{cpus:.2f} busy on average" + (f": {render.percent(part)}" if part is not None else "")


def _memory(found: RunEfficiency) -> str:
    given, peak = found.used.grant.memory_bytes, found.used.record.peak_memory_bytes
    asked = f"{show_size(given)} given, " if given is not None else "no limit, "
    if found.memory_now_bytes is not None:
        return f"{asked}{show_size(found.memory_now_bytes)} in use now"
    if peak is None:
        return f"{asked}peak {_UNKNOWN}"
    share = found.compared.memory_efficiency
    of = " by its largest process" if given is None else ""
    part = f": {render.percent(share)}" if share is not None else ""
    return f"{asked}{show_size(peak)} at most{of}{part}"


def _gpus(grant: Grant, compared: Efficiency) -> str:
    share = f" ({show_size(grant.gpu_memory_bytes)} of each)" if grant.gpu_memory_bytes is not None else ""
    busy = f"{render.percent(compared.gpu_efficiency)} busy" if compared.gpu_efficiency is not None else "use unknown"
    hours = render.fine(compared.gpu_hours) if compared.gpu_hours is not None else _UNKNOWN
    return f"{count_of(grant.gpu_count, 'GPU')} given{share}, {busy}, {hours} GPU hours"


def _time(ran_ns: int | None, limit_ns: int | None, part: float | None) -> str:
    if ran_ns is None:
        return _UNKNOWN
    of = f" of {render.duration(limit_ns)}: {render.percent(part)}" if limit_ns is not None else ", no limit"
    return f"{render.duration(ran_ns)}{of}"


def _next_time(advice: Advice) -> list[tuple[str, str]]:
    keys = [
        f"cpus = {advice.cpus}" if advice.cpus is not None else "",
        f'memory = "{format_size(advice.memory_bytes)}"' if advice.memory_bytes is not None else "",
        f'gpu_memory = "{format_size(advice.gpu_memory_bytes)}"' if advice.gpu_memory_bytes is not None else "",
        f'time_limit = "{format_duration(advice.time_limit_ns)}"' if advice.time_limit_ns is not None else "",
    ]
    return [*(("note", note) for note in advice.notes), ("next time", "\n".join(filter(None, keys)))]


def _of_array(found: ArrayEfficiency) -> list[tuple[str, str]]:
    whole: Summary = found.summary
    limit = f" of {render.duration(whole.time_limit_ns)}" if whole.time_limit_ns is not None else ", no limit"
    given = whole.memory_bytes.most
    return [
        ("array", f"{found.job}, {count_of(whole.tasks, 'task')}: {render.counts(whole.states)}"),
        ("CPUs", f"{whole.cpus.most or 0} given to each, {_busy(whole.cpus_used, whole.cpu_efficiency)}"),
        (
            "memory",
            (f"{show_size(given)} given to each, " if given is not None else "no limit, ")
            + _spread("peak", whole.peak_memory_bytes, whole.run_time_ns, show_size),
        ),
        ("GPU hours", _gpu_hours(whole) if whole.gpu_hours else ""),
        ("time", _spread("run time", whole.run_time_ns, whole.run_time_ns, render.duration) + limit),
        *_next_time(whole.advice),
    ]


def _gpu_hours(whole: Summary) -> str:
    part = whole.gpu_efficiency
    busy = f"{render.percent(part)} busy" if part is not None else "use unknown"
    energy = f", {render.energy(whole.energy_mj)}" if whole.energy_mj is not None else ""
    return f"{render.fine(whole.gpu_hours)}, {busy}{energy}"


def _spread(what: str, spread: Spread, ended: Spread, show: Callable[[int], str]) -> str:
    if spread.median is None or spread.most is None:
        return f"{what} {_UNKNOWN}"
    of = f" (known for {spread.known} of {ended.known})" if spread.known < ended.known else ""
    return f"median {show(spread.median)}, {show(spread.most)} at most{of}"
