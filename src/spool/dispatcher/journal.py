"""What the journal has to remember of the table, where it is written anew in short."""

from __future__ import annotations

from spool.formats import journal
from spool.state.table import Live, Table


def worth_remembering(table: Table, boot_id: str) -> list[journal.Line]:
    """Return what `recall` needs to find all of *table* again that no file says; *boot_id* is that of this boot."""
    lines: list[journal.Line] = []
    for live in table.live.values():
        at_ns = live.started_at_ns
        boot = live.boot_id or boot_id
        lines.append(journal.Started(live.name, live.run, boot, live.inode, live.wait.arrived_at_ns, at_ns))
        if live.stop is not None and not live.stop_recorded:
            lines.append(stopping_line(live))
    for array in table.arrays.values():
        at_ns = array.expanded_at_ns
        lines.append(journal.Started(array.name, array.run, boot_id, array.inode, array.arrived_at_ns, at_ns))
    # After the starts: one that is moved out of running/ waits while its run is being stopped.
    for job in table.jobs.values():
        if job.wait is not None:
            wait = job.wait
            lines.append(journal.Waits(job.name, wait.arrived_at_ns, wait.waited_ns_before, wait.clock_at_ns))
    return lines


def stopping_line(live: Live) -> journal.Line:
    """Return what the journal says of a run that is stopped, in place of its record."""
    stop = live.stop
    assert stop is not None
    return journal.Stopping(live.name, live.run, stop.kind.value, stop.by, stop.at_ns, stop.reason)
