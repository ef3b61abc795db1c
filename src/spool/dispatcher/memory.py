"""What the journal says: read when a dispatcher begins, and written anew in short."""

from __future__ import annotations

from dataclasses import dataclass, field

from spool.dispatcher.table import Table
from spool.formats import journal


@dataclass
class Memory:
    """What the journal says."""

    waits: dict[str, journal.Waits] = field(default_factory=dict)
    open: dict[tuple[str, int], journal.Started] = field(default_factory=dict)  # started and not over
    over: dict[tuple[str, int], tuple[journal.Started, journal.Over]] = field(default_factory=dict)
    closed: dict[str, journal.Started] = field(default_factory=dict)  # the newest that is over for good
    told: set[str] = field(default_factory=set)  # what listeners were told of, and is not over


def recall(lines: list[journal.Line]) -> Memory:
    """Return what is still true of what the journal says."""
    memory = Memory()
    for line in lines:
        match line:
            case journal.Waits():
                memory.waits[line.job] = line
                memory.closed.pop(line.job, None)  # the same file may have been queued again
            case journal.Told(told, over):
                (memory.told.discard if over else memory.told.add)(told)
            case journal.Left():
                memory.waits.pop(line.job, None)
            case journal.Started():
                memory.open[line.job, line.run] = line
                memory.closed.pop(line.job, None)
                waits = memory.waits.get(line.job)
                if waits is not None and waits.arrived_at_ns == line.arrived_at_ns:
                    del memory.waits[line.job]
            case journal.Over():
                started = memory.open.pop((line.job, line.run), None)
                if started is not None:
                    memory.over[line.job, line.run] = started, line
                if line.final and started is not None:
                    memory.closed[line.job] = started
    return memory


def worth_remembering(table: Table, boot_id: str) -> list[journal.Line]:
    """Return what `recall` needs to find all of *table* again that no file says; *boot_id* is that of this boot."""
    lines: list[journal.Line] = []
    for job in table.jobs.values():
        if job.wait is not None:
            wait = job.wait
            lines.append(journal.Waits(job.name, wait.arrived_at_ns, wait.waited_ns_before, wait.clock_at_ns))
    for live in table.live.values():
        at_ns = live.started_at_ns
        boot = live.boot_id or boot_id
        lines.append(journal.Started(live.name, live.run, boot, live.inode, live.wait.arrived_at_ns, at_ns))
    for array in table.arrays.values():
        at_ns = array.expanded_at_ns
        lines.append(journal.Started(array.name, array.run, boot_id, array.inode, array.arrived_at_ns, at_ns))
    return lines
