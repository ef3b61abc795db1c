"""Named resources, such as licences: the amounts that runs hold, and the indices for a new run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from spool.core.model import Grant, Pool, Request
from spool.core.reasons import count_of


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

    def lacks(self, request: Request, pools: Sequence[Pool]) -> bool:
        """Whether some resource that *request* names is not free."""
        return any(pool is None or need > self.free(pool) for pool, need in _named(request, pools))

    def lacking(self, request: Request, pools: Sequence[Pool]) -> list[Pool]:
        """Return which of *pools* have too little free for *request*."""
        return [pool for pool, need in _named(request, pools) if pool is not None and need > self.free(pool)]

    def why_full(self, request: Request, pools: Sequence[Pool]) -> str:
        """Describe the shortage of named resources of *request*, one that `pools` has."""
        return "; ".join(
            self._lack(pool, need)
            for pool, need in _named(request, pools)
            if pool is not None and need > self.free(pool)
        )

    def _lack(self, pool: Pool, need: int) -> str:
        held, holders = self.granted(pool.name), self._holders[pool.name]
        hold = f"{count_of(holders, 'run')} hold{'s' if holders == 1 else ''} {held}"
        if pool.indices and self._unknown(pool):
            return f"{pool.name}: needs {need}, and which are free is unknown ({hold})"
        holding = f" ({hold})" if holders else ""
        return f"{pool.name}: needs {need}, {self.free(pool)} of {pool.total} free{holding}"

    def take(self, request: Request, pools: Sequence[Pool]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the lowest free indices for *request*, which lacks nothing."""
        return tuple(
            (pool.name, tuple(self._free_indices(pool)[:need]))
            for pool, need in _named(request, pools)
            if pool is not None and pool.indices
        )


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


def in_words(counts: Iterable[tuple[str, int]], indices: Iterable[tuple[str, tuple[int, ...]]] = ()) -> str:
    """Return named resources as "licence 1, tpu 2 (0, 3)"."""
    which = {name: f" ({', '.join(map(str, each))})" for name, each in indices}
    return ", ".join(f"{name} {count}{which.get(name, '')}" for name, count in counts)


def _named(request: Request, pools: Sequence[Pool]) -> list[tuple[Pool | None, int]]:
    by_name = {pool.name: pool for pool in pools}
    return [(by_name.get(name), need) for name, need in request.resources]
