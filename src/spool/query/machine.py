"""The machine at one moment: its resources, their users, the free part, and problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from spool.client.autostart import outlook
from spool.core.gpus import HORIZON_NS, GpuSlot, is_active, unknown_gpus, why_closed
from spool.core.layout import DONE
from spool.core.model import Gpu, Machine, Request, Reservation, Running
from spool.core.reasons import instant, some_of
from spool.core.resources import FreeResources
from spool.machine.host import NO_CARD, unlisted_cards
from spool.query.jobs import RECENT_NS, JobLister, counts
from spool.query.rows import JobRow, in_words
from spool.query.shared import GpuLease, leases_on, problems_of, without_users
from spool.query.snapshot import Snapshot, snapshot
from spool.store.spool import Service, Spool


class GpuState(StrEnum):
    """Who has a GPU."""

    IDLE = "idle"
    EXCLUSIVE = "exclusive"  # one run
    SHARED = "shared"  # runs that were granted a part of its memory
    LEASED = "leased"  # other users have it, or a part of it, by a lease
    FOREIGN = "foreign"  # processes outside the spool
    UNUSED = "unused"  # left out by `gpu.use`
    PROBLEM = "problem"


class GpuHolder(Struct, frozen=True):
    """A run that has a GPU, and the memory of it that it uses; None: unknown."""

    run: Running
    taken_bytes: int | None


class GpuStatus(Struct, frozen=True):
    """One GPU. `why_not` is why no job could have it unshared now; None: one could.

    `leases` are what other users of a shared machine have of it; None: the machine is not shared.
    """

    gpu: Gpu
    state: GpuState
    holders: tuple[GpuHolder, ...]
    reserved: tuple[str, ...]
    why_not: str | None
    leases: tuple[GpuLease, ...] | None = None


class GpuList(Struct, frozen=True):
    """All GPUs. `reserved` are the reservations by number, for no GPU in particular."""

    gpus: tuple[GpuStatus, ...]
    problem: str | None
    reserved: tuple[str, ...]
    at_ns: int
    none_because: str = ""  # why there are none; "" if there are some, or if that is unknown
    unused: tuple[str, ...] = ()  # which others there are, and why they are not used


class RunHere(Struct, frozen=True):
    """A run, and whether its engine has not confirmed it yet."""

    run: Running
    on_its_way: bool = False


class PoolStatus(Struct, frozen=True):
    """A named resource. Free means that it can be granted now."""

    total: int
    granted: int
    free: int


class DispatcherStatus(Struct, frozen=True):
    """The dispatcher of the spool. None if its last view does not say."""

    pid: int | None
    host: str | None
    since_at_ns: int | None
    heartbeat_at_ns: int | None
    silent_ns: int | None  # how long it has been silent, if too long
    lock_astray: bool = False  # `.lock` was deleted or replaced


class MachineStatus(Struct, frozen=True):
    """The data of `spool info`. Totals are what may be granted, after reserves."""

    spool: str
    seen: Snapshot
    cpus_granted: int
    memory_granted_bytes: int
    dispatcher: DispatcherStatus | None
    next_dispatcher: str  # without a dispatcher: how the next one starts
    gpus: GpuList
    resources: dict[str, PoolStatus]
    runs: tuple[RunHere, ...]
    states: dict[str, int]  # of waiting and running jobs
    ended: dict[str, int]  # jobs that ended within the last day, by outcome
    problems: tuple[str, ...]

    @property
    def cpus_free(self) -> int:
        """The number of CPUs not granted."""
        free, use = self.seen.machine.cpus - self.cpus_granted, self.seen.machine_use
        return max(min(free, use.cpus_free) if use is not None else free, 0)

    @property
    def memory_not_granted_bytes(self) -> int:
        """The memory not granted to any run; it may be in use all the same."""
        free, use = self.seen.machine.memory_bytes - self.memory_granted_bytes, self.seen.machine_use
        return max(min(free, use.memory_free_bytes) if use is not None else free, 0)


def gpus(spool: Spool) -> GpuList:
    """Return the GPUs from the view of a dispatcher that watches them; without one, query NVML and wait."""
    return _gpus(snapshot(spool, with_gpus=True))


def _gpus(seen: Snapshot) -> GpuList:
    view, now_ns = seen.view, seen.now_ns
    leases = _leases(seen)
    gpus = tuple(
        replace(gpu, foreign=without_users(gpu.foreign, leases[gpu.uuid])) if leases else gpu
        for gpu in seen.machine.gpus
    )
    machine = replace(seen.machine, gpus=gpus)
    room = FreeResources(machine, seen.policy, now_ns, view.running, reservations=view.reservations)
    near = [each for each in view.reservations if now_ns < each.end_at_ns and each.start_at_ns <= now_ns + HORIZON_NS]
    return GpuList(
        gpus=tuple(_gpu_use(card, view.running, near, seen, leases.get(card.gpu.uuid)) for card in room.cards.cards),
        problem=machine.gpu_problem,
        reserved=tuple(f"{each.gpu_count} {_kept(each, seen)}" for each in near if each.gpu_count),
        at_ns=now_ns,
        none_because="" if machine.gpus or machine.gpu_problem else _why_none(machine),
        unused=machine.gpus_unused,
    )


def _why_none(machine: Machine) -> str:
    return "; ".join(machine.gpus_unused) or unlisted_cards() or NO_CARD


def _leases(seen: Snapshot) -> dict[str, tuple[GpuLease, ...]]:
    """Return what users have of each GPU outside of this spool; {} if the machine is not shared."""
    if seen.shared is None:
        return {}
    here: dict[str, list[int | None]] = {}
    for run in seen.view.running.values():
        for uuid in run.grant.gpu_uuids:
            here.setdefault(uuid, []).append(run.grant.gpu_memory_bytes)
    return {gpu.uuid: leases_on(gpu, seen.shared, here.get(gpu.uuid, ())) for gpu in seen.machine.gpus}


def _gpu_use(
    card: GpuSlot,
    runs: Mapping[str, Running],
    near: Sequence[Reservation],
    seen: Snapshot,
    leases: tuple[GpuLease, ...] | None,
) -> GpuStatus:
    gpu, taken = card.gpu, dict(card.gpu.taken_bytes)
    mine = [each for each in near if gpu.index in each.gpu_indices]
    active = [each for each in mine if is_active(each, seen.now_ns)]
    why_not = None
    if not card.given:
        why_not = "left out by gpu.use in the configuration"
    elif not card.idle:
        why_not = why_closed(card, Request())
    elif leases:
        why_not = f"GPU {gpu.index} is leased to {some_of(lease.user for lease in leases)}"
    elif active:
        why_not = f"reserved {_kept(active[0], seen)}"
    return GpuStatus(
        gpu,
        state=_state(card, leases or ()),
        holders=tuple(GpuHolder(runs[name], taken.get(name)) for name in (*card.alone, *card.shares)),
        reserved=tuple(_kept(each, seen) for each in mine),
        why_not=why_not,
        leases=leases,
    )


def _state(card: GpuSlot, leases: Sequence[GpuLease]) -> GpuState:
    if card.gpu.problem is not None:
        return GpuState.PROBLEM
    if card.alone or card.shares:
        return GpuState.EXCLUSIVE if card.alone else GpuState.SHARED
    if leases:
        return GpuState.LEASED
    return GpuState.UNUSED if not card.given else GpuState.FOREIGN if card.gpu.foreign else GpuState.IDLE


def _kept(each: Reservation, seen: Snapshot) -> str:
    """Return the user and the time of a reservation: "for alice until 16:00 (demo)"."""
    begins = f"from {instant(each.start_at_ns)} " if each.start_at_ns > seen.now_ns else ""
    return in_words(f"for {each.holder} {begins}until {instant(each.end_at_ns)} ({each.name})", seen.now_ns)


def machine_status(spool: Spool) -> MachineStatus:
    """Return the state of the whole machine."""
    seen = snapshot(spool, with_gpus=True, quiet=True)
    running = seen.view.running
    lister = JobLister(spool, seen.now_ns)
    listing = lister.listing(recent=0)
    named = unknown_gpus(seen.policy.gpu_use, seen.machine)
    unknown = [f"gpu.use names {name}, but the machine has no such GPU" for name in named]
    # A dispatcher says itself what it makes of the configuration: it may have read it when that was still good.
    own = None if lister.dispatcher else seen.config_problem
    refusal = in_words(seen.machine.refusal, seen.now_ns)
    problems = [own, seen.unpinned, refusal, *unknown, *listing.problems, *_held(seen), *problems_of(seen.shared)]
    return MachineStatus(
        spool=spool.root,
        seen=seen,
        cpus_granted=running.counts.cpus,
        memory_granted_bytes=running.counts.memory_bytes,
        dispatcher=_dispatcher(lister),
        next_dispatcher="" if lister.dispatcher else outlook(spool.root),
        gpus=_gpus(seen),
        resources=_resources(seen),
        runs=tuple(
            RunHere(run, on_its_way=run.submitted and spool.engine(run.name, run.run) is None)
            for run in sorted(running.values(), key=lambda run: (run.started_at_ns, run.name))
        ),
        states={state.value: number for state, number in counts(listing.rows).items()},
        ended=_ended(spool, listing.rows, seen.now_ns),
        problems=tuple(dict.fromkeys(filter(None, problems))),
    )


def _held(seen: Snapshot) -> Iterator[str]:
    """Yield why spool itself holds jobs: the first one's reason, and how many there are."""
    held = [(job.name, job.hold_reason) for job in seen.table.jobs.values() if job.hold_reason]
    if held:
        more = f" (and {len(held) - 1} more, see `spool ls`)" if len(held) > 1 else ""
        yield f"job {held[0][0]} is held: {held[0][1]}{more}"


def _resources(seen: Snapshot) -> dict[str, PoolStatus]:
    held = seen.view.running.counts.named
    shared = seen.machine_use.resources if seen.machine_use is not None else {}
    free = {pool.name: held.free(pool) for pool in seen.machine.resources}
    free |= {name: min(free[name], use.free) for name, use in shared.items() if name in free}
    return {
        pool.name: PoolStatus(pool.total, held.granted(pool.name), free[pool.name]) for pool in seen.machine.resources
    }


def _dispatcher(lister: JobLister) -> DispatcherStatus | None:
    if not lister.dispatcher:
        return None
    state, astray = lister.state, lister.service is Service.ASTRAY
    if state is None:
        return DispatcherStatus(None, None, None, None, lister.stale_ns, astray)
    host, since_ns, beat_ns = state.host or None, state.started_at_ns, state.heartbeat_ns
    return DispatcherStatus(state.pid, host, since_ns, beat_ns, lister.stale_ns, astray)


def _ended(spool: Spool, active: Iterable[JobRow], now_ns: int) -> dict[str, int]:
    """Return how many jobs, none of them *active*, ended within the last day, by the outcome of their newest run."""
    left = {*spool.names(DONE)}.difference(row.name for row in active)
    found: Counter[str] = Counter()
    for result in spool.accounts_since(now_ns - RECENT_NS):  # the newest first
        if result.job in left:
            left.discard(result.job)
            found[result.outcome.value] += now_ns - (result.ended_at_ns or now_ns) <= RECENT_NS
    return dict(+found)
