"""Values as `--json` prints them, and the names that it prints: those of the fields, or what one table says instead.

A field of the source that is named anew, or moves, gets a row there, so that programs read what they did before. A test
compares all names with a list.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any

from msgspec import Struct

from spool.formats.wire import render_instant

_WHOLE = (
    "Advice", "DispatcherStatus", "Efficiency", "Ending", "ExpiredRun", "Finding", "ForeignProcess", "GpuLease",
    "GpuList", "GpuUse", "Grant", "OtherFile", "PendingReason", "PoolStatus", "Preview", "Problem", "Reservation",
    "RunFilter", "Spread", "Stop", "Summary", "Suspension", "UserShare",
)  # fmt: skip
PUBLIC = {
    **dict.fromkeys(_WHOLE, "*"),
    "Explanation": """
        name place beside reasons start_at_ns must_end start_is_guess expected_run_ns expected score=order.score
        standing=order.words behind=order.behind behind_score=order.behind_score ahead=order.ahead dispatcher
        last_said at_ns engine engine_id starts_after if_finished later_than_at_ns start_unknown
        start_is_earliest room_of room_is_made preempted_for requests outcome last_lines last_lines_of doing run
        command started_at_ns time_limit_ns left_ns
    """,
    "GpuHolder": "job=run.name run=run.run user=run.user granted_bytes=run.grant.gpu_memory_bytes taken_bytes",
    "GpuStatus": """
        index=gpu.index uuid=gpu.uuid name=gpu.name vendor=gpu.vendor memory_total_bytes=gpu.memory_total_bytes
        memory_free_bytes=gpu.memory_free_bytes utilisation_percent=gpu.utilisation_percent
        memory_utilisation_percent=gpu.memory_utilisation_percent temperature_c=gpu.temperature_c power_w=gpu.power_w
        mig=gpu.mig state holders foreign=gpu.foreign reserved why_not leases
    """,
    "JobDetails": """
        name row places path file defaults problem runs dispatcher others expected_run_ns expected
        tasks=tasks.rows task_counts=tasks.counts failed_tasks=tasks.failed last_lines requests
    """,
    "JobRow": """
        name state run attempt priority cpus memory_bytes gpus resources user project tags submitted_at_ns
        started_at_ns ended_at_ns exit_code reason place progress suspended_ns suspended_at_ns array gpu_percent
        parameters metrics node left_ns left_by start_at_ns start_is_guess cpu_list *
        -beside -engine -gpu_idle_ns -gpu_use -gpu_uuids -left -problem -progress_at_ns -start -time_limit_ns
    """,
    "MachineStatus": """
        spool paused=seen.view.paused dispatcher cpus=seen.machine.cpus cpus_granted
        memory_bytes=seen.machine.memory_bytes memory_granted_bytes
        memory_available_bytes=seen.machine.memory_available_bytes disk_free_bytes=seen.machine.disk_free_bytes
        disk_floor_bytes=seen.policy.disk_floor_bytes gpus=gpus.gpus gpu_problem=gpus.problem resources
        max_running=seen.policy.max_running runs states ended problems at_ns=seen.now_ns next_dispatcher
        shared=seen.shared no_gpus_because=gpus.none_because
    """,
    "MachineUse": """
        arbiter since_at_ns cpus cpus_granted memory_bytes memory_granted_bytes gpus gpus_granted gpu_problem
        resources own others
    """,
    "MeasuredRun": """
        run=record.run state cpus=grant.cpus memory_bytes=grant.memory_bytes gpus=grant.gpu_count
        gpu_memory_bytes=grant.gpu_memory_bytes time_limit_ns started run_time_ns cpu_time_ns=record.cpu_time_ns
        peak_memory_bytes=record.peak_memory_bytes gpu_use=record.gpu_use engine
    """,
    "PoolView": "total granted free",
    "RunDetails": """
        run=record.run state reason attempt=record.attempt requeues=record.requeues metadir stdout stderr
        executor=record.executor engine_id node=record.node pid submitted_at_ns=record.submitted_at_ns
        started_at_ns=record.started_at_ns ended_at_ns=record.ended_at_ns exit_code=record.exit_code
        peak_memory_bytes=record.peak_memory_bytes cpu_time_ns=record.cpu_time_ns again=record.again
        again_at_ns=record.again_at_ns grant stop progress suspension gpu_use=record.gpu_use gpu_idle_ns
        end_is_bound=record.end_is_bound parameters=record.parameters metrics=record.metrics
        parts
    """,
    "Removal": "size_bytes runs jobs reservations problems",
    "RunHere": """
        job=run.name run=run.run user=run.user cpus=run.grant.cpus memory_bytes=run.grant.memory_bytes
        gpus=run.grant.gpu_indices resources=run.grant.resources resource_indices=run.grant.resource_indices
        started_at_ns=run.started_at_ns stopping=run.stopping engine=run.elsewhere gpu_count=run.grant.gpu_count
        suspended=run.suspended on_its_way cpu_list=run.grant.cpu_list
    """,
    "MachineSharing": "directory problem written_at_ns use",
    "StartingJob": """
        place name=job.name user=job.user priority=job.spec.priority grant expected_run_ns=standing.expected.ns
        run_is_guess=standing.expected.is_guess expected
    """,
    "Statistics": "first_end_at_ns=first_at_ns last_end_at_ns=last_at_ns",
    "Totals": """
        runs jobs outcomes success_rate retries requeues wait_median_ns wait_p90_ns wait_mean_ns timed_runs
        run_time_median_ns run_time_p90_ns run_time_sum_ns cpu_hours cpu_used_hours cpu_used_runs cpu_efficiency
        gpu_hours gpu_used_hours gpu_used_runs gpu_efficiency gpu_kwh gpu_kwh_runs resource_hours peak_cpus
        peak_cpus_at_ns peak_gpus peak_gpus_at_ns peak_memory_bytes peak_memory_job
    """,
    "WaitingJob": """
        place name=job.name user=job.user priority=job.spec.priority code reason start_at_ns=start.at_ns
        start_is_guess=start.guessed must_end=start.must_end expected_run_ns=standing.expected.ns
        run_is_guess=standing.expected.is_guess expected score=standing.score
        later_than_at_ns=start.later_than_ns start_unknown=start.unknown
    """,
}
"""By class: `name=path` in their order; a bare name is its own path. An instant loses its `_ns`, as everywhere.

"*" is all other fields but those with a "-": a new field of a job is in `--json` at once.

A class of a capability has its own names in `PUBLIC`.
"""


def row_of(kind: type[Struct]) -> list[str]:
    """Return the row of a struct: `name=path` for each public name."""
    words = (PUBLIC.get(kind.__name__) or vars(kind).get("PUBLIC") or "").split()
    named = {"*", *(word.lstrip("-") for word in words)}
    rest = (name for name in kind.__struct_fields__ if name not in named) if "*" in words else ()
    return [*(word for word in words if word[0] not in "*-"), *rest]


@cache
def names_of(kind: type[Struct]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """Return the public names of a struct, each with what gets its value."""
    words = row_of(kind)
    if not words:
        raise TypeError(f"{kind.__name__} has no public names")
    pairs = (word.partition("=") for word in words)
    return tuple((name, attrgetter(path or name)) for name, _, path in pairs)


_TABLES = frozenset({"resources", "resource_indices", "parameters", "metrics"})
"""Fields that are tables, held as pairs so that values with them can be compared and hashed."""

_IF_SHARED = frozenset({"shared", "leases", "start_is_earliest"})
"""Fields that are None, and then left out, on a machine that is not shared."""

_SCALARS = frozenset({str, int, float, bool, type(None)})


def plain(value: Any) -> Any:
    """Return *value* as JSON types."""
    if isinstance(value, Struct):
        found: dict[str, Any] = {}
        for name, get in names_of(type(value)):
            item = get(value)
            if item is None and name in _IF_SHARED:
                continue
            if name == "parts":  # of capabilities, each by its name
                found |= plain(item)
                continue
            if name.endswith("_at_ns"):
                found[name.removesuffix("_ns")] = None if item is None else render_instant(item)
            elif name in _TABLES and isinstance(item, tuple):
                found[name] = {key: plain(each) for key, each in item}
            else:
                found[name] = item if type(item) in _SCALARS else plain(item)
        return found
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [plain(item) for item in sorted(value, key=str)]
    return value
