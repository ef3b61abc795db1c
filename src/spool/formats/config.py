"""The configuration of a spool: its table of keys, the values that they become, and how `config.toml` is read.

A new key is a row of the table, a field of `Config` or of `core.model.Policy`, where it decides something, and what is
done with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta

from spool.core.errors import InvalidConfig, InvalidValue
from spool.core.events import EVENT_WORDS, NotifyRule
from spool.core.model import DEFAULT_KILL_GRACE_NS, SECOND_NS, JobDefaults, Limits, Policy, Pool
from spool.core.names import EXECUTORS
from spool.core.units import parse_size
from spool.formats import jobfile, slurm, toml
from spool.formats.keys import EXPORTED, MOST_LOG_LINES, REQUIRED, Key, KeyTable
from spool.formats.slurm import SlurmConfig
from spool.formats.toml import Path
from spool.formats.validation import MAX_NAMES, Duration, Format, Kind, Kinds, Problems, Reading
from spool.formats.values import (
    KINDS,
    Names,
    Text,
    different,
    one_of,
    resource_name,
    resource_variable,
    several,
    trimmed,
    words,
)

WHAT = "the configuration"

UNLIMITED = 1 << 62
"""What "unlimited" in a quota stands for: a number that nothing reaches."""

MINIMUM_RESERVE_BYTES = 512 << 20
SHORTEST_NS = SECOND_NS // 10  # what comes again and again does so no more often

_PERCENT = re.compile(r"([0-9]{1,3})(?:\.([0-9]{1,3}))? ?%")
_INDEX = re.compile(r"0|[1-9][0-9]{0,3}")
_EXPORT = re.compile(r"[A-Za-z_*?\[][A-Za-z0-9_*?\[\]!-]*")
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]+")

# A row stays a row of a table.
# fmt: off

_QUOTA = KeyTable(
    "QuotaTable",
    "How much one user or one project may have at once. A key that is absent is as in the defaults.",
    Key("max_running_jobs", "limit", 'Jobs that run, or "unlimited".'),
    Key("max_running_gpus", "limit", 'GPUs in use, or "unlimited".'),
    Key("max_running_cpus", "limit", 'CPUs in use, or "unlimited".'),
    Key("max_queued_jobs", "limit", 'Jobs that wait, or "unlimited"; the file over it stays, with the reason.'),
)

_QUOTAS = KeyTable(
    "QuotasTable",
    "Limits on what users and projects may have at once. A job must satisfy its user's and its project's.",
    Key("default_user", _QUOTA, "For every user, where the user's own table says nothing.", default={},
        field="policy.default_user_limits"),
    Key("default_project", _QUOTA, "For every project, likewise.", default={}, field="policy.default_project_limits"),
    Key("users", _QUOTA, "One table for each user named.", many="named", default={}, field="policy.user_limits"),
    Key("projects", _QUOTA, "One table for each project named.", many="named", default={},
        field="policy.project_limits"),
)

_IGNORE = KeyTable(
    "IgnoreTable",
    "Processes on a GPU, started by nobody's job, that do not keep jobs off it. One of the reasons is enough.",
    Key("names", "set of words", 'Names of programs, as "python".', default=(), field="gpu.ignore_names"),
    Key("users", "set of words", "Names of users.", default=(), field="gpu.ignore_users"),
    Key("below", "size", "Whatever holds less memory than this.", field="gpu.ignore_below_bytes"),
)

_GPU = KeyTable(
    "GpuTable",
    "Which GPUs are given to jobs, and how they are chosen.",
    Key("use", "GPUs", "Only these GPUs: indices or UUIDs. All if absent; one that is not there is an error.",
        field="policy.gpu_use"),
    Key("strategy", "word",
        'Which GPUs first: "sequential" (lowest index), "random", "packed" (the fullest that fits), "spread" (the '
        "emptiest). If absent: packed for jobs that share, sequential for the others.",
        words=("sequential", "random", "packed", "spread"), field="policy.gpu_strategy"),
    Key("poll", "duration",
        "How often others' processes are looked for while a job with GPUs runs or waits. Each start on GPUs looks "
        "again.", default="5s", least=SHORTEST_NS),
    Key("ignore_processes", _IGNORE, "Processes of others that do not keep jobs off a GPU, as an idle notebook.",
        default={}),
)

_GC = KeyTable(
    "GcTable",
    "What `spool gc` removes of ended runs. Nothing that is not stated is a reason to remove anything.",
    Key("max_age", "duration", "Runs that ended longer ago than this."),
    Key("max_runs", "count", "All but so many newest runs of each job.", least=1),
    Key("max_size", "size", "The oldest runs, until all metadirs together are no larger."),
)

_RESOURCE = KeyTable(
    "ResourceTable",
    "A resource of which each run is given certain ones.",
    Key("indices", "indices of a resource",
        "Which there are; each is given to one run at a time, the first free ones first.", default=REQUIRED),
    short=Key("total", "count", "How many there are.", least=1),
)

_RULE = KeyTable(
    "NotifyRuleTable",
    'Who is told of everybody\'s jobs, and of what. Filters are lists of patterns, as "train-*"; one must fit.',
    Key("to", "addresses", "Where to, as in a job file.", default=()),
    Key("on", "events", 'Which events, as in a job file; or those of GPUs, as "gpu_free".', default=("ended",)),
    Key("users", "patterns", "Only of jobs of these users.", default=()),
    Key("projects", "patterns", "Only of jobs of these projects.", default=()),
    Key("names", "patterns", "Only of jobs of these names.", default=()),
    Key("log_lines", "count", "So many last lines of the job's log go along.", default=0, most=MOST_LOG_LINES),
)

_SLURM = KeyTable(
    "SlurmTable",
    'How jobs with executor = "slurm" are handed to Slurm.',
    Key("partition", "word of Slurm", "The partition. If absent, Slurm's default; likewise for the next two."),
    Key("account", "word of Slurm", "The account that pays."),
    Key("qos", "word of Slurm", "The quality of service."),
    Key("max_in_flight", "count", "How many jobs may be in Slurm at once, waiting there or running.", default=200,
        least=1),
    Key("poll", "duration", "How often Slurm is asked about all jobs; every 2 s while no more than 20 are there.",
        default="10s", least=SHORTEST_NS),
    Key("submit_per_second", "number", "How many jobs a second are handed over on average; more in a short burst.",
        default=10, least=0.1, most=1000),
    Key("gpus", "names in Slurm", 'What Slurm calls the GPU types of job files: `A100 = "gpu:a100"`.', default={}),
    Key("gpu_memory", "word", 'What becomes of jobs that share a GPU: they are held ("refuse"), or ask for as many '
        'shards as GiB ("shard").', words=("refuse", "shard"), default="refuse"),
    Key("options", "options of Slurm", "More options of sbatch for every job, such as `--constraint=ib`.", default=()),
)

CONFIG = KeyTable(
    "ConfigFile",
    "The configuration of a spool: `config.toml`. Every key may be absent; an unknown key is an error.",
    Key("cpus", "count", "How many CPUs may be given out. What this machine has, if absent."),
    Key("memory", "size", "How much memory there is. What this machine has, if absent."),
    Key("memory_reserve", "share",
        "Memory kept back for the system: a percentage or a size. 5 % if absent, at least 512 MiB."),
    Key("disk_floor", "size", "With less than this free on the spool's disk nothing starts.", default="1G",
        field="policy.disk_floor_bytes"),
    Key("resources", _RESOURCE,
        "What else there is in the whole spool, by names of your own: how many of it, `licence = 3`, or which, `tpu "
        "= { indices = [0, 1] }`.", many="named", default={}),
    Key("max_running", "count", "So many jobs run at once in the whole spool.", least=1, field="policy.max_running"),
    Key("executor", "word", "What runs a job that does not say.", words=EXECUTORS, default="process"),
    Key("keep_session", "flag", "Whether the sessions of jobs that do not say stay after their end; with tmux.",
        default=False),
    Key("durability", "word",
        'What a power cut may repeat: "grouped" syncs records together, within 50 ms; "strict" syncs each before '
        "anything relies on it.", words=("grouped", "strict"), default="grouped"),
    Key("autostart", "flag",
        "Whether commands after which jobs may start or have to end (`submit`, `run`, `release`, `requeue`, "
        "`resume`, `hold`, `cancel`) start a dispatcher if none lives.", default=True),
    Key("export", "exports",
        "Which variables of the caller `submit` and `run` write into a job's `env`, unless `--export` says: names, and "
        "patterns as `CONDA_*`. What may be a secret (`*TOKEN*`, `*KEY*` and the like) goes only by its full name.",
        default=EXPORTED),
    Key("idle_exit", "timeout", "A dispatcher that was so started leaves after so long without jobs. 0s is never.",
        default="10m"),
    Key("look_every", "duration", "How often the directories are read even if no event was seen.", default="5s",
        least=SHORTEST_NS),
    Key("kill_grace", "duration", "The time between TERM and KILL, for jobs that do not say.", default="10s"),
    Key("max_requeues", "count", "How often a job whose run was lost is run again at most.", default=3),
    Key("prolog", "script", "Shell text run before every job's own prolog."),
    Key("epilog", "script", "Shell text run after every job's own epilog."),
    Key("hook_time_limit", "duration",
        "How long a hook may run; then it is ended with all that it started, and counts as a no.", default="10s",
        least=SHORTEST_NS),
    Key("notifier", "script",
        "Shell text that sends a message to an address that is neither an URL nor one of `contacts`: the address is "
        "`$1`, the event `$2`, the text comes on its standard input."),
    Key("contacts", "contacts",
        "Names for addresses, so that jobs name whom to tell, and secrets stand in this file alone.", default={}),
    Key("notify", _RULE, "Who is told of everybody's jobs, and of what: `[[notify]]`.", many="list", default=()),
    Key("metrics", "metrics file",
        "A file that metrics for Prometheus are written to, as node_exporter's textfile collector reads it: an "
        "absolute path that ends with `.prom`; it may begin with `~`."),
    Key("status_page", "page file",
        "A web page that shows the spool, renewed every few seconds while a dispatcher lives: `status.html` lies in "
        "the spool; an absolute path, which may begin with `~`, is readable by everyone. It ends with `.html`."),
    Key("log_level", "word", "How much the dispatcher says.", words=("debug", "info", "warning", "error"),
        default="info"),
    Key("other_hosts_gone", "words",
        "Hosts that are no more: their runs are taken for lost. Only ever name one that is truly off.", default=()),
    Key("on_failure", "word", "When a job has failed for good: go on, pause the spool, or cancel what waits and runs.",
        words=("continue", "pause", "halt"), default="continue", field="policy.on_failure"),
    Key("starvation_after", "anything", "Has no effect any more: nothing starves.", field="gone.starvation_after"),
    Key("time_bonus", "flag", "Has no effect any more: shorter jobs go first by themselves.", field="gone.time_bonus"),
    Key("order", "word", "Who goes first: who has waited longest for its size, or who has arrived first.",
        words=("slowdown", "arrival"), default="slowdown", field="policy.order"),
    Key("learn_run_times", "flag", "Whether the run time of jobs without a time limit is guessed from earlier runs.",
        default=True, field="policy.learn_run_times"),
    Key("fair_share", "flag", "Whether the jobs of those who have used more wait somewhat longer.", default=True,
        field="policy.fair_share"),
    Key("fair_share_by", "word", "Whose use is compared.", words=("user", "project"), default="user",
        field="policy.fair_share_by"),
    Key("half_life", "duration", "Use counts half after so long.", default="7d", field="policy.half_life_ns"),
    Key("cpu_weight", "number", "What a CPU second counts beside a GPU second.", default=0.05, least=0, most=1000,
        field="policy.cpu_weight"),
    Key("reservation_horizon", "duration",
        "So long before a reservation begins, its GPUs are kept free of jobs that would run into it.", default="12h",
        field="policy.reservation_horizon_ns"),
    Key("reservation_allows_unlimited", "flag",
        "Whether jobs without a time limit may start on GPUs that are reserved for later.", default=False,
        field="policy.reservation_allows_unlimited"),
    Key("defaults", "defaults of jobs",
        "What counts for jobs whose files do not say: keys of a job file, of `cpus`, `memory`, `time_limit`, "
        "`gpu_idle`, `gpu_idle_action`, `retry`, `notify` and `env`. No job file is changed, and what runs goes on as "
        "it began.", default={}),
    Key("slurm", _SLURM, "How jobs are handed to Slurm.", default={}),
    Key("gpu", _GPU, "Which GPUs are given to jobs, and how they are chosen.", default={}),
    Key("gc", _GC, "What `spool gc` removes of ended runs.", default={}),
    Key("quotas", _QUOTAS, "What users and projects may have at once.", default={}),
)

# fmt: on


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory kept back for the system: a share of all there is, or a size."""

    share_ppm: int | None = None  # millionths of all there is
    size_bytes: int | None = None

    def bytes_of(self, total_bytes: int) -> int:
        """Return what is kept back of *total_bytes*. A share is at least 512 MiB, unless it is nothing."""
        if self.size_bytes is not None:
            return self.size_bytes
        share = 50_000 if self.share_ppm is None else self.share_ppm
        return max(total_bytes * share // 1_000_000, MINIMUM_RESERVE_BYTES) if share else 0


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """How GPUs are watched. Which are used, and in which order, is in the policy."""

    poll_ns: int = 5 * SECOND_NS
    ignore_names: frozenset[str] = frozenset()
    ignore_users: frozenset[str] = frozenset()
    ignore_below_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GcConfig:
    """What is removed of ended runs. None is no reason to remove anything."""

    max_age_ns: int | None = None
    max_runs: int | None = None
    max_size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """What `config.toml` says. A missing or empty file is `Config()`."""

    policy: Policy = field(default_factory=Policy)
    cpus: int | None = None  # None: what the machine has
    memory_bytes: int | None = None  # None: what the machine has
    memory_reserve: Reserve = Reserve()
    resources: tuple[Pool, ...] = ()
    executor: str = "process"
    keep_session: bool = False
    durability: str = "grouped"  # or "strict"
    autostart: bool = True
    export: tuple[str, ...] = EXPORTED
    idle_exit_ns: int | None = 600 * SECOND_NS  # None: never
    look_every_ns: int = 5 * SECOND_NS
    kill_grace_ns: int = DEFAULT_KILL_GRACE_NS
    max_requeues: int = 3
    prolog: str | None = None
    epilog: str | None = None
    hook_time_limit_ns: int = 10 * SECOND_NS
    notifier: str | None = None
    contacts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notify: tuple[NotifyRule, ...] = ()
    metrics: str | None = None  # as written: absolute, or with ~
    status_page: str | None = None  # as written: a name in the spool, absolute, or with ~
    log_level: str = "info"
    other_hosts_gone: tuple[str, ...] = ()
    defaults: JobDefaults = jobfile.NO_DEFAULTS
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    gpu: GpuConfig = GpuConfig()
    gc: GcConfig = GcConfig()
    advice: tuple[str, ...] = ()  # what is written in vain, and what to write instead


_GONE = {
    "starvation_after": 'no job starves any more, whatever it says; remove it, or write order = "arrival" to have '
    "jobs start first come, first served",
    "time_bonus": 'jobs that run for less time go first by themselves; remove it, or write order = "arrival" to '
    "have jobs start first come, first served",
}


def parse(data: bytes) -> Config:
    """Return what the configuration *data* says. Raises only InvalidConfig, with every problem."""
    reading = FORMAT.read(data, WHAT)
    found = reading.found
    config, policy = found[""], found["policy"]
    if policy.get("half_life_ns") == 0:
        why = "must be more than nothing; to forget all use, write fair_share = false"
        reading.problems.add(("half_life",), why)
    config["resources"] = _resources(config.get("resources", {}), reading.problems)
    for at, rule in enumerate(config.get("notify", ())):
        if "to" not in rule:
            reading.problems.add(("notify", at), _NO_ADDRESS)
    FORMAT.judge(reading, data, WHAT)
    for key in ("default_user_limits", "default_project_limits"):
        policy[key] = Limits(**found[f"policy.{key}"])
    for key in ("user_limits", "project_limits"):
        policy[key] = {name: Limits(**limits) for name, limits in policy.get(key, {}).items()}
    config["policy"] = Policy(**policy)
    grace_ns = config.get("kill_grace_ns", DEFAULT_KILL_GRACE_NS)
    config["defaults"] = replace(config.get("defaults", jobfile.NO_DEFAULTS), kill_grace_ns=grace_ns)
    config["notify"] = tuple(NotifyRule(**rule) for rule in config.get("notify", ()))
    config["slurm"] = SlurmConfig(**found["slurm"])
    config["gpu"] = GpuConfig(**found["gpu"])
    config["gc"] = GcConfig(**found["gc"])
    advice = tuple(f"{key} has no effect: {why}" for key, why in _GONE.items() if key in found["gone"])
    return Config(**config, advice=advice)


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
    if len(listed) > MAX_NAMES:
        raise InvalidValue(f"has {len(listed):,} entries, and it may have {MAX_NAMES:,}")
    different(listed)
    return listed


def _gpus(listed: tuple[int | str, ...], path: Path, reading: Reading) -> tuple[str, ...]:
    for at, gpu in enumerate(listed):
        if not _INDEX.fullmatch(str(gpu)) and not _UUID.fullmatch(str(gpu)):
            reading.problems.add((*path, at), f"{toml.show(gpu)} is neither an index nor the UUID of a GPU")
    used = tuple(str(gpu) for gpu in listed)
    reading.problems.value(path, different, used, None)
    return used


def _contacts(tables: dict[str, Names], path: Path, reading: Reading) -> dict[str, tuple[str, ...]]:
    contacts = {name: several(to) for name, to in tables.items()}
    for name, addresses in contacts.items():
        here = (*path, name)
        if not name or "://" in name:
            reading.problems.add(here, "is an address itself, and would never be looked up")
        if not addresses or not all(address.strip() for address in addresses):
            reading.problems.add(here, "needs an address")
        reading.problems.value(here, words, addresses, None)
    return contacts


_NO_ADDRESS = 'needs "to": where the messages go'


def _addresses(stated: Names, path: Path, reading: Reading) -> tuple[str, ...]:
    addresses = several(stated)
    if not addresses or not all(address.strip() for address in addresses):
        reading.problems.add(path[:-1], _NO_ADDRESS)
    reading.problems.value(path, words, addresses, None)
    return addresses


def _events(stated: Names, path: Path, reading: Reading) -> tuple[str, ...]:
    events = several(stated)
    for event in events:
        reading.problems.value(path, lambda word: one_of(word, EVENT_WORDS), event, "")
    return events


def _defaults(stated: dict[str, Any], path: Path, reading: Reading) -> JobDefaults:
    defaults, problems = jobfile.defaults_of(stated)
    reading.problems.take(problems, path)
    return defaults


def _exports(listed: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in words(listed):
        if _EXPORT.fullmatch(pattern) is None:
            raise InvalidValue(f'{toml.show(pattern)} fits no variable; write a name or a pattern, as in "CONDA_*"')
    return listed


def _metrics(path: str) -> str:
    if not trimmed(path).startswith(("/", "~")):
        raise InvalidValue(f"{toml.show(path)} must be an absolute path")
    if not path.endswith(".prom"):
        raise InvalidValue(f"{toml.show(path)} must end with .prom, or node_exporter passes it over")
    return path


def _page(path: str) -> str:
    if not trimmed(path).startswith(("/", "~")) and "/" in path:
        raise InvalidValue(f"{toml.show(path)} must be a plain name, for a file in the spool, or an absolute path")
    if not path.endswith(".html") or os.path.basename(path).startswith("."):
        raise InvalidValue(f'{toml.show(path)} must name an .html file, as in "status.html"')
    return path


def _limit(stated: int | str) -> int:
    if isinstance(stated, int):
        return stated
    if stated == "unlimited":
        return UNLIMITED
    raise InvalidValue(f'{toml.show(stated)} is neither a number nor "unlimited"')


def reserve(text: str) -> Reserve:
    """Return `"5%"` or `"8G"` as what is kept back. Raises InvalidValue."""
    match = _PERCENT.fullmatch(trimmed(text))
    if match is None:
        if text.endswith("%"):
            raise InvalidValue(f'{toml.show(text)} is not a percentage, as in "5%"')
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
    "words": lambda key: Kind(tuple[str, ...], words),
    "set of words": lambda key: Kind(tuple[str, ...], lambda stated: frozenset(words(stated))),
    "contacts": lambda key: Kind(dict[str, Names], read=_contacts),
    "addresses": lambda key: Kind(Names, read=_addresses),
    "events": lambda key: Kind(Names, read=_events),
    "exports": lambda key: Kind(tuple[str, ...], _exports),
    "patterns": lambda key: Kind(Names, lambda stated: words(several(stated))),
    "metrics file": lambda key: Kind(Text, _metrics),
    "word of Slurm": lambda key: Kind(Text, slurm.word),
    "names in Slurm": lambda key: Kind(dict[str, str], lambda stated: {t: slurm.word(g) for t, g in stated.items()}),
    "page file": lambda key: Kind(Text, _page),
    "anything": lambda key: Kind(Duration),
}

FORMAT = Format(CONFIG, {**KINDS, **_KINDS}, InvalidConfig)
"""How the configuration is read."""
