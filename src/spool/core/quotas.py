"""What runs hold, licences and the like too, and how much a group, an array, a user or a project may hold at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from spool.core.model import Grant, Limits, Policy, Pool, Request, Running, State, Waiting
from spool.core.queue import ShapeKey
from spool.core.reasons import count_of
from spool.core.units import show_size


class Pools:
    """The named resources held by runs. Callers pass the totals."""

    __slots__ = ("_counts", "_holders", "_indexed", "_indices")

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._holders: Counter[str] = Counter()
        self._indexed: Counter[str] = Counter()  # the part of the counts whose indices are known
        self._indices: Counter[tuple[str, int]] = Counter()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pools) and all(getattr(self, each) == getattr(other, each) for each in self.__slots__)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def copy(self) -> Pools:
        """Return an independent copy."""
        other = Pools()
        if self._counts:  # most spools have no named resources, and this is done in every pass
            for each in self.__slots__:
                setattr(other, each, getattr(self, each).copy())
        return other

    def add(self, grant: Grant, sign: int = 1) -> None:
        """Add *grant* to the sums; with sign -1, subtract it."""
        for name, count in grant.resources:
            self._counts[name] += sign * count
            self._holders[name] += sign
        for name, indices in grant.resource_indices:
            self._indexed[name] += sign * len(indices)
            for index in indices:
                self._indices[name, index] += sign

    def granted(self, name: str) -> int:
        """Return how many of the resource *name* the runs hold."""
        return self._counts[name]

    def free(self, pool: Pool) -> int:
        """Return how much of *pool* can be granted now. Unknown is not free."""
        left = pool.total - self._counts[pool.name]
        if pool.indices:
            left = 0 if self._unknown(pool) else min(left, len(self._free_indices(pool)))
        return max(left, 0)

    def _free_indices(self, pool: Pool) -> list[int]:
        return [index for index in pool.indices if not self._indices[pool.name, index]]

    def _unknown(self, pool: Pool) -> bool:
        """Whether a run holds some of *pool* without an index, because the pool had none when it was granted."""
        return self._counts[pool.name] > self._indexed[pool.name]

    def lacking(self, request: Request, pools: Sequence[Pool]) -> list[tuple[Pool, int]]:
        """Return which of *pools* have too little free for *request*, and how much it needs of each."""
        return [(pool, need) for pool, need in _named(request, pools) if need > self.free(pool)]

    def why_full(self, request: Request, pools: Sequence[Pool]) -> str:
        """Describe the shortage of named resources of *request*, one that `pools` has; "" if there is none."""
        return "; ".join(self._lack(pool, need) for pool, need in self.lacking(request, pools))

    def _lack(self, pool: Pool, need: int) -> str:
        hold = hold_words(self._holders[pool.name], str(self.granted(pool.name)))
        if pool.indices and self._unknown(pool):
            return f"{pool.name}: needs {need}, and which are free is unknown{hold}"
        return f"{pool.name}: needs {need}, {self.free(pool)} of {pool.total} free{hold}"

    def take(self, request: Request, pools: Sequence[Pool]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the lowest free indices for *request*, which lacks nothing."""
        return tuple(
            (pool.name, tuple(self._free_indices(pool)[:need])) for pool, need in _named(request, pools) if pool.indices
        )


def hold_words(holders: int, amount: str) -> str:
    """Return " (2 runs hold 5 GiB)"; "" if none does."""
    return f" ({count_of(holders, 'run')} hold{'s' if holders == 1 else ''} {amount})" if holders else ""


def why_never(request: Request, pools: Sequence[Pool]) -> str | None:
    """Return which resource of *request* the spool lacks, or has too few of; None if it has everything."""
    for name, need in request.resources:
        pool = next((each for each in pools if each.name == name), None)
        if pool is None:
            there_are = ", ".join(f"{each.name} ({each.total})" for each in pools) or "none"
            return (
                f"needs {need} of the resource {name}, which the configuration does not define; it defines {there_are}"
            )
        if need > pool.total:
            return f"needs {need} of the resource {name}, the spool has {pool.total}"
    return None


def _named(request: Request, pools: Sequence[Pool]) -> list[tuple[Pool, int]]:
    """Return the pools that *request* names, as far as they exist (see `why_never`), and what it needs of each."""
    by_name = {pool.name: pool for pool in pools}
    return [(by_name[name], need) for name, need in request.resources if name in by_name]


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
        other = copy(self)
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
        defaults = policy.default_user_limits, policy.default_project_limits
        self.limited = bool(policy.user_limits or policy.project_limits) or defaults != (_UNLIMITED, _UNLIMITED)
        self._limits: dict[tuple[str, str], Limits] = {}

    def limits(self, kind: str, name: str) -> Limits:
        """Return the limits in force for the user or the project *name*."""
        known = self._limits.get((kind, name))
        if known is None:
            policy = self.policy
            if kind == "user":
                known = limits_of(policy.default_user_limits, policy.user_limits, name)
            else:
                known = limits_of(policy.default_project_limits, policy.project_limits, name)
            self._limits[kind, name] = known
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


_NONE: Mapping[str, Any] = {}


class SharedLimits:
    """The limits in force for groups and arrays: the lowest that a waiting or running member states.

    *held* are the arrays whose tasks must not start, *edited* has the limits of arrays whose own file was edited.
    """

    def __init__(
        self,
        shapes: Collection[ShapeKey] = (),
        running: Mapping[str, Running] = _NONE,
        held: Mapping[str, State] = _NONE,
        edited: Mapping[str, int | None] = _NONE,
    ) -> None:
        self.held = held
        self._shapes = shapes
        self._running = running
        self._edited = edited

    def of_group(self, name: str) -> int | None:
        """Return how many jobs of that group may run at once; None: no limit is set."""
        return self._lowest.get(("group", name))

    def of_array(self, name: str) -> int | None:
        """Return how many tasks of that array may run at once; None: no limit is set."""
        return self._edited[name] if name in self._edited else self._lowest.get(("array", name))

    @cached_property
    def _lowest(self) -> dict[tuple[str, str | None], int]:
        specs = [run.spec for run in self._running.values()]
        stated = [("group", key.group, key.group_limit) for key in self._shapes]
        stated += [("group", spec.group, spec.group_limit) for spec in specs]
        stated += [("array", key.array, key.array_limit) for key in self._shapes]
        stated += [("array", spec.task.array, spec.task.max_running) for spec in specs if spec.task is not None]
        lowest: dict[tuple[str, str | None], int] = {}
        for kind, name, limit in stated:
            if limit is not None:
                lowest[kind, name] = min(limit, lowest.get((kind, name), limit))
        return lowest
