"""What the machine has for everyone, its CPUs, memory, pools, and GPUs as NVML shows them, and who has how much of it.

A process on a GPU belongs to a lease if its user has a lease on that GPU, so that no environment of another user's
process is read. All other processes are foreign, and keep that GPU from being granted; they count for their users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from spool.core.model import SECOND_NS, Core, Gpu, Grant, Machine, cpus_of
from spool.extras.machine.ledger import Lease, LeaseLedger
from spool.extras.machine.machinefile import MachineConfig
from spool.machine import identity
from spool.machine.gpus import GpuWatcher, Ignore, Ours
from spool.machine.host import Host
from spool.query.shared import GpuShare, UserShare

_TOTALS_EVERY_NS = 10 * SECOND_NS
_AVAILABLE_EVERY_NS = SECOND_NS // 4
_FRESH_NS = SECOND_NS  # a start on GPUs needs an answer of NVML that is not older


class Hardware:
    """The machine that an arbiter shares out."""

    def __init__(self, config: MachineConfig) -> None:
        self._config = config
        self._host = Host()
        self._totals = (0, 0, 0)  # CPUs, memory, when
        self._cores: tuple[Core, ...] = ()  # that runs are pinned to
        self._available = (0, 0)  # bytes, when
        self.watches_gpus = False  # once they have mattered
        self.seen_at_ns = 0  # when the query was made that NVML has answered last; 0: the next look asks again
        self._watcher, gpu = GpuWatcher(), config.gpu
        self._watcher.ignoring(Ignore(gpu.ignore_names, gpu.ignore_users, gpu.ignore_below_bytes))
        self._watcher.asking_where(on=config.cpu_pinning)
        self._ours = Ours()

    def machine(self, now_ns: int, leases: Iterable[Lease], *, gpus: bool) -> Machine:
        """Return the machine as it is; *gpus*: whether anything concerns its GPUs."""
        config = self._config
        try:
            if not 0 <= now_ns - self._totals[2] < _TOTALS_EVERY_NS:
                total = self._host.memory().total_bytes
                cpus = config.cpus if config.cpus is not None else self._host.cpus()
                if config.cpu_pinning:
                    self._cores = self._host.cores()
                    cpus = min(cpus, cpus_of(self._cores))
                self._totals = cpus, config.memory_of(total), now_ns
            if not 0 <= now_ns - self._available[1] < _AVAILABLE_EVERY_NS:
                self._available = self._host.memory().available_bytes, now_ns
        except OSError:  # out of descriptors: what was seen last counts
            if not self._totals[0]:
                raise
        cpus, memory_bytes, _ = self._totals
        machine = Machine(cpus, memory_bytes, self._available[0], resources=config.resources, cores=self._cores)
        return self._with_gpus(machine, now_ns, leases) if gpus else machine

    def may_start_on(self, grant: Grant, now_ns: int) -> bool:
        """Whether NVML has shown the GPUs of *grant* since the last lease has left them; else it is asked again."""
        if not grant.gpu_uuids:
            return True
        free = grant.gpu_memory_bytes is not None or not any(map(self._watcher.was_ours, grant.gpu_uuids))
        if free and now_ns - self.seen_at_ns < _FRESH_NS:
            return True
        self.seen_at_ns = 0
        return False

    def fileno(self) -> int:
        """Return the descriptor that is readable when NVML has answered."""
        return self._watcher.fileno()

    def take_answer(self, now_ns: int) -> None:
        """Read NVML's answer, which is there."""
        self._watcher.look(now_ns, self._ours, max_age_ns=self._config.gpu.poll_ns, patience_ns=0)

    def close(self) -> None:
        """End the process that queries NVML."""
        self._watcher.close()

    def _with_gpus(self, machine: Machine, now_ns: int, leases: Iterable[Lease]) -> Machine:
        self.watches_gpus = True
        held: dict[str, list[Lease]] = {}
        users: dict[int, str] = {}
        for lease in leases:
            for uuid in lease.grant.gpu_uuids:
                users[lease.holder.uid] = lease.holder.user
                held.setdefault(uuid, []).append(lease)
        on = {uuid: _granted(each) for uuid, each in held.items()}
        self._ours = Ours(lambda pid: users.get(identity.owner_of(pid)), on)
        age_ns = self._config.gpu.poll_ns if self.seen_at_ns else 0
        look = self._watcher.look(now_ns, self._ours, max_age_ns=age_ns, patience_ns=0)
        self.seen_at_ns = look.seen_at_ns or 0
        gpus = tuple(
            replace(
                gpu,
                taken_bytes=_by_lease(gpu, held.get(gpu.uuid, [])),
                foreign=tuple(replace(process, job=None) for process in gpu.foreign),
                work=(),
            )
            for gpu in look.gpus
        )
        return replace(machine, gpus=gpus, gpu_problem=look.problem)


def _by_lease(gpu: Gpu, leases: list[Lease]) -> tuple[tuple[str, int], ...]:
    """Return what each lease holds of *gpu*: what its user holds there fills the leases one after the other."""
    left, taken = dict(gpu.taken_bytes), []
    for lease in leases:
        rest = left.get(lease.holder.user, 0)
        part = rest if lease.grant.gpu_memory_bytes is None else min(rest, lease.grant.gpu_memory_bytes)
        left[lease.holder.user] = rest - part
        taken.append((lease.name, part))
    return tuple(sorted(taken))


def _granted(leases: Iterable[Lease]) -> dict[str, int | None]:
    """Return what users were granted of the memory of one GPU by its *leases*; None: all of it."""
    found: dict[str, int | None] = {}
    for lease in leases:
        granted, before = lease.grant.gpu_memory_bytes, found.get(lease.holder.user, 0)
        found[lease.holder.user] = None if granted is None or before is None else before + granted
    return found


def user_shares(ledger: LeaseLedger) -> list[UserShare]:
    """Return what each user has, and how many asks of each wait."""
    leases: dict[str, list[Lease]] = {}
    for lease in ledger.leases.values():
        leases.setdefault(lease.holder.user, []).append(lease)
    asks = Counter(ask.holder.user for ask in ledger.asks.values())
    found = []
    for user in sorted(leases.keys() | asks.keys() | ledger.squatters.keys()):
        held, resources = leases.get(user, []), Counter[str]()
        for lease in held:
            resources.update(dict(lease.grant.resources))
        found.append(
            UserShare(
                user=user,
                leases=len(held),
                cpus=sum(lease.grant.cpus for lease in held),
                memory_bytes=sum(lease.grant.memory_bytes or 0 for lease in held),
                gpus=len(ledger.squatters.get(user, frozenset()).union(*(lease.grant.gpu_uuids for lease in held))),
                resources=dict(resources),
                asks=asks[user],
            )
        )
    return found


def gpu_shares(machine: Machine, ledger: LeaseLedger) -> list[GpuShare]:
    """Return which users have each GPU."""
    leases = ledger.leases.values()
    return [
        GpuShare(
            uuid=gpu.uuid,
            index=gpu.index,
            users=tuple(sorted(_granted(each for each in leases if gpu.uuid in each.grant.gpu_uuids).items())),
            without_lease=tuple(sorted(user for user, uuids in ledger.squatters.items() if gpu.uuid in uuids)),
            problem=gpu.problem,
        )
        for gpu in machine.gpus
    ]
