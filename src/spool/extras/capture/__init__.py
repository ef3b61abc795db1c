"""Capture: records the code and packages that a run begins with. Here is the table of config.toml that asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from spool.formats.capabilities import Key, KeyTable, Part
from spool.formats.validation import PartReader

if TYPE_CHECKING:
    from spool.formats.config import Config

# A row stays a row of a table.
# fmt: off

_TABLE = KeyTable(
    "CaptureTable",
    "What to record of the code that a run begins with (docs/FORMAT.md, 4.27). A table that is absent records nothing.",
    Key("git", "flag", "Whether to record the git commit of the working directory, and what differs from it.",
        default=False, field="capture.git"),
    Key("diff", "size", "How much of the uncommitted changes to keep; 0B keeps none.",
        default="1M", field="capture.diff_bytes"),
    Key("packages", "flag", "Whether to record the Python of the command and its packages.",
        default=False, field="capture.packages"),
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

    @property
    def is_on(self) -> bool:
        """Whether there is anything to record."""
        return self.git or self.packages


READER = PartReader(lambda reading: CaptureConfig(**reading.found["capture"]))
"""What reads the table `capture`."""


def wanted(config: Config) -> bool:
    """Whether the configuration asks for something to be recorded."""
    asked = config.part("capture")
    return asked is not None and asked.is_on
