"""One job in a list for people, from whatever is known of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spool.core.model import Result, Spec, State
from spool.formats.state import JobView


@dataclass(frozen=True, slots=True)
class Row:
    """One job. What is unknown is None."""

    name: str
    state: State
    run: int | None = None
    attempt: int | None = None
    priority: int | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    gpus: int | None = None
    resources: tuple[tuple[str, int], ...] = ()
    user: str | None = None
    project: str | None = None
    tags: tuple[str, ...] = ()
    submitted_at_ns: int | None = None
    started_at_ns: int | None = None
    ended_at_ns: int | None = None
    exit_code: int | None = None
    reason: str = ""
    place: str | None = None  # the state directory in which its file lies; a name may have one in several

    def time_ns(self, now_ns: int) -> int | None:
        """Return how long the job has waited, has run, or ran; None where that is unknown."""
        if self.ended_at_ns is not None:
            return self.ended_at_ns - self.started_at_ns if self.started_at_ns is not None else None
        since = self.started_at_ns if self.started_at_ns is not None else self.submitted_at_ns
        return now_ns - since if since is not None else None


def row_of_result(result: Result) -> Row:
    """Return an ended run as a row."""
    return Row(
        result.job,
        result.outcome,
        run=result.run,
        attempt=result.attempt,
        cpus=result.request.cpus,
        memory_bytes=result.request.memory_bytes,
        gpus=result.request.gpus,
        resources=result.request.resources,
        user=result.user,
        project=result.project,
        tags=result.tags,
        submitted_at_ns=result.submitted_at_ns,
        started_at_ns=result.started_at_ns,
        ended_at_ns=result.ended_at_ns,
        exit_code=result.exit_code,
        reason=result.reason if result.outcome is not State.FINISHED else "",
    )


def row_of_view(name: str, state: State, view: JobView) -> Row:
    """Return a job as the dispatcher last saw it, in the state in which it is."""
    return Row(
        name,
        state,
        run=view.run,
        attempt=view.attempt,
        priority=view.priority,
        cpus=view.cpus,
        memory_bytes=view.memory_bytes,
        gpus=view.gpus,
        resources=tuple(sorted(view.resources.items())),
        user=view.user,
        project=view.project,
        tags=view.tags,
        submitted_at_ns=view.since_ns,
        started_at_ns=view.started_at_ns,
        reason="; ".join(filter(None, (view.problem, view.reason))),
    )


def row_of_spec(row: Row, spec: Spec | None) -> Row:
    """Return *row* with what the job file says in it; as it is where that cannot be read."""
    if spec is None:
        return row
    request = spec.request
    return replace(
        row,
        priority=spec.priority,
        cpus=request.cpus,
        memory_bytes=request.memory_bytes,
        gpus=request.gpus,
        resources=request.resources,
        project=spec.project,
        tags=spec.tags,
    )
