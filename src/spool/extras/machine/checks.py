"""The check of `spool doctor` of a shared machine."""

from __future__ import annotations

import time

from spool.doctor import Check, Findings, Subject, fail, good, warn
from spool.extras.machine.status import sharing
from spool.machine import shared
from spool.store.disk import owner_of


def _shared(subject: Subject) -> Findings:
    config = subject.config
    place = shared.directory(config.machine)
    if place is None:
        if config.machine == "off" and shared.directory("auto") is not None:
            text = 'the machine is shared, and `machine = "off"` takes no part: jobs start without leases'
            yield warn(text, "remove the line from config.toml; to other users these jobs are foreign processes")
        return
    found = sharing(place, config.machine_owner, owner_of(subject.root), time.time_ns())
    if found.problem:
        yield fail(f"{found.problem}; nothing starts on this shared machine", found.remedy)
    else:
        yield good(f"an arbiter that is trusted serves {place}; `spool machine status` shows what each user has")


CHECKS = (Check("shared machine", "whether the arbiter answers, and is served by an account that may", _shared),)
"""What it finds."""
