"""One cut after the other: which change each is at, and all that goes wrong told together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from spool.testing.faults import FaultyDisk


def where(whole: FaultyDisk, number: int) -> str:
    """Return which change of the disk *whole*, which nothing cut off, has that number: for people."""
    operation = whole.recorded[number - 1]
    paths = " ".join(os.path.relpath(path, whole.staging) for path in operation.paths)
    return f"at change {number}: {operation.name} {paths}"


def can_be_torn(whole: FaultyDisk, number: int) -> bool:
    """Whether that change writes data, so that a cut can leave half of it."""
    return whole.recorded[number - 1].name in ("create", "fill", "append")


@contextmanager
def noting(failures: list[str], about: str) -> Iterator[None]:
    """Add what goes wrong in here to *failures* and go on, so that in the end all of it is told."""
    try:
        yield
    except Exception as error:
        failures.append(f"{about}: {type(error).__name__} {error}")
