"""Engines: jobs run on other machines, handed to Slurm or to Grid Engine. Here are the keys of files that say how."""

from __future__ import annotations

from spool.formats.capabilities import Key, KeyTable, Part

# A row stays a row of a table.
# fmt: off

JOB = Part(
    Key("executor_options", "options of a program",
        "More options for the command that submits the job to its engine, such as `--constraint=ib` for sbatch. "
        "Options that spool sets are refused.",
        default=(), field="engines.options", examples=[["--constraint=ib"]]),
    after="executor",
    reader="spool.extras.engines.language:JOB_READER",
)


def keys_of_all(engine: str, command: str) -> tuple[Key, ...]:
    """Return the keys that the table of every engine has."""
    return (
        Key("max_in_flight", "count", f"How many jobs may be in {engine} at once, waiting there or running.", least=1),
        Key("max_pending", "count",
            f"How many jobs may wait in {engine} for room at once. One that waits for something else, such "
            "as a drained node, a limit or a licence, does not count.", least=1),
        Key("options", "options of a program",
            f"More options of {command} for every job, such as the partition or the queue, and who pays.",
            examples=[["--partition=gpu", "--account=vision"]]),
    )


_SLURM = KeyTable(
    "SlurmTable",
    'How jobs with executor = "slurm" are handed to Slurm.',
    Key("gpus", "texts by name", 'What Slurm calls the GPU types of job files: `A100 = "gpu:a100"`.'),
    Key("gpu_memory", "word", 'What becomes of jobs that share a GPU: they are held ("refuse"), or ask for as many '
        'shards as GiB ("shard").', words=("refuse", "shard")),
    *(Key(name, "filled text", f"`--{name}` of sbatch, which `options` has as well.", default=None, internal=True)
      for name in ("partition", "account", "qos")),
    Key("preemptible_qos", "filled text", "The same, of jobs with `preemptible = true`.", default=None, internal=True),
    *keys_of_all("Slurm", "sbatch"),
)

_SGE = KeyTable(
    "SgeTable",
    'How jobs with executor = "sge" are handed to Grid Engine.',
    Key("pe", "filled text",
        "The parallel environment of jobs with more than one CPU, all on one host. Without it they are held."),
    Key("memory", "filled text", "The resource that stands for `memory`, such as `mem_free` or `h_vmem`."),
    Key("memory_per_slot", "flag",
        "Whether Grid Engine multiplies that by the number of CPUs, as it does for consumables such as `h_vmem`."),
    Key("gpus", "filled text", "The resource that stands for `gpus`. Without it, jobs with GPUs are held."),
    Key("gpu_types", "texts by name",
        'What stands for the GPU types of job files, in addition to the number: `A100 = "gpu_model=a100"`.'),
    *(Key(name, "filled text", f"`{flag}` of qsub, which `options` has as well.", default=None, internal=True)
      for name, flag in (("queue", "-q"), ("project", "-P"))),
    *keys_of_all("Grid Engine", "qsub"),
)

CONFIG = Part(
    Key("slurm", _SLURM, "How to hand jobs to Slurm.", default={}),
    Key("sge", _SGE, "How to hand jobs to Grid Engine.", default={}),
    after="preemption",
    reader="spool.extras.engines.language:CONFIG_READER",
    gone={
        f"{engine}.{key}": "spool asks, and hands jobs over, as often as is good; remove it"
        for engine in ("slurm", "sge")
        for key in ("poll", "submit_per_second")
    },
)

# fmt: on
