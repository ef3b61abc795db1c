"""Reserved GPUs: what they leave to other jobs, and which reservations conflict.

A reservation is active from its start up to, not including, its end. It does not affect jobs without GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from spool.core.gpus import GpuSlot
from spool.core.model import Machine, Policy, Reservation, Running
from spool.core.reasons import count_of, instant

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


def known_gpus(machine: Machine) -> frozenset[int] | None:
    """Return the indices of the machine's GPUs, None if they are unknown."""
    if machine.gpu_problem is not None and not machine.gpus:
        return None
    return frozenset(gpu.index for gpu in machine.gpus)


class Settled(Struct, frozen=True):
    """The valid reservations, oldest first, and the reasons against the others."""

    standing: tuple[Reservation, ...]
    refused: Mapping[str, str]


def settle(written: Iterable[Reservation], gpus: Collection[int] | None) -> Settled:
    """Accept reservations in the order of writing, unless they conflict with those accepted before.

    *gpus* are the indices of the existing GPUs, None if unknown. The result does not depend on the clock: it changes
    with the files and the GPUs only.
    """
    standing: list[Reservation] = []
    refused: dict[str, str] = {}
    for one in sorted(written, key=lambda each: (each.created_at_ns, each.name)):
        why = conflict(one, standing, gpus)
        if why is None:
            standing.append(one)
        else:
            refused[one.name] = why
    return Settled(tuple(standing), refused)


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
    for index in new.gpu_indices:
        if gpus is not None and index not in gpus:
            return f"there is no GPU {index}, {_which(gpus)}"
    others = [each for each in existing if each.name != new.name and overlap(each, new)]
    moments = {new.start_at_ns, *(each.start_at_ns for each in others if each.start_at_ns > new.start_at_ns)}
    for moment in sorted(moments):
        at_once = [each for each in others if is_active(each, moment)]
        when = instant(moment)
        wanted = set(new.gpu_indices)
        for each in at_once:
            both = sorted(wanted.intersection(each.gpu_indices))
            if both:
                return f"at {when} {_gpus(both)} is already reserved for {each.holder} ({each.name})"
        indices = wanted.union(*(each.gpu_indices for each in at_once))
        counted = sum(each.gpu_count or 0 for each in at_once) + (new.gpu_count or 0)
        if gpus is not None and len(indices) + counted > len(gpus):
            kept = f" beside {', '.join(sorted(each.name for each in at_once))}" if at_once else ""
            return (
                f"at {when} {count_of(len(indices) + counted, 'GPU')} would be reserved{kept}, the machine has "
                f"{len(gpus)}"
            )
    return None


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


class Calendar(Struct, frozen=True):
    """The effect of the reservations on jobs that start at one instant, given the GPUs and the runs on them."""

    reservations: Sequence[Reservation]
    policy: Policy
    now_ns: int
    cards: Sequence[GpuSlot]
    runs: Mapping[str, Running]

    def moments(self, user: str, project: str | None, end_ns: int | None) -> list[Moment]:
        """Return every moment at which reservations bind a job that starts now and ends by *end_ns*.

        *end_ns* None is a job without a limit. The moments are now, for the active reservations, and the start of each
        future one within the horizon and before the job has ended.
        """
        now_ns = self.now_ns
        relevant = [each for each in self.reservations if each.end_at_ns > now_ns]
        if end_ns is None and self.policy.reservation_allows_unlimited:
            end_ns = now_ns
        starts = {
            each.start_at_ns
            for each in relevant
            if now_ns < each.start_at_ns <= now_ns + self.policy.reservation_horizon_ns
            and (end_ns is None or each.start_at_ns < end_ns)
        }
        found = []
        for at_ns in sorted({now_ns, *starts}):
            active = [each for each in relevant if is_active(each, at_ns)]
            if any(not holds(each, user, project) for each in active):
                found.append(self._moment(active, user, project, at_ns))
        return found

    def _moment(self, active: Sequence[Reservation], user: str, project: str | None, at_ns: int) -> Moment:
        by_index = {index: each for each in active for index in each.gpu_indices}
        closed = {index: each for index, each in by_index.items() if not holds(each, user, project)}
        counted = [each for each in active if each.gpu_count]
        left = {each.name: each.gpu_count or 0 for each in counted}
        available = set()
        for card in self.cards:
            if card.gpu.index in by_index:
                continue
            here = [self.runs[name] for name in (*card.alone, *card.shares)]
            if at_ns > self.now_ns:
                here = [run for run in here if not _is_over(run, at_ns)]
            for run in here:  # a GPU held by a run of the reservation's owner counts towards one of its reservations
                mine = next(
                    (each for each in counted if left[each.name] and holds(each, run.user, run.spec.project)), None
                )
                if mine is not None:
                    left[mine.name] -= 1
                    break
            if not here and card.given and not card.gpu.foreign and card.gpu.problem is None:
                available.add(card.gpu.uuid)
        others = [each for each in counted if not holds(each, user, project)]
        need = sum(left[each.name] for each in others)
        return Moment(at_ns, closed, frozenset(available), max(len(available) - need, 0), others)


def _is_over(run: Running, at_ns: int) -> bool:
    limit_ns = run.spec.time_limit_ns
    return limit_ns is not None and not run.suspended and run.counts_from_ns + limit_ns <= at_ns


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
        if each.start_at_ns <= now_ns:
            texts.append(f"{what} for {each.holder} until {instant(each.end_at_ns)}")
        else:
            texts.append(f"{what} for {each.holder} from {instant(each.start_at_ns)}")
    tail = ""
    if moment.at_ns > now_ns:
        could = "has no time limit" if end_ns is None else f"could run until {instant(end_ns)}"
        tail = f", and this job {could}"
    return " and ".join(texts) + tail


def _gpus(indices: Sequence[int]) -> str:
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
