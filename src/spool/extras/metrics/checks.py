"""The check of `spool doctor` of the metrics."""

from __future__ import annotations

import os
from importlib.util import find_spec

from spool.doctor import Check, Findings, Subject, good, warn
from spool.extras.metrics.listener import NOT_INSTALLED


def _metrics(subject: Subject) -> Findings:
    stated = subject.config.part("metrics")
    if stated is None:
        return
    path = os.path.expanduser(stated)
    directory = os.path.dirname(path)
    if find_spec("prometheus_client") is None:
        why, _, remedy = NOT_INSTALLED.partition("; ")
        yield warn(why, remedy)
    elif not os.access(directory, os.W_OK | os.X_OK):
        yield warn(f"{directory} does not exist or is not writable", "fix `metrics` in config.toml")
    else:
        yield good(f"written to {path}")


CHECKS = (Check("metrics", _metrics),)
"""The check, as a row of the doctor's table."""
