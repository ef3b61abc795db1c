"""One query of NVML: the helper process that makes it, and the values of its answer.

A separate process, because a call into a hanging driver cannot be interrupted. A stuck thread would keep the dispatcher
from ending, and the kernel from releasing its lock; a child is killed, or waits for the driver alone. It answers one
line of JSON for each line that it reads, and exits when it is idle, so that an idle spool keeps no GPU awake. A user
may be waiting for its start, so this module imports little. Where another vendor's driver is loaded, the helper also
asks that one's library (`formats.capabilities.GpuVendor`).

`python -m spool.machine.nvml IDLE_SECONDS SOURCE…` is the helper; `echo | python -m spool.machine.nvml` shows one
answer.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import DecodeError, Struct, json
from msgspec.structs import replace

from spool.formats.capabilities import loaded

IDLE_SECONDS = 60
"""The helper exits after this time without a question."""

MIG_INDEX_STEP = 100

WHERE = b"where\n"
"""The question that also asks for the NUMA nodes of the GPUs and the links between them; they need some calls more."""

_NODE_WORDS = 16  # of 64 NUMA nodes each: the kernel has at most 1024

_LATELY_US = 5_000_000  # how far back to ask for the work of single processes

_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE


class Device(Struct, frozen=True):
    """One GPU or MIG instance as NVML describes it. None is unknown to NVML."""

    uuid: str
    index: int  # NVML's; for MIG instance j of GPU i: (i + 1) * 100 + j, which stays when other GPUs are split
    bus: str  # sorts in PCI bus order; a MIG instance has its parent's
    name: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None  # without the driver's own part, if NVML tells these apart
    processes: tuple[tuple[int, int | None], ...] | None = None  # (pid, bytes); None: NVML cannot list them
    drawing_bytes: int | None = 0  # memory of processes that only draw, such as a display server's; None: unknown
    utilisation_percent: int | None = None
    memory_utilisation_percent: int | None = None
    computing: tuple[tuple[int, int], ...] | None = None  # (pid, percent) of the processes that computed; None: unknown
    energy_mj: int | None = None  # consumed since its driver was loaded, in millijoules
    temperature_c: int | None = None
    power_w: int | None = None
    parent: str | None = None  # UUID of the GPU that contains the MIG instance
    problem: str | None = None
    node: int | None = None  # its NUMA node
    links: tuple[tuple[str, int], ...] = ()  # (UUID of another GPU, NVLinks to it)
    vendor: str = "NVIDIA"  # as in `core.model`, which takes longer to import than all else here


class Sample(Struct, frozen=True):
    """One answer. `devices` are those that can be granted, in PCI bus order: never a GPU in MIG mode itself."""

    devices: tuple[Device, ...] = ()
    split: tuple[str, ...] = ()  # UUIDs of the GPUs in MIG mode
    unreadable: tuple[tuple[int, str], ...] = ()  # (NVML's index, why) of GPUs without a readable UUID
    missing: bool = False  # there is no NVML on this machine
    failure: str | None = None  # which library could not be queried, and why: `devices` are those of the other one
    leaving: bool = False  # the helper exits after this answer: NVML must be restarted to see a change

    @staticmethod
    def from_json(line: bytes | str) -> Sample:
        """Return the sample in *line*. Raises ValueError if there is none."""
        try:
            return json.decode(line, type=Sample)
        except DecodeError as error:  # no ValueError in older versions of msgspec
            raise ValueError(str(error)) from None


class _Nvml:
    """The library, started once. pynvml is imported here and nowhere else."""

    def __init__(self) -> None:
        import pynvml

        self.py = pynvml
        # Errors for values that a card, an old driver or a container may not provide: unknown, but not wrong.
        self._withheld = {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION}
        self._withheld |= {pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
        self._problem: str | None = None
        self._places: dict[str, tuple[int | None, tuple[tuple[str, int], ...]]] | None = None

    def where(self, sample: Sample) -> Sample:
        """Return *sample* with the node and the links of each device, which are asked for once."""
        if self._places is None:
            whole = sorted({device.parent or device.uuid for device in sample.devices})
            found = {uuid: self._ask(self.py.nvmlDeviceGetHandleByUUID, uuid) for uuid in whole}
            handles = {uuid: handle for uuid, handle in found.items() if handle is not None}
            by_bus = {self._bus(handle): uuid for uuid, handle in handles.items()}
            self._places = {
                uuid: (self._node(handle), self._links(uuid, handles, by_bus)) for uuid, handle in handles.items()
            }
        placed = [
            replace(device, node=node, links=links if device.parent is None else ())
            for device in sample.devices
            for node, links in [self._places.get(device.parent or device.uuid, (None, ()))]
        ]
        return replace(sample, devices=tuple(placed))

    def sample(self) -> Sample:
        """Query everything. Raises pynvml.NVMLError if NVML as a whole refuses."""
        py = self.py
        devices: list[Device] = []
        split: list[str] = []
        unreadable: list[tuple[int, str]] = []
        self._problem = None  # of `where`, which needs no answer
        for index in range(py.nvmlDeviceGetCount()):
            try:
                handle = py.nvmlDeviceGetHandleByIndex(index)
                uuid = py.nvmlDeviceGetUUID(handle)
            except py.NVMLError as error:
                if error.value != py.NVML_ERROR_NO_PERMISSION:  # a device that is not ours to use is not broken
                    unreadable.append((index, str(error)))
                continue
            bus = self._bus(handle)
            mode = self._ask(py.nvmlDeviceGetMigMode, handle)
            if mode is not None and mode[0] == py.NVML_DEVICE_MIG_ENABLE:
                split.append(uuid)
                devices.extend(self._instances(handle, uuid, index, bus))
                problem = self._problem_so_far()
                if problem is not None:
                    unreadable.append((index, problem))
            else:
                devices.append(self._device(handle, uuid, index, bus))
        devices.sort(key=lambda device: (device.bus, device.index))
        return Sample(
            devices=tuple(devices),
            split=tuple(split),
            unreadable=tuple(unreadable),
            leaving=bool(unreadable) or any(device.problem for device in devices),
        )

    def _instances(self, parent: Any, parent_uuid: str, parent_index: int, bus: str) -> Iterator[Device]:
        for slot in range(self._ask(self.py.nvmlDeviceGetMaxMigDeviceCount, parent) or 0):
            try:
                handle = self.py.nvmlDeviceGetMigDeviceHandleByIndex(parent, slot)
                uuid = self.py.nvmlDeviceGetUUID(handle)
            except self.py.NVMLError:
                continue  # no instance there, or just removed
            yield self._device(handle, uuid, (parent_index + 1) * MIG_INDEX_STEP + slot, bus, parent_uuid)

    def _device(self, handle: Any, uuid: str, index: int, bus: str, parent: str | None = None) -> Device:
        py = self.py
        total, free, used = self._memory(handle)
        processes = self._processes(handle)
        rates = self._told(py.nvmlDeviceGetUtilizationRates, handle)  # a MIG instance has none
        computing = None if rates is None else int(rates.gpu)
        milliwatts = self._told(py.nvmlDeviceGetPowerUsage, handle)
        return Device(
            uuid=uuid,
            index=index,
            bus=bus,
            name=self._ask(py.nvmlDeviceGetName, handle) or "",
            total_bytes=total,
            free_bytes=free,
            used_bytes=used,
            processes=processes,
            drawing_bytes=self._drawing(handle, dict(processes or ())),
            utilisation_percent=computing,
            memory_utilisation_percent=None if rates is None else int(rates.memory),
            computing=self._computing(handle, processes, computing),
            energy_mj=self._told(py.nvmlDeviceGetTotalEnergyConsumption, handle),  # Volta and newer
            temperature_c=self._told(py.nvmlDeviceGetTemperature, handle, py.NVML_TEMPERATURE_GPU),
            power_w=None if milliwatts is None else round(milliwatts / 1000),
            parent=parent,
            problem=self._problem_so_far(),
        )

    def _problem_so_far(self) -> str | None:
        problem, self._problem = self._problem, None
        return problem

    def _ask(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Return the answer, or None: if it is not provided, or on an error, which is kept as the device's problem."""
        for attempt in (1, 2, 3):
            try:
                return function(*arguments)
            except self.py.NVMLError as error:
                # pynvml asks for the number of processes and then for the list, and more came in between.
                if error.value == self.py.NVML_ERROR_INSUFFICIENT_SIZE and attempt < 3:
                    continue
                if error.value not in self._withheld and self._problem is None:
                    self._problem = f"{function.__name__}: {error}"
                break
        return None

    def _bus(self, handle: Any) -> str:
        pci = self._ask(self.py.nvmlDeviceGetPciInfo_v3, handle)
        return _bus_of(pci) if pci is not None else "~"

    def _memory(self, handle: Any) -> tuple[int | None, int | None, int | None]:
        """Return (total, free, used), without the driver's own part in used if the driver is new enough."""
        py = self.py
        memory = self._told(py.nvmlDeviceGetMemoryInfo, handle, py.nvmlMemory_v2)
        if memory is None:  # older than 510
            memory = self._ask(py.nvmlDeviceGetMemoryInfo, handle)
        if memory is None or not _bytes(memory.total):  # some GPUs that share the host's memory report 0
            return None, None, None
        return _bytes(memory.total), _bytes(memory.free), _bytes(memory.used)

    def _processes(self, handle: Any) -> tuple[tuple[int, int | None], ...] | None:
        """Return the computing processes, those behind the MPS server included; None if they cannot be listed."""
        py = self.py
        compute = self._ask(py.nvmlDeviceGetComputeRunningProcesses_v3, handle)
        if compute is None and self._problem is None:  # older than 510
            compute = self._ask(py.nvmlDeviceGetComputeRunningProcesses_v2, handle)
        if compute is None:
            return None
        compute = [*compute, *(self._told(py.nvmlDeviceGetMPSComputeRunningProcesses_v3, handle) or ())]  # none: no MPS
        found: dict[int, int | None] = {}
        for process in compute:
            used = _bytes(process.usedGpuMemory)
            before = found.get(process.pid)
            found[process.pid] = used if before is None else max(before, used or 0)
        return tuple(sorted(found.items()))

    def _drawing(self, handle: Any, computing: Mapping[int, int | None]) -> int | None:
        """Return the memory of processes that draw and do not compute; None if one of them does not report it."""
        py = self.py
        found = self._told(py.nvmlDeviceGetGraphicsRunningProcesses_v3, handle)
        if found is None:  # older than 510; and a MIG instance, which cannot draw, supports neither
            found = self._told(py.nvmlDeviceGetGraphicsRunningProcesses_v2, handle) or ()
        sizes = [_bytes(process.usedGpuMemory) for process in found if process.pid not in computing]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def _told(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Return the answer, or None: on an error too, which is no problem of the device."""
        try:
            return function(*arguments)
        except self.py.NVMLError:
            return None

    def _computing(
        self, handle: Any, processes: tuple[tuple[int, int | None], ...] | None, percent: int | None
    ) -> tuple[tuple[int, int], ...] | None:
        """Return each process's share of computing time; NVML is asked only if several processes may share it."""
        if processes is None or percent is None:
            return None
        if percent == 0 or not processes:
            return ()
        if len(processes) == 1:
            return ((processes[0][0], percent),)
        samples = self._told(self.py.nvmlDeviceGetProcessUtilization, handle, time.time_ns() // 1000 - _LATELY_US)
        if samples is None:  # a MIG instance, an old card, or no sample yet
            return None
        newest: dict[int, tuple[int, int]] = {}
        for sample in samples:
            newest[sample.pid] = max(newest.get(sample.pid, (0, 0)), (int(sample.timeStamp), int(sample.smUtil)))
        return tuple(sorted((pid, min(share, 100)) for pid, (_, share) in newest.items()))

    # Where whole GPUs are. What NVML does not tell is unknown, and no problem: it decides between equals only.

    def _node(self, handle: Any) -> int | None:
        scope = self.py.NVML_AFFINITY_SCOPE_NODE
        masks = self._ask(self.py.nvmlDeviceGetMemoryAffinity, handle, _NODE_WORDS, scope) or ()
        nodes = (64 * at + bit for at, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1)
        return next(nodes, None)

    def _links(self, uuid: str, handles: Mapping[str, Any], by_bus: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
        """Return the number of links to each other GPU: direct ones, or 1 for a way through a switch."""
        py, handle, found = self.py, handles[uuid], dict[str, int]()
        for link in range(py.NVML_NVLINK_MAX_LINKS):
            with suppress(py.NVMLError):
                if py.nvmlDeviceGetNvLinkState(handle, link) == py.NVML_FEATURE_ENABLED:
                    other = by_bus.get(_bus_of(py.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)))
                    if other is not None:
                        found[other] = found.get(other, 0) + 1
        for other, there in handles.items():
            if other != uuid and other not in found:
                with suppress(py.NVMLError):
                    if py.nvmlDeviceGetP2PStatus(handle, there, py.NVML_P2P_CAPS_INDEX_NVLINK) == py.NVML_P2P_STATUS_OK:
                        found[other] = 1
        return tuple(sorted(found.items()))


def _bus_of(pci: Any) -> str:
    return f"{pci.domain:08x}:{pci.bus:02x}:{pci.device:02x}"


def _answer(nvml: _Nvml | None, *, where: bool = False) -> tuple[Sample, _Nvml | None]:
    try:
        if nvml is None:
            nvml = _Nvml()
            nvml.py.nvmlInit()
        sample = nvml.sample()
        return nvml.where(sample) if where else sample, nvml
    except Exception as error:  # report any error instead of dying
        if nvml is not None and isinstance(error, nvml.py.NVMLError):
            missing = error.value == nvml.py.NVML_ERROR_LIBRARY_NOT_FOUND
            why = _why_not_loaded() if missing else str(error)
            return (Sample(missing=True) if why is None else Sample(failure=f"NVML: {why}", leaving=True)), None
        return Sample(failure=f"NVML: {type(error).__name__}: {error}", leaving=True), None


def _why_not_loaded() -> str | None:
    """Return the problem of the library, or None if there is no library: pynvml calls both "not found"."""
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return None if "No such file" in str(error) else str(error)
    return "the library appeared just now"


def _bytes(value: int | None) -> int | None:
    return None if value is None or value == _NOT_AVAILABLE else int(value)


def main(idle_seconds: float = IDLE_SECONDS, sources: Sequence[str] = ()) -> int:
    """Answer until *idle_seconds* have passed, the other end is closed, or NVML must be restarted.

    *sources* name what adds the GPUs of other libraries to each answer (`formats.capabilities.GpuVendor`).
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of the library must not mix with the answers
    nvml: _Nvml | None = None
    others = [loaded(source)() for source in sources]
    while select.select([0], [], [], idle_seconds)[0] and (asked := os.read(0, 4096)):
        sample, nvml = _answer(nvml, where=asked.endswith(WHERE))
        for other in others:
            sample = other.beside(sample)
        print(json.encode(sample).decode(), file=answers, flush=True)
        if sample.leaving:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main(float(next(iter(sys.argv[1:2]), IDLE_SECONDS)), sys.argv[2:]))
