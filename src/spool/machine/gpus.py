"""The GPUs of the machine as NVML shows them, watched over time, and the users of each one.

NVML can never block the caller: a separate process queries it (`nvml.py`), and a look waits a moment for the answer and
then goes on with the known state. This state is never taken for more than it is:

* no NVML on the machine: there are no GPUs;
* NVML fails or hangs: the GPUs that were seen stay, each with its `problem`, and the look has one too;
* a GPU that falls off stays, with its `problem`, its index and its UUID, until it is back;
* a GPU in MIG mode is not there; its instances are, and one that is taken apart is forgotten.

There are two ways to find the users of memory and processes. If NVML's pids are valid here, each process is looked up.
Inside a pid namespace they are not: NVML gives the pids of the host, and the same number may be a process of ours that
has nothing to do with a GPU. There, and if NVML cannot list processes, only the memory counts: memory used while none
of our runs is on the GPU is foreign, and additional memory while one is there is ours.

Memory that no living process accounts for is still in use: by a process in another namespace, hidden, or just ended.
That is judged by a single answer of NVML, so that every caller gets the same result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Set
from typing import ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from spool.core.model import SECOND_NS, ForeignProcess, Gpu, GpuWork
from spool.formats.state import GpuLook
from spool.machine import identity
from spool.machine.helpers import ChildProcess, import_path
from spool.machine.host import vendors_here
from spool.machine.nvml import IDLE_SECONDS, MIG_INDEX_STEP, WHERE, Device, Sample

QUIET_BYTES = 256 << 20
"""Unaccounted memory above this counts as in use: drivers and displays always hold a little."""

_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h

MAX_AGE_NS = 5 * SECOND_NS
"""A look asks again if the last answer is older."""

PATIENCE_NS = SECOND_NS // 4
"""The total waiting time of looks for one answer, and of a start for its own. A healthy driver needs some ms."""

LIMIT_NS = 10 * SECOND_NS
"""NVML counts as hung after this time without an answer. Initialising eight idle GPUs may take some seconds."""

NO_ANSWER = "NVML has not answered yet"

_MOMENT_SECONDS = 2.0  # for a killed helper to be gone, on a busy machine


class Ours(Struct, frozen=True):
    """Our runs on the GPUs, and what we want to know.

    `job_of` returns the job of a pid, or None; a process of a run that is just ending still belongs to it. `on` is UUID
    -> job -> bytes granted there, None for a GPU not shared. `ignores` says which foreign processes do not count, and
    `where` asks for the NUMA nodes of the GPUs and the links between them.
    """

    job_of: Callable[[int], str | None] = lambda pid: None
    on: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    ignores: Callable[[ForeignProcess], bool] = lambda process: False
    where: bool = False


class DeviceUse(Struct, frozen=True):
    """The users of one GPU. The fields are those of `spool.core.model.Gpu`."""

    foreign: tuple[ForeignProcess, ...] = ()
    taken_bytes: tuple[tuple[str, int], ...] = ()
    problem: str | None = None
    work: tuple[GpuWork, ...] = ()


def in_pid_namespace(*, proc: str = identity.PROC) -> bool:
    """Whether this process is in a pid namespace other than the machine's own. Unknown counts as yes."""
    try:
        return identity.pid_namespace(proc=proc) != _FIRST_PID_NAMESPACE
    except OSError:
        return True


def who(pid: int) -> tuple[str, str | None] | None:
    """Return name and user of a process; None if it has ended, zombies included. The user may be unknown."""
    import psutil  # type: ignore[import-untyped]  # 10 ms that most commands need not pay

    stat = identity.read_stat(pid)
    if stat is None:
        # If /proc is mounted with hidepid, processes of other users are not in it, but exist.
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
    """Attributes the use of each device to runs and to foreign processes. Remembers what one look cannot show.

    If `pids_mean_something` is False, only memory is considered.
    """

    def __init__(
        self,
        *,
        pids_mean_something: bool = True,
        who: Callable[[int], tuple[str, str | None] | None] = who,
    ) -> None:
        self.pids_mean_something = pids_mean_something
        self._who = who
        self._others_bytes: dict[str, int] = {}  # memory used while none of our runs was there

    def read(self, device: Device, ours: Ours, asked: Ours) -> DeviceUse:
        """Return the users of *device*. *asked* is `Ours` at the time of the NVML query, *ours* that of now."""
        now, before = ours.on.get(device.uuid, {}), asked.on.get(device.uuid, {})
        if self.pids_mean_something and device.processes is not None:
            use = self._by_process(device, device.processes, ours, now.keys() | before.keys())
        else:
            use = self._by_memory(device, now, before)
        # A run that came or left since the query has done an unknown part of it.
        here = [each for each in use.work if each.job in now and each.job in before]
        if device.energy_mj is not None:
            here = [replace(each, counter_mj=device.energy_mj, sharers=len(now)) for each in here]
        return replace(use, foreign=tuple(each for each in use.foreign if not ours.ignores(each)), work=tuple(here))

    def _by_process(
        self, device: Device, processes: tuple[tuple[int, int | None], ...], ours: Ours, here: Set[str]
    ) -> DeviceUse:
        sizes: dict[str, list[int | None]] = {job: [] for job in here}
        foreign: list[ForeignProcess] = []
        ended: list[ForeignProcess] = []
        taken: dict[str, int] = {}
        living: list[int | None] = []
        for pid, used in processes:
            job = ours.job_of(pid)
            found = self._who(pid) if job not in here else None
            if job is not None and job in here:
                sizes[job].append(used)
                if used is not None:
                    taken[job] = taken.get(job, 0) + used
            elif found is None:
                # Often a child forked with the device open, as data loaders are, that outlived its parent.
                ended.append(ForeignProcess(pid, "ended, but still holds memory", used))
                continue
            else:
                foreign.append(ForeignProcess(pid, found[0], used, found[1], job))
            living.append(used)
        if not here:  # else the rest may belong to a run of ours, even to one that has just left
            left = _left_over(device, living)
            if left is None or left > QUIET_BYTES:  # below, NVML merely lists them for a moment after their end
                foreign += ended
            foreign += _unseen(device, [*living, *(process.memory_bytes for process in ended)], "unknown")
        done = _work_of(device, sizes, ours.job_of, alone=len(here) == 1 and not foreign)
        return DeviceUse(tuple(foreign), tuple(sorted(taken.items())), work=done)

    def _by_memory(self, device: Device, now: Mapping[str, int | None], asked: Mapping[str, int | None]) -> DeviceUse:
        used = device.used_bytes
        if now or asked:  # a run that has just left was still there at the query
            others = self._others_bytes.get(device.uuid, 0)
            ours_bytes = None if used is None else max(0, used - others)
            jobs, percent = now.keys() | asked.keys(), device.utilisation_percent if others <= QUIET_BYTES else None
            # Of several jobs whose processes are unknown, the work of each is unknown too.
            work = tuple(GpuWork(job, percent, ours_bytes) for job in jobs) if len(jobs) == 1 else ()
            return DeviceUse(taken_bytes=() if ours_bytes is None else _shared_out(ours_bytes, now), work=work)
        if used is not None:
            self._others_bytes[device.uuid] = used
        elif device.processes is None:
            return DeviceUse(
                problem="NVML reports neither its processes nor its memory, so whether it is idle is unknown"
            )
        name = "unknown" if self.pids_mean_something else "in another pid namespace"
        foreign = [ForeignProcess(pid, name, memory) for pid, memory in device.processes or ()]
        foreign += _unseen(device, [process.memory_bytes for process in foreign], name)
        return DeviceUse(tuple(foreign))


def _work_of(
    device: Device, sizes: Mapping[str, list[int | None]], job_of: Callable[[int], str | None], *, alone: bool
) -> tuple[GpuWork, ...]:
    """Return the work of each job, whose processes have *sizes*. *alone*: no other process computes there."""
    percents: dict[str | None, int] = {}
    for pid, share in device.computing or ():
        owner = job_of(pid)
        percents[owner] = percents.get(owner, 0) + share
    found = []
    for job, own in sorted(sizes.items()):
        percent = device.utilisation_percent if alone else None
        if percent is None and device.computing is not None:
            percent = min(percents.get(job, 0), 100)
        if percent is None and device.parent is not None and not own:
            percent = 0  # an instance reports no utilisation, and computes for its processes only
        used = None if None in own else sum(size or 0 for size in own)
        if alone and (used is None or not own):
            used = _left_over(device, ())
            used = 0 if used is not None and used <= QUIET_BYTES and not own else used
        found.append(GpuWork(job, percent, used))
    return tuple(found)


def _left_over(device: Device, sizes: Iterable[int | None]) -> int | None:
    """Return the used memory that none of the processes with these *sizes* accounts for; None is unknown."""
    known = [device.drawing_bytes, *sizes]
    if device.used_bytes is None or None in known:
        return None
    return max(0, device.used_bytes - sum(size or 0 for size in known))


def _unseen(device: Device, sizes: Iterable[int | None], name: str) -> list[ForeignProcess]:
    """Return a stand-in for unaccounted memory, nothing if it is little or unknown."""
    left = _left_over(device, sizes)
    # The kernel, too, shows pid 0 for a process outside the pid namespace.
    return [ForeignProcess(0, name, left)] if left is not None and left > QUIET_BYTES else []


def _shared_out(used_bytes: int, granted: Mapping[str, int | None]) -> tuple[tuple[str, int], ...]:
    """Return how much of *used_bytes* each job holds, filling one grant after the other.

    The actual shares cannot be known; it only matters that the unused parts of the grants have the right sum.
    """
    taken = []
    for job, grant in sorted(granted.items()):
        part = used_bytes if grant is None else min(used_bytes, grant)
        taken.append((job, part))
        used_bytes -= part
    return tuple(taken)


class _Known(Struct, frozen=True):
    gpu: Gpu
    bus: str
    parent: str | None


class Roster:
    """Every GPU that was seen and may come back.

    A GPU that is no longer listed stays, with its problem; so its runs keep their grants, and an index in the
    configuration or in a reservation does not suddenly mean its neighbour. A GPU that went into MIG mode, or an
    instance that was destroyed, was removed on purpose and is forgotten.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self.unused: tuple[str, ...] = ()
        """Which other GPUs there are, without a UUID, and why."""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return all GPUs, in PCI bus order."""
        ordered = sorted(self._known.values(), key=lambda known: (known.bus, known.gpu.index))
        return tuple(known.gpu for known in ordered)

    def blind(self, problem: str) -> None:
        """Mark the state of every GPU as unknown, with that problem."""
        self._known = {uuid: _blind(known, problem) for uuid, known in self._known.items()}

    def update(self, sample: Sample, use_of: Callable[[Device], DeviceUse]) -> bool:
        """Apply an answer of NVML; return whether it lists every known GPU."""
        listed = {device.uuid for device in sample.devices}
        errors, gone = dict(sample.unreadable), sample.failure or "NVML no longer lists it"
        for uuid, known in list(self._known.items()):
            if uuid in listed:
                continue
            if uuid in sample.split or (known.parent is not None and known.parent in {*sample.split, *listed}):
                del self._known[uuid]
            else:
                self._known[uuid] = _blind(known, errors.get(known.gpu.index, gone))
        for device in sample.devices:
            before = self._known.get(device.uuid)
            gpu = self._gpu(device, use_of(device), before.gpu if before else None)
            self._known[device.uuid] = _Known(gpu, device.bus, device.parent)
        indices = {known.gpu.index for known in self._known.values()}
        told = {index // MIG_INDEX_STEP - 1 if index >= MIG_INDEX_STEP else index for index in indices}
        self.unused = tuple(f"GPU {index} is not used: {why}" for index, why in errors.items() if index not in told)
        return self._known.keys() <= listed

    def _gpu(self, device: Device, use: DeviceUse, before: Gpu | None) -> Gpu:
        return Gpu(
            uuid=device.uuid,
            index=self._free_index(device.index) if before is None else before.index,
            name=device.name or (before.name if before else "unknown"),
            memory_total_bytes=device.total_bytes,
            memory_free_bytes=device.free_bytes,
            foreign=use.foreign,
            problem=device.problem or use.problem,
            taken_bytes=use.taken_bytes,
            mig=device.parent is not None,
            utilisation_percent=device.utilisation_percent,
            memory_utilisation_percent=device.memory_utilisation_percent,
            temperature_c=device.temperature_c,
            power_w=device.power_w,
            work=use.work,
            node=device.node,
            links=device.links,
            vendor=device.vendor,
        )

    def _free_index(self, wanted: int) -> int:
        """Return *wanted*, or the lowest free index: NVML renumbers GPUs when one has fallen off."""
        taken = {known.gpu.index for known in self._known.values()}
        return wanted if wanted not in taken else next(index for index in range(len(taken) + 1) if index not in taken)


def _blind(known: _Known, problem: str) -> _Known:
    was = known.gpu
    gpu = Gpu(was.uuid, was.index, was.name, was.memory_total_bytes, None, problem=problem, mig=was.mig)
    gpu = replace(gpu, node=was.node, links=was.links, vendor=was.vendor)
    return replace(known, gpu=gpu)


class NvmlHelper:
    """Queries the helper, one question at a time. The first question starts it, and restarts it when it is gone.

    No call waits longer than requested, whatever the driver does. At most one helper exists at a time: one that was
    killed inside a hanging driver ends when the driver returns, and until then no other is started.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, idle_seconds: float = IDLE_SECONDS) -> None:
        """Start nothing yet. *environment* is the helper's; None means this process's own."""
        given = os.environ if environment is None else environment
        others = (vendor.source for vendor in vendors_here(environment))
        arguments = ("spool.machine.nvml", str(idle_seconds), *others)
        self._child = ChildProcess(arguments, lambda: {**given, "PYTHONPATH": import_path()}, answers_on_stdout=True)
        self._where = False  # whether the question is also for the nodes and the links of the GPUs
        self._lingers = False  # whether a killed helper has not gone in time
        self._again = False  # whether the open question may be repeated
        self._done()

    def fileno(self) -> int:
        """Return a descriptor for polling, readable when an answer can be received; it never changes."""
        return self._child.fileno()

    def ask(self, *, where: bool = False) -> str | None:
        """Ask, unless a question is open already. Return why it cannot be asked now, or None.

        *where*: also for the NUMA nodes of the GPUs and the links between them.
        """
        if self.asking:
            return None
        self._again, self._where = True, where
        return self._ask()

    def receive(self, wait_ns: int) -> Sample | None:
        """Return the answer to the open question, or None if there is none after *wait_ns*."""
        deadline_ns = time.monotonic_ns() + wait_ns
        while self.asking:
            if not self._child.wait(max(0, deadline_ns - time.monotonic_ns()) / 1e9):
                return None
            alive, lines = self._child.is_alive, self._child.read()
            if lines:
                return self._read(lines[0])
            if not alive or self._child.has_hung_up:
                trouble = self._gone()
                if trouble is not None:
                    return Sample(failure=f"NVML: {trouble}")
        return None

    def stop(self) -> None:
        """End the helper and drop the question."""
        self._done()
        self._child.give_up(kill=True)

    def close(self) -> None:
        """End the helper for good."""
        self.stop()
        self._child.join(_MOMENT_SECONDS)
        self._child.close()

    def _ask(self) -> str | None:
        child, question = self._child, WHERE if self._where else b"\n"
        if not child.is_alive:
            child.give_up()  # it left because it was idle
        if child.pid is None:
            self._lingers = child.lingers(0.0 if self._lingers else _MOMENT_SECONDS)  # a pass waits for it once
            if self._lingers:
                return "the process that queries NVML hangs in the driver and cannot be killed"
            try:
                child.start(question)
            except OSError as error:
                return f"cannot start the process that queries NVML: {error.strerror}"
        else:
            child.send(question)  # if it is just leaving, the end of its answers will show that
        child.watch()
        self.asking = True
        return None

    def _read(self, line: bytes) -> Sample:
        try:
            sample = Sample.from_json(line)
        except ValueError as error:
            sample = Sample(failure=f"NVML: its process sent an unreadable answer: {error}", leaving=True)
        if sample.leaving:
            self.stop()
        else:
            self._done()
        return sample

    def _gone(self) -> str | None:
        """Return why there will be no answer, or None if the question was asked again."""
        self._done()
        code = self._child.exit_code()
        self._child.give_up()
        if code == 0 and self._again:  # it was just leaving because it was idle
            self._again = False
            return self._ask()
        if code is None:
            return "the process that queries NVML answers no more and does not end"
        return f"the process that queries NVML ended, {'signal' if code < 0 else 'code'} {abs(code)}"

    def _done(self) -> None:
        self.asking = False  # whether a question is open
        self._child.watch(False)  # its exit when idle does not matter


class GpuWatcher:
    """Looks at the GPUs on request, and never otherwise.

    A dispatcher may poll `fileno()`; when it is readable, an answer is there, and the next look takes it in.
    """

    every_ns: ClassVar[int] = 5 * SECOND_NS  # between looks while a job with GPUs runs or waits

    def __init__(
        self,
        *,
        uses: UseReader | None = None,
        environment: Mapping[str, str] | None = None,
        limit_ns: int = LIMIT_NS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """Ask nothing yet. *environment* is that of the process that queries NVML; None means this process's own."""
        self._helper = NvmlHelper(environment, idle_seconds)
        self._uses = uses or UseReader(pids_mean_something=not in_pid_namespace())
        self._limit_ns = limit_ns
        self._roster = Roster()
        self._look = GpuLook(problem=NO_ANSWER)
        self._asked_at_ns: int | None = None  # time of the last question, answered or not
        self._asked_for = self._answered_for = Ours()
        self.asked = 0  # number of questions
        self.answered = 0  # number of the last question that was answered, or failed
        self._waited_ns = 0  # for the open question

    def fileno(self) -> int:
        """Return a descriptor to poll, which never changes. When it is readable, call `look`."""
        return self._helper.fileno()

    def look(
        self,
        now_ns: int,
        ours: Ours | None = None,
        *,
        max_age_ns: int = MAX_AGE_NS,
        patience_ns: int = PATIENCE_NS,
    ) -> GpuLook:
        """Return the GPUs, asking NVML if the last answer is older than *max_age_ns* or a shared GPU was left since.

        Waits for an answer at most *patience_ns*, counted over all looks at the same question. Without an answer it
        returns the known state, or, after the limit, that NVML hangs.
        """
        ours = ours or Ours()
        if self._helper.asking:
            self._receive(now_ns, ours, 0)
        if not self._helper.asking and self._outdated(now_ns, ours, max_age_ns):
            self._ask(now_ns, ours)
        if self._helper.asking:
            self._receive(now_ns, ours, max(0, patience_ns - self._waited_ns))
        return self._look

    def was_ours(self, uuid: str) -> bool:
        """Whether a run of ours had that GPU at the last query, whose answer then cannot show it free."""
        return uuid in self._answered_for.on

    def doubt(self) -> GpuLook:
        """Treat the known state as unknown, until the open question is answered."""
        self._say(NO_ANSWER)
        return self._look

    def close(self) -> None:
        """End the process that queries NVML. The watcher cannot be used any more."""
        self._helper.close()

    def _outdated(self, now_ns: int, ours: Ours, max_age_ns: int) -> bool:
        # If the clock was set back, the answer is old, not young for ever.
        if self._asked_at_ns is None or not 0 <= now_ns - self._asked_at_ns < max_age_ns:
            return True
        return any(
            granted is not None and job not in ours.on.get(uuid, {})  # nothing to measure if it had it alone
            for uuid, jobs in self._asked_for.on.items()
            for job, granted in jobs.items()
        )

    def _ask(self, now_ns: int, ours: Ours) -> None:
        self._asked_at_ns, self._asked_for, self._waited_ns = now_ns, ours, 0
        self.asked += 1
        trouble = self._helper.ask(where=ours.where)
        if trouble is not None:
            self._fail(trouble)

    def _receive(self, now_ns: int, ours: Ours, wait_ns: int) -> None:
        began_ns = time.monotonic_ns()
        sample = self._helper.receive(wait_ns)
        self._waited_ns += time.monotonic_ns() - began_ns
        if sample is not None:
            self._take_in(sample, ours)
        elif max(now_ns - (self._asked_at_ns or now_ns), self._waited_ns) >= self._limit_ns:
            self._helper.stop()
            self._fail(f"NVML hangs: no answer within {self._limit_ns / SECOND_NS:g}s")

    def _take_in(self, sample: Sample, ours: Ours) -> None:
        self.answered, self._answered_for = self.asked, self._asked_for
        if sample.failure is not None and not sample.devices:
            self._fail(sample.failure)
        elif not sample.missing:
            is_whole = self._roster.update(sample, lambda device: self._uses.read(device, ours, self._asked_for))
            self._look = GpuLook(self._roster.gpus(), None, self._asked_at_ns, self._roster.unused)
            if not is_whole:
                self._helper.stop()  # only an NVML that starts afterwards lists a GPU that comes back
        elif self._roster.gpus():
            self._fail("NVML: its library is gone")
        else:
            self._look = GpuLook(seen_at_ns=self._asked_at_ns)

    def _fail(self, problem: str) -> None:
        self.answered = self.asked
        self._say(problem)

    def _say(self, problem: str) -> None:
        self._roster.blind(problem)
        self._look = GpuLook(self._roster.gpus(), problem, seen_at_ns=self._asked_at_ns)
