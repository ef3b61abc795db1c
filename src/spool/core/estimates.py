"""When runs end: what their limits promise, and what is assumed of those that have none."""

from __future__ import annotations

from spool.core.model import SECOND_NS, Running

AT_LEAST_NS = 600 * SECOND_NS
"""A run without a limit is taken to go on for at least so long."""


def promised_end_ns(run: Running) -> int | None:
    """Return when *run* has ended by its own time limit; None without one."""
    limit = run.spec.time_limit_ns
    return None if limit is None else run.started_at_ns + limit


def expected_end_ns(run: Running, now_ns: int) -> int:
    """Return when *run* is expected to have ended, never before now.

    With a limit: at its limit. Without: as long again from now as it has run, at least ten minutes. One that is
    being stopped: within its `kill_grace`.
    """
    limit = run.spec.time_limit_ns
    ran_ns = now_ns - run.started_at_ns
    end = now_ns + max(ran_ns, AT_LEAST_NS) if limit is None else run.started_at_ns + limit
    if run.stopping:
        end = min(end, now_ns + run.spec.kill_grace_ns)
    return max(end, now_ns)
