"""What is changed of a trace before it is simulated: who states time limits, and the load of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from msgspec.structs import replace

from spool.core.errors import SpoolError
from spool.core.model import Machine, Policy, Spec
from spool.extras.simulate.simulation import SimulatedJob
from spool.extras.simulate.workload import UNKNOWN_USER, Workload, fitting

_SEED = 0  # so that the same users state a limit in every run


def prepared(
    workload: Workload, machine: Machine, limits: float, load: float | None
) -> tuple[tuple[SimulatedJob, ...], float | None]:
    """Return the jobs that fit the machine, that share of whose users states limits, and their load.

    *load*: the times between submissions are stretched or compressed to that load; None: they stay.
    """
    coming = fitting(workload, machine, Policy())
    own = load_of(coming, machine)
    if load is not None and coming:
        if not own:
            raise SpoolError(f"{workload.source}: its jobs arrive at once, and have no load to scale")
        first, factor = min(each.submit_at_ns for each in coming), own / load
        stretched = (first + round((each.submit_at_ns - first) * factor) for each in coming)
        coming = tuple(replace(each, submit_at_ns=at_ns) for each, at_ns in zip(coming, stretched, strict=True))
        own = load_of(coming, machine)
    return stating_limits(coming, limits), own


def load_of(coming: Sequence[SimulatedJob], machine: Machine) -> float | None:
    """Return the work of jobs, processors times run time, as a share of the machine's up to the last submission.

    That of GPUs if it is larger; None if all jobs arrive at once.
    """
    submitted = [each.submit_at_ns for each in coming]
    span_ns = max(submitted, default=0) - min(submitted, default=0)
    if not span_ns:
        return None
    work = sum(each.spec.request.cpus * each.duration_ns for each in coming) / (machine.cpus * span_ns)
    if not machine.gpus:
        return work
    gpu_work = sum(each.spec.request.gpus * each.duration_ns for each in coming)
    return max(work, gpu_work / (len(machine.gpus) * span_ns))


def stating_limits(coming: Sequence[SimulatedJob], share: float) -> tuple[SimulatedJob, ...]:
    """Return the jobs with time limits for only that share of the users: always the same users.

    If all jobs are one user's, or a job's user is unknown, each job is drawn separately.
    """
    if share >= 1:
        return tuple(coming)
    draw = Random(_SEED)
    users = sorted({each.user for each in coming} - {UNKNOWN_USER})
    if len(users) == 1:
        users = []
    draw.shuffle(users)
    stating = {user: at < int(share * len(users) + 0.5) for at, user in enumerate(users)}
    silent = {id(each.spec): replace(each.spec, time_limit_ns=None) for each in coming}
    equal: dict[Spec, Spec] = {}  # few shapes save time and memory
    silent = {key: equal.setdefault(spec, spec) for key, spec in silent.items()}
    return tuple(
        each
        if (stating[each.user] if each.user in stating else draw.random() < share)
        else replace(each, spec=silent[id(each.spec)])
        for each in coming
    )
