"""Events made of what the dispatcher knows. Their ids are made of what happened, so that a repeat has the same."""

from __future__ import annotations

import spool
from spool.core.events import Event, EventName
from spool.core.layout import Layout
from spool.core.model import Reservation, Result, Spec
from spool.dispatcher.lasting import Kind, Lasting
from spool.machine import identity
from spool.machine.host import user_name
from spool.state.table import Job, JobFile, Live


def of_run(name: EventName, live: Live, root: str, at_ns: int, reason: str = "", *, part: str = "") -> Event:
    """Return an event of a run that is alive. *part* tells it from others of its name in the same run."""
    spec = live.spec
    return Event(
        id=":".join(filter(None, (live.name, str(live.run), name, part))),
        name=name,
        at_ns=at_ns,
        host=identity.host(),
        version=spool.__version__,
        spool_dir=root,
        reason=reason,
        job=live.name,
        run=live.run,
        attempt=live.series.attempt,
        user=live.user,
        project=spec.project,
        group=spec.group,
        tags=spec.tags,
        executor=live.executor,
        request=spec.request,
        grant=live.grant,
        submitted_at_ns=live.wait.arrived_at_ns,
        started_at_ns=live.started_at_ns,
        metadir=Layout(root).metadir(live.name, live.run),
        notify=spec.notify,
    )


def of_end(result: Result, spec: Spec | None, root: str) -> Event:
    """Return the event of a run that is over, or of a job that ended without one."""
    name = EventName(result.outcome) if result.again is None else EventName.RETRYING
    return Event(
        id=f"{result.job}:{result.run}:{name}",
        name=name,
        at_ns=result.ended_at_ns or 0,
        host=result.host or identity.host(),
        version=spool.__version__,
        spool_dir=root,
        reason=result.reason,
        job=result.job,
        run=result.run,
        attempt=result.attempt,
        user=result.user,
        project=result.project,
        group=result.group,
        tags=result.tags,
        executor=result.executor,
        request=result.request,
        grant=result.grant,
        submitted_at_ns=result.submitted_at_ns,
        started_at_ns=result.started_at_ns,
        result=result,
        metadir=Layout(root).metadir(result.job, result.run),
        notify=spec.notify if spec is not None else None,
        is_array=spec is not None and spec.is_array,
    )


def of_file(name: EventName, job: Job, file: JobFile, root: str, at_ns: int, reason: str = "") -> Event:
    """Return an event of a job that waits or is held. Its file's last change tells it from others of its name."""
    spec = file.spec
    tried = f"{job.series.attempt}.{job.series.requeues}" if name is EventName.SUBMITTING else ""
    return Event(
        id=":".join(filter(None, (job.name, str(file.changed_at_ns), tried, name))),
        name=name,
        at_ns=at_ns,
        host=identity.host(),
        version=spool.__version__,
        spool_dir=root,
        reason=reason,
        job=job.name,
        attempt=job.series.attempt,
        user=user_name(file.uid),
        project=spec.project if spec else None,
        group=spec.group if spec else None,
        tags=spec.tags if spec else (),
        executor=spec.executor if spec else None,
        request=spec.request if spec else None,
        submitted_at_ns=job.wait.arrived_at_ns if job.wait is not None else None,
        notify=spec.notify if spec else None,
        is_array=spec is not None and spec.is_array,
    )


def of_reservation(name: EventName, this: Lasting, root: str, at_ns: int, of: Reservation | None) -> Event:
    """Return that the reservation *this* began or is over; *of* is None if its file is gone."""
    return Event(
        id=f"{this.id}:{name}",
        name=name,
        at_ns=at_ns,
        host=identity.host(),
        version=spool.__version__,
        spool_dir=root,
        reason=(of.comment or "") if of is not None else "it was removed",
        user=of.user if of is not None else None,
        project=of.project if of is not None else None,
        reservation=this.name,
    )


def of_spool(name: EventName, this: Lasting, root: str, at_ns: int, reason: str = "") -> Event:
    """Return an event of a GPU or of the dispatcher."""
    return Event(
        id=f"{this.id}:{name}",
        name=name,
        at_ns=at_ns,
        host=identity.host(),
        version=spool.__version__,
        spool_dir=root,
        reason=reason,
        gpu=this.name if this.kind is Kind.GPU else None,
    )
