"""The machine as all of its users share it: values, and their words. A capability reads them (`Capability.sharing`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from spool.core.model import ForeignProcess, Gpu, Pool
from spool.core.reasons import count_of
from spool.core.units import show_size
from spool.formats.capabilities import only
from spool.formats.config import Config
from spool.formats.state import PoolView, SharedView
from spool.machine.host import NO_ASKING, NO_ASKING_REMEDY, shared_directory

if TYPE_CHECKING:
    from spool.store.spool import Spool


class UserShare(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one user has of the machine, over all of that user's spools."""

    user: str
    leases: int = 0
    cpus: int = 0
    memory_bytes: int = 0
    gpus: int = 0  # by lease or without
    resources: dict[str, int] = {}
    asks: int = 0  # starts that wait for a lease


class GpuShare(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The users that have one GPU by lease. One with memory shares it."""

    uuid: str
    index: int
    users: tuple[tuple[str, int | None], ...] = ()  # user, bytes granted; None: not shared
    without_lease: tuple[str, ...] = ()  # users with processes there
    problem: str | None = None


class MachineUse(Struct, frozen=True):
    """What there is of a shared machine, and the part of each user by lease, over all spools of that user.

    `own` is the part of the owner of the spool; the others come in the order of what they have.
    """

    arbiter: int  # its pid
    since_at_ns: int
    cpus: int
    cpus_granted: int
    memory_bytes: int
    memory_granted_bytes: int
    gpus: int
    gpus_granted: int
    gpus_free: int
    gpu_problem: str | None
    resources: dict[str, PoolView]
    own: UserShare
    others: tuple[UserShare, ...]
    by_gpu: dict[str, GpuShare]

    @property
    def cpus_free(self) -> int:
        """The number of CPUs in no lease."""
        return max(self.cpus - self.cpus_granted, 0)

    @property
    def memory_free_bytes(self) -> int:
        """The memory in no lease; it may be in use all the same."""
        return max(self.memory_bytes - self.memory_granted_bytes, 0)


class MachineSharing(Struct, frozen=True):
    """A shared machine. `problem` is why its arbiter seems not to serve it, "" if it does.

    `use` is from `written_at_ns`; None if nothing is known of it.
    """

    directory: str
    problem: str
    remedy: str
    written_at_ns: int | None
    use: MachineUse | None

    @property
    def gist(self) -> tuple[object, ...]:
        """A value that changes when there is news, but not with the time."""
        return self.directory, bool(self.problem), self.use


class GpuLease(Struct, frozen=True):
    """A user's part of a GPU outside of this spool. None: all of it was granted; it is unknown how much is used."""

    user: str
    granted_bytes: int | None
    taken_bytes: int | None


def shared_machine(spool: Spool, now_ns: int, config: Config) -> MachineSharing | None:
    """Return the machine as its users share it; None if the spool has the machine for itself."""
    directory = shared_directory(config.machine)
    if directory is None:
        return None
    read = only("sharing")
    if read is None:
        return MachineSharing(directory, NO_ASKING, NO_ASKING_REMEDY, None, None)
    found = read(directory, config.machine_owner, spool.ownership.owner, now_ns)
    assert isinstance(found, MachineSharing)
    return found


def elsewhere(shares: MachineSharing | None, *here: int) -> tuple[int, ...]:
    """Return the CPUs, memory and GPUs that only others have; *here* is what one spool has of each."""
    use = shares.use if shares is not None else None
    granted = (use.cpus_granted, use.memory_granted_bytes, use.gpus_granted) if use is not None else (0, 0, 0)
    return tuple(max(of_all - own, 0) for of_all, own in zip(granted, here, strict=True))


def arbiter_view(shares: MachineSharing) -> SharedView:
    """Return what a dispatcher that begins now would have of the arbiter."""
    use = shares.use
    return SharedView(
        directory=shares.directory,
        problem=shares.problem,
        remedy=shares.remedy,
        cpus=use.cpus if use is not None else None,
        memory_bytes=use.memory_bytes if use is not None else None,
        resources=tuple(Pool(name, pool.total) for name, pool in use.resources.items()) if use is not None else (),
    )


def leases_on(gpu: Gpu, shares: MachineSharing | None, here: Iterable[int | None]) -> tuple[GpuLease, ...]:
    """Return what users have of *gpu* outside of this spool. *here*: the bytes of each run of it, None for all."""
    share = shares.use.by_gpu.get(gpu.uuid) if shares is not None and shares.use is not None else None
    if shares is None or shares.use is None or share is None:
        return ()
    sizes: dict[str, int | None] = {}
    for user, size in share.users:
        before = sizes.get(user, 0)
        sizes[user] = None if size is None or before is None else before + size
    own, ours = shares.use.own.user, list(here)
    if own in sizes and ours:
        granted = sizes.pop(own)
        rest = granted - sum(size or 0 for size in ours) if granted is not None and None not in ours else 0
        if rest > 0:
            sizes[own] = rest
    return tuple(GpuLease(user, size, _taken(gpu, user)) for user, size in sorted(sizes.items()))


def _taken(gpu: Gpu, user: str) -> int | None:
    sizes = [each.memory_bytes for each in gpu.foreign if each.user == user]
    return sum(size for size in sizes if size is not None) if sizes and None not in sizes else None


def without_users(foreign: Iterable[ForeignProcess], leases: Iterable[GpuLease]) -> tuple[ForeignProcess, ...]:
    """Return *foreign* without the processes of the users of *leases*, which say what these have."""
    users = [lease.user for lease in leases]
    return tuple(each for each in foreign if each.user not in users)


def problems_of(shares: MachineSharing | None) -> tuple[str, ...]:
    """Return the problem of a shared machine, as one of the spool's problems; () without one."""
    if shares is None or not shares.problem:
        return ()
    return (f"shared machine: {shares.problem}; {shares.remedy}",)


def in_words(share: UserShare) -> str:
    """Return what a user has, and what waits: "3 leases: 5 CPUs, 8 GiB, 1 GPU; 2 waiting"."""
    held = ""
    if share.leases or share.gpus:
        parts = [count_of(share.cpus, "CPU"), show_size(share.memory_bytes) if share.memory_bytes else ""]
        parts += [count_of(share.gpus, "GPU") if share.gpus else "", pools_of(share)]
        held = f"{count_of(share.leases, 'lease')}: {', '.join(filter(None, parts))}"
    return "; ".join(filter(None, (held, f"{share.asks} waiting" if share.asks else ""))) or "nothing"


def pools_of(share: UserShare) -> str:
    """Return the named resources that a user has: "licence 2, tpu 1"."""
    return ", ".join(f"{name} {number}" for name, number in sorted(share.resources.items()) if number)


def lease_words(lease: GpuLease, size: Callable[[int], str] = show_size) -> str:
    """Describe a user's part of a GPU: "bob's lease (granted 20 GiB, uses 18 GiB)"."""
    granted = f"granted {size(lease.granted_bytes)}" if lease.granted_bytes is not None else ""
    taken = f"uses {size(lease.taken_bytes)}" if lease.taken_bytes is not None else ""
    tail = ", ".join(filter(None, (granted, taken)))
    return f"{lease.user}'s lease{f' ({tail})' if tail else ''}"
