"""Builders for the planner's tests: values with everything left out that a test does not speak of."""

from __future__ import annotations

import re
from datetime import UTC
from typing import Any

from msgspec.structs import replace

from spool.core.forecast import StartForecast, forecast
from spool.core.model import (
    ArrayTask,
    Dependencies,
    Gpu,
    Grant,
    Machine,
    Policy,
    Request,
    Running,
    Spec,
    Suspension,
    Waiting,
)
from spool.core.priority import Past
from spool.core.queue import WaitingQueue
from spool.core.reasons import in_words
from spool.core.resources import Runs
from spool.core.scheduler import Plan, View, decide

S = 1_000_000_000
GIB = 1 << 30
NOW = 1_767_268_800 * S  # 2026-01-01 12:00 UTC

_REQUEST = set(Request.__struct_fields__)


def at(clock: str) -> int:
    """Return the instant at which a clock shows *clock* ("HH:MM") on the day of NOW."""
    hours, minutes = map(int, clock.split(":"))
    return NOW + ((hours - 12) * 3600 + minutes * 60) * S


def spec(**values: Any) -> Spec:
    """Return a spec; request fields are given beside the others."""
    asked = {key: values.pop(key) for key in list(values) if key in _REQUEST}
    if "gpu_type" in values:
        names = values.pop("gpu_type")
        asked["gpu_types"] = (names,) if isinstance(names, str) else tuple(names or ())
    if values.get("task") is not None and not isinstance(values["task"], ArrayTask):
        values["task"] = ArrayTask(*values["task"])
    if "depends_on" in values and not isinstance(values["depends_on"], Dependencies):
        names = values["depends_on"]
        values["depends_on"] = Dependencies(all=(names,) if isinstance(names, str) else tuple(names))
    return Spec(command="true", request=Request(**asked), **values)


def job(name: str, *, user: str = "alice", waited: int = 0, arrived: int | None = None, **values: Any) -> Waiting:
    """Return a job that has waited for *waited* seconds."""
    since = NOW - waited * S
    own = {
        key: values.pop(key)
        for key in ("waited_ns_before", "attempt", "not_before_ns", "executor_problem")
        if key in values
    }
    clock = values.pop("clock_at_ns", since)
    arrived_at_ns = since if arrived is None else arrived
    return Waiting(name, spec(**values), user, arrived_at_ns, clock_at_ns=clock, **own)


def grant_of(request: Request, gpus: tuple[int, ...] = ()) -> Grant:
    """Return what *request* gets, on the GPUs of these indices."""
    return Grant(
        request.cpus,
        request.memory_bytes,
        tuple(f"GPU-{index}" for index in gpus),
        gpus,
        request.gpu_memory_bytes if gpus else None,
    )


def run(
    name: str, *, user: str = "alice", ran: int = 60, on: tuple[int, ...] = (), stopping: bool = False,
    suspended: tuple[int, int | None] = (0, None), **values: Any,
) -> Running:  # fmt: skip
    """Return a run that started *ran* seconds ago, on the GPUs of the indices *on*.

    *suspended*: for how many seconds before, and since how many it is; None: it is not.
    """
    before, since = suspended
    at = None if since is None else NOW - since * S
    what = spec(gpus=len(on), **values)
    return Running(name, 1, user, what, grant_of(what.request, on), NOW - ran * S, stopping=stopping,
                   suspension=Suspension(before * S, at, at))  # fmt: skip


def gpus(
    number: int, name: str = "NVIDIA A100-SXM4-80GB", total: int | None = 80 * GIB, **values: Any
) -> tuple[Gpu, ...]:
    """Return *number* GPUs with nobody on them."""
    free = values.pop("memory_free_bytes", total)
    return tuple(Gpu(f"GPU-{index}", index, name, total, free, **values) for index in range(number))


def machine(cpus: int = 4, memory: int = 64 * GIB, **values: Any) -> Machine:
    """Return a machine."""
    if isinstance(values.get("gpus"), int):
        values["gpus"] = gpus(values["gpus"])
    return Machine(cpus, memory, **values)


def view(*jobs: Waiting, on: Machine | None = None, **values: Any) -> View:
    """Return a view with these jobs in the queue."""
    if not isinstance(values.get("held", {}), dict):
        values["held"] = {each.name: each for each in values["held"]}
    past = values.setdefault("past", Past(Policy()))
    values["running"] = Runs(values.get("running", ()), past.run_times)
    return View(on or machine(), WaitingQueue(jobs), **values)


def used(policy: Policy | None = None, **amounts: float) -> Past:
    """Return a past in which these users (or projects) have used so much, and nothing else has happened."""
    past = Past(policy or Policy())
    for key, amount in amounts.items():
        past.shares.change(key, amount, NOW - S)
        past.shares.change(key, -amount, NOW)
    return past


def plan(*jobs: Waiting, now: int = NOW, policy: Policy | None = None, **values: Any) -> Plan:
    """Decide over these jobs."""
    return decide(view(*jobs, **values), now, policy or Policy())


def foretold(found: Plan, name: str) -> StartForecast | None:
    """Return what is foretold of the start of *name*; None where it starts by the plan itself, or has no time."""
    told = forecast(found, [name]).get(name)
    return None if told is None or told.at_ns is None or name in started(found) else told


def started(found: Plan) -> list[str]:
    """Return who starts, in order."""
    return [start.name for start in found.starts]


def why(found: Plan, name: str) -> str:
    """Return the first reason for which *name* waits, as it reads now."""
    return in_words(str(found.reason(name)), found.now_ns, UTC)


def numbers(found: Plan, name: str) -> list[int]:
    """Return the numbers of the first reason for which *name* waits."""
    return [int(number) for number in re.findall(r"\b\d+\b", why(found, name))]


def code(found: Plan, name: str) -> str | None:
    """Return what kind of reason comes first for which *name* waits."""
    reason = found.reason(name)
    return None if reason is None else reason.code


def later(one: Waiting, seconds: int) -> Waiting:
    """Return the job as if it had arrived that much later."""
    return replace(one, arrived_at_ns=one.arrived_at_ns + seconds * S)
