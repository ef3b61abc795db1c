"""Whose a GPU's memory and processes are: a run's of ours, or somebody else's.

Two ways to tell. Where pids mean here what they mean to NVML, each process is asked for. Inside a pid namespace they
do not: NVML gives the pids of the host, and the same number may be a process of ours that has nothing to do with a
GPU. There, and where NVML cannot list processes, the memory alone tells: what is used while none of our runs is on
the GPU is somebody else's, and what comes on top of that while one is there is ours.

Memory that no living process accounts for is somebody's all the same: of another namespace, hidden, or just ended.
That is judged by one answer of NVML's alone, so that everybody who asks comes to the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field

from spool.core.model import ForeignProcess
from spool.machine import identity
from spool.machine.nvml import Device

QUIET_BYTES = 256 << 20
"""Used memory that no process accounts for is somebody's above this: drivers and displays hold a little always."""

_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h


@dataclass(frozen=True, slots=True)
class Ignore:
    """Which processes of others do not count (`gpu.ignore_processes`): any one of the reasons is enough."""

    names: frozenset[str] = frozenset()
    users: frozenset[str] = frozenset()
    below_bytes: int = 0

    def covers(self, process: ForeignProcess) -> bool:
        """Return whether *process* does not count. Unknown memory is not below anything."""
        small = process.memory_bytes is not None and process.memory_bytes < self.below_bytes
        return small or process.name in self.names or process.user in self.users


@dataclass(frozen=True, slots=True)
class Ours:
    """What runs of ours are on the GPUs.

    `job_of` returns the job that a pid belongs to, or None; a process of a run that is just ending belongs to it.
    `on` is UUID -> job -> bytes granted there, None for a GPU given alone.
    """

    job_of: Callable[[int], str | None] = lambda pid: None
    on: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Use:
    """Who uses one GPU. The fields are those of `spool.core.model.Gpu`."""

    foreign: tuple[ForeignProcess, ...] = ()
    taken_bytes: tuple[tuple[str, int], ...] = ()
    problem: str | None = None


def in_pid_namespace(*, proc: str = identity.PROC) -> bool:
    """Return whether this process is in a pid namespace that is not the machine's own. Unknown counts as yes."""
    try:
        return identity.pid_namespace(proc=proc) != _FIRST_PID_NAMESPACE
    except OSError:
        return True


def who(pid: int) -> tuple[str, str | None] | None:
    """Return the name and the user of a process; None if it has ended, as a zombie has. The user may be unknown."""
    import psutil  # type: ignore[import-untyped]  # 10 ms that most commands need not pay

    stat = identity.read_stat(pid)
    if stat is None:
        # Where /proc is mounted with hidepid, the processes of others are not in it and still exist.
        return ("hidden", None) if psutil.pid_exists(pid) else None
    if stat.dead:
        return None
    try:
        process = psutil.Process(pid)
        name = process.name()
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:
        return "hidden", None
    try:
        return name, process.username()
    except psutil.Error:
        return name, None


class UseReader:
    """Tells whose each device's use is. Remembers what one look cannot show.

    `pids_mean_something` False: memory is all there is to go by.
    """

    def __init__(
        self,
        *,
        pids_mean_something: bool = True,
        ignore: Ignore | None = None,
        who: Callable[[int], tuple[str, str | None] | None] = who,
    ) -> None:
        self.pids_mean_something = pids_mean_something
        self.ignore = ignore or Ignore()
        self._who = who
        self._others_bytes: dict[str, int] = {}  # used when none of our runs was there

    def read(self, device: Device, ours: Ours, asked: Ours) -> Use:
        """Return who uses *device*. *asked* is `Ours` of when NVML was asked, *ours* that of now."""
        now, before = ours.on.get(device.uuid, {}), asked.on.get(device.uuid, {})
        if self.pids_mean_something and device.processes is not None:
            return self._by_process(device, device.processes, ours, now.keys() | before.keys())
        return self._by_memory(device, now, before)

    def _by_process(
        self, device: Device, processes: tuple[tuple[int, int | None], ...], ours: Ours, here: Set[str]
    ) -> Use:
        foreign: list[ForeignProcess] = []
        ended: list[ForeignProcess] = []
        taken: dict[str, int] = {}
        living: list[int | None] = []
        for pid, used in processes:
            job = ours.job_of(pid)
            found = self._who(pid) if job not in here else None
            if job in here:
                if job is not None and used is not None:
                    taken[job] = taken.get(job, 0) + used
            elif found is None:
                # Commonly a child that was forked with the device open, as data loaders are, and outlived its parent.
                ended.append(ForeignProcess(pid, "ended, its memory still held", used))
                continue
            else:
                foreign.append(ForeignProcess(pid, found[0], used, found[1], job))
            living.append(used)
        if not here:  # else what is left over may be a run's of ours, also of one that has just left
            left = _left_over(device, living)
            if left is None or left > QUIET_BYTES:  # else NVML lists them a moment longer than they lived
                foreign += ended
            foreign += _unseen(device, [*living, *(process.memory_bytes for process in ended)], "unknown")
        return Use(self._counted(foreign), tuple(sorted(taken.items())))

    def _by_memory(self, device: Device, now: Mapping[str, int | None], asked: Mapping[str, int | None]) -> Use:
        used = device.used_bytes
        if now or asked:  # a run that has just left was still there when NVML was asked
            if used is None:
                return Use()
            return Use(taken_bytes=_shared_out(max(0, used - self._others_bytes.get(device.uuid, 0)), now))
        if used is not None:
            self._others_bytes[device.uuid] = used
        elif device.processes is None:
            return Use(problem="NVML tells neither its processes nor its memory, so whether it is idle is unknown")
        name = "unknown" if self.pids_mean_something else "in another pid namespace"
        foreign = [ForeignProcess(pid, name, memory) for pid, memory in device.processes or ()]
        foreign += _unseen(device, [process.memory_bytes for process in foreign], name)
        return Use(self._counted(foreign))

    def _counted(self, processes: list[ForeignProcess]) -> tuple[ForeignProcess, ...]:
        return tuple(process for process in processes if not self.ignore.covers(process))


def _left_over(device: Device, sizes: Iterable[int | None]) -> int | None:
    """Return how much of the memory in use none of the processes of these *sizes* has; None is unknown."""
    known = [device.drawing_bytes, *sizes]
    if device.used_bytes is None or None in known:
        return None
    return max(0, device.used_bytes - sum(size or 0 for size in known))


def _unseen(device: Device, sizes: Iterable[int | None], name: str) -> list[ForeignProcess]:
    """Return what stands for the memory in use that nobody accounts for, nothing where it is little or unknown."""
    left = _left_over(device, sizes)
    # Pid 0 is how the kernel itself writes a process that a pid namespace cannot see.
    return [ForeignProcess(0, name, left)] if left is not None and left > QUIET_BYTES else []


def _shared_out(used_bytes: int, granted: Mapping[str, int | None]) -> tuple[tuple[str, int], ...]:
    """Return how much of *used_bytes* each job holds, filling one grant after the other.

    Which job holds what cannot be known; that the grants not yet taken come out right in sum is what matters.
    """
    taken = []
    for job, grant in sorted(granted.items()):
        part = used_bytes if grant is None else min(used_bytes, grant)
        taken.append((job, part))
        used_bytes -= part
    return tuple(taken)
