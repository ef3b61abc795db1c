"""Fair share: who has used more than the others has to wait somewhat longer than they do.

The score of a waiting job (see `order`) is multiplied by `2^(0.5 * (1 - level))`, and by no less than 1/1.5; `level`
is 1 for who has used as much as the average, 2 for twice as much, 0 for nothing. Half of what was used is forgotten
with every half life. An absolute rank for who has used less would starve the others: the factor is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from heapq import heappop, heappush

from spool.core.model import SECOND_NS, Grant, Policy

LEAST = 1 / 1.5
"""The factor of who has used the most."""

_STEEP = 0.5
_NEGLIGIBLE = 1000  # who has used less than so small a part of all does not count as somebody to be fair to
_NOISE = 1e-12  # of the sums: where nothing has run yet, they differ by as little
_TOO_LARGE = 256.0  # doublings since the reference: numbers are taken back to a nearer one


def share_key(user: str, project: str | None, policy: Policy) -> str:
    """Return under which key usage is counted: the user, or the project ("" for none) where so configured."""
    return (project or "") if policy.fair_share_by == "project" else user


def weigh(grant: Grant, policy: Policy) -> float:
    """Return what a run of that grant uses in a second: its GPUs, and its CPUs times `cpu_weight`."""
    return len(grant.gpu_uuids) + grant.cpus * policy.cpu_weight


class Shares:
    """What each user or project has used, decayed, by spans of time in which it used so much in a second.

    Nothing is decayed step by step: what is used counts the more the later, and all that is asked for are ratios. So
    each start and each end changes two numbers, and the cost of asking does not grow with the number of runs.
    """

    __slots__ = (
        "_base",
        "_half_life_s",
        "_heap",
        "_rate",
        "_reference_ns",
        "_sum_base",
        "_sum_rate",
        "_used",
        "_watched",
    )

    def __init__(self, half_life_ns: int) -> None:
        self._half_life_s = max(half_life_ns, SECOND_NS) / SECOND_NS
        self._reference_ns: int | None = None
        self._base: dict[str, float] = {}
        self._rate: dict[str, float] = {}
        self._sum_base = self._sum_rate = 0.0
        self._used: set[str] = set()  # of those of whom nothing runs, who have used more than is negligible
        self._heap: list[tuple[float, str]] = []  # … and how much at least, the least first
        self._watched: set[str] = set()  # who is in it

    def begin(self, key: str, rate: float, at_ns: int) -> None:
        """Count what *key* uses in a second from then on."""
        if not rate:
            return
        before = rate * self._grown(at_ns)
        self._base[key] = self._base.get(key, 0.0) - before
        self._rate[key] = self._rate.get(key, 0.0) + rate
        self._sum_base -= before
        self._sum_rate += rate
        self._used.discard(key)

    def end(self, key: str, rate: float, at_ns: int) -> None:
        """Count it no more."""
        if not rate:
            return
        until = rate * self._grown(at_ns)
        self._base[key] = self._base.get(key, 0.0) + until
        self._rate[key] = self._rate.get(key, 0.0) - rate
        self._sum_base += until
        self._sum_rate -= rate
        if self._rate[key] < rate * 1e-6:  # nothing of it runs: the noise of the sums is no usage
            self._sum_rate -= self._rate.pop(key)
            if not self._rate:
                self._sum_rate = 0.0
            self._used.add(key)
            if key not in self._watched:
                self._watched.add(key)
                heappush(self._heap, (self._base[key], key))

    def factors(self, now_ns: int, active: Collection[str]) -> dict[str, float]:
        """Return the factor of each of *active*, the keys that have jobs which wait or run."""
        grown = self._grown(now_ns)
        total = self._sum_base + self._sum_rate * grown
        if total <= self._sum_rate * grown * _NOISE:
            return dict.fromkeys(active, 1.0)
        self._forget(total / _NEGLIGIBLE)
        others = len(self._used) - sum(key in self._used for key in active)
        keys = len(active) + others
        found = {}
        for key in active:
            used = self._base.get(key, 0.0) + self._rate.get(key, 0.0) * grown
            level = max(used, 0.0) / total * keys
            found[key] = max(math.pow(2.0, _STEEP * (1 - level)), LEAST)
        return found

    def _forget(self, least: float) -> None:
        """Pass over those who have used next to nothing since, and use nothing."""
        heap = self._heap
        while heap and heap[0][0] <= least:
            _, key = heappop(heap)
            self._watched.discard(key)
            if key in self._rate:
                continue  # it is watched again when nothing of it runs any more
            if self._base[key] <= least:
                self._used.discard(key)
            else:  # it has used more since
                self._watched.add(key)
                heappush(heap, (self._base[key], key))

    def _grown(self, at_ns: int) -> float:
        """Return how much somebody who uses 1 in a second has used until then, in today's weight of the reference."""
        if self._reference_ns is None:
            self._reference_ns = at_ns
        doublings = (at_ns - self._reference_ns) / SECOND_NS / self._half_life_s
        if doublings > _TOO_LARGE:
            self._move(at_ns, doublings)
            doublings = 0.0
        return math.pow(2.0, max(doublings, -_TOO_LARGE)) * self._half_life_s / math.log(2)

    def _move(self, at_ns: int, doublings: float) -> None:
        """Take another instant as the reference."""
        smaller = math.pow(2.0, -min(doublings, 1000.0))
        self._reference_ns = at_ns
        for key in self._base:
            self._base[key] *= smaller
        self._sum_base = sum(self._base.values())
        self._heap = [(self._base[key], key) for key in sorted(self._used, key=self._base.__getitem__)]
        self._watched = set(self._used)
