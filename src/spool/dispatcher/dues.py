"""When the next pass is due, if nothing wakes the dispatcher before."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spool.dispatcher.loop import Dispatcher


def due_in_ns(of: Dispatcher, limit_ns: int | None) -> int | None:
    """Return how long until one of its parts has something to do, at most *limit_ns*; None: nobody has."""
    now = time.monotonic_ns()
    held_up = bool(of.confinement.held_up())
    always = (
        of.terminator.next_due_ns(),
        of.status.next_due_ns(),
        of.supervisor.next_due_ns(),
        of.confinement.next_due_ns(),
    )
    moments = [moment for moment in always if moment is not None]
    if not held_up:  # else all of it waits for the spool as a whole, which is tried again
        others = (
            of.scanner.next_due_ns(),
            of.reservations.next_due_ns(),
            of.observer.next_due_ns,
            of.filemoves.next_due_ns(),
            of.arrays.next_due_ns(),
            of.monitor.next_due_ns(),
            of.events.client.next_due_ns(),
            of.world.next_due_ns(),
        )
        moments += [moment for moment in others if moment is not None]
    waits = [moment - now for moment in moments]
    if (due_in := of.limits.next_due_ns()) is not None:
        waits.append(due_in)
    if (due_in := of.launcher.shortage.due_in_ns(of.clock())) is not None and not held_up:
        waits.append(due_in)
    if of.plan is not None and of.plan.next_at_ns is not None and not held_up:
        waits.append(of.plan.next_at_ns - of.clock())
    if of.world.gpus_matter():
        waits.append(of.settings.config.gpu.poll_ns)
    if limit_ns is not None:
        waits.append(limit_ns)
    return max(0, min(waits)) if waits else None
