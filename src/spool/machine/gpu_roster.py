"""Which GPUs there are, over time: a GPU that was seen once keeps its UUID and its index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from spool.core.model import Gpu
from spool.machine.gpu_use import Use
from spool.machine.nvml import Device, Sample


@dataclass(frozen=True, slots=True)
class _Known:
    gpu: Gpu
    bus: str
    parent: str | None


class Roster:
    """Every GPU that was seen and may come back.

    A GPU that is not listed any more stays, with its problem; so its runs keep what they were given, and an index in
    the configuration or in a reservation does not suddenly mean its neighbour. A GPU that went into MIG mode, and an
    instance of one that was taken apart, were taken away on purpose: these are forgotten.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._absent: set[str] = set()

    def gpus(self) -> tuple[Gpu, ...]:
        """Return all of them, in PCI bus order."""
        ordered = sorted(self._known.values(), key=lambda known: (known.bus, known.gpu.index))
        return tuple(known.gpu for known in ordered)

    def blind(self, problem: str) -> None:
        """Say of every GPU that nothing is known of it now."""
        self._known = {uuid: _blind(known, problem) for uuid, known in self._known.items()}

    def absent(self) -> bool:
        """Return whether a GPU that was seen is not listed now."""
        return bool(self._absent)

    def update(self, sample: Sample, use_of: Callable[[Device], Use]) -> tuple[str, ...]:
        """Take in what NVML said. Return notes on GPUs that are there but never told their UUID."""
        listed = {device.uuid for device in sample.devices}
        errors = dict(sample.unreadable)
        for uuid, known in list(self._known.items()):
            if uuid in listed:
                continue
            if uuid in sample.split or (known.parent is not None and known.parent in {*sample.split, *listed}):
                del self._known[uuid]
            else:
                self._known[uuid] = _blind(known, errors.get(known.gpu.index, "NVML does not list it any more"))
        for device in sample.devices:
            before = self._known.get(device.uuid)
            gpu = self._gpu(device, use_of(device), before.gpu if before else None)
            self._known[device.uuid] = _Known(gpu, device.bus, device.parent)
        self._absent = self._known.keys() - listed
        indices = {known.gpu.index for known in self._known.values()}
        return tuple(f"GPU {index}: {why}" for index, why in sample.unreadable if index not in indices)

    def _gpu(self, device: Device, use: Use, before: Gpu | None) -> Gpu:
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
        )

    def _free_index(self, wanted: int) -> int:
        """Return *wanted*, or the lowest index that no GPU has: NVML counts anew when one has fallen off."""
        taken = {known.gpu.index for known in self._known.values()}
        return wanted if wanted not in taken else next(index for index in range(len(taken) + 1) if index not in taken)


def _blind(known: _Known, problem: str) -> _Known:
    was = known.gpu
    gpu = Gpu(was.uuid, was.index, was.name, was.memory_total_bytes, None, problem=problem, mig=was.mig)
    return replace(known, gpu=gpu)
