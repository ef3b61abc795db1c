"""The check of `spool doctor` of the status page."""

from __future__ import annotations

import os

from spool.doctor import Check, Findings, Subject, good, warn
from spool.extras.page import page_path


def _page(subject: Subject) -> Findings:
    path = page_path(subject.config, subject.root)
    if path is None:
        return
    if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK | os.X_OK):
        yield warn(f"{path} cannot be written", "fix `status_page` in config.toml")
    else:
        yield good(f"written to {path}")


CHECKS = (Check("status page", _page),)
"""The check, as a row of the doctor's table."""
