"""The keys of a job file: their types as TOML has them, their defaults, and what they mean.

The descriptions are the documentation: the JSON Schema and the pages are made from them.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from spool.core.names import EXECUTORS
from spool.formats.validation import Duration, Size

MOST = 1_000_000
"""No count in a job file is larger."""

MOST_LOG_LINES = 200
"""A message holds no more of a log."""

Names = str | tuple[str, ...]
Text = Annotated[str, Meta(min_length=1)]


class DependsOn(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which jobs this one waits for, and how they must have ended. All that is stated must hold."""

    all: Annotated[Names, Meta(description="Every one of these jobs has finished (exit code 0).")] | UnsetType = UNSET
    any: Annotated[Names, Meta(description="One of these jobs has finished.")] | UnsetType = UNSET
    ended: (
        Annotated[Names, Meta(description="Every one of these jobs has ended, whatever the outcome.")] | UnsetType
    ) = UNSET
    failed: Annotated[Names, Meta(description="Every one of these jobs has ended badly.")] | UnsetType = UNSET
    each: (
        Annotated[str, Meta(description="An array of the same indices: each task waits for the one of its own index.")]
        | UnsetType
    ) = UNSET


class RetryTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a run that ended badly is tried again. Delay before try n: min(delay * backoff^(n-1), max_delay)."""

    max: Annotated[int, Meta(ge=0, le=MOST, description="How many times at most it is tried again.")] = 0
    delay: Annotated[Duration, Meta(description="Wait before the first new try.")] = "0s"
    backoff: Annotated[float, Meta(ge=1, le=1000, description="Each later wait is so many times the one before.")] = 2.0
    max_delay: Annotated[Duration, Meta(description="No wait is longer.")] = "1h"
    on: Annotated[
        tuple[str | int, ...],
        Meta(description='Outcomes ("failed", "timeout", "out_of_memory") and exit codes (1-255) to try again after.'),
    ] = ("failed",)


class NotifyTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where messages about the job go, and on which events."""

    to: Annotated[
        Names,
        Meta(
            description="Where to: addresses of web hooks and services, names of `contacts` of the configuration, or "
            "what its `notifier` understands."
        ),
    ] = ()
    on: Annotated[
        Names,
        Meta(
            description='"ended" (whatever the outcome), outcomes, as "failed", "timeout", or other events of jobs, as '
            '"started", "retrying", "held".'
        ),
    ] = ("ended",)
    log_lines: Annotated[
        int, Meta(ge=0, le=MOST_LOG_LINES, description="So many last lines of the job's log go along.")
    ] = 0


class TaskTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which task of which array this file is. Written by spool when it expands an array; not for hand-written files."""

    array: Annotated[str, Meta(description="The job whose file was expanded.")]
    index: Annotated[int, Meta(ge=0, le=9_999_999, description="This task's index.")]
    max_running: (
        Annotated[int, Meta(ge=1, le=MOST, description="At most so many tasks of the array run at once.")] | UnsetType
    ) = UNSET


class JobFile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A job: what to run, what it needs, and when. Only `command` is required; an unknown key is an error."""

    command: Annotated[
        str | tuple[str, ...],
        Meta(description="What to run: a text, run by `shell`; or a list of arguments, executed as it is."),
    ]
    shell: Annotated[str, Meta(description="The shell that runs a `command` that is a text: an absolute path.")] = (
        "/bin/sh"
    )
    workdir: (
        Annotated[
            Text,
            Meta(
                description="Where the command runs: an absolute path, or one that begins with `~` or an environment "
                "variable. The home directory if absent; `spool submit` records its own."
            ),
        ]
        | UnsetType
    ) = UNSET
    env: Annotated[
        dict[str, str],
        Meta(description="Environment variables, added to the dispatcher's environment."),
    ] = {}
    cpus: Annotated[int, Meta(ge=0, le=MOST, description="How many CPUs it is given.")] = 1
    memory: (
        Annotated[Size, Meta(description="Host memory: counted when the job is placed, and enforced while it runs.")]
        | UnsetType
    ) = UNSET
    gpus: Annotated[int, Meta(ge=0, le=MOST, description="How many GPUs it is given.")] = 0
    gpu_memory: (
        Annotated[
            Size,
            Meta(
                description="Memory of each GPU. With it the job shares its GPUs with other jobs that state theirs; "
                "without it its GPUs are its own."
            ),
        ]
        | UnsetType
    ) = UNSET
    gpu_type: (
        Annotated[Text, Meta(description='The name of the GPUs, or a part of it: "A100". "auto" is any.')] | UnsetType
    ) = UNSET
    resources: Annotated[
        dict[str, Annotated[int, Meta(ge=1, le=MOST)]],
        Meta(
            description="How much it is given of the resources that the configuration names, such as licences: "
            "`resources = { licence = 1 }`."
        ),
    ] = {}
    time_limit: (
        Annotated[Duration, Meta(description="How long it may run; then it is stopped, and its outcome is `timeout`.")]
        | UnsetType
    ) = UNSET
    signal: (
        Annotated[
            str,
            Meta(
                description="A signal sent as a warning before the time limit, and how long before: "
                '"USR1@60s". "USR1" alone is 60 seconds before.',
                extra_json_schema={"examples": ["USR1@60s"]},
            ),
        ]
        | UnsetType
    ) = UNSET
    kill_grace: (
        Annotated[Duration, Meta(description="The time between TERM and KILL for a run being stopped. 10s if absent.")]
        | UnsetType
    ) = UNSET
    priority: Annotated[int, Meta(ge=0, le=255, description="Higher is considered first.")] = 10
    depends_on: (
        Annotated[
            Names | DependsOn,
            Meta(
                description="Jobs that this one waits for. A list means that all must finish well. "
                "An array's name means all its tasks."
            ),
        ]
        | UnsetType
    ) = UNSET
    on_dependency_failure: Annotated[
        str,
        Meta(
            description="What happens when a dependency can no longer be satisfied: the job is cancelled, or waits on.",
            extra_json_schema={"enum": ["cancel", "wait"]},
        ),
    ] = "cancel"
    start_after: Annotated[
        Any,
        Meta(
            description="Not before: a date and time (RFC 3339; without an offset it is the machine's local time), "
            "or a duration, counted from when the job was queued.",
            extra_json_schema={"type": "string", "examples": ["2026-01-31T09:00:00+01:00", "2h"]},
        ),
    ] = UNSET
    scheduling_timeout: (
        Annotated[Duration, Meta(description="Waited longer than this without a start: `unschedulable`. 0s is never.")]
        | UnsetType
    ) = UNSET
    group: Annotated[Text, Meta(description="Jobs of one group are limited together.")] | UnsetType = UNSET
    group_limit: (
        Annotated[int, Meta(ge=1, le=MOST, description="At most so many jobs of the group run at once.")] | UnsetType
    ) = UNSET
    array: (
        Annotated[
            str,
            Meta(
                description='Makes many jobs of this file: their indices, "0-99", with a step "0-99:2", as a list '
                '"1,3,7-9", and with "%4" at the end at most 4 at once.',
                extra_json_schema={"examples": ["0-99%4", "0-99:2", "1,3,7-9"]},
            ),
        ]
        | UnsetType
    ) = UNSET
    matrix: (
        Annotated[
            dict[str, list[str | int | float | bool]],
            Meta(
                description="Makes many jobs of this file: each key a list, one job for each combination. `{key}` in "
                "`command`, `env` and the paths is replaced by the job's value."
            ),
        ]
        | UnsetType
    ) = UNSET
    rows: (
        Annotated[
            list[dict[str, str | int | float | bool]],
            Meta(
                description="Makes many jobs of this file: a list of tables with the same keys, one job for each. "
                "`{key}` is replaced as for `matrix`. `spool submit --param-file` makes it of a table.",
                extra_json_schema={"examples": [[{"lr": 0.1, "seed": 1}, {"lr": 0.01, "seed": 7}]]},
            ),
        ]
        | UnsetType
    ) = UNSET
    max_running: (
        Annotated[int, Meta(ge=1, le=MOST, description="At most so many of its tasks run at once.")] | UnsetType
    ) = UNSET
    task: Annotated[TaskTable, Meta(description="Written by spool: which task of which array this is.")] | UnsetType = (
        UNSET
    )
    retry: Annotated[RetryTable, Meta(description="When a run that ended badly is tried again.")] | UnsetType = UNSET
    requeue: Annotated[
        bool,
        Meta(
            description="After a reboot or a vanished process run again, at most 3 times, counted apart from `retry`."
        ),
    ] = True
    stdout: (
        Annotated[
            Text,
            Meta(
                description="Where the output goes: a path, relative to `workdir`; `%n` is the job's name, "
                "`%r` the run, `%a` the array index, `%%` a percent sign. One `log` in the metadir if absent."
            ),
        ]
        | UnsetType
    ) = UNSET
    stderr: (
        Annotated[Text, Meta(description="Where the error output goes, like `stdout`; together with it if absent.")]
        | UnsetType
    ) = UNSET
    prolog: Annotated[Text, Meta(description="Shell text that the wrapper runs before the command.")] | UnsetType = (
        UNSET
    )
    epilog: Annotated[Text, Meta(description="Shell text that the wrapper runs after the command.")] | UnsetType = UNSET
    executor: (
        Annotated[
            str,
            Meta(
                description="What runs the job. From the configuration if absent.",
                extra_json_schema={"enum": list(EXECUTORS)},
            ),
        ]
        | UnsetType
    ) = UNSET
    keep_session: (
        Annotated[
            bool,
            Meta(
                description="Whether the session of the job stays after its end, to be read; with the executor tmux. "
                "From the configuration if absent."
            ),
        ]
        | UnsetType
    ) = UNSET
    project: Annotated[Text, Meta(description="For people, filters and quotas.")] | UnsetType = UNSET
    tags: Annotated[tuple[Text, ...], Meta(description="For people and filters.")] = ()
    comment: Annotated[str, Meta(description="For people.")] | UnsetType = UNSET
    notify: (
        Annotated[
            Names | NotifyTable,
            Meta(
                description="Where messages about the job go, and on which events. "
                "A text or a list is where to, and the event is that it ends."
            ),
        ]
        | UnsetType
    ) = UNSET
