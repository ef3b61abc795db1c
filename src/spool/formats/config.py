"""The configuration of a spool: the keys of `config.toml`, their defaults and what they mean, and how they are read.

The descriptions are the documentation: the JSON Schema and the pages are made from them. Names are those of
`core.model.Policy`, where a key decides something.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from spool.core.errors import InvalidConfig, InvalidFile, InvalidValue
from spool.core.events import EVENT_WORDS, NotifyRule
from spool.core.model import DEFAULT_KILL_GRACE_NS, SECOND_NS, Limits, Policy, Pool
from spool.core.names import EXECUTORS
from spool.core.units import parse_duration, parse_size
from spool.formats import toml
from spool.formats.job_schema import MOST_LOG_LINES, Names
from spool.formats.toml import Path
from spool.formats.validation import MAX_NAMES, Duration, Problems, Size, convert
from spool.formats.values import different, one_of, resource_name, resource_variable, trimmed, words

MOST = 1_000_000
"""No count in a configuration is larger."""

Share = Annotated[str, Meta(extra_json_schema={"examples": ["5%", "8G"]})]
"""A percentage or a size."""

Count = Annotated[int, Meta(ge=0, le=MOST)] | str
"""A limit: a number, or "unlimited"."""

V = TypeVar("V")

WHAT = "the configuration"

UNLIMITED = 1 << 62
"""What "unlimited" in a quota stands for: a number that nothing reaches."""

MINIMUM_RESERVE_BYTES = 512 << 20

_PERCENT = re.compile(r"([0-9]{1,3})(?:\.([0-9]{1,3}))? ?%")
_INDEX = re.compile(r"0|[1-9][0-9]{0,3}")
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]+")


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
    log_level: str = "info"
    other_hosts_gone: tuple[str, ...] = ()
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
    try:
        document = toml.read(data, WHAT)
    except InvalidFile as error:
        raise InvalidConfig(WHAT, error.problems) from None
    problems = Problems()
    raw = convert(document, ConfigFile, problems)
    config = _config(raw, problems) if problems.limited(raw) else Config()
    if problems:
        raise InvalidConfig(WHAT, problems.listed(toml.decode(data, WHAT)))
    return config


def _config(raw: ConfigFile, problems: Problems) -> Config:
    gpu, gc, ignore = raw.gpu, raw.gc, raw.gpu.ignore_processes

    def duration(path: Path, text: str, *, least_ns: int = 0) -> int:
        return problems.value(path, lambda value: _at_least(parse_duration(value), least_ns, value), text, least_ns)

    def size(path: Path, text: str) -> int:
        return problems.value(path, parse_size, text, 0)

    return Config(
        policy=_policy(raw, problems),
        cpus=_known(raw.cpus),
        memory_bytes=None if raw.memory is UNSET else size(("memory",), raw.memory),
        memory_reserve=Reserve()
        if raw.memory_reserve is UNSET
        else problems.value(("memory_reserve",), reserve, raw.memory_reserve, Reserve()),
        resources=_resources(raw.resources, problems),
        executor=_word(raw.executor, ("executor",), EXECUTORS, problems),
        keep_session=raw.keep_session,
        durability=_word(raw.durability, ("durability",), ("grouped", "strict"), problems),
        autostart=raw.autostart,
        idle_exit_ns=duration(("idle_exit",), raw.idle_exit) or None,
        look_every_ns=duration(("look_every",), raw.look_every, least_ns=SECOND_NS // 10),
        kill_grace_ns=duration(("kill_grace",), raw.kill_grace),
        max_requeues=raw.max_requeues,
        prolog=_known(raw.prolog),
        epilog=_known(raw.epilog),
        hook_time_limit_ns=duration(("hook_time_limit",), raw.hook_time_limit, least_ns=SECOND_NS // 10),
        notifier=_known(raw.notifier),
        contacts={name: _contact(name, to, problems) for name, to in raw.contacts.items()},
        notify=tuple(_rule(table, at, problems) for at, table in enumerate(raw.notify)),
        metrics=None if raw.metrics is UNSET else problems.value(("metrics",), _metrics, raw.metrics, None),
        log_level=_word(raw.log_level, ("log_level",), ("debug", "info", "warning", "error"), problems),
        other_hosts_gone=_clean(raw.other_hosts_gone, ("other_hosts_gone",), problems),
        gpu=GpuConfig(
            poll_ns=duration(("gpu", "poll"), gpu.poll, least_ns=SECOND_NS // 10),
            ignore_names=frozenset(_clean(ignore.names, ("gpu", "ignore_processes", "names"), problems)),
            ignore_users=frozenset(_clean(ignore.users, ("gpu", "ignore_processes", "users"), problems)),
            ignore_below_bytes=0 if ignore.below is UNSET else size(("gpu", "ignore_processes", "below"), ignore.below),
        ),
        gc=GcConfig(
            max_age_ns=None if gc.max_age is UNSET else duration(("gc", "max_age"), gc.max_age),
            max_runs=_known(gc.max_runs),
            max_size_bytes=None if gc.max_size is UNSET else size(("gc", "max_size"), gc.max_size),
        ),
        advice=tuple(f"{key} has no effect: {why}" for key, why in _GONE.items() if getattr(raw, key) is not UNSET),
    )


def _policy(raw: ConfigFile, problems: Problems) -> Policy:
    quotas = raw.quotas

    def duration(key: str, text: str) -> int:
        return problems.value((key,), parse_duration, text, 0)

    def limits(path: Path, tables: Mapping[str, QuotaTable]) -> dict[str, Limits]:
        return {name: _limits(table, (*path, name), problems) for name, table in tables.items()}

    strategy = _known(raw.gpu.strategy)
    if strategy is not None:
        _word(strategy, ("gpu", "strategy"), ("sequential", "random", "packed", "spread"), problems)
    half_life = duration("half_life", raw.half_life)
    if half_life == 0:
        problems.add(("half_life",), "must be more than nothing; to forget all use, write fair_share = false")
    return Policy(
        order=_word(raw.order, ("order",), ("slowdown", "arrival"), problems),
        learn_run_times=raw.learn_run_times,
        fair_share=raw.fair_share,
        fair_share_by=_word(raw.fair_share_by, ("fair_share_by",), ("user", "project"), problems),
        half_life_ns=half_life,
        cpu_weight=raw.cpu_weight,
        disk_floor_bytes=problems.value(("disk_floor",), parse_size, raw.disk_floor, 0),
        gpu_strategy=strategy,
        gpu_use=_gpu_use(raw.gpu, problems),
        reservation_horizon_ns=duration("reservation_horizon", raw.reservation_horizon),
        reservation_allows_unlimited=raw.reservation_allows_unlimited,
        default_user_limits=_limits(quotas.default_user, ("quotas", "default_user"), problems),
        default_project_limits=_limits(quotas.default_project, ("quotas", "default_project"), problems),
        user_limits=limits(("quotas", "users"), quotas.users),
        project_limits=limits(("quotas", "projects"), quotas.projects),
        max_running=_known(raw.max_running),
        on_failure=_word(raw.on_failure, ("on_failure",), ("continue", "pause"), problems),
    )


def _resources(tables: Mapping[str, int | ResourceTable], problems: Problems) -> tuple[Pool, ...]:
    pools = []
    variables: dict[str, str] = {}
    for name, there_is in tables.items():
        path = ("resources", name)
        if not problems.value(path, resource_name, name, ""):
            continue
        other = variables.setdefault(resource_variable(name), name)
        if other != name:
            problems.add(path, f'has the same variable as "{other}", {resource_variable(name)}; rename one of them')
        if isinstance(there_is, ResourceTable):
            problems.value((*path, "indices"), _indices, there_is.indices, None)
            pools.append(Pool(name, len(there_is.indices), there_is.indices))
        else:
            pools.append(Pool(name, there_is))
    return tuple(pools)


def _indices(listed: tuple[int, ...]) -> None:
    if not listed:
        raise InvalidValue("is an empty list; name the indices, or leave the resource out")
    if len(listed) > MAX_NAMES:
        raise InvalidValue(f"has {len(listed):,} entries, and it may have {MAX_NAMES:,}")
    different(listed)


def _gpu_use(table: GpuTable, problems: Problems) -> tuple[str, ...] | None:
    if table.use is UNSET:
        return None
    for at, gpu in enumerate(table.use):
        if not _INDEX.fullmatch(str(gpu)) and not _UUID.fullmatch(str(gpu)):
            problems.add(("gpu", "use", at), f"{toml.show(gpu)} is neither an index nor the UUID of a GPU")
    used = tuple(str(gpu) for gpu in table.use)
    problems.value(("gpu", "use"), different, used, None)
    return used


def _contact(name: str, to: Names, problems: Problems) -> tuple[str, ...]:
    addresses = _several(to)
    if not name or "://" in name:
        problems.add(("contacts", name), "is an address itself, and would never be looked up")
    if not addresses or not all(address.strip() for address in addresses):
        problems.add(("contacts", name), "needs an address")
    return _clean(addresses, ("contacts", name), problems)


def _rule(table: NotifyRuleTable, at: int, problems: Problems) -> NotifyRule:
    to, on = _several(table.to), _several(table.on)
    if not to or not all(address.strip() for address in to):
        problems.add(("notify", at), 'needs "to": where the messages go')
    for event in on:
        problems.value(("notify", at, "on"), lambda word: one_of(word, EVENT_WORDS), event, "")
    users, projects, names = (
        _clean(_several(stated), ("notify", at, key), problems)
        for key, stated in (("users", table.users), ("projects", table.projects), ("names", table.names))
    )
    return NotifyRule(_clean(to, ("notify", at, "to"), problems), on, users, projects, names, table.log_lines)


def _clean(values: tuple[str, ...], path: Path, problems: Problems) -> tuple[str, ...]:
    """Return *values*, which are taken as they stand: white space around one, or one that comes twice, is a mistake."""
    problems.value(path, words, values, None)
    return values


def _several(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _metrics(path: str) -> str:
    if not trimmed(path).startswith(("/", "~")):
        raise InvalidValue(f"{toml.show(path)} must be an absolute path")
    if not path.endswith(".prom"):
        raise InvalidValue(f"{toml.show(path)} must end with .prom, or node_exporter passes it over")
    return path


def _limits(table: QuotaTable, path: Path, problems: Problems) -> Limits:
    def limit(key: str, stated: int | str | UnsetType) -> int | None:
        if isinstance(stated, str):
            return problems.value((*path, key), _unlimited, stated, None)
        return _known(stated)

    return Limits(
        max_running_jobs=limit("max_running_jobs", table.max_running_jobs),
        max_running_gpus=limit("max_running_gpus", table.max_running_gpus),
        max_running_cpus=limit("max_running_cpus", table.max_running_cpus),
        max_queued_jobs=limit("max_queued_jobs", table.max_queued_jobs),
    )


def _unlimited(text: str) -> int:
    if text == "unlimited":
        return UNLIMITED
    raise InvalidValue(f'{toml.show(text)} is neither a number nor "unlimited"')


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


def _at_least(amount_ns: int, least_ns: int, text: str) -> int:
    if amount_ns < least_ns:
        raise InvalidValue(f"{toml.show(text)} is too short; the least is {least_ns // 1_000_000}ms")
    return amount_ns


def _word(value: str, path: Path, words: Iterable[str], problems: Problems) -> str:
    return problems.value(path, lambda text: one_of(text, words), value, "")


def _known(value: V | UnsetType) -> V | None:
    return None if value is UNSET else value
