"""Which CPUs and GPUs a run gets where it matters which: on a spool with `cpu_pinning`, and nowhere else.

A CPU is what the kernel calls one: a hardware thread. Those of one core share its units, so a run gets whole cores
first, and on one NUMA node if one has room, near its GPUs if such a node has. Who has which CPUs follows from the
grants of the runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import lru_cache

from spool.core.model import Core, Gpu

MOST_CPUS = 1 << 16
"""No CPU has this number: the kernel numbers them from 0, up to its NR_CPUS."""

_Free = tuple[Core, tuple[int, ...]]
_Cost = tuple[int, int, bool, int, list[int]]


@lru_cache(maxsize=1024)
def cpus_in(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list as the kernel writes it, "0-3,8", in order; none if *text* is no such list."""
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() and end.isascii() and len(end) < 6 for end in ends):
            return ()
        begin, end = map(int, ends)
        if not begin <= end < MOST_CPUS:
            return ()
        found.update(range(begin, end + 1))
    return tuple(sorted(found))


def cpu_list(cpus: Iterable[int]) -> str:
    """Return *cpus* as the kernel writes such a list: "0-3,8"."""
    spans: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def choose_cpus(
    cores: Sequence[Core], taken: Set[int], count: int, near: Set[int | None] = frozenset()
) -> tuple[int, ...]:
    """Return *count* CPUs of *cores*, none of them *taken*, in order; none if too few are free.

    *near* are the NUMA nodes of the run's GPUs. One node that has room comes before one that is near. Of the nodes with
    room the fullest is taken, so that the others stay free for wide runs.
    """
    nodes: dict[int, list[_Free]] = {}
    for core in cores:
        free = tuple(cpu for cpu in core.cpus if cpu not in taken)
        if free:
            nodes.setdefault(core.node, []).append((core, free))
    found: list[int] = []
    while len(found) < count and nodes:
        need = count - len(found)
        sizes = {node: sum(len(free) for _, free in parts) for node, parts in nodes.items()}
        node = min(
            sizes,
            key=lambda each: (
                sizes[each] < need,
                each not in near,
                sizes[each] if sizes[each] >= need else -sizes[each],
                each,
            ),
        )
        found += _of_node(nodes.pop(node), need)
    return tuple(sorted(found)) if len(found) == count else ()


def _of_node(parts: list[_Free], need: int) -> list[int]:
    """Return up to *need* CPUs of one node: whole cores, and for the rest what is left of a core in use."""
    found: list[int] = []
    left = sorted(parts, key=lambda part: part[0].cpus)
    while left and len(found) < need:
        rest = need - len(found)
        _, free = part = min(left, key=lambda each: _cost(each, rest))  # the first of equal ones
        left.remove(part)
        found += free[:rest]
    return found


def _cost(part: _Free, need: int) -> tuple[int, int]:
    """Return how little a core suits: whole ones first, then the rest of one that holds the need, then large rests."""
    core, free = part
    if len(free) == len(core.cpus) <= need:
        return 0, 0
    return (1, len(free)) if len(free) >= need else (2, -len(free))


def linked_first(
    gpus: Sequence[Gpu], count: int, rank: Callable[[Gpu], object], free: Mapping[int | None, int], cpus: int
) -> list[Gpu]:
    """Return *gpus*, which are in order, with the best *count* first among those of equal *rank*.

    The best are linked to each other most (NVLink), then on the fewest nodes, then near *cpus* free CPUs (*free* has
    those of each node), then linked least to GPUs that stay free. Otherwise the order stays.
    """
    if not 0 < count < len(gpus):
        return list(gpus)
    last = rank(gpus[count - 1])
    begin = next(at for at, gpu in enumerate(gpus) if rank(gpu) == last)
    end = begin + sum(rank(gpu) == last for gpu in gpus[begin:])
    before, equal = list(gpus[:begin]), list(gpus[begin:end])

    def cost(chosen: list[Gpu]) -> _Cost:
        nodes = {gpu.node for gpu in chosen}
        return (
            -sum(_links(gpu, chosen) for gpu in chosen),
            len(nodes),
            sum(free.get(node, 0) for node in nodes) < cpus,
            sum(_links(gpu, [other for other in equal if other not in chosen]) for gpu in chosen),
            [gpus.index(gpu) for gpu in chosen],
        )

    seeds = [before] if before else [[gpu] for gpu in equal]
    best = min((_grown(seed, equal, count, cost) for seed in seeds), key=cost)
    return [*best, *(gpu for gpu in gpus if gpu not in best)]


def _grown(seed: list[Gpu], others: Collection[Gpu], count: int, cost: Callable[[list[Gpu]], _Cost]) -> list[Gpu]:
    chosen = list(seed)
    while len(chosen) < count:
        more = [[*chosen, gpu] for gpu in others if gpu not in chosen]
        chosen = min(more, key=cost)
    return chosen


def _links(gpu: Gpu, others: Iterable[Gpu]) -> int:
    known = dict(gpu.links)
    return sum(known.get(other.uuid, 0) for other in others)
