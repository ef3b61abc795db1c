"""`spool info`: the machine, what is in use, and any problems."""

from __future__ import annotations

import click

from spool.cli import publicjson, render
from spool.cli.common import json_option, viewed
from spool.cli.group import Verb
from spool.core.names import engine_title
from spool.core.pools import in_words
from spool.core.reasons import count_of
from spool.core.units import show_duration, show_size
from spool.formats.capabilities import contributed
from spool.query.machine import GpuState, MachineStatus, RunHere, machine_status

_COLUMNS = (
    render.Column("JOB", cut="middle"),
    render.Column("USER", cut="middle", drop=3),
    render.Column("CPU", right=True),
    render.Column("MEM", right=True, drop=2),
    render.Column("GPU", cut="words"),
    render.Column("RESOURCES", cut="words", drop=1),
    render.Column("FOR", right=True),
    render.Column(""),
)


@click.command(cls=Verb)
@json_option
@click.pass_obj
def command(root: str, as_json: bool) -> int:
    """Show the machine, what is in use, how many jobs there are, and any problems.

    It reads the machine and the files afresh and needs no dispatcher; GPU values come from the dispatcher if it watches
    them. `spool gpus` shows more about GPUs, `spool doctor` about problems.

      spool info
      spool info --json | jq .states

    By hand: nproc; free; df .; ls running; cat state.json
    """
    spool = viewed(root)
    found = machine_status(spool)
    if as_json:
        render.as_json({"version": 1, **publicjson.plain(found)})
    else:
        _print(found, "unknown" if spool.unread else "")
    return 0


def _print(found: MachineStatus, unknown: str) -> None:
    lines = [
        ("spool", f"{found.spool}{'  (paused: no job starts)' if found.paused else ''}"),
        ("dispatcher", _dispatcher(found)),
        ("CPUs", f"{found.cpus}, {found.cpus_granted} granted, {_elsewhere(found)}{found.cpus_free} free"),
        ("memory", _memory(found)),
        ("GPUs", _gpus(found)),
        *((name, f"{use.total}, {use.granted} granted, {use.free} free") for name, use in found.resources.items()),
        ("disk", _disk(found)),
        *([("runs", _runs(found))] if found.max_running is not None else []),
        (
            "jobs",
            ", ".join(f"{number} {state}" for state, number in found.states.items()) or unknown or "no active jobs",
        ),
        (
            "last day",
            ", ".join(f"{number} {outcome}" for outcome, number in found.ended.items()) or unknown or "no jobs ended",
        ),
    ]
    render.pairs(lines)
    for problem in found.problems:
        render.prose(f"problem: {problem}")
    if found.shared is not None:
        for _, print_users in contributed("on_info"):
            print_users(found.shared, found.at_ns)
    if found.runs:
        render.say()
        rows = [_row(each, found.at_ns) for each in found.runs]
        kept = [at for at, column in enumerate(_COLUMNS) if column.title != "RESOURCES" or any(row[at] for row in rows)]
        render.table([_COLUMNS[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _elsewhere(found: MachineStatus) -> str:
    return f"{found.cpus_elsewhere} granted to others, " if found.cpus_elsewhere else ""


def _row(each: RunHere, now_ns: int) -> list[str]:
    run, grant = each.run, each.run.grant
    return [
        run.name,
        run.user,
        str(grant.cpus),
        render.size(grant.memory_bytes),
        ",".join(map(str, grant.gpu_indices)) if run.elsewhere is None else count_of(grant.gpu_count, "GPU"),
        in_words(grant.resources, grant.resource_indices),
        render.duration(now_ns - run.started_at_ns),
        _remark(each),
    ]


def _remark(each: RunHere) -> str:
    run = each.run
    if run.stopping or run.suspended:
        return "stopping" if run.stopping else "suspended"
    if run.elsewhere is None:
        return ""
    return f"{'on its way to' if each.on_its_way else 'in'} {engine_title(run.elsewhere)}"


_ASTRAY = "ITS .lock WAS DELETED OR REPLACED: it creates a new one soon"


def _dispatcher(found: MachineStatus) -> str:
    one = found.dispatcher
    if one is None:
        return found.next_dispatcher
    if one.pid is None:
        return "running; no heartbeat yet" + (f", {_ASTRAY}" if one.lock_astray else "")
    parts = [f"pid {one.pid}"]
    if one.since_at_ns is not None:
        parts.append(f"for {show_duration(found.at_ns - one.since_at_ns)}")
    if one.heartbeat_at_ns is not None:
        parts.append(f"heartbeat {show_duration(max(0, found.at_ns - one.heartbeat_at_ns))} ago")
    if one.silent_ns is not None:
        parts.append("NO RECENT HEARTBEAT")
    if one.lock_astray:
        parts.append(_ASTRAY)
    return ", ".join(parts)


def _memory(found: MachineStatus) -> str:
    parts = [
        f"{show_size(found.memory_bytes)} after the reserve",
        f"{show_size(found.memory_granted_bytes)} granted",
        *([f"{show_size(found.memory_elsewhere_bytes)} granted to others"] if found.memory_elsewhere_bytes else []),
        f"{show_size(found.memory_not_granted_bytes)} not granted",
    ]
    if found.memory_available_bytes is not None:
        parts.append(f"{show_size(found.memory_available_bytes)} actually available")
    return ", ".join(parts)


def _runs(found: MachineStatus) -> str:
    return f"{len(found.runs)} of {found.max_running}{': the spool is full' if found.is_full else ''}"


def _gpus(found: MachineStatus) -> str:
    if found.gpu_problem is not None:
        return f"unknown: {found.gpu_problem}"
    if not found.gpus:
        return f"none: {found.no_gpus_because}"
    states: dict[str, list[str]] = {}
    for each in found.gpus:
        is_kept = each.state is GpuState.IDLE and each.why_not is not None
        states.setdefault("reserved" if is_kept else each.state, []).append(str(each.gpu.index))
    return f"{len(found.gpus)}: " + "; ".join(f"{state} {', '.join(each)}" for state, each in states.items())


def _disk(found: MachineStatus) -> str:
    if found.disk_free_bytes is None:
        return "unknown"
    low = ", too little to start jobs" if found.is_disk_low else ""
    return f"{show_size(found.disk_free_bytes)} free, floor {show_size(found.disk_floor_bytes)}{low}"
