"""The keys of a job file: their types as TOML has them, their defaults, and what they mean; and the keys of arrays.

The descriptions are the documentation: the JSON Schema and the pages are made from them. The keys that make many jobs
of one file, `array`, `matrix` and `rows`, have grammars of their own, and rules beside which others they may stand.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from spool.core.arrays import ARRAY, INDEX
from spool.core.errors import InvalidValue
from spool.core.model import ArraySpec
from spool.core.names import EXECUTORS, MAX_NAME_LENGTH
from spool.formats.toml import show
from spool.formats.validation import MAX_NAMES, Duration, Problems, Size

MOST = 1_000_000
"""No count in a job file is larger."""

MOST_LOG_LINES = 200
"""A message holds no more of a log."""

Names = str | tuple[str, ...]
Text = Annotated[str, Meta(min_length=1)]
MAX_TASKS = 100_000
"""One file makes at most so many jobs."""

MAX_INDEX = 9_999_999

Matrix = tuple[tuple[str, tuple[str, ...]], ...]
"""The lists of a matrix, in the order of the file, their values as text."""

Rows = tuple[tuple[tuple[str, str], ...], ...]
"""What each task of a list of rows has, the keys in the order of the first row, the values as text."""

_MATRIX_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
_PADDED = re.compile(r"(?<![0-9])0+(?=[0-9])")
_AT_ONCE = re.compile(r"[1-9][0-9]{0,8}")


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


def array(value: str) -> ArraySpec:
    """Return `"0-99:2%4"` as its indices, ascending. A blank may follow a comma."""
    ranges, percent, at_once = value.partition("%")
    if percent and _AT_ONCE.fullmatch(at_once) is None:
        raise InvalidValue(f'{show(value)}: after "%" stands how many tasks run at once, at least 1')
    if ranges.count(",") >= MAX_NAMES:
        raise InvalidValue(f"{show(value)} lists more than {MAX_NAMES:,} indices and ranges; write a range, or rows")
    indices: set[int] = set()
    for part in ranges.replace(", ", ",").split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise InvalidValue(f'{show(value)} is not an array; write "0-99", "0-99:2", "1,3,7-9" or "0-99%4"')
        if _PADDED.search(part):
            bare = _PADDED.sub("", part)
            raise InvalidValue(f"{show(value)}: {part} has leading zeros, and the tasks' names have none; write {bare}")
        first = int(match.group(1))
        last = first if match.group(2) is None else int(match.group(2))
        step = 1 if match.group(3) is None else int(match.group(3))
        if last < first:
            raise InvalidValue(f"{show(value)}: {part} ends before it begins")
        if step == 0:
            raise InvalidValue(f"{show(value)}: a step of 0 never ends")
        if last > MAX_INDEX:
            raise InvalidValue(f"{show(value)}: no index is larger than {MAX_INDEX}")
        more = range(first, last + 1, step)
        if len(more) + len(indices) > MAX_TASKS:
            raise InvalidValue(f"{show(value)} makes more than {MAX_TASKS} jobs")
        if not indices.isdisjoint(more):
            twice = next(index for index in more if index in indices)
            raise InvalidValue(f"{show(value)} names the index {twice} twice, and makes one task of each")
        indices.update(more)
    return ArraySpec(tuple(sorted(indices)), int(at_once) if percent else None)


def matrix(value: dict[str, list[str | int | float | bool]]) -> Matrix:
    """Return the lists of a matrix, their values as text."""
    tasks = 1
    if len(value) > MAX_NAMES:
        raise InvalidValue(f"has {len(value):,} keys, and it may have {MAX_NAMES:,}")
    for key, choices in value.items():
        _matrix_key(key)
        if not choices:
            raise InvalidValue(f"{key} is an empty list, so that there is nothing to run")
        tasks *= len(choices)
    if not value:
        raise InvalidValue("is empty; each key of it is a list of values")
    if tasks > MAX_TASKS:
        raise InvalidValue(f"makes {tasks} jobs, and one file may make {MAX_TASKS}")
    return tuple((key, tuple(_matrix_text(choice) for choice in choices)) for key, choices in value.items())


def rows(value: list[dict[str, str | int | float | bool]]) -> Rows:
    """Return a list of rows, their values as text."""
    if not value:
        raise InvalidValue("is an empty list, so that there is nothing to run")
    if len(value) > MAX_TASKS:
        raise InvalidValue(f"makes {len(value)} jobs, and one file may make {MAX_TASKS}")
    keys = tuple(value[0])
    if not keys:
        raise InvalidValue("begins with an empty table; each has the same keys, with this task's values")
    if len(keys) > MAX_NAMES:
        raise InvalidValue(f"has {len(keys):,} keys in each row, and it may have {MAX_NAMES:,}")
    for key in keys:
        _matrix_key(key)
    known = set(keys)
    for at, row in enumerate(value):
        if row.keys() != known:
            other = next(iter(sorted(known ^ row.keys())))
            lacks = "has no" if other in known else "has a"
            raise InvalidValue(f"row {at + 1} {lacks} {other}; every row has the same keys as the first")
    return tuple([tuple([(key, _matrix_text(row[key])) for key in keys]) for row in value])


def _matrix_key(key: str) -> None:
    if _MATRIX_KEY.fullmatch(key) is None:
        raise InvalidValue(f"{show(key)} must be of letters, digits, _ and -, a letter first")
    if key == INDEX:
        raise InvalidValue("{index} is the task's number already; give the key another name")


def _matrix_text(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)


def of_array(raw: JobFile) -> bool:
    """Whether the file makes an array, or is a task of one."""
    return any(key is not UNSET for key in (raw.array, raw.matrix, raw.rows, raw.task))


def check_together(
    raw: JobFile, name: str, array: ArraySpec | None, matrix: Matrix, rows: Rows, problems: Problems
) -> None:
    """Note what is wrong between the keys of an array or a task. What is wrong with one alone is noted already."""
    keys = [key for key in ("array", "matrix", "rows") if getattr(raw, key) is not UNSET]
    if not keys:
        if raw.max_running is not UNSET:
            problems.add(
                ("max_running",), 'needs "array", "matrix" or "rows"; to limit several jobs together use "group"'
            )
        return
    if raw.task is not UNSET:
        problems.add(("task",), "is written by spool into the files of single tasks, which are no arrays themselves")
    if raw.matrix is not UNSET and raw.rows is not UNSET:
        problems.add(("rows",), 'cannot stand beside "matrix"; write the product into the rows')
    if array is not None and array.max_running is not None and raw.max_running not in (UNSET, array.max_running):
        problems.add(("max_running",), f'says {raw.max_running}, and "array" says {array.max_running}')
    given = {key for key, _ in (*matrix, *(rows[0] if rows else ()))}
    if array is not None and ARRAY in given:
        problems.add((keys[1], ARRAY), 'is what {array} means beside "array": its index; give the key another name')
    tasks = math.prod(len(choices) for _, choices in matrix) * (len(rows) or 1)
    last = tasks - 1
    if array is not None:
        last = array.indices[-1] if len(keys) == 1 else tasks * len(array.indices) - 1
        if len(keys) > 1 and tasks * len(array.indices) > MAX_TASKS:
            made = tasks * len(array.indices)
            problems.add(("array",), f'makes {made} jobs together with "{keys[1]}", and one file may make {MAX_TASKS}')
    if len(f"{name}_{last}") > MAX_NAME_LENGTH:
        problems.add(
            (keys[0],),
            f"the tasks' names ({name}_{last}) would be longer than {MAX_NAME_LENGTH} characters; rename the file",
        )
