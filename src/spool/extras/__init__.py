"""The capabilities that come with spool, each a folder here that nothing else names.

A folder can be deleted: its row in this table then counts for nothing. A row says what the folder contributes
(`core.capability`).
"""

from __future__ import annotations

from spool.core.capability import Capability, EngineOffer

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
        "engines",
        "Hands jobs to Slurm, to Grid Engine, or to another cluster that an installed package can talk to.",
        job="spool.extras.engines:JOB",
        config="spool.extras.engines:CONFIG",
        only_elsewhere="are for the command of an engine such as Slurm, and the job's executor is {}",
        engines={
            "slurm": EngineOffer(
                "Slurm",
                "spool.extras.engines.engine:executor",
                check="spool.extras.engines.settings:check",
                still_ends="spool.extras.engines.slurm:still_ends",
                checks="spool.extras.engines.probe:OF_SLURM",
                shortcut="Hand it to Slurm: the same as --executor slurm.",
            ),
            "sge": EngineOffer(
                "Grid Engine",
                "spool.extras.engines.engine:executor",
                check="spool.extras.engines.settings:check",
                still_ends="spool.extras.engines.sge:still_ends",
            ),
        },
        search="spool.extras.engines.settings:offered",
    ),
)
