"""The keys of a job file, each spelled once: a table, and what a row of such a table says.

Of the rows are made what reads the file (`validation`), its JSON Schema and its table on the pages (`schema`), and the
options of the command line with their help (`cli.joboptions`). So a new key is a row here, a field of the model, and
what is done with it. What a value of a kind may be is in `values`, and in `jobfile` if only a job file has it. The
tables of the other files stand where these are read, in `config` and `reservation`; this one stands apart and imports
next to nothing, so that the plain case of `spool submit` starts quickly.
"""

from __future__ import annotations

from collections.abc import Iterable

from spool.core.names import EXECUTORS

MOST = 1_000_000
"""No count in a file is larger."""

MOST_LOG_LINES = 200
"""A message holds no more of a log."""

MAX_INDEX = 9_999_999
"""No index of an array is larger."""


EXPORTED = (
    "PATH", "VIRTUAL_ENV", "CONDA_*", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_*", "TZ",
)  # fmt: skip
"""The variables that a submission takes along unless the configuration names others."""


class KeyTable:
    """The keys of a file, or of a table in it. *short* is the key that a value means that is no table."""

    def __init__(self, name: str, about: str, *keys: Key, short: Key | None = None) -> None:
        self.name = name
        self.about = about
        self.keys = keys
        self.short = short


class Key:
    """One key: its name, the kind of its value, and what it means, as the pages have it; and what else there is to say.

    * `default`: as the file would have it; None: there is none.
    * `field`: of the model; with a dot from its root, without one in the part that the table is. By itself the key's
      name, that of a size or duration with its unit.
    * `option`: how the command line spells it; `help` if that is not what the pages have. `shortcuts` are flags that
      stand for one value each: the spelling, the value, the help.
    * `also`: how other tools spell the option; it is taken, and no help lists it.
    * `words`: the only ones that it may be. `least`, `most`: its bounds. `examples`: for editors.
    * `needs`: another key, and why this one makes no sense without it.
    * `array_only`: not of the tasks that are made of the file.
    * `many`: "list" if it is a list of such tables, "named" if a table of them by names of the user's own.
    """

    def __init__(  # a row has many columns, most of them empty
        self,
        name: str,
        kind: str | KeyTable,
        about: str,
        *,
        default: object = None,
        field: str = "",
        option: str = "",
        also: str = "",
        help: str = "",  # noqa: A002  (no other word says it)
        shortcuts: tuple[tuple[str, str, str], ...] = (),
        words: tuple[str, ...] = (),
        least: int | None = None,
        most: int = MOST,
        examples: Iterable[object] = (),
        needs: str = "",
        array_only: bool = False,
        many: str = "",
    ) -> None:
        self.name = name
        self.table = None if isinstance(kind, str) else kind
        self.kind = kind if isinstance(kind, str) else kind.name
        self.about = about
        self.default = default
        self.field = field or name + _UNITS.get(self.kind, "")
        self.option = option
        self.also = also
        self.help = help or about.replace("`", "")
        self.shortcuts = shortcuts
        self.words = words
        self.least = least
        self.most = most
        self.examples = examples
        self.needs = needs
        self.array_only = array_only
        self.many = many


_UNITS = {"size": "_bytes", "duration": "_ns", "timeout": "_ns"}
REQUIRED = object()
"""The default of a key that must be stated."""

# A row stays a row of a table.
# fmt: off

DEPENDS_ON = KeyTable(
    "DependsOn",
    "Which jobs this one waits for, and how they must have ended. All that is stated must hold.",
    every := Key("all", "jobs", "Every one of these jobs has finished (exit code 0)."),
    Key("any", "jobs", "One of these jobs has finished."),
    Key("ended", "jobs", "Every one of these jobs has ended, whatever the outcome."),
    Key("failed", "jobs", "Every one of these jobs has ended badly."),
    Key("each", "paired job", "An array of the same indices: each task waits for the one of its own index."),
    short=every,
)

RETRY = KeyTable(
    "RetryTable",
    "When a run that ended badly is tried again. Delay before try n: min(delay * backoff^(n-1), max_delay).",
    Key("max", "count", "How many times at most it is tried again.", default=0, option="--retry-max N"),
    Key("delay", "duration", "Wait before the first new try.", default="0s", option="--retry-delay TIME"),
    Key("backoff", "number", "Each later wait is so many times the one before.", default=2.0, least=1, most=1000,
        option="--retry-backoff FACTOR"),
    Key("max_delay", "duration", "No wait is longer.", default="1h", option="--retry-max-delay TIME"),
    Key("on", "ends", 'Outcomes ("failed", "timeout", "out_of_memory") and exit codes (1-255) to try again after.',
        default=("failed",), option="--retry-on OUTCOME|CODE,…",
        help="Outcomes (failed, timeout, out_of_memory) and exit codes to try again after. Default: failed."),
)

NOTIFY = KeyTable(
    "NotifyTable",
    "Where messages about the job go, and on which events.",
    addresses := Key("to", "addresses",
        "Where to: addresses of web hooks and services, names of `contacts` of the configuration, or what its "
        "`notifier` understands.", default=(), option="--notify ADDRESS,…"),
    Key("on", "events",
        '"ended" (whatever the outcome), outcomes, as "failed", "timeout", or other events of jobs, as "started", '
        '"retrying", "held".', default=("ended",), option="--notify-on EVENT,…"),
    Key("log_lines", "count", "So many last lines of the job's log go along.", default=0, most=MOST_LOG_LINES,
        option="--notify-log-lines N"),
    short=addresses,
)

TASK = KeyTable(
    "TaskTable",
    "Which task of which array this file is. Written by spool when it expands an array; not for hand-written files.",
    Key("array", "job", "The job whose file was expanded.", default=REQUIRED),
    Key("index", "count", "This task's index.", default=REQUIRED, most=MAX_INDEX),
    Key("max_running", "count", "At most so many tasks of the array run at once.", least=1),
)

# The keys of a job file in blocks, for the pages have them in one order, and the help in another.

_COMMAND = (
    Key("command", "command", "What to run: a text, run by `shell`; or a list of arguments, executed as it is.",
        default=REQUIRED),
    Key("script", "program",
        "The text of a script; its first line begins with `#!`. Each run has it as a file in its metadir, and executes "
        "that file in place of the first word of `command`. `command` is a list then; its other words are the "
        "arguments. `spool submit job.sh` writes it."),
    Key("shell", "shell", "The shell that runs a `command` that is a text: an absolute path.", default="/bin/sh",
        option="--shell PATH"),
    Key("workdir", "workdir",
        "Where the command runs: an absolute path, or one that begins with `~` or an environment variable. The home "
        "directory if absent; `spool submit` records its own.", option="--workdir DIR", also="--chdir -D",
        help="Where the command runs; a relative one is taken from here. Default: here."),
    Key("env", "variables", "Environment variables, added to those that every job begins with (clause 7).", default={},
        option="-e --env KEY[=VALUE]",
        help="Set an environment variable; without =VALUE it is passed on as it is now. May be repeated."),
)

_MACHINE = (
    Key("cpus", "count", "How many CPUs it is given.", default=1, field="request.cpus", option="--cpus N",
        also="--cpus-per-task"),
    Key("memory", "size", "Host memory: counted when the job is placed, and enforced while it runs.", least=1,
        field="request.memory_bytes", option="-m --memory SIZE", also="--mem"),
)

_GPUS = (
    Key("gpus", "count", "How many GPUs it is given.", default=0, field="request.gpus", option="-g --gpus N",
        also="-G --gpus-per-node"),
    Key("gpu_memory", "size",
        "Memory of each GPU. With it the job shares its GPUs with other jobs that state theirs; without it its GPUs "
        "are its own.", least=1, field="request.gpu_memory_bytes", option="--gpu-memory SIZE",
        needs="gpus: it is the memory of each GPU"),
    Key("gpu_type", "GPU type", 'The name of the GPUs, or a part of it: "A100". "auto" is any.',
        field="request.gpu_type", option="--gpu-type NAME", needs="gpus"),
)

_RESOURCES = (
    Key("resources", "amounts",
        "How much it is given of the resources that the configuration names, such as licences: `resources = { "
        "licence = 1 }`.", default={}, field="request.resources", option="--resource --resources NAME=N,…",
        help="What it needs of the resources that the configuration names; NAME alone is 1. May be repeated."),
)

_LIMITS = (
    Key("time_limit", "duration", "How long it may run; then it is stopped, and its outcome is `timeout`.", least=1,
        option="-t --time-limit TIME", also="--time"),
    Key("signal", "signal",
        'A signal sent as a warning before the time limit, and how long before: "USR1@60s". "USR1" alone is 60 '
        "seconds before.", examples=["USR1@60s"], option="--signal NAME@TIME",
        needs="time_limit: it is a warning before that"),
    Key("gpu_idle", "timeout",
        "How long it may leave all its GPUs idle before `gpu_idle_action` follows. 0s is forever.",
        option="--gpu-idle TIME"),
    Key("gpu_idle_action", "word",
        'What follows: "warn" tells people, "stop" stops the run too, and its outcome is `cancelled`.',
        words=("warn", "stop"), default="warn", option="--gpu-idle-action warn|stop"),
    Key("kill_grace", "duration", "The time between TERM and KILL for a run being stopped. 10s if absent.",
        option="--kill-grace TIME"),
)

_WHEN = (
    Key("priority", "count", "Higher is considered first.", default=10, most=255, option="-p --priority 0-255"),
    Key("depends_on", DEPENDS_ON,
        "Jobs that this one waits for. A list means that all must finish well. An array's name means all its tasks.",
        option="-d --depends-on [KIND:]NAME,…", also="--dependency",
        help="Jobs that must finish first; before a colon any, ended, failed or each. May be repeated."),
    Key("on_dependency_failure", "word",
        "What happens when a dependency can no longer be satisfied: the job is cancelled, or waits on.",
        words=("cancel", "wait"), default="cancel", option="--on-dependency-failure cancel|wait"),
    Key("start_after", "moment or delay",
        "Not before: a date and time (RFC 3339; without an offset it is the machine's local time), or a duration, "
        "counted from when the job was queued.", examples=["2026-01-31T09:00:00+01:00", "2h"],
        option="--start-after TIME", also="--begin -b",
        help="Not before: 16:00, 'tomorrow 8:00', friday, 'now + 2 hours', 2h, or a date and time."),
    Key("scheduling_timeout", "timeout", "Waited longer than this without a start: `unschedulable`. 0s is never.",
        option="--scheduling-timeout TIME"),
)

_GROUPS = (
    Key("group", "label", "Jobs of one group are limited together.", option="--group NAME"),
    Key("group_limit", "count", "At most so many jobs of the group run at once.", least=1, option="--group-limit N",
        needs="group"),
)

_MANY = (
    Key("array", "indices",
        'Makes many jobs of this file: their indices, "0-99", with a step "0-99:2", as a list "1,3,7-9", and with '
        '"%4" at the end at most 4 at once.', examples=["0-99%4", "0-99:2", "1,3,7-9"], array_only=True,
        option="--array 0-99:2%4", also="-a",
        help="Makes many jobs of one, one for each index: with a step :2, at most 4 at once %4. Each has its index in "
        "$SPOOL_ARRAY_INDEX, and {index} is replaced in the command, env and paths."),
    Key("matrix", "choices",
        "Makes many jobs of this file: each key a list, one job for each combination. `{key}` in `command`, `env` "
        "and the paths is replaced by the job's value.", array_only=True, option="--matrix KEY=VALUE,…",
        help="Makes many jobs: a key and its values. May be repeated; {key} is replaced in the command."),
    Key("rows", "rows",
        "Makes many jobs of this file: a list of tables with the same keys, one job for each. `{key}` is replaced "
        "as for `matrix`. `spool submit --param-file` makes it of a table.",
        examples=[[{"lr": 0.1, "seed": 1}, {"lr": 0.01, "seed": 7}]], array_only=True, option="--param-file FILE.csv",
        help="Makes many jobs: one for each row of a table; its first line has the keys. {key} is replaced."),
    Key("max_running", "count", "At most so many of its tasks run at once.", least=1, array_only=True,
        option="--max-running N"),
    Key("task", TASK, "Written by spool: which task of which array this is."),
)

_AGAIN = (
    Key("retry", RETRY, "When a run that ended badly is tried again."),
    Key("requeue", "flag",
        "After a reboot or a vanished process run again, at most 3 times, counted apart from `retry`.", default=True,
        option="--requeue --no-requeue",
        help="Run it again after a reboot or when it vanished. Default: yes, at most 3 times."),
)

_OUTPUT = (
    Key("stdout", "output",
        "Where the output goes: a path, relative to `workdir`; `%n` is the job's name, `%r` the run, `%a` the array "
        "index, `%%` a percent sign. One `log` in the metadir if absent.", option="--stdout PATH", also="-o --output",
        help="Where the output goes: %n is the job, %r the run, %a the index. Default: a file in the spool."),
    Key("stderr", "output", "Where the error output goes, like `stdout`; together with it if absent.",
        option="--stderr PATH", also="--error"),
)

_RUNNING = (
    Key("prolog", "script", "Shell text that the wrapper runs before the command.", option="--prolog SHELL-TEXT"),
    Key("epilog", "script", "Shell text that the wrapper runs after the command.", option="--epilog SHELL-TEXT"),
    Key("executor", "word", "What runs the job. From the configuration if absent.", words=EXECUTORS,
        option=f"--executor {'|'.join(EXECUTORS)}",
        shortcuts=(
            ("--tmux", "tmux",
             "Run it in a terminal, to which `spool attach` goes: the same as --executor tmux."),
            ("--slurm", "slurm", "Hand it to Slurm: the same as --executor slurm."),
        )),
    Key("executor_options", "options of Slurm",
        "More options of sbatch, for the executor slurm: `--constraint=ib`. What spool sets itself is refused.",
        default=(), examples=[["--constraint=ib"]], option="--executor-option OPTION", also="--executor-options",
        help="One more option of sbatch, as --constraint=ib, for the executor slurm. May be repeated."),
    Key("keep_session", "flag",
        "Whether the session of the job stays after its end, to be read; with the executor tmux. From the "
        "configuration if absent.", option="--keep-session --no-keep-session"),
)

_PEOPLE = (
    Key("project", "label", "For people, filters and quotas.", option="--project NAME"),
    Key("tags", "labels", "For people and filters.", default=(), option="--tag --tags TAG,…"),
    Key("comment", "text", "For people.", option="--comment TEXT"),
    Key("notify", NOTIFY,
        "Where messages about the job go, and on which events. A text or a list is where to, and the event is that "
        "it ends."),
)

JOB = KeyTable(
    "JobFile",
    "A job: what to run, what it needs, and when. Only `command` is required; an unknown key is an error.",
    *_COMMAND, *_MACHINE, *_GPUS, *_RESOURCES, *_LIMITS, *_WHEN, *_GROUPS, *_MANY, *_AGAIN, *_OUTPUT, *_RUNNING,
    *_PEOPLE,
)

DEFAULTS = KeyTable(
    "DefaultsTable",
    "What counts for jobs whose files do not say.",
    *(key for key in JOB.keys if key.name in (
        "cpus", "memory", "time_limit", "gpu_idle", "gpu_idle_action", "retry", "notify", "env",
    )),
)

BY_OPTION = (
    *_GPUS, *_MACHINE, *_RESOURCES, *_LIMITS, *_WHEN, *_AGAIN, *reversed(_COMMAND), *_OUTPUT, *_RUNNING, *_GROUPS,
    *_MANY, *_PEOPLE,
)  # fmt: skip
"""The keys of a job file in the order in which a submission writes them."""

COMMON = ("gpus", "cpus", "memory", "time_limit", "depends_on", "start_after", "array")
"""The keys whose options the help lists before all others."""

SECTIONS = (
    ("What it needs", (*_GPUS, *_MACHINE, *_RESOURCES)),
    ("When it runs", (*_WHEN, *_GROUPS)),
    ("How long it runs", _LIMITS),
    ("Retries", _AGAIN),
    ("Arrays", _MANY),
    ("Environment", _COMMAND),
    ("Output", _OUTPUT),
    ("How it runs", _RUNNING),
    ("Labels and messages", _PEOPLE),
)
"""The sections of the help, each with the keys whose options it lists unless they are common."""
