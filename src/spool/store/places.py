"""Where the runs of a spool began: what may go on in the original does not run again in a copy of the spool."""

from __future__ import annotations

import os

from spool.core.layout import JOBS
from spool.formats.freetext import one_line
from spool.formats.run_records import GrantRecord


def place_of(root: str) -> str:
    """Return the inode of the directory of all runs, which a move keeps and a copy does not, and the path of the spool.

    Raises OSError.
    """
    return f"{os.stat(f'{root}/{JOBS}').st_ino} {one_line(os.fsencode(root))}"


def why_copied(root: str, grant: GrantRecord | None) -> str:
    """Return why a run, with its records in the spool at *root*, is that of another spool; "" if it is not.

    A run without a recorded place is this spool's. Raises OSError.
    """
    if grant is None or grant.place is None:
        return ""
    inode, _, path = grant.place.partition(" ")
    if inode == place_of(root).partition(" ")[0]:
        return ""
    return f"run {grant.run} began in {path}; this spool is a copy of that, where it may have gone on"
