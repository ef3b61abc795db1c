"""AMD's GPUs as the ROCm SMI library shows them, in the values of `nvml`.

Where AMD's driver for computing is loaded, the helper process of `nvml` asks for these too. A GPU is known by its
unique ID, as `ROCR_VISIBLE_DEVICES` takes it.

`echo | python -m spool.machine.nvml 60 spool.extras.amd.rocm:Rocm` shows one answer.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_float, c_uint32, c_uint64, create_string_buffer
from typing import Any

from msgspec.structs import replace

from spool.machine.nvml import Device, Sample

_NAMES = ("librocm_smi64.so.1", "librocm_smi64.so.7", "librocm_smi64.so.6", "librocm_smi64.so.5")
_PLACE = "lib/librocm_smi64.so"
_VRAM = 0  # RSMI_MEM_TYPE_VRAM
_WITHHELD = frozenset({2, 4, 9})  # RSMI_STATUS_NOT_SUPPORTED, _PERMISSION, _NOT_YET_IMPLEMENTED: unknown, but not wrong
_GONE = 10  # RSMI_STATUS_NOT_FOUND: the process has just ended
_MOST_PROCESSES = 4096
_MOST_DEVICES = 256
_NAME_BYTES = 128


class _Process(ctypes.Structure):
    """`rsmi_process_info_t`. Later fields fill the room after these."""

    _fields_ = (
        ("pid", c_uint32),
        ("pasid", c_uint32),
        ("vram", c_uint64),
        ("sdma", c_uint64),
        ("occupancy", c_uint32),
        ("more", c_uint32),
    )


class _RocmError(Exception):
    """A call failed; the text is the library's."""


class Rocm:
    """The library, started at the first question and after each failure."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._problem: str | None = None
        self._failed = False  # a call of the present answer has failed: the library must be restarted to see a change

    def beside(self, nvidia: Sample) -> Sample:
        """Return the answer of NVML with AMD's GPUs beside NVIDIA's. Their indices follow NVIDIA's.

        A failure of one library says nothing of the other's GPUs: ROCm's fails on each machine without a card of AMD.
        """
        try:
            if self._library is None:
                library = _load()
                if library is None:
                    return nvidia
                _check(library, library.rsmi_init(c_uint64(0)))
                self._library = library
            indices = [each.index for each in nvidia.devices if each.parent is None]
            first = max(indices, default=-1) + 1 + len(nvidia.split)
            devices, unreadable = self._devices(first)
        except _RocmError as error:
            # A library that was never started is tried again as it is: NVML need not be restarted for that.
            leaving = nvidia.leaving or self._library is not None or not nvidia.devices
            self._library = None
            failure = "; ".join(filter(None, (nvidia.failure, f"ROCm SMI: {error}")))
            return replace(nvidia, failure=failure, leaving=leaving)
        return replace(
            nvidia,
            devices=tuple(sorted((*nvidia.devices, *devices), key=lambda device: (device.bus, device.index))),
            unreadable=(*nvidia.unreadable, *unreadable),
            missing=nvidia.missing and not devices and not unreadable,
            leaving=nvidia.leaving or self._failed,
        )

    def _devices(self, first: int) -> tuple[list[Device], list[tuple[int, str]]]:
        library = self._library
        assert library is not None
        self._failed = False
        count = c_uint32()
        _check(library, library.rsmi_num_monitor_devices(byref(count)))
        found: list[Device] = []
        unreadable: list[tuple[int, str]] = []
        users = dict(self._processes())
        for at in range(min(count.value, _MOST_DEVICES)):
            self._problem = None
            number = self._number("rsmi_dev_unique_id_get", at)
            if not number:
                why = self._problem or "it has no unique ID, by which ROCR_VISIBLE_DEVICES could name it"
                unreadable.append((first + at, why))
                continue
            found.append(self._device(at, f"GPU-{number:016x}", first + at, users.get(at, {})))
        # The parts of a GPU that is split (SPX, CPX) have the ID of the whole, so none can be given alone.
        many = {uuid for uuid, times in Counter(each.uuid for each in found).items() if times > 1}
        unreadable += [(each.index, f"it is a part of a GPU: others have its ID, {each.uuid}") for each in found
                       if each.uuid in many]  # fmt: skip
        return [each for each in found if each.uuid not in many], unreadable

    def _device(self, at: int, uuid: str, index: int, users: dict[int, int | None]) -> Device:
        total = self._number("rsmi_dev_memory_total_get", at, _VRAM) or None
        used = self._number("rsmi_dev_memory_usage_get", at, _VRAM) if total is not None else None
        bdf = self._number("rsmi_dev_pci_id_get", at)
        busy = self._number("rsmi_dev_busy_percent_get", at, kind=c_uint32)
        moving = self._number("rsmi_dev_memory_busy_percent_get", at, kind=c_uint32)
        return Device(
            uuid=uuid,
            index=index,
            bus="~" if bdf is None else f"{bdf >> 32:08x}:{bdf >> 8 & 0xFF:02x}:{bdf >> 3 & 0x1F:02x}",
            name=self._name(at),
            total_bytes=total,
            free_bytes=None if total is None or used is None else max(total - used, 0),
            used_bytes=used,
            processes=tuple(sorted(users.items())),
            utilisation_percent=None if busy is None else min(busy, 100),
            memory_utilisation_percent=None if moving is None else min(moving, 100),
            computing=_computing(users, busy),
            energy_mj=self._energy_mj(at),
            problem=self._problem,
            vendor="AMD",
        )

    def _number(self, call: str, at: int, *kinds: int, kind: type[c_uint32] | type[c_uint64] = c_uint64) -> int | None:
        """Return what *call* says of device *at*; None if it does not say, or fails: that is the device's problem."""
        value = kind()
        function = getattr(self._library, call, None)  # an older library lacks some
        if function is None:
            return None
        return int(value.value) if self._went(call, function(c_uint32(at), *kinds, byref(value))) else None

    def _went(self, call: str, status: int) -> bool:
        if status and status not in _WITHHELD and self._problem is None:
            self._problem = f"{call}: {_words(self._library, status)}"
            self._failed = True
        return status == 0

    def _name(self, at: int) -> str:
        text = create_string_buffer(_NAME_BYTES)
        library: Any = self._library
        if not self._went("rsmi_dev_name_get", library.rsmi_dev_name_get(c_uint32(at), text, _NAME_BYTES)):
            return "AMD GPU"
        name = text.value.decode("utf-8", "replace").strip()
        return name if name.lower().startswith(("amd ", "advanced micro")) else f"AMD {name}".strip()

    def _energy_mj(self, at: int) -> int | None:
        function = getattr(self._library, "rsmi_dev_energy_count_get", None)
        if function is None:
            return None
        count, step, when = c_uint64(), c_float(), c_uint64()
        if function(c_uint32(at), byref(count), byref(step), byref(when)) or not count.value:
            return None  # for accounts only: an error here is no problem of the device
        return int(count.value * float(step.value) / 1000)  # a step is some microjoules

    def _processes(self) -> Iterator[tuple[int, dict[int, int | None]]]:
        """Yield each device that processes compute on, with their pids and what each holds of its memory."""
        library: Any = self._library
        room = c_uint32(_MOST_PROCESSES)
        listed = (_Process * _MOST_PROCESSES)()
        _check(library, library.rsmi_compute_process_info_get(listed, byref(room)))
        users: dict[int, dict[int, int | None]] = {}
        for process in listed[: room.value]:
            number = c_uint32(_MOST_DEVICES)
            on = (c_uint32 * _MOST_DEVICES)()
            status = library.rsmi_compute_process_gpus_get(c_uint32(process.pid), on, byref(number))
            if status == _GONE:
                continue
            _check(library, status)
            for at in on[: number.value]:
                here = _Process()
                call = library.rsmi_compute_process_info_by_device_get
                status = call(c_uint32(process.pid), c_uint32(at), byref(here))
                users.setdefault(at, {})[int(process.pid)] = None if status else int(here.vram)
        yield from users.items()


def _computing(users: dict[int, int | None], busy: int | None) -> tuple[tuple[int, int], ...] | None:
    """Return who computed; None if several processes are there, which the library does not tell apart."""
    if busy is None or len(users) > 1:
        return None
    return tuple((pid, min(busy, 100)) for pid in users) if busy else ()


def _load() -> ctypes.CDLL | None:
    """Return the library; None if there is none. Raises _RocmError if it is there and cannot be loaded."""
    rocm = os.environ.get("ROCM_PATH", "/opt/rocm")
    for name in (f"{rocm}/{_PLACE}", *_NAMES):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            if "No such file" not in str(error):
                raise _RocmError(str(error)) from None
    return None


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise _RocmError(_words(library, status))


def _words(library: Any, status: int) -> str:
    text = c_char_p()
    if library.rsmi_status_string(status, byref(text)) or text.value is None:
        return f"status {status}"
    return text.value.decode("utf-8", "replace")
