"""The configuration of a spool: the table of its keys, their values, and the reader of `config.toml`.

A new key is a row of the table, a field of `Config` (of `core.model.Policy` if decisions depend on it) with its
default, and the code that uses it. What the configuration of a shared machine (`machinefile`) also says is `Capacity`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from spool.core.errors import InvalidConfig, InvalidValue
from spool.core.layout import EXPORTED
from spool.core.model import (
    DEFAULT_KILL_GRACE_NS,
    MAX_REQUEUES,
    SECOND_NS,
    ForeignProcess,
    JobDefaults,
    Limits,
    Parts,
    Policy,
    Pool,
)
from spool.core.units import parse_size
from spool.formats import jobfile, toml
from spool.formats.capabilities import REQUIRED, Key, KeyTable, executors, with_parts
from spool.formats.keys import DEFAULTS
from spool.formats.toml import Path
from spool.formats.validation import Format, Kind, Kinds, Problems, Reading
from spool.formats.values import KINDS, Text, different, resource_name, resource_variable, trimmed, words

WHAT = "the configuration"

UNLIMITED = 1 << 62
"""The value of "unlimited" in a quota; no amount reaches it."""

MINIMUM_RESERVE_BYTES = 512 << 20

_PERCENT = re.compile(r"([0-9]{1,3})(?:\.([0-9]{1,3}))? ?%")
_INDEX = re.compile(r"0|[1-9][0-9]{0,3}")
_EXPORT = re.compile(r"[A-Za-z_*?\[][A-Za-z0-9_*?\[\]!-]*")
_ACCOUNT = re.compile(r"@?[^@\s:,/-][^@\s:,/]*(?:@[^@\s:,/]+)?")  # as in a directory service: alice@lab.example
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]+")

GONE = {
    "starvation_after": 'jobs no longer starve, with any value; remove it, or set order = "arrival" for first come, '
    "first served",
    "time_bonus": 'shorter jobs go first anyway; remove it, or set order = "arrival" for first come, first served',
    "hq": "spool hands no jobs to HyperQueue any more; remove it",
    "tariff": "multiply the hours and kWh of `spool stats --json` by your prices; remove it",
    "learn_run_times": "a guess never holds up a job for long; remove it, and state time limits that you know",
    "half_life": "usage always counts half after 7 days; remove it, or set fair_share = false to ignore it",
    "cpu_weight": "20 CPUs always count as one GPU; remove it",
    "reservation_horizon": "GPUs are always kept free from 12 hours before their reservation; remove it",
    "reservation_allows_unlimited": "a job without a time limit would run into the reservation; remove it, and give "
    "such jobs a time limit",
    **dict.fromkeys(
        ("preemption.after", "preemption.long", "preemption.short", "preemption.every"),
        "remove [preemption]; its times are fixed, and preemption = false stops no run for another",
    ),
    "wrapper": "spool takes the faster program by itself; remove it",
    "look_every": "the directories are always read every 5 seconds, and at once after a file event; remove it",
    "hook_time_limit": "a hook always has 30 seconds; remove it",
    "log_level": "dispatcher.log has what a user may need; remove it",
    "keep_session": "write keep_session = true in the job file, or submit with --set keep_session=true",
    "gpu.poll": "GPUs in use are always looked at every 5 seconds; remove it",
    "gc.max_runs": "write gc.max_age or gc.max_size; `spool gc --keep-runs` removes by number",
}
"""The keys that have no effect any more, each with the reason and what to write instead."""

# A row stays a row of a table.
# fmt: off

QUOTA = KeyTable(
    "QuotaTable",
    "Limits for one user or one project. A key that is absent is taken from the defaults.",
    Key("max_running_jobs", "limit", 'Maximum running jobs, or "unlimited".'),
    Key("max_running_gpus", "limit", 'Maximum GPUs in use, or "unlimited".'),
    Key("max_running_cpus", "limit", 'Maximum CPUs in use, or "unlimited".'),
    Key("max_running_memory", "size limit", 'Maximum memory granted to running jobs, or "unlimited".',
        field="max_running_memory_bytes"),
    Key("max_queued_jobs", "limit",
        'Maximum waiting jobs, or "unlimited"; files beyond it stay in `queued/` with a reason.'),
)

_QUOTAS = KeyTable(
    "QuotasTable",
    "Limits on what users and projects use at once. A job must satisfy those of its user and of its project.",
    Key("default_user", QUOTA, "Limits for every user; a user's own table takes precedence.", default={},
        field="policy.default_user_limits"),
    Key("default_project", QUOTA, "Limits for every project; a project's own table takes precedence.", default={},
        field="policy.default_project_limits"),
    Key("users", QUOTA, "One table per user.", many="named", default={}, field="policy.user_limits"),
    Key("projects", QUOTA, "One table per project.", many="named", default={}, field="policy.project_limits"),
)

_IGNORE = KeyTable(
    "IgnoreTable",
    "Processes outside spool that do not keep jobs off a GPU. One matching condition is enough.",
    Key("names", "set of words", 'Program names, such as "python".', default=(), field="gpu.ignore_names"),
    Key("users", "set of words", "User names.", default=(), field="gpu.ignore_users"),
    Key("below", "size", "Processes that hold less GPU memory than this.", default=None,
        field="gpu.ignore_below_bytes"),
)

_GPU = KeyTable(
    "GpuTable",
    "Which GPUs jobs may use, and how they are chosen.",
    Key("use", "GPUs", "Use only these GPUs: indices or UUIDs. Default: all. A GPU that does not exist is an error.",
        field="policy.gpu_use"),
    Key("strategy", "word",
        'Which GPUs to use first: "sequential" (lowest index), "random", "packed" (the fullest that fits), "spread" '
        "(the emptiest). Default: the smallest memory (SCHEDULING 4); packed for jobs that share GPUs.",
        words=("sequential", "random", "packed", "spread"), field="policy.gpu_strategy"),
    Key("ignore_processes", _IGNORE,
        "Processes outside spool that do not keep jobs off a GPU, such as an idle notebook.", default={}),
)

_GC = KeyTable(
    "GcTable",
    "Which ended runs the dispatcher (every hour) and `spool gc` remove. A limit that is not set removes nothing.",
    Key("max_age", "duration", "Remove runs that ended longer ago than this."),
    Key("max_size", "size", "Remove the oldest runs until all metadirs together fit this size."),
)

_RESOURCE = KeyTable(
    "ResourceTable",
    "A resource whose units are numbered; each run gets specific ones.",
    Key("indices", "indices of a resource",
        "The indices of the units. Each unit belongs to one run at a time; the first free ones come first.",
        default=REQUIRED),
    short=Key("total", "count", "How many units there are.", least=1),
)

CONFIG = KeyTable(
    "ConfigFile",
    "The configuration of a spool: `config.toml`. Every key is optional; an unknown key is an error.",
    *with_parts("config", (
    Key("cpus", "count", "Number of CPUs that jobs may use. Default: all of this machine's."),
    Key("cpu_pinning", "flag",
        "Whether each run gets CPUs that no other pinned run has: whole cores first, on one NUMA node and near its "
        "GPUs if possible. On a shared machine no run is pinned."),
    Key("memory", "size", "Amount of memory. Default: all of this machine's."),
    Key("memory_reserve", "share",
        "Memory reserved for the system: a percentage or a size. Default: 5%, at least 512 MiB."),
    Key("machine", "machine",
        'How several users share this machine: "auto" asks the arbiter in `/run/spool` if `/etc/spool/machine.toml` '
        'exists; "off" starts jobs without it, as foreign processes to the other users; the path of a '
        "directory asks the arbiter that `spool machine serve DIR` runs there."),
    Key("machine_owner", "account",
        "The account whose arbiter is trusted, in addition to root, `spool-machine` and yourself."),
    Key("disk_floor", "size", "Start nothing while the spool's disk has less free space than this.",
        field="policy.disk_floor_bytes"),
    Key("resources", _RESOURCE,
        "Other resources, under names that you choose: a number, `licence = 3`, or indices, `tpu = { "
        "indices = [0, 1] }`.", many="named", default={}),
    Key("max_running", "count", "Maximum number of jobs that run at once in the whole spool.", least=1,
        field="policy.max_running"),
    Key("executor", "executor", "What runs jobs that do not set `executor`: one of these, or an engine that an "
        "installed package offers.", words=executors()),
    Key("gpu_names", "word",
        "What `CUDA_VISIBLE_DEVICES` of jobs has: UUIDs, or indices for programs that take no UUIDs. A MIG instance "
        "always has its UUID.", words=("uuid", "index")),
    Key("durability", "word",
        'What may be done twice after a power cut: "grouped" syncs records together, within 50 ms; "strict" syncs each '
        "one before anything relies on it.", words=("grouped", "strict")),
    Key("accept_from", "accounts",
        'Whose job files run, in addition to those of the owner of the spool: users, and groups with an `@`, as in '
        '`["alice", "@lab"]`. Their jobs run as the owner.', default=()),
    Key("autostart", "flag",
        "Whether commands that start or end jobs (`submit`, `run`, `release`, `requeue`, `resume`, `hold`, `cancel`) "
        "start a dispatcher if none is running."),
    Key("export", "exports",
        "Which of the caller's variables `submit` and `run` copy into a job's `env`, unless `--export` is given: "
        "names and patterns such as `CONDA_*`. Possible secrets (`*TOKEN*`, `*KEY*` and the like) match full names "
        "only."),
    Key("idle_exit", "timeout",
        "A dispatcher that was started this way exits after this time without jobs. 0s means never."),
    Key("kill_grace", "duration", "Time between TERM and KILL, for jobs that do not set `kill_grace`."),
    Key("max_requeues", "count", "Maximum number of times a job is run again after its run was lost."),
    Key("prolog", "script", "Shell code to run before every job's own prolog."),
    Key("epilog", "script", "Shell code to run after every job's own epilog."),
    Key("other_hosts_gone", "words",
        "Hosts that no longer exist: their runs count as lost. Name a host only if it is off for good.", default=()),
    Key("on_failure", "word",
        "What to do when a job has finally failed: continue, pause the spool, or cancel all jobs.",
        words=("continue", "pause", "halt"), field="policy.on_failure"),
    Key("order", "word", "Which job goes first: the one that has waited longest for its size, or the oldest.",
        words=("slowdown", "arrival"), field="policy.order"),
    Key("fair_share", "flag", "Whether jobs of users with more usage, recent or since they came, wait longer.",
        field="policy.fair_share"),
    Key("fair_share_by", "word", "What fair share compares.", words=("user", "project"),
        field="policy.fair_share_by"),
    Key("defaults", "defaults of jobs",
        f"Defaults for keys that a job file does not set: {', '.join(f'`{key.name}`' for key in DEFAULTS.keys)}. "
        "Job files stay unchanged, and running jobs keep what they started with.", default={}),
    Key("preemption", "flag", "Whether long runs of jobs with `preemptible = true` are stopped for short jobs.",
        field="policy.preemption"),
    Key("gpu", _GPU, "Which GPUs jobs may use, and how they are chosen.", default={}),
    Key("gc", _GC, "Which ended runs the dispatcher (every hour) and `spool gc` remove.", default={}),
    Key("quotas", _QUOTAS, "Limits on what users and projects use at once.", default={}),
)), gone=GONE)

# fmt: on


class Reserve(Struct, frozen=True):
    """Memory reserved for the system: a share of the total, or a size."""

    share_ppm: int | None = None  # millionths of the total
    size_bytes: int | None = None

    def bytes_of(self, total_bytes: int) -> int:
        """Return how much of *total_bytes* is reserved. A share other than zero is at least 512 MiB."""
        if self.size_bytes is not None:
            return self.size_bytes
        share = 50_000 if self.share_ppm is None else self.share_ppm
        return max(total_bytes * share // 1_000_000, MINIMUM_RESERVE_BYTES) if share else 0


class GpuConfig(Struct, frozen=True):
    """Which processes outside spool keep no jobs off a GPU. The policy says which GPUs are used, and in which order."""

    ignore_names: frozenset[str] = frozenset()
    ignore_users: frozenset[str] = frozenset()
    ignore_below_bytes: int = 0

    def ignores(self, process: ForeignProcess) -> bool:
        """Whether *process* does not count: one of the reasons is enough. Unknown memory is not below any limit."""
        small = process.memory_bytes is not None and process.memory_bytes < self.ignore_below_bytes
        return small or process.name in self.ignore_names or process.user in self.ignore_users


class RetentionPolicy(Struct, frozen=True):
    """The limits beyond which ended runs are removed. None: no limit."""

    max_age_ns: int | None = None
    max_runs: int | None = None
    max_size_bytes: int | None = None


class Capacity(Struct, frozen=True):
    """How much of the machine jobs may use, and who goes first."""

    policy: Policy = field(default_factory=Policy)
    cpus: int | None = None  # None: those of the machine
    cpu_pinning: bool = False
    memory_bytes: int | None = None  # None: that of the machine
    memory_reserve: Reserve = Reserve()
    resources: tuple[Pool, ...] = ()
    gpu: GpuConfig = GpuConfig()
    advice: tuple[str, ...] = ()  # about keys without effect, and what to write instead

    def memory_of(self, total_bytes: int) -> int:
        """Return the memory for all jobs together on a machine with *total_bytes*."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return max(0, total_bytes - self.memory_reserve.bytes_of(total_bytes))


class Config(Capacity, frozen=True):
    """The values of `config.toml`. A missing or empty file is `Config()`."""

    machine: str = "auto"  # or "off", or a directory: absolute, or with ~
    machine_owner: str | None = None
    executor: str = "process"
    gpu_names: str = "uuid"  # or "index"
    durability: str = "grouped"  # or "strict"
    accept_from: tuple[str, ...] = ()
    autostart: bool = True
    export: tuple[str, ...] = EXPORTED
    idle_exit_ns: int | None = 600 * SECOND_NS  # None: never
    kill_grace_ns: int = DEFAULT_KILL_GRACE_NS
    max_requeues: int = MAX_REQUEUES
    prolog: str | None = None
    epilog: str | None = None
    other_hosts_gone: tuple[str, ...] = ()
    defaults: JobDefaults = jobfile.NO_DEFAULTS
    gc: RetentionPolicy = RetentionPolicy()
    parts: Parts = ()

    def part(self, capability: str) -> Any:
        """Return the value of the keys of a capability; None if the file has none of them."""
        return next((value for name, value in self.parts if name == capability), None)


def parse(data: bytes) -> Config:
    """Return the configuration in *data*. Raises only InvalidConfig, with every problem."""
    reading = FORMAT.read(data, WHAT)
    found = reading.found
    config = capacity_of(reading)
    config["parts"] = FORMAT.read_parts(reading)
    FORMAT.judge(reading, data, WHAT)
    grace_ns = config.get("kill_grace_ns", DEFAULT_KILL_GRACE_NS)
    config["defaults"] = replace(config.get("defaults", jobfile.NO_DEFAULTS), kill_grace_ns=grace_ns)
    config["gc"] = RetentionPolicy(**found["gc"])
    return Config(**config)


def capacity_of(reading: Reading) -> dict[str, Any]:
    """Return the fields of the root that a file sets, those of `Capacity` complete, and add their problems."""
    found = reading.found
    root, policy = found[""], found["policy"]
    root["advice"] = reading.advice
    for key in ("default_user_limits", "default_project_limits"):
        policy[key] = Limits(**found[f"policy.{key}"])
    for key in ("user_limits", "project_limits"):
        policy[key] = {name: Limits(**limits) for name, limits in policy.get(key, {}).items()}
    root["policy"] = Policy(**policy)
    root["resources"] = _resources(root.get("resources", {}), reading.problems)
    root["gpu"] = GpuConfig(**found["gpu"])
    return root


def _resources(tables: Mapping[str, dict[str, Any]], problems: Problems) -> tuple[Pool, ...]:
    pools = []
    variables: dict[str, str] = {}
    for name, stated in tables.items():
        path = ("resources", name)
        if not problems.value(path, resource_name, name, ""):
            continue
        other = variables.setdefault(resource_variable(name), name)
        if other != name:
            problems.add(path, f'has the same variable as "{other}", {resource_variable(name)}; rename one of them')
        indices = stated.get("indices", ())
        pools.append(Pool(name, stated.get("total", len(indices)), indices))
    return tuple(pools)


def _indices(listed: tuple[int, ...]) -> tuple[int, ...]:
    if not listed:
        raise InvalidValue("is an empty list; name the indices, or leave the resource out")
    different(listed)
    return listed


def _gpus(listed: tuple[int | str, ...], path: Path, reading: Reading) -> tuple[str, ...]:
    for at, gpu in enumerate(listed):
        if not _INDEX.fullmatch(str(gpu)) and not _UUID.fullmatch(str(gpu)):
            reading.problems.add((*path, at), f"{toml.show(gpu)} is neither an index nor the UUID of a GPU")
    used = tuple(str(gpu) for gpu in listed)
    reading.problems.value(path, different, used, None)
    return used


def _defaults(stated: dict[str, Any], path: Path, reading: Reading) -> JobDefaults:
    defaults, problems = jobfile.defaults_of(stated)
    reading.problems.take(problems, path)
    return defaults


def _all_like(pattern: re.Pattern[str], otherwise: str, listed: tuple[str, ...]) -> tuple[str, ...]:
    """Return words as written, if all match. Raises InvalidValue, with what one that does not is *otherwise*."""
    for word in words(listed):
        if pattern.fullmatch(word) is None:
            raise InvalidValue(f"{toml.show(word)} {otherwise}")
    return listed


accounts = partial(_all_like, _ACCOUNT, 'is neither a user such as "alice" nor a group such as "@lab"')
"""Return users and groups as written, `alice` and `@lab`. Raises InvalidValue."""

_exports = partial(_all_like, _EXPORT, 'matches no variable; write a name or a pattern such as "CONDA_*"')


def _account(account: str) -> str:
    if account.startswith("@") or _ACCOUNT.fullmatch(account) is None:
        raise InvalidValue(f'{toml.show(account)} is not an account such as "alice"')
    return account


def _machine(where: str) -> str:
    if trimmed(where) not in ("auto", "off") and not where.startswith(("/", "~")):
        raise InvalidValue(f'{toml.show(where)} is neither "auto" nor "off" nor an absolute path')
    return where


def _limit(stated: int | str) -> int:
    if isinstance(stated, int):
        return stated
    if stated == "unlimited":
        return UNLIMITED
    raise InvalidValue(f'{toml.show(stated)} is neither a number nor "unlimited"')


def reserve(text: str) -> Reserve:
    """Return `"5%"` or `"8G"` as a reserve. Raises InvalidValue."""
    match = _PERCENT.fullmatch(trimmed(text))
    if match is None:
        if text.endswith("%"):
            raise InvalidValue(f'{toml.show(text)} is not a percentage such as "5%"')
        return Reserve(size_bytes=parse_size(text))
    whole, fraction = match.groups()
    share_ppm = int(whole) * 10_000 + int((fraction or "0").ljust(3, "0")) * 10
    if share_ppm >= 1_000_000:
        raise InvalidValue(f"{toml.show(text)} would leave nothing for jobs")
    return Reserve(share_ppm=share_ppm)


_KINDS: Kinds = {
    "share": lambda key: Kind(Annotated[str, Meta(extra_json_schema={"examples": ["5%", "8G"]})], reserve),
    "defaults of jobs": lambda key: Kind(dict[str, Any], read=_defaults),
    "indices of a resource": lambda key: Kind(tuple[Annotated[int, Meta(ge=0, le=key.most)], ...], _indices),
    "GPUs": lambda key: Kind(tuple[int | str, ...], read=_gpus),
    "limit": lambda key: Kind(Annotated[int, Meta(ge=0, le=key.most)] | str, _limit),
    "size limit": lambda key: Kind(Text, lambda text: UNLIMITED if trimmed(text) == "unlimited" else parse_size(text)),
    "words": lambda key: Kind(tuple[str, ...], words),
    "set of words": lambda key: Kind(tuple[str, ...], lambda stated: frozenset(words(stated))),
    "accounts": lambda key: Kind(tuple[str, ...], accounts),
    "account": lambda key: Kind(Text, _account),
    "machine": lambda key: Kind(Text, _machine),
    "exports": lambda key: Kind(tuple[str, ...], _exports),
}

FORMAT = Format(CONFIG, {**KINDS, **_KINDS}, InvalidConfig, Config(), "config")
"""The reader of the configuration."""
