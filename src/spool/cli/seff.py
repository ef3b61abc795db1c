"""`spool seff`: requested and used resources of a job, and advice for the next request."""

from __future__ import annotations

from collections.abc import Callable

import click
from msgspec.structs import replace

from spool.cli import publicjson, render
from spool.cli.common import json_option, name_argument, one_job, opened
from spool.cli.group import Verb
from spool.core.efficiency import Advice, Efficiency, Spread, Summary
from spool.core.model import Grant
from spool.core.reasons import count_of
from spool.core.units import format_duration, format_size, show_size
from spool.query.comparison import ArrayEfficiency, RunEfficiency, compare

_UNKNOWN = "unknown"


@click.command(cls=Verb)
@name_argument
@click.option("--run", type=click.IntRange(1), metavar="N", help="The run to show. Default: the newest.")
@json_option
@click.pass_obj
def command(root: str, name: str, run: int | None, as_json: bool) -> int:
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
        render.as_json({"version": 1, **_json(found)})
    else:
        render.pairs(
            line for line in (_of_run(found) if isinstance(found, RunEfficiency) else _of_array(found)) if line[1]
        )
    return 0


def _json(found: RunEfficiency | ArrayEfficiency) -> dict[str, object]:
    if isinstance(found, ArrayEfficiency):
        return {"job": found.job, "array": True, **publicjson.plain(found.summary)}
    return {
        "job": found.used.record.job,
        "array": False,
        **publicjson.plain(found.used),
        "so_far": not found.used.ended,
        "memory_now_bytes": found.memory_now_bytes,
        "auto": found.auto,
        **publicjson.plain(found.compared),
        "runs": publicjson.plain(found.runs),
    }


def _of_run(found: RunEfficiency) -> list[tuple[str, str]]:
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
    states = ", ".join(f"{count} {state}" for state, count in whole.states.items())
    limit = f" of {render.duration(whole.time_limit_ns)}" if whole.time_limit_ns is not None else ", no limit"
    given = whole.memory_bytes.most
    return [
        ("array", f"{found.job}, {count_of(whole.tasks, 'task')}: {states}"),
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
