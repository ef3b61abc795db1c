"""The vendors of GPUs: whose driver may be here, and the cards on the PCI bus that no driver lists."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from spool.core.capability import GpuVendor
from spool.core.model import NVIDIA
from spool.formats.capabilities import capabilities

PCI = "/sys/bus/pci/devices"
NO_CARD = "this machine has no NVIDIA card"
_DISPLAY = ("0x03",)  # the class of display controllers: a card's audio and USB are devices of their own
_OF_NVIDIA = (NVIDIA, "0x10de", _DISPLAY, "the driver's library, libnvidia-ml.so.1")


def vendors_here(environment: Mapping[str, str] | None = None) -> tuple[GpuVendor, ...]:
    """Return the vendors beside NVIDIA whose GPUs may be here: one of their signs is."""
    variables = os.environ if environment is None else environment
    return tuple(
        vendor
        for vendor in _others()
        if any(sign[1:] in variables if sign.startswith("$") else os.path.exists(sign) for sign in vendor.signs)
    )


def unlisted_cards(pci: str = PCI, *, listed: Collection[str] = ()) -> str:
    """Return what is wrong with the cards on the bus that no driver lists; "" if there are none.

    *listed* are the vendors whose driver lists GPUs.
    """
    try:
        devices = os.listdir(pci)
    except OSError:
        return ""
    found = [(_read(f"{pci}/{device}/vendor"), _read(f"{pci}/{device}/class")) for device in devices]
    for name, number, classes, library in (_OF_NVIDIA, *((each.name, *each.on_the_bus) for each in _others())):
        cards = sum(vendor == number and kind.startswith(classes) for vendor, kind in found)
        if cards and name not in listed:
            they = f"1 {name} card is" if cards == 1 else f"{cards} {name} cards are"
            return f"{they} on the PCI bus, but {library}, is missing or lists none"
    return ""


def _others() -> list[GpuVendor]:
    return [capability.gpus for capability in capabilities() if capability.gpus is not None]


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
