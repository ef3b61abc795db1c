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
        "machine",
        "Lets users who do not trust each other share the machine: an arbiter gives their spools turns.",
        files="spool.extras.machine.machinefile:FILES",
        leases="spool.extras.machine.asking:ArbiterLeases",
        sharing="spool.extras.machine.status:sharing",
        verbs={
            "machine": ContributedVerb(
                "The machine",
                "spool.extras.machine.verb:command",
                "Share the machine among several users.",
                after="gpus",
            )
        },
        on_info="spool.extras.machine.verb:print_shared",
        checks="spool.extras.machine.checks:CHECKS",
    ),
)
