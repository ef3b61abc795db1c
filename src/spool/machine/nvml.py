"""What NVML says, once: the helper process that asks it, and the values that it answers with.

A process of its own, because a call into a driver that hangs cannot be broken off. A thread stuck in one would keep
the dispatcher from ever ending, and the kernel from ever giving its lock back; a child is killed, or waits for the
driver alone. It answers one line of JSON for each line that it reads, and leaves when nobody asks any more, so that
an idle spool keeps no GPU awake. It starts in front of somebody who waits, so this module imports little.

`python -m spool.machine.nvml` is the helper; `echo | python -m spool.machine.nvml` shows one answer.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct, json

IDLE_SECONDS = 60
"""A helper that is not asked for this long exits."""

MIG_INDEX_STEP = 100

_LATELY_US = 5_000_000  # how far back the work of single processes is asked for

_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE


class Device(Struct, frozen=True):
    """One GPU or MIG instance as NVML describes it. None is what NVML cannot tell."""

    uuid: str
    index: int  # NVML's; of MIG instance j of GPU i: (i + 1) * 100 + j, which stays when other GPUs are split
    bus: str  # sorts as the PCI bus does; a MIG instance's is its parent's
    name: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None  # without what the driver keeps for itself, where NVML tells these apart
    processes: tuple[tuple[int, int | None], ...] | None = None  # (pid, bytes); None: NVML cannot list them
    drawing_bytes: int | None = 0  # what processes have that only draw, as a display server's; None: unknown
    utilisation_percent: int | None = None
    memory_utilisation_percent: int | None = None
    computing: tuple[tuple[int, int], ...] | None = None  # (pid, percent) of those that did; None: unknown
    parent: str | None = None  # UUID of the GPU that a MIG instance is a part of
    problem: str | None = None


class Sample(Struct, frozen=True):
    """One answer. `devices` are those that can be given, in PCI bus order: never a GPU in MIG mode itself."""

    devices: tuple[Device, ...] = ()
    split: tuple[str, ...] = ()  # UUIDs of the GPUs in MIG mode
    unreadable: tuple[tuple[int, str], ...] = ()  # (NVML's index, why) of GPUs that do not even tell their UUID
    missing: bool = False  # there is no NVML on this machine
    failure: str | None = None  # why nothing could be asked
    driver: str | None = None
    leaving: bool = False  # the helper leaves after this answer: NVML must be started anew to see what changed

    def to_json(self) -> str:
        """Return the sample as one line."""
        return json.encode(self).decode()

    @staticmethod
    def from_json(line: bytes | str) -> Sample:
        """Read what `to_json` wrote. Raises ValueError if it did not."""
        return json.decode(line, type=Sample)


class _Nvml:
    """The library, started once. pynvml is imported here and nowhere else."""

    def __init__(self) -> None:
        import pynvml

        self.py = pynvml
        # What a card, a driver's age or a container's rights may withhold: then it is unknown, and nothing is wrong.
        self._withheld = {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION}
        self._withheld |= {pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
        self._problem: str | None = None

    def sample(self) -> Sample:
        """Ask for everything. Raises pynvml.NVMLError if NVML as a whole refuses."""
        py = self.py
        devices: list[Device] = []
        split: list[str] = []
        unreadable: list[tuple[int, str]] = []
        driver = self._ask(py.nvmlSystemGetDriverVersion)
        self._problem = None  # its number is only shown
        for index in range(py.nvmlDeviceGetCount()):
            try:
                handle = py.nvmlDeviceGetHandleByIndex(index)
                uuid = py.nvmlDeviceGetUUID(handle)
            except py.NVMLError as error:
                if error.value != py.NVML_ERROR_NO_PERMISSION:  # not ours to use is not broken
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
            driver=driver,
            leaving=bool(unreadable) or any(device.problem for device in devices),
        )

    def _instances(self, parent: Any, parent_uuid: str, parent_index: int, bus: str) -> Iterator[Device]:
        for slot in range(self._ask(self.py.nvmlDeviceGetMaxMigDeviceCount, parent) or 0):
            try:
                handle = self.py.nvmlDeviceGetMigDeviceHandleByIndex(parent, slot)
                uuid = self.py.nvmlDeviceGetUUID(handle)
            except self.py.NVMLError:
                continue  # no instance there, or it went away just now
            yield self._device(handle, uuid, (parent_index + 1) * MIG_INDEX_STEP + slot, bus, parent_uuid)

    def _device(self, handle: Any, uuid: str, index: int, bus: str, parent: str | None = None) -> Device:
        name = self._ask(self.py.nvmlDeviceGetName, handle) or ""
        total, free, used = self._memory(handle)
        processes = self._processes(handle)
        computing, moving = self._utilisation(handle)
        return Device(
            uuid=uuid,
            index=index,
            bus=bus,
            name=name,
            total_bytes=total,
            free_bytes=free,
            used_bytes=used,
            processes=processes,
            drawing_bytes=self._drawing(handle, dict(processes or ())),
            utilisation_percent=computing,
            memory_utilisation_percent=moving,
            computing=self._computing(handle, processes, computing),
            parent=parent,
            problem=self._problem_so_far(),
        )

    def _problem_so_far(self) -> str | None:
        """Return the first error since the last call of this."""
        problem, self._problem = self._problem, None
        return problem

    def _ask(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Return the answer, or None: because it is withheld, or because of an error, kept for the device's problem."""
        for attempt in (1, 2, 3):
            try:
                return function(*arguments)
            except self.py.NVMLError as error:
                # More processes came between pynvml's questions how many there are and which.
                if error.value == self.py.NVML_ERROR_INSUFFICIENT_SIZE and attempt < 3:
                    continue
                if error.value not in self._withheld and self._problem is None:
                    self._problem = f"{function.__name__}: {error}"
                break
        return None

    def _bus(self, handle: Any) -> str:
        pci = self._ask(self.py.nvmlDeviceGetPciInfo_v3, handle)
        return f"{pci.domain:08x}:{pci.bus:02x}:{pci.device:02x}" if pci is not None else "~"

    def _memory(self, handle: Any) -> tuple[int | None, int | None, int | None]:
        """Return (total, free, used), the driver's own part not counted as used where the driver is new enough."""
        py = self.py
        try:
            memory = py.nvmlDeviceGetMemoryInfo(handle, version=py.nvmlMemory_v2)
        except py.NVMLError:  # older than 510
            memory = self._ask(py.nvmlDeviceGetMemoryInfo, handle)
        if memory is None or not _bytes(memory.total):  # some GPUs that share the host's memory say 0
            return None, None, None
        return _bytes(memory.total), _bytes(memory.free), _bytes(memory.used)

    def _processes(self, handle: Any) -> tuple[tuple[int, int | None], ...] | None:
        """Return the processes that compute, those behind the MPS server included; None if they cannot be listed."""
        py = self.py
        compute = self._ask(py.nvmlDeviceGetComputeRunningProcesses_v3, handle)
        if compute is None and self._problem is None:  # older than 510
            compute = self._ask(py.nvmlDeviceGetComputeRunningProcesses_v2, handle)
        if compute is None:
            return None
        with suppress(py.NVMLError):  # no MPS
            compute = [*compute, *py.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle)]
        found: dict[int, int | None] = {}
        for process in compute:
            used = _bytes(process.usedGpuMemory)
            before = found.get(process.pid)
            found[process.pid] = used if before is None else max(before, used or 0)
        return tuple(sorted(found.items()))

    def _drawing(self, handle: Any, computing: Mapping[int, int | None]) -> int | None:
        """Return what the processes have that draw and do not compute; None if one of them does not tell."""
        py, found = self.py, []
        for ask in (py.nvmlDeviceGetGraphicsRunningProcesses_v3, py.nvmlDeviceGetGraphicsRunningProcesses_v2):
            with suppress(py.NVMLError):  # older than 510; and a MIG instance, which cannot draw, knows neither
                found = ask(handle)
                break
        sizes = [_bytes(process.usedGpuMemory) for process in found if process.pid not in computing]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def _utilisation(self, handle: Any) -> tuple[int | None, int | None]:
        """Return in how much of the time it computed, and moved memory, in percent. It is for show: no error counts."""
        try:
            rates = self.py.nvmlDeviceGetUtilizationRates(handle)
        except self.py.NVMLError:  # a MIG instance has none
            return None, None
        return int(rates.gpu), int(rates.memory)

    def _computing(
        self, handle: Any, processes: tuple[tuple[int, int | None], ...] | None, percent: int | None
    ) -> tuple[tuple[int, int], ...] | None:
        """Return which processes computed in how much of the time; NVML is asked only where several may share that."""
        if processes is None or percent is None:
            return None
        if percent == 0 or not processes:
            return ()
        if len(processes) == 1:
            return ((processes[0][0], percent),)
        since_us = time.time_ns() // 1000 - _LATELY_US
        try:
            samples = self.py.nvmlDeviceGetProcessUtilization(handle, since_us)
        except self.py.NVMLError:  # a MIG instance, an old card, or no sample yet
            return None
        newest: dict[int, tuple[int, int]] = {}
        for sample in samples:
            newest[sample.pid] = max(newest.get(sample.pid, (0, 0)), (int(sample.timeStamp), int(sample.smUtil)))
        return tuple(sorted((pid, min(share, 100)) for pid, (_, share) in newest.items()))


def _answer(nvml: _Nvml | None) -> tuple[Sample, _Nvml | None]:
    try:
        if nvml is None:
            nvml = _Nvml()
            nvml.py.nvmlInit()
        return nvml.sample(), nvml
    except Exception as error:  # whatever it is, report it instead of dying with it
        if nvml is not None and isinstance(error, nvml.py.NVMLError):
            missing = error.value == nvml.py.NVML_ERROR_LIBRARY_NOT_FOUND
            why = _why_not_loaded() if missing else str(error)
            return (Sample(missing=True) if why is None else Sample(failure=why, leaving=True)), None
        return Sample(failure=f"{type(error).__name__}: {error}", leaving=True), None


def _why_not_loaded() -> str | None:
    """Return what is wrong with the library, or None if there is none: pynvml calls both "not found"."""
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return None if "No such file" in str(error) else str(error)
    return "the library appeared just now"


def _bytes(value: int | None) -> int | None:
    return None if value is None or value == _NOT_AVAILABLE else int(value)


def main(idle_seconds: float = IDLE_SECONDS) -> int:
    """Answer until nobody has asked for *idle_seconds*, the asker is gone, or NVML must be started anew."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the library prints is no answer
    nvml: _Nvml | None = None
    while select.select([0], [], [], idle_seconds)[0] and os.read(0, 4096):
        sample, nvml = _answer(nvml)
        print(sample.to_json(), file=answers, flush=True)
        if sample.leaving:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:2])))
