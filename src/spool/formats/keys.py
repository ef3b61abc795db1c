"""The keys of a job file, each spelled once, in a table.

From the rows come the reader of the file (`validation`), its JSON Schema and its table in the docs (`schema`), and the
command line's options with their help (`cli.joboptions`). So a new key is a row here, a field of the model, and the
code that uses it. `values` defines the kinds of values, `jobfile` those of job files only. The tables of the other
files are beside their readers, in `config` and `reservation`; this one is separate and imports almost nothing, so that
the plain case of `spool submit` starts quickly.
"""

from __future__ import annotations

from spool.formats.capabilities import MAX_INDEX, REQUIRED, Key, KeyTable, engines, executors, with_parts

# A row stays a row of a table.
# fmt: off

DEPENDS_ON = KeyTable(
    "DependsOn",
    "The jobs this one waits for, and how they must end. All stated conditions must hold.",
    every := Key("all", "jobs", "All of these jobs finished (exit code 0)."),
    Key("any", "jobs", "At least one of these jobs finished."),
    Key("ended", "jobs", "All of these jobs ended, with any outcome."),
    Key("failed", "jobs", "All of these jobs ended with any outcome but `finished`."),
    Key("each", "paired job", "An array with the same indices: each task waits for the task with its own index."),
    short=every,
)

RETRY = KeyTable(
    "RetryTable",
    "When to retry a run that failed. Delay before retry n: min(delay * backoff^(n-1), max_delay).",
    most := Key("max", "count", "Maximum number of retries.", option="--retry N", also="--retry-max"),
    Key("delay", "duration", "Delay before the first retry."),
    Key("backoff", "number", "Backoff factor: the delay is multiplied by it after each retry.", least=1,
        most=1000),
    Key("max_delay", "duration", "Maximum delay between retries."),
    Key("on", "ends", 'Outcomes ("failed", "timeout", "out_of_memory") and exit codes (1-255) to retry.'),
    Key("memory_factor", "number",
        "After `out_of_memory` the next run requests that many times the memory, never more than the machine has, and "
        "later runs of the name do too. Adds `out_of_memory` to `on`.", least=1, most=1000),
    short=most,
)

TASK = KeyTable(
    "TaskTable",
    "Identifies this file as a task of an array. Written by spool when it expands an array; not for hand-written "
    "files.",
    Key("array", "job", "The array job that was expanded.", default=REQUIRED),
    Key("index", "count", "This task's index.", default=REQUIRED, most=MAX_INDEX),
    Key("max_running", "count", "Maximum number of the array's tasks that run at once.", least=1),
)

# The keys of a job file in blocks, because the docs list them in one order and the help in another.

_COMMAND = with_parts("job", (
    Key("command", "command", "What to run: a string, run by `shell`; or a list of arguments, executed as is.",
        default=REQUIRED),
    Key("script", "program",
        "The text of a script; its first line begins with `#!`. Each run gets it as a file in its metadir and "
        "executes that file instead of the first word of `command`. `command` must then be a list; its other words "
        "are the arguments. `spool submit job.sh` writes it."),
    Key("shell", "shell", "The shell that runs a `command` given as a string: an absolute path."),
    Key("workdir", "workdir",
        "The working directory: an absolute path, or one that begins with `~` or an environment variable. Default: "
        "the home directory; `spool submit` writes the current one.", option="--workdir DIR", also="--chdir -D --cwd",
        help="Working directory. Default: the current one."),
    Key("env", "variables", "Environment variables, added to those that every job starts with (FORMAT 7).", default={},
        option="-e --env KEY[=VALUE]",
        help="Set an environment variable; without =VALUE, pass on its current value. May be repeated.",
        in_defaults=True),
))

_INHERITED = with_parts("job", (
    Key("umask", "umask",
        'The umask, in octal: "002". `spool submit` and `spool run` write the one of the caller, unless that is 022.',
        examples=["002", "077"], in_defaults=True),
    Key("limits", "limits",
        "Soft limits: `as`, `core`, `cpu`, `data`, `fsize`, `nofile` and `stack`, as in limits.conf(5), but in bytes, "
        'seconds or files, or "unlimited"; at most the hard limits of the dispatcher. Default: those of a '
        "login, `core = 0`, `nofile = 1024` and `stack = 8388608`. `spool submit` and `spool run` write those of the "
        "caller that differ.", default={}, examples=[{"nofile": 65536, "core": "unlimited"}], in_defaults=True),
    Key("nice", "niceness",
        "The niceness, from -20 to 19; only root can go below that of the dispatcher. `spool submit` and `spool run` "
        "write the one of the caller, unless that is 0.", default=None, in_defaults=True),
))

_SETUP = with_parts("job", (
    Key("setup", "script",
        "Lines for `shell` to run just before the command, in the same shell: `module load cuda`, "
        "`. venv/bin/activate`, `ulimit -c 0`. If they fail, the command does not run.",
        examples=["module load cuda"], in_defaults=True),
))

_MACHINE = with_parts("job", (
    Key("cpus", "count", "Number of CPUs.", field="request.cpus", option="--cpus N", also="--cpus-per-task",
        in_defaults=True),
    Key("memory", "size or auto",
        'Host memory: counted when the job is scheduled and enforced while it runs. "auto": what earlier runs of its '
        'name used, plus a margin; "auto:8G" states the first guess.', least=1,
        field="request.memory_bytes", option="-m --memory SIZE|auto", also="--mem",
        help="Host memory, enforced. auto: by earlier runs.",
        in_defaults=True),
))

_GPUS = with_parts("job", (
    Key("gpus", "count", "Number of GPUs.", field="request.gpus", option="-g --gpus N",
        also="-G --gpus-per-node"),
    Key("gpu_memory", "size or auto",
        "Memory on each GPU. With it, the job shares its GPUs with other jobs that set it; without it, the job has "
        'its GPUs to itself, as with "auto" until a run of its name has shown how much it uses.', least=1,
        field="request.gpu_memory_bytes", option="--gpu-memory SIZE|auto",
        help="Memory on each GPU, which it then shares.",
        needs="gpus: it is the memory on each GPU"),
    Key("gpu_min_memory", "size",
        "Minimum memory of each GPU. The job keeps its GPUs to itself: with `gpus = 1` and "
        '`gpu_min_memory = "40G"` it has a whole GPU of 40 GiB or more.', least=1,
        field="request.gpu_min_memory_bytes", option="--gpu-min-memory SIZE",
        help="Minimum memory of each whole GPU.",
        needs="gpus: it is the minimum memory of each GPU"),
    Key("gpu_type", "GPU type",
        'The GPU model or part of its name, such as "A100"; a list, such as ["A100", "H100"], means that any of them '
        'will do. "auto" means any model.', default=None,
        field="request.gpu_types", option="--gpu-type NAME,…", needs="gpus",
        help="GPU model, or a part of its name."),
))

_RESOURCES = with_parts("job", (
    Key("resources", "amounts",
        "Amounts of the resources that the configuration defines, such as licences: `resources = { licence = 1 }`.",
        default={}, field="request.resources"),
))

_LIMITS = with_parts("job", (
    Key("time_limit", "duration", "Maximum run time; a job that exceeds it is stopped with the outcome `timeout`.",
        least=1, option="-t --time-limit TIME", also="--time --timeout",
        help="Maximum run time; then it is stopped.", in_defaults=True),
    Key("signal", "signal",
        'A warning signal before the time limit, and how long before: "USR1@60s". "USR1" alone means 60 seconds '
        "before.", examples=["USR1@60s"], also="--signal", needs="time_limit: it warns before that limit"),
    Key("signal_to", "word",
        'Which processes get it. "main": each program that the command, or a shell in it, runs, and what that program '
        'has started only if it alone handles the signal. "all": all of these. "shell": the command itself, such as a '
        'script with a trap. Default: "main", and a shell that has a trap for it.', words=("main", "all", "shell"),
        default=None, needs="signal"),
    Key("gpu_idle", "timeout",
        "How long the job may leave all its GPUs idle before `gpu_idle_action` applies. 0s means no limit.",
        in_defaults=True),
    Key("gpu_idle_action", "word",
        'What happens then: "warn" sends a warning, "stop" also stops the run, with the outcome `cancelled`.',
        words=("warn", "stop"), in_defaults=True),
    Key("kill_grace", "duration", "Time between TERM and KILL when a run is stopped. Default: 10s.",
        default=None),
))

_WHEN = with_parts("job", (
    Key("priority", "count", "Jobs with higher priority are considered first.", most=255,
        option="-p --priority 0-255"),
    Key("depends_on", DEPENDS_ON,
        "Jobs that this one waits for. A list means that all must finish successfully. An array's name means all of "
        "its tasks.", option="-d --depends-on NAME,…", also="--dependency",
        help="Jobs that must finish first; before them any:, ended:, failed: or each: for other conditions."),
    Key("on_dependency_failure", "word",
        "What to do when a dependency can no longer be satisfied: cancel the job, or keep it waiting.",
        words=("cancel", "wait"), default="cancel"),
    Key("start_after", "moment or delay",
        "Earliest start: a date and time (RFC 3339; the machine's local time if it has no offset), or a duration "
        "counted from when the job was queued.", examples=["2026-01-31T09:00:00+01:00", "2h"],
        option="--start-after TIME", also="--begin -b",
        help="Do not start before: 16:00, 'tomorrow 8:00', friday, 2h, a date."),
    Key("scheduling_timeout", "timeout",
        "Maximum wait; a job that waits longer ends as `unschedulable`. 0s means no maximum."),
))

_GROUPS = with_parts("job", (
    Key("group", "label", "Group name; `group_limit` limits its running jobs."),
    Key("group_limit", "count", "Maximum number of the group's jobs that run at once.", least=1,
        needs="group"),
))

_MANY = with_parts("job", (
    Key("array", "indices",
        'Turns this file into many jobs, one for each index: "0-99", "0-99:2" with a step, "1,3,7-9" as a list. With '
        '"%4" at the end, at most 4 run at once.', examples=["0-99%4", "0-99:2", "1,3,7-9"], array_only=True,
        option="--array 0-99:2%4", also="-a",
        help="One job for each {index}, $SPOOL_ARRAY_INDEX; :2 is a step, %4 at most 4 at once."),
    Key("matrix", "choices",
        "Turns this file into many jobs: each key has a list, and each combination is a job. `{key}` in `command`, "
        "`env` and the paths is replaced by the job's value, which `$SPOOL_PARAM_KEY` has too.", array_only=True,
        option="--matrix KEY=VALUE,…",
        help="One job for each value, its {key} and $SPOOL_PARAM_KEY. May be repeated."),
    Key("rows", "rows",
        "Turns this file into many jobs: a list of tables with the same keys, one job for each. `{key}` is replaced "
        "as for `matrix`. `spool submit --param-file` writes it from a table.",
        examples=[[{"lr": 0.1, "seed": 1}, {"lr": 0.01, "seed": 7}]], array_only=True, rare=True,
        option="--param-file FILE.csv",
        help="Submit one job for each row of a table, whose first line has the keys."),
    Key("max_running", "count", "Maximum number of the array's tasks that run at once.", least=1, array_only=True),
    Key("task", TASK, "Written by spool: which array task this is.", internal=True),
))

_AGAIN = with_parts("job", (
    Key("retry", RETRY, "When to retry a run that failed.", in_defaults=True),
    Key("requeue", "flag",
        "Whether to run again after a reboot, or if the process vanished: at most 3 times, apart from `retry`.",
        also="--requeue --no-requeue"),
    Key("preemptible", "flag",
        "Whether a long run may be stopped, with its `signal` and `kill_grace`, so that a short job can start. It runs "
        "again as soon as there is room. For jobs that continue from a checkpoint."),
))

_OUTPUT = with_parts("job", (
    Key("stdout", "output",
        "Path for the output, relative to `workdir`; `%n` is the job's name, `%r` the run, `%a` the array index, `%%` "
        "a percent sign. Default: `log` in the metadir.", option="--stdout PATH", also="-o --output",
        help="Path for the output: %n the job, %r the run."),
    Key("stderr", "output", "Path for the error output, like `stdout`. Default: the same file as the output.",
        option="--stderr PATH", also="--error", rare=True,
        help="Path for the error output, if not the same."),
))

_RUNNING = with_parts("job", (
    Key("prolog", "script", "Shell code to run before the command."),
    Key("epilog", "script", "Shell code to run after the command, at most until 5 minutes beyond the time limit."),
    Key("executor", "executor",
        "What runs the job: one of these, or an engine that an installed package offers. Default: from the "
        "configuration.", words=executors(),
        help="What runs the job. Default: as configured.",
        option="--executor NAME", rare=True,
        shortcuts=(
            ("--tmux", "tmux", "Run it in a terminal that `spool attach` opens."),
            *((f"--{name}", name, offer.shortcut) for name, offer in engines().items() if offer.shortcut),
        )),
    Key("keep_session", "flag",
        "Whether to keep the job's tmux session open after it ends."),
))

_PEOPLE = with_parts("job", (
    Key("project", "label", "Project name, for filters and quotas.", option="--project NAME"),
    Key("tags", "labels", "Tags, for filters.", default=(), option="--tag --tags TAG,…"),
    Key("comment", "text", "Free-text comment.", also="--comment"),
))

JOB = KeyTable(
    "JobFile",
    "A job: what to run, what it needs, and when. Only `command` is required; an unknown key is an error.",
    *_COMMAND, *_INHERITED, *_SETUP, *_MACHINE, *_GPUS, *_RESOURCES, *_LIMITS, *_WHEN, *_GROUPS, *_MANY, *_AGAIN,
    *_OUTPUT, *_RUNNING, *_PEOPLE,
)

DEFAULTS = KeyTable(
    "DefaultsTable",
    "Defaults for keys that a job file does not set.",
    *(key for key in JOB.keys if key.in_defaults),
)

BY_OPTION = (
    *_GPUS, *_MACHINE, *_RESOURCES, *_LIMITS, *_WHEN, *_AGAIN, *reversed(_COMMAND), *_SETUP, *_OUTPUT, *_RUNNING,
    *_GROUPS, *_MANY, *_PEOPLE, *_INHERITED,
)  # fmt: skip
"""The keys of a job file in the order in which a submission writes them."""

COMMON = ("gpus", "cpus", "memory", "time_limit", "depends_on", "start_after", "array")
"""The keys whose options the help lists before all others."""

SECTIONS = (
    ("Resources", (*_GPUS, *_MACHINE, *_RESOURCES)),
    ("When it runs", (*_WHEN, *_GROUPS, *_LIMITS, *_AGAIN)),
    ("Arrays", _MANY),
    ("Environment", _COMMAND),
    ("How it runs", (*_SETUP, *_RUNNING, *_OUTPUT, *_PEOPLE)),
)
"""The sections of the help, each with the keys whose options it lists unless they are common."""
