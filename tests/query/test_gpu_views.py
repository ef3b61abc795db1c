"""What a run does with its GPUs is the same in every view, from its first look on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cli.records import TRUE, begin, serve
from spool.core import layout
from spool.core.gpuuse import GpuWatch
from spool.core.model import GpuWork, Grant
from spool.formats import run_records
from spool.formats.state import GpuUseView, JobView, parse_state
from spool.machine.processes import MachineProber
from spool.query.details import RunEfficiency, compare, job_details
from spool.query.jobs import list_jobs
from spool.store.spool import Service, Spool

S = 1_000_000_000


@pytest.mark.parametrize("written", [True, False], ids=["an old record", "no record"])
def test_state_json_is_believed_before_the_record_while_a_dispatcher_lives(
    spool_root: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """`seff`, `show` and `ls` tell the last look, though the record is older; without a dispatcher that."""
    now = time.time_ns()
    old = GpuWatch.since(now - 20 * S, 1).looked(now - 18 * S, [GpuWork("x", 0, 1 << 20)], 60 * S)
    new = old.looked(now - 2 * S, [GpuWork("x", 80, 1 << 30)], 60 * S).looked(now, [GpuWork("x", 0, 1 << 30)], 60 * S)
    metadir = begin(spool_root, "x", f"{TRUE}gpus = 1\n", Grant(1, None, ("GPU-1",), (0,)), now - 20 * S)
    if written:
        (metadir / layout.GPUS).write_bytes(run_records.render_gpus(old))
    said = JobView(
        state="running", run=1, gpus=1, gpu_uuids=("GPU-1",), gpu_use=GpuUseView.of(new), gpu_idle_ns=new.idle_ns
    )
    serve(monkeypatch, spool_root, {"x": said}, at_ns=now)
    spool = Spool(str(spool_root))
    monkeypatch.setattr(MachineProber, "is_wrapper", lambda *_: True)  # this process stands for it
    view = parse_state((spool_root / layout.STATE).read_bytes())
    assert view is not None
    known = tuple(each.use() for each in view.jobs["x"].gpu_use)
    found = compare(spool, "x")
    assert isinstance(found, RunEfficiency)
    details = job_details(spool, "x").runs[-1]
    assert (found.used.record.gpu_use, details.record.gpu_use, details.gpu_idle_ns) == (known, known, 2 * S)
    assert list_jobs(spool).rows[0].gpu_percent == 0
    assert round(known[0].mean_percent or 0) == round(100 * (found.compared.gpu_efficiency or 0))
    monkeypatch.setattr(Spool, "service", lambda self: Service.NONE)
    assert job_details(spool, "x").runs[-1].record.gpu_use == (old.gpus if written else ())
