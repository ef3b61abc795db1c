"""What a dispatcher and an arbiter say of a spool and its machine, for tests that have neither."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spool.core import layout
from spool.core.model import SECOND_NS, ForeignProcess, Grant, Request, Result, State
from spool.formats.run_records import render_history
from spool.formats.state import GpuUseView, GpuView, JobView, MachineView, PoolView, StateView, render_state
from spool.query import shared
from spool.query.shared import GpuShare, MachineSharing, MachineUse, UserShare
from spool.store.ownership import this_user

G = 1 << 30
HOUR_NS = 3600 * SECOND_NS
BOB = UserShare(user="bob", leases=2, cpus=5, memory_bytes=8 * G, gpus=1, resources={"licence": 1}, asks=4)


def a_machine(cpus: int = 16, memory_bytes: int = 64 * G, **more: object) -> MachineView:
    """Return a machine of which nothing is taken."""
    free = {"cpus_free": cpus, "memory_free_bytes": memory_bytes}
    return MachineView(cpus=cpus, memory_bytes=memory_bytes, **{**free, **more})  # type: ignore[arg-type]


def a_view(now_ns: int, **more: object) -> StateView:
    """Return what a dispatcher says that has nothing to do."""
    given = {"version": 1, "at_ns": now_ns, "pid": 1, "host": "box", "machine": a_machine(), **more}
    return StateView(**given)  # type: ignore[arg-type]


def a_running_job(now_ns: int, *, hours: float = 1.0, limit_hours: float | None = 2.0, **more: object) -> JobView:
    """Return a job that has run for so long."""
    given = {
        "state": "running",
        "run": 1,
        "cpus": 4,
        "memory_bytes": 8 * G,
        "gpus": 0,
        "user": "alice",
        "submitted_at_ns": now_ns - int((hours + 0.5) * HOUR_NS),
        "started_at_ns": now_ns - int(hours * HOUR_NS),
        "time_limit_ns": int(limit_hours * HOUR_NS) if limit_hours is not None else None,
        **more,
    }
    return JobView(**given)  # type: ignore[arg-type]


def a_waiting_job(now_ns: int, reason: str, **more: object) -> JobView:
    """Return a job that has waited for ten minutes."""
    given = {"state": "queued", "cpus": 1, "user": "bob", "submitted_at_ns": now_ns - 600 * SECOND_NS, "reason": reason}
    return JobView(**{**given, **more})  # type: ignore[arg-type]


def a_gpu_view(index: int, **more: object) -> GpuView:
    """Return a GPU."""
    given = {"uuid": f"GPU-{index}", "index": index, "name": "H100", "memory_total_bytes": 80 * G}
    return GpuView(**{**given, "memory_free_bytes": 60 * G, "utilisation_percent": 87, **more})  # type: ignore[arg-type]


def an_end(now_ns: int, job: str, *, hours_ago: float, **more: object) -> Result:
    """Return a run of an hour that ended so long ago."""
    ended_at_ns = now_ns - int(hours_ago * HOUR_NS)
    given = {
        "job": job,
        "run": 1,
        "attempt": 1,
        "outcome": State.FINISHED,
        "reason": "exit code 0",
        "submitted_at_ns": ended_at_ns - 2 * HOUR_NS,
        "started_at_ns": ended_at_ns - HOUR_NS,
        "ended_at_ns": ended_at_ns,
        "user": "alice",
        "request": Request(2, G, 1),
        "grant": Grant(2, G, ("GPU-1",), (1,)),
        **more,
    }
    return Result(**given)  # type: ignore[arg-type]


def busy_view(now_ns: int) -> StateView:
    """Return a view with something of everything."""
    machine = a_machine(
        64,
        512 * G,
        cpus_free=8,
        memory_free_bytes=212 * G,
        gpus_at_ns=now_ns,
        gpus=(
            a_gpu_view(0, jobs=("train",), memory_free_bytes=G),
            a_gpu_view(1, jobs=("eval", "notebook"), taken_bytes={"eval": 20 * G}),
            a_gpu_view(2, utilisation_percent=0, foreign_processes=(ForeignProcess(4711, "python", 3 * G, "frank"),)),
            a_gpu_view(3, problem="fell off the bus"),
        ),
        resources={"licence": PoolView(total=3, granted=2)},
    )
    use = (GpuUseView(percent=93, mean_percent=71.4, peak_percent=100),)
    jobs = {
        "train": a_running_job(
            now_ns, hours=9, limit_hours=24, gpus=1, gpu_uuids=("GPU-0",), project="lora", gpu_use=use
        ),
        "eval": a_running_job(now_ns, hours=1.9, gpus=1, gpu_uuids=("GPU-1",), user="carol"),
        "notebook": a_running_job(now_ns, hours=5, limit_hours=None, gpus=1, gpu_uuids=("GPU-1",), user="dave"),
        "sweep": a_running_job(now_ns, array=True, reason="12 of 40 tasks have ended", user="bob"),
        "prep-" + "common-crawl-" * 7: a_running_job(now_ns, state="stopping", reason="time limit reached"),
        "big": a_waiting_job(now_ns, "needs 4 GPUs, and 1 is free", gpus=4, priority=50, memory_bytes=900 * G),
        "report": a_waiting_job(now_ns, "waits for eval to finish"),
        "parked": a_waiting_job(now_ns, "held by bob", state="held"),
        "broken": a_waiting_job(now_ns, 'cpus: "many" is not a number', state="invalid"),
    }
    return a_view(now_ns, host="gpu-box", machine=machine, jobs=jobs)


def busy_history(now_ns: int) -> list[Result]:
    """Return a day's runs of two users, one of which failed."""
    ended = [an_end(now_ns, f"job-{n}", hours_ago=20 - n, user="alice" if n % 3 else "bob") for n in range(18)]
    return [*ended, an_end(now_ns, "bad", hours_ago=0.5, outcome=State.FAILED, reason="exit code 1", user="bob")]


def lay(root: Path, view: StateView | None, ended: list[Result] | None = None) -> Path:
    """Write a view into a spool, and a history if there is one; return its root."""
    if view is not None:
        staged = root / layout.STAGING / "view"
        staged.write_bytes(render_state(view))
        staged.rename(root / layout.STATE)
    if ended is not None:
        (root / layout.HISTORY).write_bytes(b"".join(map(render_history, ended)))
    return root


class Arbiter:
    """An arbiter of a machine with 16 CPUs and 32 GiB, in whose stead a test says who has what of it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the spool at *root* use its machine."""
        self.directory = str(root.parent / "machine")
        (root / "config.toml").write_text(f'autostart = false\nmachine = "{self.directory}"\n')
        self.says()
        monkeypatch.setattr(shared, "only", lambda column: lambda *_: self.said)

    def says(
        self, *others: UserShare, own: Mapping[str, Any] | None = None, by_gpu: Mapping[str, Any] | None = None,
        problem: str = "", written_at_ns: int = 1,
    ) -> None:  # fmt: skip
        """Have these users share it: *own* is the part of this one, *by_gpu* has the users of each GPU by lease."""
        mine = UserShare(user=this_user(), **(own or {}))
        gpus = {
            f"GPU-{at}": GpuShare(uuid=f"GPU-{at}", index=at, users=(users,))
            for at, users in enumerate((by_gpu or {}).items())
        }
        use = MachineUse(
            arbiter=4711, since_at_ns=1, cpus=16, cpus_granted=mine.cpus + sum(each.cpus for each in others),
            memory_bytes=32 * G, memory_granted_bytes=sum(each.memory_bytes for each in (mine, *others)),
            gpus=2, gpus_granted=len(gpus), gpus_free=0, gpu_problem=None, resources={}, own=mine, others=others,
            by_gpu=gpus,
        )  # fmt: skip
        known = None if problem else use
        self.said = MachineSharing(self.directory, problem, "start it", written_at_ns, known)
