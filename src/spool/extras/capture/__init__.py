"""Capture: records the code and packages that a run begins with. Here is the key of config.toml that asks for it."""

from __future__ import annotations

from spool.formats.capabilities import Key, Part
from spool.formats.validation import PartReader

_SWITCH = "write capture = true instead, which records the commit, the changes up to 1 MiB and the packages"

CONFIG = Part(
    Key(
        "capture",
        "flag",
        "Whether to record the git commit of the working directory that a run begins with, what differs from it, and "
        "the Python of the command with its packages.",
        default=False,
        field="capture.asked",
    ),
    after="gpu",
    reader="spool.extras.capture:READER",
    gone=dict.fromkeys(("capture.git", "capture.diff", "capture.packages"), _SWITCH),
)

READER = PartReader(lambda reading: reading.found["capture"]["asked"] or None)
"""What reads the key `capture`; None if it asks for no record."""
