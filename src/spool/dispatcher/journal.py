"""The memory of the dispatcher on the disk, and the order in which it is written: event, journal, then the file move.

What no job file says (places in the queue, runs that began and are not over) is noted as a line. A line reaches
`.journal` only after the events that were recorded before it are in `events.jsonl`, so that a listener hears of a step
before the next dispatcher takes it for done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from spool.formats import journal
from spool.formats.config import Config
from spool.formats.journal import Line
from spool.state.run import ActiveRun
from spool.state.table import JobEntry, SchedulerState
from spool.store.disk import SpoolTrouble
from spool.store.logs import Logs


class Journal:
    """Gathers lines and writes them. What cannot be written raises SpoolTrouble and stays noted."""

    def __init__(self, logs: Logs, write_events: Callable[[], None]) -> None:
        """*write_events* writes the events that were recorded; it comes before every line."""
        self._logs = logs
        self._write_events = write_events
        self._lines: list[Line] = []

    def read(self) -> list[Line]:
        """Return all that the journal on the disk says."""
        return self._logs.read_journal()

    def note(self, *lines: Line) -> None:
        """Have *lines* written by the next :meth:`commit`, after those noted before."""
        self._lines += lines

    def note_place(self, job: JobEntry) -> None:
        """Note the place of a job in the queue, and its clock, if it has one."""
        if job.wait is not None:
            self.note(job.wait.line(job.name))

    @property
    def has_notes(self) -> bool:
        """Whether something is noted and not written."""
        return bool(self._lines)

    def commit(self) -> None:
        """Write what was recorded and noted. Comes before every step that follows from it."""
        self._write_events()
        if self._lines:
            self._logs.remember(self._lines)
            self._lines = []

    def write(self, lines: Iterable[Line]) -> None:
        """Write these *lines* at once, before those that are noted."""
        self._write_events()
        self._logs.remember(lines)

    def account(self, lines: bytes) -> None:
        """Append whole lines to the history."""
        self._logs.account(lines)

    def sync(self) -> None:
        """Wait until every line is on the disk."""
        self._logs.sync()

    @property
    def is_strict(self) -> bool:
        """Whether every line is on the disk once it is written."""
        return self._logs.strict

    def configuration_changed(self, config: Config) -> None:
        """Sync as often as *config* says from now on."""
        self._logs.keep_strict(strict=config.durability == "strict")

    def check(self) -> None:
        """Raise SpoolTrouble if the last grouped sync failed."""
        if (problem := self._logs.problem) is not None:
            raise SpoolTrouble(problem.errno, problem.strerror, problem.filename) from problem

    @property
    def is_long(self) -> bool:
        """Whether it is worth compacting."""
        return self._logs.long

    def compact(self, lines: list[Line]) -> None:
        """Replace all that it says, and all that is noted, by *lines*."""
        self._logs.compact(lines)
        self._lines = []


def all_lines(state: SchedulerState, boot_id: str) -> list[Line]:
    """Return what `recall` needs to find all of *state* again that no file says; *boot_id* is that of this boot."""
    lines: list[Line] = []
    for live in state.live.values():
        boot = live.boot_id or boot_id
        lines.append(
            journal.Started(live.name, live.run, boot, live.inode, live.wait.arrived_at_ns, live.started_at_ns)
        )
        if live.stop is not None and not live.stop_recorded:
            lines.append(stopping_line(live))
    for array in state.arrays.values():
        at_ns = array.expanded_at_ns
        lines.append(journal.Started(array.name, array.run, boot_id, array.inode, array.arrived_at_ns, at_ns))
    # After the starts: one that is moved out of running/ waits while its run is being stopped.
    lines += [job.wait.line(job.name) for job in state.jobs.values() if job.wait is not None]
    return lines


def stopping_line(live: ActiveRun) -> Line:
    """Return what the journal says of a run that is stopped, in place of its record."""
    stop = live.stop
    assert stop is not None
    return journal.Stopping(live.name, live.run, stop.kind.value, stop.by, stop.at_ns, stop.reason)
