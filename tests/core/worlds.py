"""Generated spools for the properties of the planner, and what must be true in every one of them."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import GIB, NOW, S, gpus, machine
from spool.core.model import ArrayTask, Dependencies, Limits, Machine, Policy, Request, Running, Spec, Waiting

BOX = machine(cpus=4, memory=8 * GIB, gpus=gpus(4, total=8 * GIB))

REQUESTS = st.builds(
    Request,
    cpus=st.integers(0, 5),
    memory_bytes=st.sampled_from([None, None, GIB, 3 * GIB, 8 * GIB, 9 * GIB]),
    gpus=st.sampled_from([0, 0, 0, 1, 1, 2, 4, 5]),
    gpu_memory_bytes=st.sampled_from([None, None, GIB, 3 * GIB, 8 * GIB]),
)

SPECS = st.builds(
    Spec,
    command=st.just("true"),
    request=REQUESTS,
    priority=st.sampled_from([10, 10, 10, 0, 200]),
    time_limit_ns=st.sampled_from([None, 60 * S, 600 * S, 7200 * S]),
    group=st.sampled_from([None, None, "g"]),
    group_limit=st.sampled_from([None, 1, 2]),
    task=st.sampled_from([None, None, ArrayTask("sweep", 0, 1), ArrayTask("sweep", 1, 2)]),
    project=st.sampled_from([None, "p"]),
)

POLICIES = st.builds(
    Policy,
    guess_budget=st.sampled_from([0.1, 0.1, 0.0]),
    fair_share=st.booleans(),
    gpu_strategy=st.sampled_from([None, "random", "packed", "spread", "sequential"]),
    default_user_limits=st.builds(
        Limits,
        max_running_jobs=st.sampled_from([None, 2]),
        max_running_gpus=st.sampled_from([None, 3]),
        max_running_cpus=st.sampled_from([None, 3]),
        max_running_memory_bytes=st.sampled_from([None, 3 << 30]),
    ),
    default_project_limits=st.builds(Limits, max_running_jobs=st.sampled_from([None, 2])),
)

NAMES = [f"j{number}" for number in range(8)]

GATES = st.fixed_dictionaries(
    {},
    optional={
        "start_after_ns": st.integers(NOW - 5, NOW + 5),
        "scheduling_timeout_ns": st.sampled_from([0, S, 10**6 * S]),
        "depends_on": st.builds(
            Dependencies,
            all=st.lists(st.sampled_from(NAMES[:4]), max_size=2).map(tuple),
            any=st.lists(st.sampled_from(NAMES[:4]), max_size=2).map(tuple),
            ended=st.lists(st.sampled_from([*NAMES[:4], "sweep"]), max_size=1).map(tuple),
        ),
    },
)


@st.composite
def waiting(draw: st.DrawFn, names: list[str] = NAMES) -> Waiting:
    """Draw a job that waits, for something of its own perhaps."""
    waited = draw(st.integers(0, 4000))
    return Waiting(
        draw(st.sampled_from(names)),
        replace(draw(SPECS), **draw(GATES)),
        draw(st.sampled_from(["alice", "bob"])),
        NOW - waited * S,
        clock_at_ns=draw(st.sampled_from([NOW - waited * S, None])),
        not_before_ns=draw(st.sampled_from([None, None, NOW + 3])),
        executor_problem=draw(st.sampled_from([None, None, None, "no tmux"])),
    )


def over_committed(box: Machine, runs: list[Running], policy: Policy, waiting_specs: list[Spec]) -> list[str]:
    """Return what these runs have more of than there is: counted plainly, by nothing that the planner uses."""
    wrong = []
    if sum(run.grant.cpus for run in runs) > box.cpus:
        wrong.append("cpus")
    if sum(run.grant.memory_bytes or 0 for run in runs) > box.memory_bytes:
        wrong.append("memory")
    for gpu in box.gpus:
        here = [run.grant for run in runs if gpu.uuid in run.grant.gpu_uuids]
        alone = [grant for grant in here if grant.gpu_memory_bytes is None]
        shared = sum(grant.gpu_memory_bytes or 0 for grant in here)
        if (alone and len(here) > 1) or shared > (gpu.memory_total_bytes or 0):
            wrong.append(gpu.uuid)
    wrong += [run.name for run in runs if len(set(run.grant.gpu_uuids)) != run.spec.request.gpus]
    specs = [run.spec for run in runs] + waiting_specs
    limits = [spec.group_limit for spec in specs if spec.group and spec.group_limit is not None]
    if limits and sum(run.spec.group is not None for run in runs) > min(limits):
        wrong.append("group")
    limits = [spec.task.max_running for spec in specs if spec.task]
    if limits and sum(run.spec.task is not None for run in runs) > min(limits):
        wrong.append("array")
    owners = [(policy.default_user_limits, [run for run in runs if run.user == name]) for name in ("alice", "bob")]
    owners.append((policy.default_project_limits, [run for run in runs if run.spec.project is not None]))
    for most, mine in owners:
        used = {
            "max_running_jobs": len(mine),
            "max_running_gpus": sum(len(run.grant.gpu_uuids) for run in mine),
            "max_running_cpus": sum(run.grant.cpus for run in mine),
            "max_running_memory_bytes": sum(run.grant.memory_bytes or 0 for run in mine),
        }
        limits = {name: getattr(most, name) for name in used}
        wrong += [name for name, limit in limits.items() if limit is not None and used[name] > limit]
    return wrong
