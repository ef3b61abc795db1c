"""Selection of GPUs for a job, its own, shared or reserved, in order; and of its CPUs, where it matters which.

A CPU is what the kernel calls one: a hardware thread. Those of one core share its units, so a run gets whole cores
first, and on one NUMA node if one has room, near its GPUs if such a node has. Who has which CPUs follows from the
grants of the runs alone.

A reservation is active from its start up to, not including, its end. It does not affect jobs without GPUs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import lru_cache
from random import Random

from msgspec import Struct, field
from msgspec.structs import replace

from spool.core.layout import ANY_GPU_TYPE
from spool.core.model import (
    NVIDIA,
    SECOND_NS,
    Core,
    ForeignProcess,
    Gpu,
    Grant,
    Machine,
    Policy,
    Request,
    Reservation,
    Running,
)
from spool.core.reasons import count_of, instant, some_of
from spool.core.units import show_size

_NAMED_SIZE_PERCENT = 93
"""How much of the memory in its name a GPU may lack and still count as that large.

An "80 GB" H100 reports 79.6 GiB, and error correction takes a sixteenth of an A10, an L40S or an A6000.
"""

NEW_RUN = 0
"""The number of a run that starts in this pass; runs on disk count from 1."""

Kind = tuple[tuple[str, ...], int | None]
"""What jobs ask of a GPU as it was built: one of these types, and the least memory in total."""

_Need = tuple[int | None, Kind, bool]  # what a request asks of a GPU: memory, kind, several

HORIZON_NS = 12 * 3600 * SECOND_NS
"""From this long before a reservation begins, its GPUs take no jobs that would run into it."""


class GpuSlot(Struct):
    """One GPU and the shares of our runs."""

    gpu: Gpu
    given: bool  # selected by `gpu.use`
    alone: list[str] = field(default_factory=list)  # runs that have it to themselves
    shares: dict[str, int] = field(default_factory=dict)  # run -> bytes granted
    shared_bytes: int = 0
    untaken_bytes: int = 0  # granted to runs, and not yet used by them
    returned: dict[str, int] = field(default_factory=dict)  # memory of released runs when last measured

    @property
    def free_bytes(self) -> int | None:
        """Memory really free for new runs; None is unknown."""
        free = self.gpu.memory_free_bytes
        return None if free is None else free + sum(self.returned.values()) - self.untaken_bytes

    @property
    def idle(self) -> bool:
        """Whether the GPU has no run of ours, no other process and no problem."""
        return not (self.alone or self.shares or self.gpu.foreign or self.gpu.problem)

    def has_room(self, request: Request) -> bool:
        """Tell whether *request* could have this GPU, or its share of it, now. Its type is not checked."""
        need = request.gpu_memory_bytes
        if request.gpu_min_memory_bytes is not None and self.gpu.memory_total_bytes is None:
            return False  # unknown is not enough
        if need is None:
            return self.idle
        gpu = self.gpu
        if self.alone or gpu.problem is not None:
            return False
        if gpu.memory_total_bytes is not None and self.shared_bytes + need > gpu.memory_total_bytes:
            return False
        # Unknown is not free. Memory that is granted to our runs and not yet used looks free, but is not.
        free = self.free_bytes
        return free is not None and need <= free


class GpuSlots:
    """The GPUs of a machine with the grants of its runs; `claim` and `release` update them, in any order."""

    def __init__(self, machine: Machine, policy: Policy) -> None:
        self.problem = machine.gpu_problem
        self.strategy = policy.gpu_strategy
        self.cards = [GpuSlot(gpu, given=chosen(gpu, policy.gpu_use)) for gpu in machine.gpus]
        self.by_uuid = {card.gpu.uuid: card for card in self.cards}
        self._mixed = len({card.gpu.vendor for card in self.cards if card.given}) > 1
        self._suitable: dict[_Need, list[GpuSlot]] = {}
        self._open: dict[_Need, list[GpuSlot]] = {}

    def claim(self, run: Running) -> None:
        """Give *run* the GPUs of its grant. GPUs that the machine no longer has are skipped."""
        for card in self._cards_of(run.grant):
            card.returned.pop(run.name, None)
            granted = run.grant.gpu_memory_bytes
            if granted is None:
                card.alone.append(run.name)
            else:
                card.shares[run.name] = granted
                card.shared_bytes += granted
                card.untaken_bytes += max(granted - _taken(card.gpu, run), 0)

    def release(self, run: Running) -> None:
        """Undo `claim`."""
        for card in self._cards_of(run.grant):
            granted = run.grant.gpu_memory_bytes
            if granted is None:
                card.alone.remove(run.name)
            else:
                del card.shares[run.name]
                card.shared_bytes -= granted
                card.untaken_bytes -= max(granted - _taken(card.gpu, run), 0)
            card.returned[run.name] = _taken(card.gpu, run)

    def _cards_of(self, grant: Grant) -> list[GpuSlot]:
        if not grant.gpu_uuids:
            return []
        self._open.clear()
        return [self.by_uuid[uuid] for uuid in grant.gpu_uuids if uuid in self.by_uuid]

    def open_to(self, request: Request) -> list[GpuSlot]:
        """Return the GPUs that have room for *request* now, reserved or not."""
        if self.problem is not None:
            return []
        asked = _need_of(request)
        found = self._open.get(asked)
        if found is None:
            found = self._open[asked] = [card for card in self.suitable(request) if card.has_room(request)]
        return found

    def suitable(self, request: Request) -> list[GpuSlot]:
        """Return the GPUs that could serve *request* if they were idle.

        A job with several GPUs gets whole ones only: CUDA shows a process one MIG instance and nothing beside it, so
        the others would lie idle. On a machine with GPUs of several vendors, NVIDIA's are for any job and the others
        for jobs that name their type, and several GPUs are of one vendor: no program uses two.
        """
        need, kind, several = asked = _need_of(request)
        if asked not in self._suitable:
            found = [
                card
                for card in self.cards
                if card.given
                and not (card.gpu.mig and several)
                and (need is None or card.gpu.memory_total_bytes is None or need <= card.gpu.memory_total_bytes)
                and is_of_kind(card.gpu, kind)
                and self._is_meant(card, kind)
            ]
            if self._mixed and several:
                vendors = sorted({card.gpu.vendor for card in found}, key=lambda vendor: (vendor != NVIDIA, vendor))
                of_one = ([card for card in found if card.gpu.vendor == vendor] for vendor in vendors)
                found = max(of_one, key=len, default=[])
            self._suitable[asked] = found
        return self._suitable[asked]

    def _is_meant(self, card: GpuSlot, kind: Kind) -> bool:
        """Tell whether a job that names that *kind* can use the vendor's programs: NVIDIA's, if it names no type."""
        types = kind[0]
        return not self._mixed or card.gpu.vendor == NVIDIA or bool(types and types != (ANY_GPU_TYPE,))

    def _instances(self, request: Request) -> str:
        """Return a note about the MIG instances that *request* cannot have, "" if there are none."""
        kind = kind_of(request)
        number = sum(card.given and card.gpu.mig and is_of_kind(card.gpu, kind) for card in self.cards)
        if request.gpus < 2 or not number:
            return ""
        there = f"{count_of(number, 'MIG instance')} do{'es' if number == 1 else ''} not count"
        return f"{there}: CUDA can use only one at a time, so a job with several GPUs needs whole ones"

    def in_order(self, cards: Iterable[GpuSlot], request: Request, seed: int) -> list[GpuSlot]:
        """Return *cards* in the order of the strategy."""
        shared = request.gpu_memory_bytes is not None
        strategy = self.strategy or ("packed" if shared else None)
        found = sorted(cards, key=lambda card: (card.gpu.index, card.gpu.uuid))
        if strategy == "random":
            Random(seed).shuffle(found)  # noqa: S311
        elif strategy != "sequential":
            found.sort(key=lambda card: _size(card.gpu))
        if shared and strategy == "packed":
            found.sort(key=lambda card: -card.shared_bytes)
        elif shared and strategy == "spread":
            found.sort(key=lambda card: card.shared_bytes)
        return found

    def never(self, request: Request) -> str | None:
        """Return why the machine can never serve *request*, or None if it could (or if that is unknown)."""
        if not request.gpus or self.problem is not None:
            return None
        suitable = len(self.suitable(request))
        if suitable >= request.gpus:
            return None
        wanted = count_of(request.gpus, "GPU")
        usable = [card for card in self.cards if card.given]
        given = [card for card in usable if self._is_meant(card, kind_of(request))]
        if not given:
            unused = f" that may be used ({len(self.cards)} in all)" if self.cards else ""
            return f"needs {wanted}, the machine has none{unused}"
        whole = [card for card in given if not card.gpu.mig or request.gpus == 1]
        others = Counter(card.gpu.vendor for card in usable if card not in given)
        notes = [
            f'{count_of(number, "GPU")} of {vendor} not counted: gpu_type = "{vendor}" asks for them'
            for vendor, number in sorted(others.items())
        ]
        beside = "".join(f"; {note}" for note in (self._instances(request), *notes) if note)
        if len(whole) < request.gpus:
            return f"needs {wanted}, the machine has {len(whole)}{beside}"
        types, least = kind_of(request)
        of_type = [card.gpu for card in whole if is_of_kind(card.gpu, (types, None))]
        if len(of_type) < request.gpus:
            names = some_of(sorted({card.gpu.name for card in given}))
            return f"needs {wanted}{type_in_words(types)}, the machine has {len(of_type)} ({names}){beside}"
        size = show_size(max(request.gpu_memory_bytes or 0, least or 0))
        sizes = [gpu.memory_total_bytes for gpu in of_type if gpu.memory_total_bytes is not None]
        largest = "" if least is None or not sizes else f" (the largest has {show_size(max(sizes))})"
        kind = "" if least is None else type_in_words(types)
        return f"needs {wanted}{kind} with {size}, the machine has {suitable} as large as that{largest}{beside}"

    def full(self, request: Request) -> str:
        """Return in words why too few GPUs have room for *request*."""
        types, least = kind_of(request)
        kind = type_in_words(types) + ("" if least is None else f" of at least {show_size(least)}")
        wanted = f"{request.gpus}{kind}"
        if self.problem is not None:
            return f"needs {wanted}, and what is free is unknown: {self.problem}"
        need = request.gpu_memory_bytes
        found = len(self.open_to(request))
        if need is None:
            there = f"{found or 'none'} {'is' if found < 2 else 'are'} idle"
            head = f"needs {count_of(request.gpus, 'unshared GPU')}{kind}; {there}"
        else:
            there = f"{found or 'none'} {'has' if found < 2 else 'have'} that much"
            head = f"needs {count_of(request.gpus, 'GPU')}{kind} with {show_size(need)} free; {there}"
        closed = [why_closed(card, request) for card in self.suitable(request) if not card.has_room(request)]
        rest = [f"and {len(closed) - 8} more"] if len(closed) > 8 else []
        return "; ".join(filter(None, [head, *closed[:8], *rest, self._instances(request)]))


def chosen(gpu: Gpu, use: tuple[str, ...] | None) -> bool:
    """Tell whether `gpu.use` (indices or UUIDs; None is all) names *gpu*."""
    return use is None or gpu.uuid in use or str(gpu.index) in use


def unknown_gpus(use: tuple[str, ...] | None, machine: Machine) -> tuple[str, ...]:
    """Return the entries of `gpu.use` that the machine does not have: a configuration error, never "then all"."""
    if use is None or machine.gpu_problem is not None:
        return ()
    known = {name for gpu in machine.gpus for name in (gpu.uuid, str(gpu.index))}
    return tuple(name for name in use if name not in known)


@lru_cache(maxsize=4096)
def is_of_type(name: str, wanted: str | None) -> bool:
    """Tell whether a GPU of that *name* is of the *wanted* type: a part of the name, in either case.

    Numbers match as a whole: "A100" does not match "A10", nor "T400" "T4".
    """
    if wanted is None or wanted.lower() == ANY_GPU_TYPE:
        return True
    before = r"(?<![0-9])" if wanted[:1].isdigit() else ""
    after = r"(?![0-9])" if wanted[-1:].isdigit() else ""
    return re.search(before + re.escape(wanted) + after, name, re.IGNORECASE) is not None


def kind_of(request: Request) -> Kind:
    """Return the kind of GPU that *request* names."""
    return request.gpu_types, request.gpu_min_memory_bytes


def _need_of(request: Request) -> _Need:
    return request.gpu_memory_bytes, (request.gpu_types, request.gpu_min_memory_bytes), request.gpus > 1


def is_of_kind(gpu: Gpu, kind: Kind) -> bool:
    """Tell whether *gpu* is of one of the types, and as large as the least memory. An unknown memory may be."""
    types, least = kind
    size = gpu.memory_total_bytes
    if least is not None and size is not None and size * 100 < least * _NAMED_SIZE_PERCENT:
        return False
    return not types or any(is_of_type(gpu.name, each) for each in types)


def type_in_words(types: tuple[str, ...]) -> str:
    """Return " of type A100 or H100"; "" for any type."""
    return f" of type {' or '.join(types)}" if types and types != (ANY_GPU_TYPE,) else ""


def _size(gpu: Gpu) -> float:
    """Return the memory of *gpu*: a job that may have any GPU leaves the larger ones to the jobs that need them."""
    return math.inf if gpu.memory_total_bytes is None else gpu.memory_total_bytes


def _taken(gpu: Gpu, run: Running) -> int:
    """Return the memory of *run* on *gpu* when last measured; 0 for a run that starts in this pass."""
    if run.run == NEW_RUN:
        return 0
    known = [taken for job, taken in gpu.taken_bytes if job == run.name]
    if known or run.grant.gpu_memory_bytes is not None:
        return sum(known)
    others = sum(process.memory_bytes or 0 for process in gpu.foreign)  # it was alone: the rest was its own
    return max((gpu.memory_used_bytes or 0) - others, 0)


def left_by(gpu: Gpu, run: Running) -> Gpu:
    """Return *gpu* as it will look without *run*, with its memory free."""
    free = gpu.memory_free_bytes
    return replace(
        gpu,
        memory_free_bytes=None if free is None else free + _taken(gpu, run),
        taken_bytes=tuple(each for each in gpu.taken_bytes if each[0] != run.name),
        foreign=tuple(process for process in gpu.foreign if process.job != run.name),
    )


def why_closed(card: GpuSlot, request: Request) -> str:
    """Return why *card* has no room for *request*."""
    need, least = request.gpu_memory_bytes, request.gpu_min_memory_bytes
    gpu = card.gpu
    label = f"GPU {gpu.index}"
    if gpu.problem is not None:
        return f"{label}: {gpu.problem}"
    if least is not None and gpu.memory_total_bytes is None:
        return f"{label}: how much memory it has is unknown"
    if card.alone:
        return f"{label} is in exclusive use by {some_of(card.alone)}"
    if need is not None:
        free = card.free_bytes
        if free is None:
            return f"{label}: how much is free is unknown"
        left = max(free, 0)
        if gpu.memory_total_bytes is not None:
            left = min(left, gpu.memory_total_bytes - card.shared_bytes)
        return f"{label} has {show_size(left)} left{',' if gpu.foreign else ''}{_beside(gpu)}"
    if card.shares:
        return f"{label} is shared by {some_of(sorted(card.shares))}"
    return f"{label}{_beside(gpu)}"


def _beside(gpu: Gpu) -> str:
    """Return who uses *gpu* outside spool: " is used by …"; "" without any."""
    if not gpu.foreign:
        return ""
    process = gpu.foreign[0]
    more = f" and {len(gpu.foreign) - 1} more" if len(gpu.foreign) > 1 else ""
    size = "" if process.memory_bytes is None else show_size(process.memory_bytes)
    return f" is used by {stranger(process, size)}{more}"


def stranger(process: ForeignProcess, size: str) -> str:
    """Describe *process* with its *size*: "pid 4711 (python, bob, 3 GiB) outside spool"."""
    if process.pid == 0:
        return f"a process that cannot be seen ({', '.join(filter(None, [process.user, size]))}) outside spool"
    where = "outside spool" if process.job is None else f"of {process.job}, which was not given it"
    return f"pid {process.pid} ({', '.join(filter(None, [process.name, process.user, size]))}) {where}"


_Free = tuple[Core, tuple[int, ...]]
_Cost = tuple[int, int, bool, int, list[int]]


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


def linked_first(gpus: Sequence[Gpu], count: int, free: Mapping[int | None, int], cpus: int) -> list[Gpu]:
    """Return *gpus*, which are in order, with the best *count* first among those of equal memory.

    The best are linked to each other most (NVLink), then on the fewest nodes, then near *cpus* free CPUs (*free* has
    those of each node), then linked least to GPUs that stay free. Otherwise the order stays.
    """
    if not 0 < count < len(gpus):
        return list(gpus)
    last = _size(gpus[count - 1])
    begin = next(at for at, gpu in enumerate(gpus) if _size(gpu) == last)
    end = begin + sum(_size(gpu) == last for gpu in gpus[begin:])
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


NOBODY = "nobody"
"""The user of a reservation for no jobs: its GPUs stay free for interactive use."""


def holds(reservation: Reservation, user: str, project: str | None) -> bool:
    """Tell whether *reservation* is for the jobs of that user and project."""
    if reservation.user is not None:
        return reservation.user == user and user != NOBODY
    return reservation.project is not None and reservation.project == project


def is_active(reservation: Reservation, at_ns: int) -> bool:
    """Tell whether *reservation* is active at that instant."""
    return reservation.start_at_ns <= at_ns < reservation.end_at_ns


def overlap(one: Reservation, other: Reservation) -> bool:
    """Tell whether both are active at some instant."""
    return one.start_at_ns < other.end_at_ns and other.start_at_ns < one.end_at_ns


def as_if_alone(machine: Machine) -> Machine:
    """Return *machine* without its other users: another judges what these have."""
    gpus = tuple(
        replace(gpu, foreign=(), taken_bytes=(), memory_free_bytes=None if gpu.problem else gpu.memory_total_bytes)
        for gpu in machine.gpus
    )
    return replace(machine, memory_available_bytes=None, gpus=gpus)


def known_gpus(machine: Machine) -> frozenset[int] | None:
    """Return the indices of the machine's GPUs, None if they are unknown."""
    if machine.gpu_problem is not None and not machine.gpus:
        return None
    return frozenset(gpu.index for gpu in machine.gpus)


def settle(
    written: Iterable[Reservation], gpus: Collection[int] | None
) -> tuple[tuple[Reservation, ...], dict[str, str]]:
    """Accept reservations in the order of writing, unless they conflict with those accepted before.

    Return the accepted ones, oldest first, and the reasons against the others. *gpus* are the indices of the existing
    GPUs, None if unknown. The result does not depend on the clock: it changes with the files and the GPUs only.
    """
    standing: list[Reservation] = []
    refused: dict[str, str] = {}
    for one in sorted(written, key=lambda each: (each.created_at_ns, each.name)):
        why = conflict(one, standing, gpus)
        if why is None:
            standing.append(one)
        else:
            refused[one.name] = why
    return tuple(standing), refused


def conflict(new: Reservation, existing: Iterable[Reservation], gpus: Collection[int] | None) -> str | None:
    """Return why *new* cannot stand beside *existing* on a machine with *gpus*, or None if it can.

    *gpus* are their indices, which may have gaps (MIG instances). None: they are unknown, and then only conflicts of
    reservations by index can be found. Checked moment by moment: reservations that never hold at once are not in each
    other's way. A conflict can begin only where a reservation starts, so only the starts within *new* are checked.
    """
    if new.end_at_ns <= new.start_at_ns:
        return "its end is before its start"
    if new.gpu_count is None and not new.gpu_indices:
        return "it names no GPUs"
    if new.gpu_count is not None and new.gpu_count < 1:
        return "it must reserve at least one GPU"
    if gpus is not None and (absent := [index for index in new.gpu_indices if index not in gpus]):
        return f"there is no GPU {absent[0]}, {_which(gpus)}"
    others = [each for each in existing if each.name != new.name and overlap(each, new)]
    moments = {new.start_at_ns, *(each.start_at_ns for each in others if each.start_at_ns > new.start_at_ns)}
    clashes = (_clash(new, [each for each in others if is_active(each, at)], gpus, at) for at in sorted(moments))
    return next((why for why in clashes if why is not None), None)


def _clash(new: Reservation, at_once: Sequence[Reservation], gpus: Collection[int] | None, moment: int) -> str | None:
    """Return why *new* cannot hold at that moment, at which the others of *at_once* hold."""
    when = instant(moment)
    for each in at_once:
        if both := sorted({*new.gpu_indices}.intersection(each.gpu_indices)):
            return f"at {when} {_gpus(both)} is already reserved for {each.holder} ({each.name})"
    indices = {*new.gpu_indices}.union(*(each.gpu_indices for each in at_once))
    number = len(indices) + sum(each.gpu_count or 0 for each in (*at_once, new))
    if gpus is None or number <= len(gpus):
        return None
    kept = f" beside {', '.join(sorted(each.name for each in at_once))}" if at_once else ""
    return f"at {when} {count_of(number, 'GPU')} would be reserved{kept}, the machine has {len(gpus)}"


def _which(gpus: Collection[int]) -> str:
    has = f"the machine has {count_of(len(gpus), 'GPU')}"
    return has if sorted(gpus) == list(range(len(gpus))) else f"{has}: {', '.join(map(str, sorted(gpus)))}"


class Moment(Struct):
    """The GPUs that one set of simultaneously active reservations leaves to a job."""

    at_ns: int
    closed: Mapping[int, Reservation]  # GPU index -> its reservation
    available: frozenset[str]  # free GPUs at that time that no reservation names by index
    budget: int  # how many of these the job may take
    counted: Sequence[Reservation]  # the reservations by count that set the budget


def choose(cards: Sequence[GpuSlot], number: int, bound: Sequence[Moment]) -> list[GpuSlot] | None:
    """Return *number* of *cards*, the first that the reservations allow, or None if they allow too few."""
    if not bound:
        return list(cards[:number]) if len(cards) >= number else None
    free = [card for card in cards if not any(card.gpu.index in moment.closed for moment in bound)]

    def cost(card: GpuSlot) -> int:
        return sum(card.gpu.uuid in moment.available for moment in bound)

    # Try the wanted order first; if that exceeds a budget, take the cheapest first, which fits if anything does.
    for order in (free, sorted(free, key=cost)):
        budgets = [moment.budget for moment in bound]
        taken: list[GpuSlot] = []
        for card in order:
            if len(taken) == number:
                break
            pays = [at for at, moment in enumerate(bound) if card.gpu.uuid in moment.available]
            if all(budgets[at] > 0 for at in pays):
                taken.append(card)
                for at in pays:
                    budgets[at] -= 1
        if len(taken) == number:
            return taken
    return None


def binding(cards: Sequence[GpuSlot], number: int, bound: Sequence[Moment]) -> Moment:
    """Return the moment whose reservations leave fewer than *number* of *cards*."""
    for upto in range(1, len(bound) + 1):
        if choose(cards, number, bound[:upto]) is None:
            return bound[upto - 1]
    return bound[-1]


def holders(moment: Moment, now_ns: int, end_ns: int | None) -> str:
    """Return the owners of the GPUs at that moment, and until or from when; the job could run until *end_ns*."""
    kept: dict[str, Reservation] = {each.name: each for each in (*moment.closed.values(), *moment.counted)}
    texts = []
    for each in kept.values():
        what = _gpus(sorted(each.gpu_indices)) if each.gpu_indices else count_of(each.gpu_count or 0, "GPU")
        when = f"until {instant(each.end_at_ns)}" if each.start_at_ns <= now_ns else f"from {instant(each.start_at_ns)}"
        texts.append(f"{what} for {each.holder} {when}")
    tail = ""
    if moment.at_ns > now_ns:
        could = "has no time limit" if end_ns is None else f"could run until {instant(end_ns)}"
        tail = f", and this job {could}"
    return " and ".join(texts) + tail


def _gpus(indices: Sequence[int]) -> str:
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
