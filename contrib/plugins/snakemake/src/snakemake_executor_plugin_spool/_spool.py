"""What the plugin needs of spool: submit a batch, find a job and its runs, cancel."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from spool import Client, InvalidJob, Job, NoSuchJob, SpoolError

Keys = Mapping[str, object]
"""The keys of a job file, `command` and `name` among them."""


def submit(client: Client, jobs: Sequence[Keys]) -> list[Job | InvalidJob]:
    """Submit jobs as one batch; return each, or why the spool does not take it, in their order."""
    try:
        return list(client.submit_many(jobs))
    except InvalidJob as error:
        if len(jobs) == 1:
            return [error]
    return [found for job in jobs for found in submit(client, [job])]


def cancel(client: Client, names: Iterable[str], reason: str) -> None:
    """Cancel jobs; those that have ended stay as they are."""
    for name in names:
        with suppress(SpoolError):  # it has just ended
            client.cancel(name, reason)


def active(client: Client, name: str) -> Job | None:
    """Return the job of that name if it waits, is held or runs."""
    try:
        job = client.job(name)
        return job if job.outcome is None else None
    except NoSuchJob:
        return None


def newest_run(client: Client, name: str) -> int:
    """Return the number of the newest run of a job, 0 if it has none."""
    try:
        return max((int(run) for run in os.listdir(f"{client.root}/jobs/{name}") if run.isdigit()), default=0)
    except FileNotFoundError:
        return 0
