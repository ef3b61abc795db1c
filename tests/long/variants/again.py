"""Collect the tests of a module once more, for the executors and shells that the core leaves out."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def again(here: dict[str, Any], module: ModuleType) -> None:
    """Put what *module* has into the namespace *here*; `plugins/variants.py` leaves out what does not vary."""
    here |= {name: value for name, value in vars(module).items() if not name.startswith("__")}
