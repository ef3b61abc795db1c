"""Cards for computing on the PCI bus, to tell a machine without a card from one without a driver."""

from __future__ import annotations

import os
from collections.abc import Collection

PCI = "/sys/bus/pci/devices"
NO_CARD = "this machine has no NVIDIA card"
_NVIDIA, _AMD = "0x10de", "0x1002"
_DISPLAY = "0x03"  # the class of display controllers: a card's audio and USB are devices of their own
_COMPUTING = ("0x0380", "0x1200")  # the classes of AMD's cards without a display: a processor's graphics do not count


def unlisted_cards(pci: str = PCI, *, listed: Collection[str] = ()) -> str:
    """Return what is wrong with the cards on the bus that no driver lists; "" if there are none.

    *listed* are the vendors whose driver lists GPUs.
    """
    cards = amd = 0
    try:
        devices = os.listdir(pci)
    except OSError:
        return ""
    for device in devices:
        if _read(f"{pci}/{device}/vendor") == _NVIDIA and _read(f"{pci}/{device}/class").startswith(_DISPLAY):
            cards += 1
        amd += _read(f"{pci}/{device}/vendor") == _AMD and _read(f"{pci}/{device}/class").startswith(_COMPUTING)
    if amd and (not cards or "NVIDIA" in listed) and "AMD" not in listed:
        they = "1 AMD card is" if amd == 1 else f"{amd} AMD cards are"
        return f"{they} on the PCI bus, but the library of ROCm, librocm_smi64.so, is missing or lists none"
    if not cards or "NVIDIA" in listed:
        return ""
    they = "1 NVIDIA card is" if cards == 1 else f"{cards} NVIDIA cards are"
    return f"{they} on the PCI bus, but the driver's library, libnvidia-ml.so.1, is missing or lists none"


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
