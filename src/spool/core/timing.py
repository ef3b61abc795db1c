"""The instants of a waiting job: its earliest start, its waiting time, its deadline."""

from __future__ import annotations

from spool.core.model import Waiting


def begins_at_ns(job: Waiting) -> int | None:
    """Return the earliest start of *job* as set in its file; None: not set."""
    begins = job.spec.start_after_ns
    delay = job.spec.start_delay_ns
    if delay is None:
        return begins
    delayed = job.arrived_at_ns + delay
    return delayed if begins is None or delayed > begins else begins


def opens_at_ns(job: Waiting) -> int | None:
    """Return the earliest start of *job*: from its file, or after a retry's delay. None: not limited."""
    begins = begins_at_ns(job)
    retry = job.not_before_ns
    if retry is None or begins is None:
        return begins if retry is None else retry
    return max(begins, retry)


def deadline_ns(job: Waiting) -> int | None:
    """Return the last instant at which *job* has not yet waited longer than its scheduling timeout, or None.

    None without a timeout (0 means none), and while its clock is stopped.
    """
    timeout = job.spec.scheduling_timeout_ns
    if not timeout or job.clock_at_ns is None:
        return None
    return job.clock_at_ns + timeout - job.waited_ns_before


def waited_ns(job: Waiting, now_ns: int) -> int:
    """Return how long *job* has waited since it was (re)queued; held and paused time does not count."""
    if job.clock_at_ns is None:
        return job.waited_ns_before
    return job.waited_ns_before + max(now_ns - job.clock_at_ns, 0)
