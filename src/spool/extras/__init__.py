"""The capabilities that come with spool, each a folder here that nothing else names.

A folder can be deleted: its row in this table then counts for nothing. A row says what the folder contributes
(`formats.capabilities`).
"""

from __future__ import annotations

from spool.formats.capabilities import Capability, ContributedVerb, EngineOffer, GpuVendor

_ENGINE, _CHECK = "spool.extras.engines.engine:executor", "spool.extras.engines.language:check"

TABLE = (
    Capability(
        "amd",
        "Grants the GPUs of AMD, as the library of ROCm shows them.",
        gpus=GpuVendor(
            "AMD",
            signs=("/dev/kfd", "$ROCM_PATH"),
            source="spool.extras.amd.rocm:Rocm",
            visible="spool.extras.amd:visible",
            tool="rocm-smi",
            on_the_bus=("0x1002", ("0x0380", "0x1200"), "the library of ROCm, librocm_smi64.so"),
        ),
    ),
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
        "Hands jobs to Slurm or to Grid Engine.",
        job="spool.extras.engines:JOB",
        config="spool.extras.engines:CONFIG",
        only_elsewhere="are for the command of an engine such as Slurm, and the job's executor is {}",
        engines={
            "slurm": EngineOffer("Slurm", _ENGINE, check=_CHECK, shortcut="Hand it to Slurm."),
            "sge": EngineOffer("Grid Engine", _ENGINE, check=_CHECK),
        },
    ),
    Capability(
        "here",
        "Runs a command in the terminal of its submitter: `spool run --here`.",
        job="spool.extras.here:JOB",
        only_here="is one of this machine, and its job runs here",
        running="in a terminal",
        problem="spool.extras.here.launching:problem",
        launch="spool.extras.here.launching:launched",
        starts="spool.extras.here.launching:start",
        way="spool.extras.here:WAY",
    ),
    Capability(
        "machine",
        "Lets users who do not trust each other share the machine: an arbiter gives their spools turns.",
        files="spool.extras.machine:FILES",
        leases="spool.extras.machine.asking:ArbiterLeases",
        sharing="spool.extras.machine.protocol:sharing",
        verbs={
            "machine": ContributedVerb(
                "Administration",
                "spool.extras.machine.verb:command",
                "Share the machine among several users.",
                after="service",
            )
        },
        on_info="spool.extras.machine.verb:print_shared",
    ),
    Capability(
        "page",
        "Writes a web page that shows the spool.",
        config="spool.extras.page:CONFIG",
        listener="spool.extras.page.document:PageWriter",
        checks="spool.extras.page.document:CHECKS",
    ),
    Capability(
        "capture",
        "Records the code that a run begins with, compares runs, and runs them again.",
        config="spool.extras.capture:CONFIG",
        steps="spool.extras.capture.steps:Captures",
        record="spool.extras.capture.code:capture_of",
        verbs={
            "diff": ContributedVerb(
                "More", "spool.extras.capture.verbs:diff", "Show what differs between two runs.", after="seff"
            ),
            "rerun": ContributedVerb(
                "More", "spool.extras.capture.verbs:rerun", "Submit an earlier run again, as a new job.", after="diff"
            ),
        },
        told="spool.extras.capture.code:told",
    ),
    Capability(
        "metrics",
        "Writes metrics for Prometheus.",
        config="spool.extras.metrics:CONFIG",
        listener="spool.extras.metrics.listener:Metrics",
    ),
    Capability(
        "notify",
        "Sends messages about jobs by mail, chat or web hook.",
        job="spool.extras.notify:JOB",
        config="spool.extras.notify:CONFIG",
        doubts="spool.extras.notify.sending:doubts",
        listener="spool.extras.notify.sending:Notifier",
        listens="spool.extras.notify.settings:listens",
        for_jobs=True,
        checks="spool.extras.notify.checks:CHECKS",
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
    Capability(
        "plot",
        "Draws runs over time, and the charts of other verbs.",
        verbs={
            "plot": ContributedVerb(
                "More",
                "spool.extras.plot.verb:command",
                "Plot what ran when and where, in the terminal or to a file.",
                after="plan",
            )
        },
        charts="spool.extras.plot.pictures:DRAWING",
    ),
    Capability(
        "simulate",
        "Simulates how policies would schedule a workload.",
        verbs={
            "simulate": ContributedVerb(
                "Administration",
                "spool.extras.simulate.verb:command",
                "Simulate a workload and compare policies.",
                after="doctor",
            )
        },
    ),
    Capability(
        "functions",
        "Makes each call of a Python function a job.",
        value="spool.extras.functions.executor:result_of",
        public=dict.fromkeys(
            ("Executor", "Future", "Cancelled", "JobFailed", "Lost", "OutOfMemory", "RemoteError", "TimedOut"),
            "spool.extras.functions.executor",
        ),
    ),
    Capability(
        "foreign",
        "Submits scripts for other schedulers.",
        scripts="spool.extras.foreign.scripts:ForeignScripts",
        dependencies="spool.extras.foreign.scripts:in_our_words",
        answers="spool.extras.foreign.lines:answer",
    ),
)
