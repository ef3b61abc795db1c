"""The machine and the rest of what a decision needs, looked at no more often than it can have changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from spool.core.model import SECOND_NS, Gpu, Machine, State
from spool.core.rules import short_of_disk
from spool.dispatcher.settings import Settings
from spool.dispatcher.table import Table
from spool.machine import tree
from spool.machine.gpu_use import Ignore, Ours
from spool.machine.gpus import GpuWatcher
from spool.machine.host import Host, disk_free_bytes
from spool.store.spool import Spool

_TOTALS_EVERY_NS = 10 * SECOND_NS
_AVAILABLE_EVERY_NS = SECOND_NS // 4
_DISK_EVERY_NS = SECOND_NS


class World:
    """Looks at the machine for a dispatcher or for a command that plans."""

    def __init__(self, spool: Spool, table: Table, settings: Settings, *, with_gpus: bool = False) -> None:
        """Look at nothing yet. *with_gpus*: at the GPUs too, whether a job wants one or not."""
        self._with_gpus = with_gpus
        self._spool_dir = Path(spool.root)
        self._table = table
        self._settings = settings
        self._host = Host()
        self._gpus: GpuWatcher | None = None
        self._totals: tuple[int, int, int] = (0, 0, 0)  # cpus, memory, when
        self._available: tuple[int, int] = (0, 0)  # bytes, when
        self._disk: tuple[int | None, int] = (None, 0)
        self._seen: Machine | None = None

    @property
    def gpus(self) -> GpuWatcher | None:
        """Return what watches the GPUs, None as long as no job has asked for one."""
        return self._gpus

    def gpus_matter(self) -> bool:
        """Whether a job that wants GPUs waits or runs, or somebody asks for them."""
        return (
            self._with_gpus
            or any(shape.key.request.gpus for shape in self._table.queue.shapes)
            or any(live.grant.gpu_uuids for live in self._table.live.values())
        )

    def want_gpus(self, *, wanted: bool) -> None:
        """Have the GPUs looked at even if no job has to do with them, or no longer."""
        self._with_gpus = wanted

    def machine(self, now_ns: int) -> Machine:
        """Return the machine as it is; the same object as long as nothing has changed."""
        self._look(now_ns)
        cpus, memory, _ = self._totals
        gpus: tuple[Gpu, ...] = ()
        problem = None
        if self.gpus_matter():
            if self._gpus is None:
                self._gpus = GpuWatcher()
            config = self._settings.config.gpu
            self._gpus.ignore = Ignore(config.ignore_names, config.ignore_users, config.ignore_below_bytes)
            look = self._gpus.look(now_ns, self._ours(), max_age_ns=config.poll_ns)
            gpus, problem = look.gpus, look.problem
        seen = Machine(cpus, memory, self._available[0], gpus, problem, self._disk[0])
        if seen != self._seen:
            self._seen = seen
        return self._seen or seen

    def why_no_room(self) -> str:
        """Return why the disk is too short for anything new; "" if it is not."""
        short = short_of_disk(disk_free_bytes(self._spool_dir), self._settings.config.policy)
        return short.text if short is not None else ""

    def what_counts(self, machine: Machine) -> Machine:
        """Return *machine* without the numbers that no decision looks at now: they change all the time.

        The memory that is really free counts where a job that waits asks for memory, the disk where it is short.
        """
        free = machine.disk_free_bytes
        short = free is not None and free < self._settings.config.policy.disk_floor_bytes
        available = machine.memory_available_bytes if self._memory_matters() else None
        return replace(machine, memory_available_bytes=available, disk_free_bytes=free if short else None)

    def take_gpu_answer(self) -> None:
        """NVML's answer is there: take it in."""
        if self._gpus is not None:
            self._gpus.look(time.time_ns(), self._ours(), max_age_ns=self._settings.config.gpu.poll_ns, patience_ns=0)

    def _look(self, now_ns: int) -> None:
        if not 0 <= now_ns - self._totals[2] < _TOTALS_EVERY_NS:
            config = self._settings.config
            host = self._host.memory()
            cpus = config.cpus if config.cpus is not None else self._host.cpus()
            memory = config.memory_bytes
            if memory is None:
                memory = max(0, host.total_bytes - config.memory_reserve.bytes_of(host.total_bytes))
            self._totals = (cpus, memory, now_ns)
            self._available = (host.available_bytes, now_ns)
        if not 0 <= now_ns - self._available[1] < _AVAILABLE_EVERY_NS and self._memory_matters():
            self._available = (self._host.memory().available_bytes, now_ns)
        if not 0 <= now_ns - self._disk[1] < _DISK_EVERY_NS:
            self._disk = (disk_free_bytes(self._spool_dir), now_ns)

    def configuration_changed(self) -> None:
        """Look at everything anew."""
        self._totals = (0, 0, 0)

    def _memory_matters(self) -> bool:
        return any(shape.key.request.memory_bytes for shape in self._table.queue.shapes)

    def _ours(self) -> Ours:
        on: dict[str, dict[str, int | None]] = {}
        for live in self._table.live.values():
            for uuid in live.grant.gpu_uuids:
                on.setdefault(uuid, {})[live.name] = live.grant.gpu_memory_bytes
        return Ours(self._job_of, on)

    def _job_of(self, pid: int) -> str | None:
        """Return the job whose run the process *pid* carries the mark of."""
        name = tree.job_of(pid, str(self._spool_dir))
        job = self._table.jobs.get(name) if name is not None else None
        return name if job is not None and job.live is not None else None

    def close(self) -> None:
        """End what watches the GPUs."""
        if self._gpus is not None:
            self._gpus.close()


class Outcomes(Mapping[str, State]):
    """The newest outcome of each job that has ended, read from its records when a rule first asks."""

    def __init__(self, spool: Spool, standing: Callable[[str], State | None] = lambda _: None) -> None:
        """*standing* knows of names that have not ended though no queue has them, and what they do."""
        self._spool = spool
        self._standing = standing
        self._known: dict[str, State] = {}
        self._missing: dict[str, int] = {}

    def __getitem__(self, name: str) -> State:
        if (state := self._standing(name)) is not None:
            return state
        state = self._known.get(name)
        if state is None:
            # A name that nobody has seen is asked for at every pass; the disk is not.
            if self._missing.get(name, 0) > time.monotonic_ns():
                raise KeyError(name)
            state = self._read(name)
            if state is None:
                self._missing[name] = time.monotonic_ns() + 5 * SECOND_NS
                raise KeyError(name)
            self._known[name] = state
        return state

    def __iter__(self):  # type: ignore[no-untyped-def]
        """Only `get` is asked for by the rules."""
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def record(self, name: str, state: State) -> None:
        """Take in that a job has ended for good."""
        self._known[name] = state
        self._missing.pop(name, None)

    def forget(self, name: str) -> None:
        """Forget what a job was that waits or runs again."""
        self._known.pop(name, None)

    def _read(self, name: str) -> State | None:
        run = self._spool.latest_run(name)
        result = self._spool.result(name, run) if run is not None else None
        return result.outcome if result is not None and result.again is None else None
