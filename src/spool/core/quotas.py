"""Limits on how much may run at once: of a group, of an array, of a user, of a project."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct, field

from spool.core.model import Grant, Limits, Policy, Running, State, Waiting
from spool.core.pools import Pools
from spool.core.units import show_size

_UNLIMITED = Limits()
Owner = TypeVar("Owner", bound=Hashable)


class QuotaUse(NamedTuple):
    """The resources held by the runs of one user or one project."""

    jobs: int = 0
    gpus: int = 0
    cpus: int = 0
    memory_bytes: int = 0


_NOTHING = QuotaUse()


class Counts:
    """The sums of the runs' grants, in total and by group, array, user and project.

    Grants on another machine count for the owners and the limits only.
    """

    __slots__ = (
        "arrays",
        "cpu_holders",
        "cpus",
        "groups",
        "memory_bytes",
        "memory_holders",
        "named",
        "projects",
        "runs",
        "users",
    )

    def __init__(self) -> None:
        self.runs = 0
        self.cpus = 0
        self.memory_bytes = 0
        self.cpu_holders = self.memory_holders = 0  # the number of runs that hold some
        self.named = Pools()
        self.groups: dict[str, int] = {}
        self.arrays: dict[str, int] = {}
        self.users: dict[str, QuotaUse] = {}
        self.projects: dict[str | None, QuotaUse] = {}

    def copy(self) -> Counts:
        """Return an independent copy."""
        other = Counts.__new__(Counts)
        other.runs, other.cpus, other.memory_bytes = self.runs, self.cpus, self.memory_bytes
        other.cpu_holders, other.memory_holders = self.cpu_holders, self.memory_holders
        other.named = self.named.copy()
        other.groups, other.arrays = self.groups.copy(), self.arrays.copy()
        other.users, other.projects = self.users.copy(), self.projects.copy()
        return other

    def add(self, run: Running, sign: int = 1, *, owners: bool = True) -> None:
        """Count *run*; with sign -1, uncount it. Without *owners*, not for its user and its project."""
        spec, grant = run.spec, run.grant
        self.runs += sign
        if run.elsewhere is None:
            memory = grant.memory_bytes or 0
            self.cpus += sign * grant.cpus
            self.memory_bytes += sign * memory
            self.cpu_holders += sign * (grant.cpus > 0)
            self.memory_holders += sign * (memory > 0)
            if grant.resources:
                self.named.add(grant, sign)
        if spec.group is not None:
            count(self.groups, spec.group, sign)
        if spec.task is not None:
            count(self.arrays, spec.task.array, sign)
        if owners:
            _use(self.users, run.user, grant, sign)
            _use(self.projects, spec.project, grant, sign)


def count(counts: dict[Owner, int], owner: Owner, sign: int) -> None:
    """Count one more of *owner*, or one fewer; an owner of none is not in *counts*."""
    number = counts.get(owner, 0) + sign
    if number:
        counts[owner] = number
    else:
        del counts[owner]


def _use(uses: dict[Any, QuotaUse], key: str | None, grant: Grant, sign: int) -> None:
    jobs, gpus, cpus, memory = uses.get(key, _NOTHING)
    use = QuotaUse(
        jobs + sign,
        gpus + sign * grant.gpu_count,
        cpus + sign * grant.cpus,
        memory + sign * (grant.memory_bytes or 0),
    )
    if use.jobs:
        uses[key] = use
    else:
        del uses[key]


class Lowest:
    """Limits stated by members of groups: in each group the lowest one is in force."""

    __slots__ = ("_stated",)

    def __init__(self) -> None:
        self._stated: dict[str, dict[int, int]] = {}  # group -> limit -> number of members that state it

    def add(self, name: str, limit: int) -> None:
        """Add a member that states *limit*."""
        stated = self._stated.setdefault(name, {})
        stated[limit] = stated.get(limit, 0) + 1

    def discard(self, name: str, limit: int) -> None:
        """Remove one such member."""
        stated = self._stated[name]
        stated[limit] -= 1
        if not stated[limit]:
            del stated[limit]
            if not stated:
                del self._stated[name]

    def of(self, name: str) -> int | None:
        """Return the lowest limit that a member of *name* states, None if none does."""
        stated = self._stated.get(name)
        return min(stated) if stated else None


def limits_of(default: Limits, named: Mapping[str, Limits], name: str) -> Limits:
    """Return the limits in force for *name*: field by field its own, else the default."""
    own = named.get(name)
    if own is None:
        return default
    return Limits(
        **{
            each: getattr(default, each) if getattr(own, each) is None else getattr(own, each)
            for each in Limits.__struct_fields__
        }
    )


class Quotas:
    """The limits in force for users and projects."""

    __slots__ = ("_limits", "limited", "policy")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.limited = _limits_anybody(policy)
        self._limits: dict[tuple[str, str], Limits] = {}

    def limits(self, kind: str, name: str) -> Limits:
        """Return the limits in force for the user or the project *name*."""
        known = self._limits.get((kind, name))
        if known is None:
            policy = self.policy
            known = (
                limits_of(policy.default_user_limits, policy.user_limits, name)
                if kind == "user"
                else limits_of(policy.default_project_limits, policy.project_limits, name)
            )
            self._limits[(kind, name)] = known
        return known

    def why_full(self, job: Waiting, counts: Counts) -> tuple[str, bool] | None:
        """Return which quota *job* would exceed if it started, and whether it would alone. User first, then project."""
        if not self.limited:
            return None
        project = job.spec.project
        return self._why(job, "user", job.user, counts.users.get(job.user, _NOTHING)) or (
            None if project is None else self._why(job, "project", project, counts.projects.get(project, _NOTHING))
        )

    def _why(self, job: Waiting, kind: str, name: str, use: QuotaUse) -> tuple[str, bool] | None:
        limits = self.limits(kind, name)
        request = job.request
        who = name if kind == "user" else f"project {name}"
        for thing, limit, used, need in (
            ("jobs", limits.max_running_jobs, use.jobs, 1),
            ("GPUs", limits.max_running_gpus, use.gpus, request.gpus),
            ("CPUs", limits.max_running_cpus, use.cpus, request.cpus),
            ("memory", limits.max_running_memory_bytes, use.memory_bytes, request.memory_bytes or 0),
        ):
            if limit is None or not need or used + need <= limit:
                continue
            show = show_size if thing == "memory" else str
            wanted = "" if need == 1 or thing == "jobs" else f", needs {show(need)}"
            if need > limit:
                return f"{who} may use {show(limit)} {thing} at once, this job needs {show(need)}", True
            return f"{who} uses {show(used)} of {show(limit)} {thing}{wanted}", False
        return None


def _limits_anybody(policy: Policy) -> bool:
    named = policy.user_limits or policy.project_limits
    return bool(named) or not (policy.default_user_limits == policy.default_project_limits == _UNLIMITED)


class SharedLimits(Struct, frozen=True):
    """The limits in force for groups and arrays: the lowest that a waiting or running member states."""

    groups: Sequence[Lowest] = ()
    arrays: Sequence[Lowest] = ()
    held: Mapping[str, State] = field(default_factory=dict)  # arrays whose tasks must not start
    edited: Mapping[str, int | None] = field(default_factory=dict)  # of arrays whose own file was edited since

    def of_group(self, name: str) -> int | None:
        """Return how many jobs of that group may run at once; None: no limit is set."""
        return _lowest(self.groups, name)

    def of_array(self, name: str) -> int | None:
        """Return how many tasks of that array may run at once; None: no limit is set."""
        return self.edited[name] if name in self.edited else _lowest(self.arrays, name)


def _lowest(stated: Sequence[Lowest], name: str) -> int | None:
    return min((limit for each in stated if (limit := each.of(name)) is not None), default=None)
