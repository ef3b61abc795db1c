"""Values as `--json` prints them, and the names of those that contain another value: each, and where it is found.

A struct that is not in the table is printed with the names of its own fields.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any

from msgspec import Struct

from spool.formats.timestamps import render_instant

PUBLIC = {
    "GpuHolder": """
        job=run.name run=run.run user=run.user granted_bytes=run.grant.gpu_memory_bytes taken_bytes
    """,
    "GpuStatus": """
        index=gpu.index uuid=gpu.uuid name=gpu.name memory_total_bytes=gpu.memory_total_bytes
        memory_free_bytes=gpu.memory_free_bytes utilisation_percent=gpu.utilisation_percent
        memory_utilisation_percent=gpu.memory_utilisation_percent mig=gpu.mig state holders foreign=gpu.foreign
        reserved why_not
    """,
    "MeasuredRun": """
        run=record.run state cpus=grant.cpus memory_bytes=grant.memory_bytes gpus=grant.gpu_count
        gpu_memory_bytes=grant.gpu_memory_bytes time_limit_ns started run_time_ns cpu_time_ns=record.cpu_time_ns
        peak_memory_bytes=record.peak_memory_bytes gpu_use=record.gpu_use engine
    """,
    "RunHere": """
        job=run.name run=run.run user=run.user cpus=run.grant.cpus memory_bytes=run.grant.memory_bytes
        gpus=run.grant.gpu_indices resources=run.grant.resources resource_indices=run.grant.resource_indices
        started_at_ns=run.started_at_ns stopping=run.stopping engine=run.elsewhere gpu_count=run.grant.gpu_count
        suspended=run.suspended on_its_way
    """,
    "StartingJob": """
        place name=job.name user=job.user priority=job.spec.priority grant expected_run_ns=standing.expected.ns
        run_is_guess=standing.expected.is_guess expected
    """,
    "TimelineRun": """
        job=account.job run=account.run outcome=account.outcome user=account.user project=account.project
        group=account.group executor=account.executor ready_at_ns started_at_ns ended_at_ns
        cpus=account.cpus gpus=account.gpus memory_bytes=account.memory_bytes
        peak_memory_bytes=account.peak_memory_bytes
    """,
    "WaitingJob": """
        place name=job.name user=job.user priority=job.spec.priority code reason start_at_ns=start.at_ns
        start_is_guess=start.guessed must_end=start.must_end expected_run_ns=standing.expected.ns
        run_is_guess=standing.expected.is_guess expected score=standing.score
        later_than_at_ns=start.later_than_ns start_unknown=start.unknown
    """,
}
"""By class: `name=path` in their order; a bare name is its own path. An instant loses its `_ns`, as everywhere."""


@cache
def names_of(kind: type) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """Return the public names of a struct, each with what gets its value."""
    words = PUBLIC.get(kind.__name__)
    listed: tuple[str, ...] = kind.__struct_fields__ if words is None else tuple(words.split())  # type: ignore[attr-defined]
    pairs = (word.partition("=") for word in listed)
    return tuple((name, attrgetter(path or name)) for name, _, path in pairs)


_TABLES = frozenset({"resources", "resource_indices"})
"""Fields that are tables, held as pairs so that values with them can be compared and hashed."""


_SCALARS = frozenset({str, int, float, bool, type(None)})


def plain(value: Any) -> Any:
    """Return *value* as JSON types."""
    if isinstance(value, Struct):
        found: dict[str, Any] = {}
        for name, get in names_of(type(value)):
            item = get(value)
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
