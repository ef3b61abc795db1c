"""Rules of the house: a time limit for each job, GPUs only for a project, a word in each log, a ledger of all ends."""

from __future__ import annotations

from pathlib import Path

from spool.listeners.plugins import Event, hookimpl

_told: set[str] = set()  # an event may be told twice; its id is the same then


@hookimpl
def spool_queueing(event: Event) -> dict[str, str]:
    """Add a time limit to jobs without one; `spool show` says that it comes from here."""
    return {"time_limit": "24h"}


@hookimpl
def spool_submitting(event: Event) -> str | None:
    """Veto GPUs without a project. The job is held then, with these words as the reason."""
    if event.request is not None and event.request.gpus and event.project is None:
        return 'jobs with GPUs need a project: project = "..."'
    return None


@hookimpl
def spool_prep(event: Event) -> str:
    """Have every log begin with whose job it is."""
    return f"echo 'house rules: this is a job of {event.user}'"


@hookimpl
def spool_event(event: Event) -> None:
    """Keep the ledger: a line for each run that is over."""
    if event.result is None or event.id in _told:
        return
    _told.add(event.id)
    with Path(event.spool_dir, "ledger").open("a", encoding="utf-8") as ledger:
        ledger.write(f"{event.job} {event.run} {event.name}\n")
