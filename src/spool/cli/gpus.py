"""`spool gpus`: each GPU, who uses it, and why it is unavailable."""

from __future__ import annotations

import click

from spool.cli import publicjson, render
from spool.cli.common import json_option, viewed
from spool.cli.group import Verb
from spool.cli.telling import tell
from spool.core.gpus import stranger
from spool.query.machine import GpuHolder, GpuState, GpuStatus, gpus
from spool.query.shared import lease_words

_COLUMNS = (
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
_STYLES = {
    GpuState.IDLE: "green", GpuState.EXCLUSIVE: "", GpuState.SHARED: "", GpuState.LEASED: "",
    GpuState.FOREIGN: "yellow", GpuState.UNUSED: "dim", GpuState.PROBLEM: "red",
}  # fmt: skip


@click.command(cls=Verb)
@json_option
@click.pass_obj
def command(root: str, as_json: bool) -> int:
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
    found = gpus(viewed(root))
    if as_json:
        render.as_json({"version": 1, **publicjson.plain(found)})
        return 0
    if found.gpus:
        render.table(_COLUMNS, [_row(each) for each in found.gpus], [_STYLES[each.state] for each in found.gpus])
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


def _row(each: GpuStatus) -> list[str]:
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
