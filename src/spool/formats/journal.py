"""The lines of `.journal`: state that the dispatcher must remember and that no job file has (FORMAT 1.10).

It holds each job's place in the queue and its waiting clock, the keys that hooks set in it, and the runs that were
started and are not over. One JSON array a line, the word first. A line that cannot be read (a power cut may leave half
of one) is ignored: the journal holds memories, and each of them has a safe default.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from spool.core import layout
from spool.core.model import JobDefaults, Reservation, Stop, StopKind
from spool.formats import jobfile
from spool.formats.wire import decoded


class Waits(msgspec.Struct, frozen=True, array_like=True, tag="waits", gc=False):
    """A job waits or is held: its place, and its clock."""

    job: str
    arrived_at_ns: int
    waited_ns_before: int  # on the clock before `clock_at_ns`
    clock_at_ns: int | None  # None: the clock is stopped (held)


class Left(msgspec.Struct, frozen=True, array_like=True, tag="left", gc=False):
    """A job no longer waits, and nothing about it needs remembering."""

    job: str


class Reviewed(msgspec.Struct, frozen=True, array_like=True, tag="reviewed"):
    """Hooks were asked about this version of a job file: the keys that each has set, often none."""

    job: str
    inode: int
    mtime_ns: int
    size: int
    keys: tuple[tuple[str, dict[str, Any]], ...] = ()  # hook, keys

    def is_for(self, version: tuple[int, int, int]) -> bool:
        """Whether it is about that version of the file: its inode, `mtime_ns` and size."""
        return (self.inode, self.mtime_ns, self.size) == version


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started", gc=False):
    """A run was started (or is about to be: the line comes before the launch)."""

    job: str
    run: int
    boot_id: str
    inode: int  # of the job file
    arrived_at_ns: int
    at_ns: int


class Stopping(msgspec.Struct, frozen=True, array_like=True, tag="stopping", gc=False):
    """A run is being stopped, but the record `stop` of its metadir could not be written."""

    job: str
    run: int
    kind: str
    by: str
    at_ns: int
    reason: str = ""


class Over(msgspec.Struct, frozen=True, array_like=True, tag="over", gc=False):
    """A run is over and completely filed."""

    job: str
    run: int
    final: bool  # the job's file belongs in done/; False: the job goes on
    outcome: str = ""  # empty: it never started, or was not a run


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told", gc=False):
    """Listeners were told of a lasting fact that no file records; or that fact no longer holds."""

    id: str
    over: bool = False
    reservation: Reservation | None = None  # that it is about: its file may be gone


Line = Waits | Left | Reviewed | Started | Stopping | Over | Told
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


render = msgspec.json.Encoder().encode_lines
"""Return lines as text, each ended by a newline."""


def parse(data: bytes) -> Iterator[Line]:
    """Yield the lines of *data* in their order, without those that cannot be read."""
    for text in data.split(b"\n"):
        if text:
            line = decoded(_decoder, text)
            name, run = getattr(line, "job", "x"), getattr(line, "run", 1)  # which become parts of a path
            if line is not None and layout.valid_name(name) and 0 < run <= layout.MOST_RUNS:
                yield line


class Memory(msgspec.Struct):
    """The combined content of the journal."""

    waits: dict[str, Waits] = msgspec.field(default_factory=dict)
    open: dict[tuple[str, int], Started] = msgspec.field(default_factory=dict)  # started and not over
    over: dict[tuple[str, int], tuple[Started, Over]] = msgspec.field(default_factory=dict)
    closed: dict[str, Started] = msgspec.field(default_factory=dict)  # the newest run that is over for good
    stopping: dict[tuple[str, int], Stop] = msgspec.field(default_factory=dict)  # where no record says so
    reviewed: dict[str, Reviewed] = msgspec.field(default_factory=dict)
    told: dict[str, Told] = msgspec.field(default_factory=dict)  # what listeners were told of, and what still holds

    def completed(self, name: str, version: tuple[int, int, int], defaults: JobDefaults) -> JobDefaults:
        """Return *defaults* with what hooks set in that version of the file of a job (see :meth:`Reviewed.is_for`)."""
        reviewed = self.reviewed.get(name)
        if reviewed is None or not reviewed.keys or not reviewed.is_for(version):
            return defaults
        return jobfile.with_set(defaults, reviewed.keys)

    def newest(self, name: str) -> Started | None:
        """Return the newest run of a job that was started and is not over; None if there is none."""
        lines = (line for (job, _), line in self.open.items() if job == name)
        return max(lines, key=lambda line: line.run, default=None)


def recall(lines: list[Line]) -> Memory:
    """Return the statements of the journal that are still true."""
    memory = Memory()
    for line in lines:
        match line:
            case Waits():
                memory.waits[line.job] = line
                memory.closed.pop(line.job, None)  # the same file may have been queued again
            case Told():
                memory.told.pop(line.id, None)
                if not line.over:
                    memory.told[line.id] = line
            case Left():
                memory.waits.pop(line.job, None)
                memory.reviewed.pop(line.job, None)
            case Reviewed():
                memory.reviewed[line.job] = line
            case Started():
                memory.open[line.job, line.run] = line
                memory.closed.pop(line.job, None)
                waits = memory.waits.get(line.job)
                if waits is not None and waits.arrived_at_ns == line.arrived_at_ns:
                    del memory.waits[line.job]
            case Stopping():
                with suppress(ValueError):
                    stop = Stop(StopKind(line.kind), line.by, line.at_ns, line.reason)
                    memory.stopping[line.job, line.run] = stop
            case Over():
                started = memory.open.pop((line.job, line.run), None)
                if started is not None:
                    memory.over[line.job, line.run] = started, line
                if line.final and started is not None:
                    memory.closed[line.job] = started
                    memory.reviewed.pop(line.job, None)
    return memory
