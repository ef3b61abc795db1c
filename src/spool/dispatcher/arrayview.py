"""How arrays in progress look in `state.json`."""

from __future__ import annotations

from collections import Counter

from spool.core.model import State
from spool.formats.state import JobView
from spool.state.table import Table


def array_views(table: Table) -> dict[str, JobView]:
    """Return the view of every array in progress: how far it has come is its reason."""
    running = Counter(live.spec.task.array for live in table.live.values() if live.spec.task is not None)
    views = {}
    for array in table.arrays.values():
        state, reason = State.RUNNING, array.progress(running[array.name])
        if array.cancelled is not None:
            state, reason = State.STOPPING, f"{array.cancelled}: {reason}"
        elif array.held:
            state = State.HELD
        request = array.spec.request
        views[array.name] = JobView(
            state=state,
            reason=reason,
            run=array.run,
            priority=array.spec.priority,
            cpus=request.cpus,
            memory_bytes=request.memory_bytes,
            gpus=request.gpus,
            resources=dict(request.resources),
            user=array.user,
            project=array.spec.project,
            tags=array.spec.tags,
            since_ns=array.arrived_at_ns,
            started_at_ns=array.expanded_at_ns,
            array=True,
        )
    return views
