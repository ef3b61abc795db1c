"""The capabilities that come with spool, each a folder here that nothing else names.

A folder can be deleted: its row in this table then counts for nothing. A row says what the folder contributes
(`core.capability`).
"""

from __future__ import annotations

from spool.core.capability import Capability, ContributedVerb

TABLE = (
    Capability(
        "containers",
        "Runs the command of a job in a container of podman, docker or apptainer.",
        job="spool.extras.containers:JOB",
        only_here='is for this machine alone; for {} write the runtime into the command, as ["apptainer", "exec", …]',
        by_others=True,
        problem="spool.extras.containers.runtimes:problem",
        launch="spool.extras.containers.runtimes:launched",
    ),
    Capability(
        "top",
        "Shows the queue, the runs and the machine on a live screen.",
        verbs={
            "top": ContributedVerb(
                "Jobs", "spool.extras.top:command", "Watch and manage jobs and GPUs on a live screen.", after="ls"
            )
        },
    ),
)
