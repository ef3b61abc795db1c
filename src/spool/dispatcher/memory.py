"""What the journal says: read when a dispatcher begins, and written anew in short."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from spool.core.model import Stop, StopKind
from spool.dispatcher.table import Live, Table
from spool.formats import journal


@dataclass
class Memory:
    """What the journal says."""

    waits: dict[str, journal.Waits] = field(default_factory=dict)
    open: dict[tuple[str, int], journal.Started] = field(default_factory=dict)  # started and not over
    over: dict[tuple[str, int], tuple[journal.Started, journal.Over]] = field(default_factory=dict)
    closed: dict[str, journal.Started] = field(default_factory=dict)  # the newest that is over for good
    stopping: dict[tuple[str, int], Stop] = field(default_factory=dict)  # where no record says it
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
            case journal.Stopping():
                with suppress(ValueError):
                    stop = Stop(StopKind(line.kind), line.by, line.at_ns, line.reason)
                    memory.stopping[line.job, line.run] = stop
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
