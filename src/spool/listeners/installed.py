"""Whether any plugin is installed, found out without loading one: `importlib.metadata` would cost a pass or two."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache

GROUP = "spool"
"""The group of entry points that plugins are named in."""

_HEAD = f"[{GROUP}]".encode()


@cache
def plugins_installed() -> bool:
    """Whether a distribution that this process can import has an entry point of our group."""
    return plugins_in(sys.path)


def plugins_in(places: Iterable[str]) -> bool:
    """Whether a distribution in one of the directories *places* has an entry point of our group."""
    for place in places:
        try:
            names = os.listdir(place or ".")
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")) and _names_one(f"{place or '.'}/{name}/entry_points.txt"):
                return True
    return False


def _names_one(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return any(line.strip() == _HEAD for line in file)
    except OSError:
        return False
