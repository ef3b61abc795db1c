"""The machine and other inputs of a decision, read no more often than they can change."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from spool.core.constraints import short_of_disk
from spool.core.gpus import known_gpus
from spool.core.model import SECOND_NS, Core, Grant, Machine, NoLeases, cpus_of
from spool.formats.config import Config
from spool.formats.state import GpuLook, SharedView
from spool.machine import processes
from spool.machine.gpus import PATIENCE_NS, GpuWatcher, Ours
from spool.machine.host import Host, disk_free_bytes
from spool.state.table import SchedulerState
from spool.store.edited import Settings
from spool.store.spool import Spool

_TOTALS_EVERY_NS = 10 * SECOND_NS
_AVAILABLE_EVERY_NS = SECOND_NS // 4
_DISK_EVERY_NS = SECOND_NS


def on_shared(machine: Machine, config: Config, shared: SharedView) -> Machine:
    """Return *machine* with the totals of the arbiter that shares it out, as far as *config* allows this spool them."""
    no_leases = NoLeases(shared.problem, shared.problem_since_ns, shared.remedy) if shared.problem else None
    machine = replace(machine, cores=())  # the arbiter knows which CPUs other spools have
    if shared.cpus is None or shared.memory_bytes is None:
        return replace(machine, no_leases=no_leases)
    own = {pool.name: pool for pool in machine.resources}
    for pool in shared.resources:
        total = min(pool.total, own[pool.name].total) if pool.name in own else pool.total
        own[pool.name] = replace(pool, total=total)
    return replace(
        machine,
        cpus=shared.cpus if config.cpus is None else min(config.cpus, shared.cpus),
        memory_bytes=(
            shared.memory_bytes if config.memory_bytes is None else min(config.memory_bytes, shared.memory_bytes)
        ),
        resources=tuple(own.values()),
        no_leases=no_leases,
    )


class MachineMonitor:
    """Watches the machine for a dispatcher or for a command that plans."""

    def __init__(
        self,
        spool: Spool,
        table: SchedulerState,
        settings: Settings,
        *,
        with_gpus: bool = False,
        told: Callable[[], GpuLook | None] = lambda: None,
    ) -> None:
        """Look at nothing yet. *with_gpus*: look at the GPUs even if no job wants one.

        *told* are the GPUs as a dispatcher saw them; then NVML is not asked.
        """
        self.wants_gpus = with_gpus
        self._told = told
        self.gpus_at_ns: int | None = None  # time of the NVML query; None: nothing is known of the GPUs
        self.gpus_are_new = False  # NVML has answered since the last pass
        self._seen_answer = 0  # number of the last answer that a pass has seen
        self._needed = 0  # number of the answer that a start waits for
        self._doubt_at_ns = 0  # monotonic; until then that start keeps its reserved room
        self._doubts = False
        self._spool_dir = Path(spool.root)
        self._table = table
        self._settings = settings
        self._host = Host()
        self.gpus: GpuWatcher | None = None  # None until a job needs one
        self._totals: tuple[int, int, int] = (0, 0, 0)  # cpus, memory, when
        self._cores: tuple[Core, ...] = ()  # that runs are pinned to
        self._available: tuple[int, int] = (0, 0)  # bytes, when
        self._disk: tuple[int | None, int] = (None, 0)
        self._seen: Machine | None = None
        self.gpu_indices: frozenset[int] | None = None  # of the GPUs that exist; None until known

    def gpus_matter(self) -> bool:
        """Whether a waiting or running job wants GPUs, or the caller asked for them."""
        return self.wants_gpus or bool(
            self._table.runs.with_gpus or any(request.gpus for request in self._table.queue.requests_here())
        )

    def want_gpus(self, *, wanted: bool) -> None:
        """Look at the GPUs even if no job uses them."""
        self.wants_gpus = wanted

    def machine(self, now_ns: int, *, patience_ns: int = 0) -> Machine:
        """Return the machine as it is; the same object while nothing has changed.

        *patience_ns* is the waiting time for NVML, if it is asked.
        """
        self._look(now_ns)
        cpus, memory, _ = self._totals
        look, self.gpus_are_new = GpuLook(), False
        if self.gpus_matter():
            if (told := self._told()) is not None:
                look = told
            else:
                look = self._look_at_gpus(now_ns, patience_ns)
                answered = self.gpus.answered if self.gpus is not None else 0
                self.gpus_are_new = answered > self._seen_answer and answered >= self._needed
                self._seen_answer = answered
        self.gpus_at_ns = look.seen_at_ns
        seen = Machine(
            cpus,
            memory,
            self._available[0],
            look.gpus,
            look.problem,
            look.unused,
            self._disk[0],
            resources=self._settings.config.resources,
            cores=self._cores,
        )
        if self.gpus_matter() and (known := known_gpus(seen)) is not None:
            self.gpu_indices = known
        self._seen = self._seen if seen == self._seen else seen
        return self._seen or seen

    def why_no_room(self) -> str:
        """Return why the disk has too little room for a start; "" if it has enough."""
        short = short_of_disk(disk_free_bytes(self._spool_dir), self._settings.config.policy)
        return short.text if short is not None else ""

    def may_start_on(self, grant: Grant) -> bool:
        """Whether the GPUs of *grant* are known well enough to start a job on them.

        They are if NVML has answered since the last pass, and, for GPUs that are not shared, if that query came after
        the last run had left them: only then it shows other processes.
        """
        if not grant.gpu_uuids:
            return True
        if not self.gpus_are_new or self.gpus is None:
            return False
        return grant.gpu_memory_bytes is not None or not any(map(self.gpus.was_ours, grant.gpu_uuids))

    def ask_gpus_again(self, now_ns: int) -> None:
        """Query NVML for a start that waits. If the answer does not come soon, the GPUs are unknown until then."""
        if self.gpus is not None and self._needed <= self.gpus.answered:
            self._needed = self.gpus.asked + 1  # an open query may have been answered in part
            self._doubt_at_ns, self._doubts = time.monotonic_ns() + PATIENCE_NS, False
            self._look_at_gpus(now_ns, 0)

    @property
    def gpus_are_asked(self) -> bool:
        """Whether waiting or running jobs need GPUs, and NVML has not answered its first query yet."""
        return self.gpus_matter() and self.gpus is not None and not self.gpus.answered

    def due_ns(self) -> int | None:
        """Return when a pass must look at the GPUs, on the monotonic clock; None if no job needs them."""
        if not self.gpus_matter():
            return None
        due_ns = time.monotonic_ns() + GpuWatcher.every_ns
        answer_due_ns = self.answer_due_ns()
        return due_ns if answer_due_ns is None else min(due_ns, answer_due_ns)

    def answer_due_ns(self) -> int | None:
        """Return when a pass must read an answer of NVML, or treat one that a start waits for as late, monotonic.

        An answer that came within the query itself wakes no pass.
        """
        if self.gpus is None or not self.gpus_matter():
            return None
        if self.gpus.answered > self._seen_answer:
            return 0
        return self._doubt_at_ns if self._needed > self.gpus.answered and not self._doubts else None

    def what_counts(self, machine: Machine) -> Machine:
        """Return *machine* without the numbers that no decision uses now, since they change all the time.

        Available memory counts only if a waiting job requests memory, disk space only if it is short.
        """
        names = ("utilisation_percent", "memory_utilisation_percent", "temperature_c", "power_w")
        unseen: dict[str, Any] = {**dict.fromkeys(names), "work": ()}
        idle = tuple(replace(gpu, **unseen) for gpu in machine.gpus)
        free = machine.disk_free_bytes
        short = free is not None and free < self._settings.config.policy.disk_floor_bytes
        available = machine.memory_available_bytes if self._memory_matters() else None
        return replace(machine, memory_available_bytes=available, disk_free_bytes=free if short else None, gpus=idle)

    def take_gpu_answer(self) -> None:
        """Read NVML's answer, which is there."""
        if self.gpus is not None:
            self._look_at_gpus(time.time_ns(), 0)

    def _look_at_gpus(self, now_ns: int, patience_ns: int) -> GpuLook:
        if self.gpus is None:
            self.gpus = GpuWatcher()
        watcher = self.gpus
        anew = self._needed > watcher.asked
        look = watcher.look(now_ns, self._ours(), max_age_ns=0 if anew else watcher.every_ns, patience_ns=patience_ns)
        if self._needed > watcher.answered and time.monotonic_ns() >= self._doubt_at_ns:
            self._doubts = True
            look = watcher.doubt()
        return look

    def _look(self, now_ns: int) -> None:
        if not 0 <= now_ns - self._totals[2] < _TOTALS_EVERY_NS:
            config = self._settings.config
            host = self._host.memory()
            cpus = config.cpus if config.cpus is not None else self._host.cpus()
            self._cores = self._host.cores() if config.cpu_pinning else ()
            if self._cores:
                cpus = min(cpus, cpus_of(self._cores))
            self._totals = (cpus, config.memory_of(host.total_bytes), now_ns)
            self._available = (host.available_bytes, now_ns)
        if not 0 <= now_ns - self._available[1] < _AVAILABLE_EVERY_NS and self._memory_matters():
            self._available = (self._host.memory().available_bytes, now_ns)
        if not 0 <= now_ns - self._disk[1] < _DISK_EVERY_NS:
            self._disk = (disk_free_bytes(self._spool_dir), now_ns)

    def why_not_pinned(self, *, is_shared: bool) -> str | None:
        """Return what of the configuration has no effect on which CPUs runs get, and what to do; None if all has."""
        config = self._settings.config
        if not config.cpu_pinning:
            return None
        if is_shared:
            return (
                "cpu_pinning has no effect in config.toml: this machine is shared, and its arbiter hands out the CPUs; "
                "remove the key, or set it in machine.toml for all users"
            )
        usable = cpus_of(self._cores)
        if usable and config.cpus is not None and config.cpus > usable:
            return (
                f"cpus = {config.cpus} counts as {usable}: with cpu_pinning no two runs share a CPU, and the "
                "dispatcher may use no more than these; set less, or cpu_pinning = false"
            )
        return None

    def configuration_changed(self) -> None:
        """Read everything again."""
        self._totals = (0, 0, 0)

    def _memory_matters(self) -> bool:
        return any(request.memory_bytes for request in self._table.queue.requests_here())

    def _ours(self) -> Ours:
        on, config = self._table.runs.on_gpus().items(), self._settings.config
        granted = {uuid: {run.name: run.grant.gpu_memory_bytes for run in runs} for uuid, runs in on}
        return Ours(self._job_of, granted, config.gpu.ignores, config.cpu_pinning)

    def _job_of(self, pid: int) -> str | None:
        """Return the job in the mark of the process *pid*."""
        name = processes.job_of(pid, str(self._spool_dir))
        return name if name is not None and self._table.live_of(name) is not None else None

    def close(self) -> None:
        """End the watcher of the GPUs."""
        if self.gpus is not None:
            self.gpus.close()
