"""The machine as all of its users share it, from the arbiter's `machine.json` (FORMAT 17).

The file is another account's. It counts only if an account that may serve this machine wrote it, it is read up to a
limit, and its numbers must be such as can be added. Its words are shown as all text from outside is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

from spool.core.model import SECOND_NS, ForeignProcess, Gpu, Pool
from spool.core.reasons import count_of
from spool.core.units import show_duration, show_size
from spool.formats import machine_status
from spool.formats.config import Config
from spool.formats.machine_status import GpuShare, UserShare
from spool.formats.state import SharedView
from spool.machine import shared
from spool.store.config import Settings
from spool.store.ownership import name_of
from spool.store.reading import read_with_status
from spool.store.spool import Spool

FILE = "machine.json"
SILENT_NS = 5 * SECOND_NS
"""An arbiter that has not renewed the file for longer does not answer."""

_MOST_BYTES = 4 << 20
_MOST = 1 << 62  # a larger number is a mistake, or meant to do harm
_MOST_USERS = 4096


class PoolUse(Struct, frozen=True):
    """A named resource of the machine: its total, and the part in leases."""

    total: int
    granted: int

    @property
    def free(self) -> int:
        """The part in no lease."""
        return max(self.total - self.granted, 0)


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
    resources: dict[str, PoolUse]
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

    def cpus_elsewhere(self, granted: int) -> int:
        """Return the number of CPUs granted to others, if *granted* are those of one spool."""
        return max(self.use.cpus_granted - granted, 0) if self.use is not None else 0

    def memory_elsewhere_bytes(self, granted_bytes: int) -> int:
        """Return the memory granted to others, if *granted_bytes* is that of one spool."""
        return max(self.use.memory_granted_bytes - granted_bytes, 0) if self.use is not None else 0

    def gpus_elsewhere(self, granted: int) -> int:
        """Return the number of GPUs that only others have, if runs of one spool are on *granted* of them."""
        return max(self.use.gpus_granted - granted, 0) if self.use is not None else 0


class GpuLease(Struct, frozen=True):
    """A user's part of a GPU outside of this spool. None: all of it was granted; it is unknown how much is used."""

    user: str
    granted_bytes: int | None
    taken_bytes: int | None


def shared_machine(spool: Spool, now_ns: int, config: Config | None = None) -> MachineSharing | None:
    """Return the machine as its users share it; None if the spool has the machine for itself.

    *config*: the configuration in force, if it has been read already.
    """
    config = Settings(spool).config if config is None else config
    place = shared.find(config.machine, config.machine_owner)
    if place is None:
        return None
    return read(place, spool.ownership.owner, now_ns)


def read(place: shared.SharedMachine, uid: int | None, now_ns: int) -> MachineSharing:
    """Return the shared machine that is served at *place*, as the user *uid* sees it."""
    path = f"{place.directory}/{FILE}"

    def unknown(problem: str, written_at_ns: int | None = None) -> MachineSharing:
        return MachineSharing(place.directory, problem, place.remedy, written_at_ns, None)

    try:
        found = read_with_status(path, _MOST_BYTES)
    except OSError as error:
        return unknown(f"{path} cannot be read: {error.strerror or error}")
    if found is None:
        return unknown(f"the arbiter is not running: there is no {path}")
    status, text = found
    if status.st_uid not in place.servers:
        return unknown(f"{path} belongs to {name_of(status.st_uid)}, who is not trusted to serve this machine")
    told = machine_status.parse(text)
    if told is None or not _is_sound(told):
        return unknown(f"{path} is damaged", status.st_mtime_ns)
    silent_ns = now_ns - status.st_mtime_ns
    problem = f"the arbiter has not answered for {show_duration(silent_ns)}" if silent_ns > SILENT_NS else ""
    return MachineSharing(place.directory, problem, place.remedy, status.st_mtime_ns, _use(told, uid))


def _is_sound(told: machine_status.MachineShares) -> bool:
    """Whether all numbers can be added, and no list is longer than a machine could need."""
    numbers = [told.pid, told.cpus, told.memory_bytes, told.since_ns, *told.resources.values()]
    for share in told.users:
        numbers += (share.leases, share.cpus, share.memory_bytes, share.gpus, share.asks, *share.resources.values())
    for gpu in told.gpus:
        numbers += (size for _, size in gpu.users if size is not None)
    return len(told.users) <= _MOST_USERS and all(0 <= number <= _MOST for number in numbers)


def _use(told: machine_status.MachineShares, uid: int | None) -> MachineUse:
    users = told.users
    name = name_of(uid) if uid is not None else ""
    own = next((share for share in users if share.user == name), UserShare(user=name))
    others = [share for share in users if share.user != own.user]
    return MachineUse(
        arbiter=told.pid,
        since_at_ns=told.since_ns,
        cpus=told.cpus,
        cpus_granted=sum(share.cpus for share in users),
        memory_bytes=told.memory_bytes,
        memory_granted_bytes=sum(share.memory_bytes for share in users),
        gpus=len(told.gpus),
        gpus_granted=sum(bool(gpu.users) for gpu in told.gpus),
        gpus_free=sum(not (gpu.users or gpu.without_lease) for gpu in told.gpus),
        gpu_problem=told.gpu_problem,
        resources={
            name: PoolUse(total, sum(share.resources.get(name, 0) for share in users))
            for name, total in told.resources.items()
        },
        own=own,
        others=tuple(sorted(others, key=_by_part)),
        by_gpu={gpu.uuid: gpu for gpu in told.gpus},
    )


def _by_part(share: UserShare) -> tuple[object, ...]:
    return -share.gpus, -share.cpus, -share.memory_bytes, -share.leases, -share.asks, share.user


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
