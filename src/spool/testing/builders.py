"""Values for tests, with sensible defaults for everything that a test does not set.

Sizes and durations are written as in a job file (`"16G"`, `"2h"`) or given as integers of bytes and nanoseconds. GPU
number i has the UUID `GPU-i`, and a run that requests GPUs has the first ones by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spool.core.model import (
    SECOND_NS,
    Dependencies,
    ForeignProcess,
    Gpu,
    Grant,
    Machine,
    Request,
    Result,
    Running,
    Spec,
    State,
    Waiting,
)
from spool.core.units import parse_duration, parse_size

NOW_NS = 1_800_000_000 * SECOND_NS
"""The default instant of every value."""


_REQUESTED = frozenset({"cpus", "memory", "gpus", "gpu_memory", "gpu_type", "gpu_min_memory", "resources"})


def gpu_uuid(index: int) -> str:
    """Return the UUID of GPU number *index*."""
    return f"GPU-{index}"


def a_request(
    *,
    cpus: int = 1,
    memory: str | int | None = None,
    gpus: int = 0,
    gpu_memory: str | int | None = None,
    gpu_type: str | tuple[str, ...] = (),
    gpu_min_memory: str | int | None = None,
    resources: Mapping[str, int] | None = None,
) -> Request:
    """Return a request: by default one processor and nothing else."""
    named = tuple(sorted((resources or {}).items()))
    types = (gpu_type,) if isinstance(gpu_type, str) else gpu_type
    least = _size(gpu_min_memory)
    return Request(cpus, _size(memory), gpus, _size(gpu_memory), types, named, gpu_min_memory_bytes=least)


def a_spec(
    command: str | tuple[str, ...] = "true",
    *,
    time_limit: str | int | None = None,
    scheduling_timeout: str | int | None = None,
    depends_on: Iterable[str] | Dependencies | None = None,
    **fields: Any,
) -> Spec:
    """Return a spec: by default a command that does nothing. *fields* are others of `Spec`, and keys of `a_request`."""
    if depends_on is not None and not isinstance(depends_on, Dependencies):
        depends_on = Dependencies(all=tuple(depends_on))
    requested = {key: fields.pop(key) for key in fields.keys() & _REQUESTED}
    return Spec(
        command,
        request=fields.pop("request", None) or a_request(**requested),
        time_limit_ns=_duration(time_limit),
        scheduling_timeout_ns=_duration(scheduling_timeout),
        depends_on=depends_on,
        **fields,
    )


def a_job(
    name: str = "job",
    *,
    spec: Spec | None = None,
    user: str = "alice",
    arrived_at_ns: int = NOW_NS,
    attempt: int = 1,
    not_before_ns: int | None = None,
    **keys: Any,
) -> Waiting:
    """Return a waiting job whose clock runs since its arrival.

    *keys* are those of `a_spec`; *spec*, if given, replaces everything from the file.
    """
    return Waiting(
        name,
        a_spec(**keys) if spec is None else spec,
        user,
        arrived_at_ns,
        clock_at_ns=arrived_at_ns,
        attempt=attempt,
        not_before_ns=not_before_ns,
    )


def a_grant(request: Request | None = None, *, on: Iterable[int] | None = None) -> Grant:
    """Return the grant of exactly *request*, on the GPUs *on*: by default the first ones."""
    request = request or Request()
    indices = tuple(range(request.gpus) if on is None else on)
    return Grant(
        cpus=request.cpus,
        memory_bytes=request.memory_bytes,
        gpu_uuids=tuple(gpu_uuid(index) for index in indices),
        gpu_indices=indices,
        gpu_memory_bytes=request.gpu_memory_bytes,
        resources=request.resources,
    )


def a_run(
    name: str = "run",
    *,
    on: Iterable[int] | None = None,
    spec: Spec | None = None,
    grant: Grant | None = None,
    user: str = "alice",
    run: int = 1,
    attempt: int = 1,
    started_at_ns: int = NOW_NS,
    stopping: bool = False,
    **keys: Any,
) -> Running:
    """Return a live run with its request granted on the GPUs *on*, by default the first ones.

    *keys* are those of `a_spec`; *spec*, if given, replaces everything from the file.
    """
    indices = None if on is None else tuple(on)
    if spec is None:
        spec = a_spec(**keys if indices is None else keys | {"gpus": len(indices)})
    return Running(
        name,
        run,
        user,
        spec,
        a_grant(spec.request, on=indices) if grant is None else grant,
        started_at_ns,
        attempt,
        stopping,
    )


def a_gpu(
    index: int = 0,
    *,
    uuid: str | None = None,
    name: str = "NVIDIA H100 80GB HBM3",
    memory: str | int | None = "80G",
    used: str | int = 0,
    foreign: Iterable[ForeignProcess] = (),
    taken: Iterable[tuple[str, str | int]] = (),
    problem: str | None = None,
) -> Gpu:
    """Return an idle GPU.

    *used* is the memory in use, by any process; *taken* each job's part of it.
    """
    total = _size(memory)
    return Gpu(
        uuid=gpu_uuid(index) if uuid is None else uuid,
        index=index,
        name=name,
        memory_total_bytes=total,
        memory_free_bytes=None if total is None or problem is not None else total - (_size(used) or 0),
        foreign=tuple(foreign),
        problem=problem,
        taken_bytes=tuple((job, _size(size) or 0) for job, size in taken),
    )


def a_machine(
    cpus: int = 4,
    gpus: int | Iterable[Gpu] = 2,
    *,
    memory: str | int = "16G",
    available: str | int | None = None,
    gpu_problem: str | None = None,
    disk_free: str | int | None = "100G",
) -> Machine:
    """Return an idle machine with that number of idle GPUs, or the given ones.

    *available* None: all of *memory*.
    """
    return Machine(
        cpus=cpus,
        memory_bytes=_size(memory) or 0,
        memory_available_bytes=_size(memory if available is None else available),
        gpus=tuple(a_gpu(index) for index in range(gpus)) if isinstance(gpus, int) else tuple(gpus),
        gpu_problem=gpu_problem,
        disk_free_bytes=_size(disk_free),
    )


def a_result(
    job: str = "job",
    outcome: State = State.FINISHED,
    *,
    run: int = 1,
    attempt: int = 1,
    reason: str = "",
    exit_code: int | None = None,
    submitted_at_ns: int = NOW_NS,
    waited: str | int = 0,
    ran: str | int = "60s",
    user: str = "alice",
    project: str | None = None,
    request: Request | None = None,
) -> Result:
    """Return the result of a run with the given waiting and run times. Exit code 0 if finished, 1 if failed."""
    started_at_ns = submitted_at_ns + (_duration(waited) or 0)
    if exit_code is None:
        exit_code = {State.FINISHED: 0, State.FAILED: 1}.get(outcome)
    request = request or Request()
    return Result(
        job,
        run,
        attempt,
        outcome,
        reason,
        submitted_at_ns=submitted_at_ns,
        started_at_ns=started_at_ns,
        ended_at_ns=started_at_ns + (_duration(ran) or 0),
        exit_code=exit_code,
        user=user,
        project=project,
        request=request,
        grant=a_grant(request),
    )


def _size(value: str | int | None) -> int | None:
    return parse_size(value) if isinstance(value, str) else value


def _duration(value: str | int | None) -> int | None:
    return parse_duration(value) if isinstance(value, str) else value
