"""In which order waiting jobs are considered: priority, fair share, time bonus, first queued first, name.

The order holds for one pass and is made anew in each. Within one shape of jobs (see `queue`) only priority,
arrival and name differ, so the queue can keep each shape sorted whatever the usage of the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from spool.core.model import SECOND_NS, Grant, Policy, Running, Waiting

Place = tuple[int, int, str]
"""The part of the order that no pass changes: 255 - priority, arrival, name. Smaller comes first."""

OrderKey = tuple[int, int, int, int, str]
"""The whole order: 255 - priority, -share, -bonus, arrival, name. Smaller comes first."""

HIGHEST_PRIORITY = 255
FULL_SHARE = 1_000_000_000
"""The share of who has used nothing. Shares are in billionths, so that noise in the last bit orders nothing."""

_NO_LIMIT_BONUS = 100
_DAY_NS = 86_400 * SECOND_NS


def place(job: Waiting) -> Place:
    """Return where *job* stands among the jobs of its own shape."""
    return (HIGHEST_PRIORITY - job.spec.priority, job.arrived_at_ns, job.name)


def time_bonus(time_limit_ns: int | None) -> int:
    """Return 100 without a limit, else 200 plus up to 100, the more the shorter: a minute 299, from a day on 200."""
    if time_limit_ns is None:
        return _NO_LIMIT_BONUS
    return 200 + max(_DAY_NS - time_limit_ns, 0) * 100 // _DAY_NS


def share_key(user: str, project: str | None, policy: Policy) -> str:
    """Return under which key usage is counted: the user, or the project ("" for none) where so configured."""
    return (project or "") if policy.fair_share_by == "project" else user


def weigh(grant: Grant, duration_ns: int, policy: Policy) -> float:
    """Return what a run of that grant and duration uses: GPU-seconds plus CPU-seconds times `cpu_weight`."""
    return (len(grant.gpu_uuids) + grant.cpus * policy.cpu_weight) * max(duration_ns, 0) / SECOND_NS


def shares(usage: Mapping[str, float], running: Iterable[Running], now_ns: int, policy: Policy) -> dict[str, int]:
    """Return the share of each user (or project) that has used the machine; whoever is not in it has FULL_SHARE.

    The factor is `2**-level`, `level = usage / total usage * number of users with usage`, over the usage of ended
    runs (*usage*, already decayed) and of what runs now.
    """
    if not policy.fair_share:
        return {}
    used = dict(usage)
    for run in running:
        key = share_key(run.user, run.spec.project, policy)
        used[key] = used.get(key, 0.0) + weigh(run.grant, now_ns - run.started_at_ns, policy)
    used = {key: amount for key, amount in used.items() if amount > 0}
    total = sum(used.values())
    return {key: int(math.pow(2.0, -amount / total * len(used)) * FULL_SHARE) for key, amount in used.items()}


def order_key(job: Waiting, by_user: Mapping[str, int], policy: Policy) -> OrderKey:
    """Return the whole order key of *job*; *by_user* is what `shares` returned."""
    ahead, arrived, name = place(job)
    share, bonus = rank(job.user, job.spec.project, job.spec.time_limit_ns, by_user, policy)
    return (ahead, share, bonus, arrived, name)


def rank(
    user: str, project: str | None, time_limit_ns: int | None, by_user: Mapping[str, int], policy: Policy
) -> tuple[int, int]:
    """Return the two parts of the order key that only a pass knows: -share and -bonus."""
    share = by_user.get(share_key(user, project, policy), FULL_SHARE) if by_user else FULL_SHARE
    return -share, -time_bonus(time_limit_ns) if policy.time_bonus else 0


class UsageLedger:
    """What each user or project has used by ended runs, half of it forgotten with every half life.

    Its owner adds each ended run once; a sum per key is all that is kept, whatever the length of the history.
    """

    __slots__ = ("_half_life_ns", "_sums")

    def __init__(self, half_life_ns: int) -> None:
        self._half_life_ns = half_life_ns
        self._sums: dict[str, tuple[int, float]] = {}  # as of when, how much

    def add(self, key: str, weighed_seconds: float, ended_at_ns: int) -> None:
        """Count a run (see `weigh`) that ended at *ended_at_ns*; the order of adding does not matter."""
        as_of_ns, amount = self._sums.get(key, (ended_at_ns, 0.0))
        latest_ns = max(as_of_ns, ended_at_ns)
        total = self._decay(amount, latest_ns - as_of_ns) + self._decay(weighed_seconds, latest_ns - ended_at_ns)
        self._sums[key] = (latest_ns, total)

    def at(self, now_ns: int) -> dict[str, float]:
        """Return the usage of every key, decayed to *now_ns*."""
        return {key: self._decay(amount, now_ns - as_of_ns) for key, (as_of_ns, amount) in self._sums.items()}

    def _decay(self, amount: float, age_ns: int) -> float:
        if self._half_life_ns <= 0:
            return 0.0
        return amount * math.pow(2.0, -max(age_ns, 0) / self._half_life_ns)
