"""`spool info` and `spool gpus`: the machine, its GPUs, what is in use, and any problems."""

from __future__ import annotations

import click

from spool.cli import publicjson, render
from spool.cli.common import json_option, viewed
from spool.cli.group import Verb
from spool.cli.telling import tell
from spool.core.gpus import stranger
from spool.core.reasons import count_of, pools_in_words
from spool.core.units import show_duration, show_size
from spool.formats.capabilities import contributed, engine_title
from spool.query import machine
from spool.query.machine import GpuHolder, GpuList, GpuState, GpuStatus, MachineStatus, RunHere, machine_status
from spool.query.shared import lease_words

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

_GPU_COLUMNS = (
    render.Column("GPU", right=True),
    render.Column("NAME", cut="middle", drop=2),
    render.Column("FREE", right=True),
    render.Column("TOTAL", right=True, drop=3),
    render.Column("BUSY", right=True, drop=4),
    render.Column("MEM BUSY", right=True, drop=5),
    render.Column("STATE"),
    render.Column("WHO", cut="words", least=12),
    render.Column("UUID", drop=6),
)
# STATE and WHO say why these are unavailable.
_IN_USE = frozenset({GpuState.EXCLUSIVE, GpuState.SHARED, GpuState.LEASED, GpuState.FOREIGN})
_GPU_STYLES = {
    GpuState.IDLE: "green", GpuState.EXCLUSIVE: "", GpuState.SHARED: "", GpuState.LEASED: "",
    GpuState.FOREIGN: "yellow", GpuState.UNUSED: "dim", GpuState.PROBLEM: "red",
}  # fmt: skip


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
    seen, cpus = found.seen, found.cpus_granted
    elsewhere = seen.shared.cpus_elsewhere(cpus) if seen.shared is not None else 0
    others = f"{elsewhere} granted to others, " if elsewhere else ""
    lines = [
        ("spool", f"{found.spool}{'  (paused: no job starts)' if seen.view.paused else ''}"),
        ("dispatcher", _dispatcher(found)),
        ("CPUs", f"{seen.machine.cpus}, {cpus} granted, {others}{found.cpus_free} free"),
        ("memory", _memory(found)),
        ("GPUs", _gpus(found.gpus)),
        *((name, f"{use.total}, {use.granted} granted, {use.free} free") for name, use in found.resources.items()),
        ("disk", _disk(found)),
        *_runs(found),
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
    if seen.shared is not None:
        for _, print_users in contributed("on_info"):
            print_users(seen.shared, seen.now_ns)
    if found.runs:
        render.say()
        rows = [_row(each, seen.now_ns) for each in found.runs]
        kept = [at for at, column in enumerate(_COLUMNS) if column.title != "RESOURCES" or any(row[at] for row in rows)]
        render.table([_COLUMNS[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _row(each: RunHere, now_ns: int) -> list[str]:
    run, grant = each.run, each.run.grant
    return [
        run.name,
        run.user,
        str(grant.cpus),
        render.size(grant.memory_bytes),
        ",".join(map(str, grant.gpu_indices)) if run.elsewhere is None else count_of(grant.gpu_count, "GPU"),
        pools_in_words(grant.resources, grant.resource_indices),
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
        parts.append(f"for {show_duration(found.seen.now_ns - one.since_at_ns)}")
    if one.heartbeat_at_ns is not None:
        parts.append(f"heartbeat {show_duration(max(0, found.seen.now_ns - one.heartbeat_at_ns))} ago")
    if one.silent_ns is not None:
        parts.append("NO RECENT HEARTBEAT")
    if one.lock_astray:
        parts.append(_ASTRAY)
    return ", ".join(parts)


def _memory(found: MachineStatus) -> str:
    seen, granted_bytes = found.seen, found.memory_granted_bytes
    others_bytes = seen.shared.memory_elsewhere_bytes(granted_bytes) if seen.shared is not None else 0
    parts = [
        f"{show_size(seen.machine.memory_bytes)} after the reserve",
        f"{show_size(granted_bytes)} granted",
        *([f"{show_size(others_bytes)} granted to others"] if others_bytes else []),
        f"{show_size(found.memory_not_granted_bytes)} not granted",
    ]
    if seen.machine.memory_available_bytes is not None:
        parts.append(f"{show_size(seen.machine.memory_available_bytes)} actually available")
    return ", ".join(parts)


def _runs(found: MachineStatus) -> list[tuple[str, str]]:
    most = found.seen.policy.max_running
    if most is None:
        return []
    return [("runs", f"{len(found.runs)} of {most}{': the spool is full' if len(found.runs) >= most else ''}")]


def _gpus(found: GpuList) -> str:
    if found.problem is not None:
        return f"unknown: {found.problem}"
    if not found.gpus:
        return f"none: {found.none_because}"
    states: dict[str, list[str]] = {}
    for each in found.gpus:
        is_kept = each.state is GpuState.IDLE and each.why_not is not None
        states.setdefault("reserved" if is_kept else each.state, []).append(str(each.gpu.index))
    return f"{len(found.gpus)}: " + "; ".join(f"{state} {', '.join(each)}" for state, each in states.items())


def _disk(found: MachineStatus) -> str:
    free, floor = found.seen.machine.disk_free_bytes, found.seen.policy.disk_floor_bytes
    if free is None:
        return "unknown"
    low = ", too little to start jobs" if free < floor else ""
    return f"{show_size(free)} free, floor {show_size(floor)}{low}"


@click.command("gpus", cls=Verb)
@json_option
@click.pass_obj
def gpus(root: str, as_json: bool) -> int:
    """Show each GPU: its memory, who uses it, what else runs on it, and why it is unavailable.

    The values come from the dispatcher if it watches the GPUs, so that you see what it bases decisions on; otherwise
    from NVML. STATE is idle, exclusive (one run has it), shared (runs that set gpu_memory), leased (another user of a
    shared machine has it, or a part), foreign (processes outside spool are on it), unused (excluded by gpu.use) or
    problem. BUSY is the share of recent time in which it computed, MEM BUSY in which it read or wrote its memory; empty
    if NVML does not report them.

      spool gpus
      spool gpus --json | jq '.gpus[] | select(.why_not == null) | .index'

    By hand: nvidia-smi; grep gpu jobs/*/*/grant.toml
    """
    found = machine.gpus(viewed(root))
    if as_json:
        render.as_json({"version": 1, **publicjson.plain(found)})
        return 0
    if found.gpus:
        styles = [_GPU_STYLES[each.state] for each in found.gpus]
        render.table(_GPU_COLUMNS, [_gpu_row(each) for each in found.gpus], styles)
    elif found.problem is None:
        tell(f"no GPUs: {found.none_because}")
    for each in found.gpus:
        if each.why_not is not None and each.state not in _IN_USE:
            name = f"GPU {each.gpu.index}"
            render.prose(f"{name} is unavailable: {each.why_not.removeprefix(f'{name}: ')}")
    for line in found.reserved:
        render.prose(f"reserved: {line}")
    if found.problem is not None:
        tell(f"free memory is unknown, so no GPU is given out: {found.problem}")
    return 0


def _gpu_row(each: GpuStatus) -> list[str]:
    gpu = each.gpu
    who = [_holder(holder) for holder in each.holders]
    who += [lease_words(lease, render.size) for lease in each.leases or ()]
    who += [stranger(one, render.size(one.memory_bytes)) for one in gpu.foreign]
    who += [f"reserved {line}" for line in each.reserved]
    return [
        str(gpu.index),
        gpu.name,
        render.size(gpu.memory_free_bytes) or "?",
        render.size(gpu.memory_total_bytes) or "?",
        _percent(gpu.utilisation_percent),
        _percent(gpu.memory_utilisation_percent),
        each.state,
        "; ".join(who),
        gpu.uuid,
    ]


def _percent(part: int | None) -> str:
    return "" if part is None else f"{part}%"


def _holder(holder: GpuHolder) -> str:
    taken = f"uses {render.size(holder.taken_bytes)}" if holder.taken_bytes is not None else ""
    run, share = holder.run, holder.run.grant.gpu_memory_bytes
    granted = f"granted {render.size(share)}" if share is not None else ""
    tail = ", ".join(filter(None, [run.user, granted, taken]))
    return f"{run.name} ({tail})"
