"""Capture: records the code and packages that a run begins with. Here is the table of config.toml that asks for it."""

from __future__ import annotations

from msgspec import Struct

from spool.formats.capabilities import Key, KeyTable, Part
from spool.formats.validation import PartReader, Reading

# A row stays a row of a table.
# fmt: off

_TABLE = KeyTable(
    "CaptureTable",
    "What to record of the code that a run begins with (docs/FORMAT.md, 4.27). A table that is absent records nothing.",
    Key("git", "flag", "Whether to record the git commit of the working directory, and what differs from it.",
        field="capture.git"),
    Key("diff", "size", "How much of the uncommitted changes to keep; 0B keeps none.",
        field="capture.diff_bytes"),
    Key("packages", "flag", "Whether to record the Python of the command and its packages.",
        field="capture.packages"),
)

CONFIG = Part(
    Key("capture", _TABLE, "What to record of the code that a run begins with.", default={}),
    after="gpu",
    reader="spool.extras.capture:READER",
)

# fmt: on


class CaptureConfig(Struct, frozen=True):
    """What to record of the code that a run begins with."""

    git: bool = False
    diff_bytes: int = 1 << 20
    packages: bool = False


def _read(reading: Reading) -> CaptureConfig | None:
    asked = CaptureConfig(**reading.found["capture"])
    return asked if asked.git or asked.packages else None


READER = PartReader(_read, models=lambda: {"capture": CaptureConfig()})
"""What reads the table `capture`; None if it asks for no record."""
