"""Limits on how much may run at once: of a group, of an array, of a user, of a project."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, fields

from spool.core.model import Limits, Policy, Running, Waiting
from spool.core.queue import Shape

_UNLIMITED = Limits()


@dataclass(slots=True)
class Use:
    """What the runs of one user or one project have together."""

    jobs: int = 0
    gpus: int = 0
    cpus: int = 0


def limits_of(default: Limits, named: Mapping[str, Limits], name: str) -> Limits:
    """Return the limits in force for *name*: field by field its own, else the default."""
    own = named.get(name)
    if own is None:
        return default
    return Limits(
        **{
            each.name: getattr(default, each.name) if getattr(own, each.name) is None else getattr(own, each.name)
            for each in fields(Limits)
        }
    )


class Tally:
    """How much of each group, array, user and project runs. Summed from the runs, and kept by add and take."""

    __slots__ = ("_limits", "arrays", "groups", "limited", "policy", "projects", "users")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.limited = _limits_anybody(policy)  # without a quota nobody asks what users and projects have
        self.groups: dict[str, int] = {}
        self.arrays: dict[str, int] = {}
        self.users: dict[str, Use] = {}
        self.projects: dict[str, Use] = {}
        self._limits: dict[tuple[str, str], Limits] = {}

    def add(self, run: Running, sign: int = 1) -> None:
        """Count *run*; with sign -1, count it no more."""
        spec = run.spec
        if spec.group is not None:
            self.groups[spec.group] = self.groups.get(spec.group, 0) + sign
        if spec.task is not None:
            self.arrays[spec.task.array] = self.arrays.get(spec.task.array, 0) + sign
        if not self.limited:
            return
        self._use(self.users, run.user, run, sign)
        if spec.project is not None:
            self._use(self.projects, spec.project, run, sign)

    @staticmethod
    def _use(uses: dict[str, Use], key: str, run: Running, sign: int) -> None:
        use = uses.get(key)
        if use is None:
            use = uses[key] = Use()
        use.jobs += sign
        use.gpus += sign * len(run.grant.gpu_uuids)
        use.cpus += sign * run.grant.cpus

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

    def why_quota_full(self, job: Waiting) -> str | None:
        """Return which quota *job* would exceed if it started, or None. User first, then project."""
        if not self.limited:
            return None
        project = job.spec.project
        return self._why(job, "user", job.user, self.users) or (
            None if project is None else self._why(job, "project", project, self.projects)
        )

    def _why(self, job: Waiting, kind: str, name: str, uses: Mapping[str, Use]) -> str | None:
        limits = self.limits(kind, name)
        use = uses.get(name) or Use()
        request = job.spec.request
        who = name if kind == "user" else f"project {name}"
        for thing, limit, used, need in (
            ("jobs", limits.max_running_jobs, use.jobs, 1),
            ("GPUs", limits.max_running_gpus, use.gpus, request.gpus),
            ("CPUs", limits.max_running_cpus, use.cpus, request.cpus),
        ):
            if limit is None or not need or used + need <= limit:
                continue
            wanted = "" if need == 1 or thing == "jobs" else f", needs {need}"
            if need > limit:
                return f"{who} may run {limit} {thing} at once, this job needs {need}"
            return f"{who} runs {used} of {limit} {thing}{wanted}"
        return None


def _limits_anybody(policy: Policy) -> bool:
    named = policy.user_limits or policy.project_limits
    return bool(named) or not (policy.default_user_limits == policy.default_project_limits == _UNLIMITED)


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """The limits in force for groups and for arrays: the lowest that a waiting or running member states."""

    groups: Mapping[str, int]
    arrays: Mapping[str, int]
    held: Set[str] = frozenset()  # arrays of which nothing starts


def shared_limits(
    shapes: Iterable[Shape], running: Iterable[Running], held_arrays: Set[str] = frozenset()
) -> SharedLimits:
    """Return the limits of every group and array that has a member which states one."""
    groups: dict[str, int] = {}
    arrays: dict[str, int] = {}
    for shape in shapes:
        key = shape.key
        if key.group_limit is not None and key.group is not None:
            _lower(groups, key.group, key.group_limit)
        if key.array_limit is not None and key.array is not None:
            _lower(arrays, key.array, key.array_limit)
    for run in running:
        spec = run.spec
        if spec.group is not None and spec.group_limit is not None:
            _lower(groups, spec.group, spec.group_limit)
        if spec.task is not None and spec.task.max_running is not None:
            _lower(arrays, spec.task.array, spec.task.max_running)
    return SharedLimits(groups, arrays, held_arrays)


def _lower(limits: dict[str, int], name: str, limit: int) -> None:
    known = limits.get(name)
    if known is None or limit < known:
        limits[name] = limit
