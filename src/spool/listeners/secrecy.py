"""Whether others than the owner can read what holds secrets."""

from __future__ import annotations

import os

from spool.core import layout
from spool.core.layout import Layout


def others_read(path: str, directory: str) -> bool:
    """Whether the group or everybody can read the file *path*, and reach it through its *directory*."""
    try:
        file, way = os.stat(path).st_mode, os.stat(directory).st_mode
    except OSError:
        return False
    return any(file & read and way & enter for read, enter in ((0o040, 0o010), (0o004, 0o001)))


def who_else_reads(root: str, *, in_config: bool, job: str | None) -> list[str]:
    """Return the files of the spool at *root*, of those that are said to hold secrets, that others can read."""
    at = Layout(root)
    paths = [at.at(layout.CONFIG)] if in_config else []
    if job is not None:
        paths += [at.job_file(place, job) for place in layout.PLACES]
    return [path for path in paths if others_read(path, at.root)]
