"""The keys of `config.toml`: their types as TOML has them, their defaults, and what they mean.

The descriptions are the documentation: the JSON Schema and the pages are made from them. Names are those of
`core.model.Policy`, where a key decides something.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from spool.core.names import EXECUTORS
from spool.formats.jobkeys import MOST_LOG_LINES, Names
from spool.formats.validation import Duration, Size

MOST = 1_000_000
"""No count in a configuration is larger."""

Share = Annotated[str, Meta(extra_json_schema={"examples": ["5%", "8G"]})]
"""A percentage or a size."""

Count = Annotated[int, Meta(ge=0, le=MOST)] | str
"""A limit: a number, or "unlimited"."""


class QuotaTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much one user or one project may have at once. A key that is absent is as in the defaults."""

    max_running_jobs: Annotated[Count, Meta(description='Jobs that run, or "unlimited".')] | UnsetType = UNSET
    max_running_gpus: Annotated[Count, Meta(description='GPUs in use, or "unlimited".')] | UnsetType = UNSET
    max_running_cpus: Annotated[Count, Meta(description='CPUs in use, or "unlimited".')] | UnsetType = UNSET
    max_queued_jobs: (
        Annotated[Count, Meta(description='Jobs that wait, or "unlimited"; the file over it stays, with the reason.')]
        | UnsetType
    ) = UNSET


class QuotasTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits on what users and projects may have at once. A job must satisfy its user's and its project's."""

    default_user: Annotated[
        QuotaTable, Meta(description="For every user, where the user's own table says nothing.")
    ] = QuotaTable()
    default_project: Annotated[QuotaTable, Meta(description="For every project, likewise.")] = QuotaTable()
    users: Annotated[dict[str, QuotaTable], Meta(description="One table for each user named.")] = {}
    projects: Annotated[dict[str, QuotaTable], Meta(description="One table for each project named.")] = {}


class IgnoreTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Processes on a GPU, started by nobody's job, that do not keep jobs off it. One of the reasons is enough."""

    names: Annotated[tuple[str, ...], Meta(description='Names of programs, as "python".')] = ()
    users: Annotated[tuple[str, ...], Meta(description="Names of users.")] = ()
    below: Annotated[Size, Meta(description="Whatever holds less memory than this.")] | UnsetType = UNSET


class GpuTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which GPUs are given to jobs, and how they are chosen."""

    use: (
        Annotated[
            tuple[int | str, ...],
            Meta(description="Only these GPUs: indices or UUIDs. All if absent; one that is not there is an error."),
        ]
        | UnsetType
    ) = UNSET
    strategy: (
        Annotated[
            str,
            Meta(
                description='Which GPUs first: "sequential" (lowest index), "random", "packed" (the fullest that '
                'fits), "spread" (the emptiest). If absent: packed for jobs that share, sequential for the others.',
                extra_json_schema={"enum": ["sequential", "random", "packed", "spread"]},
            ),
        ]
        | UnsetType
    ) = UNSET
    poll: Annotated[
        Duration,
        Meta(
            description="How often others' processes are looked for while a job with GPUs runs or waits. "
            "Each start on GPUs looks again."
        ),
    ] = "5s"
    ignore_processes: Annotated[
        IgnoreTable, Meta(description="Processes of others that do not keep jobs off a GPU, as an idle notebook.")
    ] = IgnoreTable()


class GcTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `spool gc` removes of ended runs. Nothing that is not stated is a reason to remove anything."""

    max_age: Annotated[Duration, Meta(description="Runs that ended longer ago than this.")] | UnsetType = UNSET
    max_runs: (
        Annotated[int, Meta(ge=1, le=MOST, description="All but so many newest runs of each job.")] | UnsetType
    ) = UNSET
    max_size: (
        Annotated[Size, Meta(description="The oldest runs, until all metadirs together are no larger.")] | UnsetType
    ) = UNSET


class ResourceTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A resource of which each run is given certain ones."""

    indices: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=MOST)], ...],
        Meta(description="Which there are; each is given to one run at a time, the first free ones first."),
    ]


class NotifyRuleTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who is told of everybody's jobs, and of what. Filters are lists of patterns, as "train-*"; one must fit."""

    to: Annotated[Names, Meta(description="Where to, as in a job file.")] = ()
    on: Annotated[
        Names, Meta(description='On which events, as in a job file; or "gpu_free", "dispatcher_stopped".')
    ] = ("ended",)
    users: Annotated[Names, Meta(description="Only of jobs of these users.")] = ()
    projects: Annotated[Names, Meta(description="Only of jobs of these projects.")] = ()
    names: Annotated[Names, Meta(description="Only of jobs of these names.")] = ()
    log_lines: Annotated[
        int, Meta(ge=0, le=MOST_LOG_LINES, description="So many last lines of the job's log go along.")
    ] = 0


class ConfigFile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration of a spool: `config.toml`. Every key may be absent; an unknown key is an error."""

    cpus: (
        Annotated[
            int, Meta(ge=0, le=MOST, description="How many CPUs may be given out. What this machine has, if absent.")
        ]
        | UnsetType
    ) = UNSET
    memory: (
        Annotated[Size, Meta(description="How much memory there is. What this machine has, if absent.")] | UnsetType
    ) = UNSET
    memory_reserve: (
        Annotated[
            Share,
            Meta(
                description="Memory kept back for the system: a percentage or a size. 5 % if absent, at least 512 MiB."
            ),
        ]
        | UnsetType
    ) = UNSET
    disk_floor: Annotated[Size, Meta(description="With less than this free on the spool's disk nothing starts.")] = "1G"
    resources: Annotated[
        dict[str, Annotated[int, Meta(ge=1, le=MOST)] | ResourceTable],
        Meta(
            description="What else there is in the whole spool, by names of your own: how many of it, "
            "`licence = 3`, or which, `tpu = { indices = [0, 1] }`."
        ),
    ] = {}
    max_running: (
        Annotated[int, Meta(ge=1, le=MOST, description="So many jobs run at once in the whole spool.")] | UnsetType
    ) = UNSET
    executor: Annotated[
        str,
        Meta(description="What runs a job that does not say.", extra_json_schema={"enum": list(EXECUTORS)}),
    ] = "process"
    keep_session: Annotated[
        bool, Meta(description="Whether the sessions of jobs that do not say stay after their end; with tmux.")
    ] = False
    durability: Annotated[
        str,
        Meta(
            description='What a power cut may repeat: "grouped" syncs records together, within 50 ms; "strict" syncs '
            "each before anything relies on it.",
            extra_json_schema={"enum": ["grouped", "strict"]},
        ),
    ] = "grouped"
    autostart: Annotated[
        bool,
        Meta(
            description="Whether commands after which jobs may start or have to end (`submit`, `run`, `release`, "
            "`requeue`, `resume`, `hold`, `cancel`) start a dispatcher if none lives."
        ),
    ] = True
    idle_exit: Annotated[
        Duration, Meta(description="A dispatcher that was so started leaves after so long without jobs. 0s is never.")
    ] = "10m"
    look_every: Annotated[
        Duration, Meta(description="How often the directories are read even if no event was seen.")
    ] = "5s"
    kill_grace: Annotated[Duration, Meta(description="The time between TERM and KILL, for jobs that do not say.")] = (
        "10s"
    )
    max_requeues: Annotated[
        int, Meta(ge=0, le=MOST, description="How often a job whose run was lost is run again at most.")
    ] = 3
    prolog: (
        Annotated[str, Meta(min_length=1, description="Shell text run before every job's own prolog.")] | UnsetType
    ) = UNSET
    epilog: (
        Annotated[str, Meta(min_length=1, description="Shell text run after every job's own epilog.")] | UnsetType
    ) = UNSET
    hook_time_limit: Annotated[
        Duration,
        Meta(description="How long a hook may run; then it is ended with all that it started, and counts as a no."),
    ] = "10s"
    notifier: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="Shell text that sends a message to an address that is neither an URL nor one of "
                "`contacts`: the address is `$1`, the event `$2`, the text comes on its standard input.",
            ),
        ]
        | UnsetType
    ) = UNSET
    contacts: Annotated[
        dict[str, Names],
        Meta(description="Names for addresses, so that jobs name whom to tell, and secrets stand in this file alone."),
    ] = {}
    notify: Annotated[
        tuple[NotifyRuleTable, ...], Meta(description="Who is told of everybody's jobs, and of what: `[[notify]]`.")
    ] = ()
    metrics: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="A file that metrics for Prometheus are written to, as node_exporter's textfile "
                "collector reads it: an absolute path that ends with `.prom`; it may begin with `~`.",
            ),
        ]
        | UnsetType
    ) = UNSET
    log_level: Annotated[
        str,
        Meta(
            description="How much the dispatcher says.",
            extra_json_schema={"enum": ["debug", "info", "warning", "error"]},
        ),
    ] = "info"
    other_hosts_gone: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts that are no more: their runs are taken for lost. Only ever name one that is truly off."
        ),
    ] = ()
    on_failure: Annotated[
        str,
        Meta(
            description="What happens when a job has failed for good: go on, or pause the spool.",
            extra_json_schema={"enum": ["continue", "pause"]},
        ),
    ] = "continue"
    starvation_after: Annotated[Duration | UnsetType, Meta(description="Has no effect any more: nothing starves.")] = (
        UNSET
    )
    time_bonus: Annotated[
        bool | UnsetType, Meta(description="Has no effect any more: shorter jobs go first by themselves.")
    ] = UNSET
    order: Annotated[
        str,
        Meta(
            description="Who goes first: who has waited longest for its size, or who has arrived first.",
            extra_json_schema={"enum": ["slowdown", "arrival"]},
        ),
    ] = "slowdown"
    learn_run_times: Annotated[
        bool, Meta(description="Whether the run time of jobs without a time limit is guessed from earlier runs.")
    ] = True
    fair_share: Annotated[
        bool, Meta(description="Whether the jobs of those who have used more wait somewhat longer.")
    ] = True
    fair_share_by: Annotated[
        str, Meta(description="Whose use is compared.", extra_json_schema={"enum": ["user", "project"]})
    ] = "user"
    half_life: Annotated[Duration, Meta(description="Use counts half after so long.")] = "7d"
    cpu_weight: Annotated[float, Meta(ge=0, le=1000, description="What a CPU second counts beside a GPU second.")] = (
        0.05
    )
    reservation_horizon: Annotated[
        Duration,
        Meta(description="So long before a reservation begins, its GPUs are kept free of jobs that would run into it."),
    ] = "12h"
    reservation_allows_unlimited: Annotated[
        bool, Meta(description="Whether jobs without a time limit may start on GPUs that are reserved for later.")
    ] = False
    gpu: Annotated[GpuTable, Meta(description="Which GPUs are given to jobs, and how they are chosen.")] = GpuTable()
    gc: Annotated[GcTable, Meta(description="What `spool gc` removes of ended runs.")] = GcTable()
    quotas: Annotated[QuotasTable, Meta(description="What users and projects may have at once.")] = QuotasTable()
