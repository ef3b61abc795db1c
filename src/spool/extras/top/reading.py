"""What the screen shows, read in threads, so that a key never waits for a disk: the whole spool, and one job.

The whole spool is read again only after changes. The threads are daemons: one that hangs in an unresponsive file system
does not prevent an exit.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from spool.cli.why import sentences
from spool.client.output import Follower, OutputPiece, progress_of
from spool.client.waiting import End
from spool.core import layout
from spool.core.errors import SpoolError, shown
from spool.core.gpus import stranger
from spool.core.gpuuse import RecentUse
from spool.core.model import SECOND_NS, Gpu, Machine, State
from spool.core.units import show_size
from spool.formats.state import MachineView
from spool.query.details import why_never_begun
from spool.query.explain import why
from spool.query.jobs import JobFilter, JobList, counts, list_jobs
from spool.query.listing import UNKNOWN, Outlook, OutlookReader
from spool.query.rows import JobRow, in_words, last_view
from spool.query.shared import (
    MachineSharing,
    lease_words,
    leases_on,
    problems_of,
    shared_machine,
    without_users,
)
from spool.query.snapshot import machine_now
from spool.store.edited import Settings
from spool.store.spool import Spool
from spool.store.tolerant import TolerantSpool

_ENDED = 200  # ended jobs
_AT_LEAST_EVERY_NS = 10 * SECOND_NS  # for facts without a file event: a dead or silent dispatcher
_GPUS_EVERY_NS = 10 * SECOND_NS  # if no dispatcher watches them, so that NVML is queried
_NO_GPUS_EVERY_NS = 60 * SECOND_NS
_WATCHED = (layout.STATE, layout.PAUSED, layout.CONFIG, layout.HISTORY, *layout.PLACES)
_LINES = 1000  # lines kept of an output
_LONGEST = 2000  # characters of a line
_TAB = 8
_AGAIN_S = 10.0  # the reason for a wait changes without the job's row
WAITING = frozenset({State.QUEUED, State.HELD, State.INVALID})
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")  # as ECMA-48 has them


class GpuGlance(Struct, frozen=True):
    """One GPU. `jobs` are its runs, `remark` is its problem, what others have of it by lease, and its foreign users.

    `recent` is its utilisation in the steps of the last half hour, in percent.
    """

    gpu: Gpu
    jobs: tuple[str, ...]
    remark: str
    recent: tuple[int | None, ...] = ()


class Overview(Struct, frozen=True):
    """The spool at one moment: active and waiting jobs, the last ended ones (newest first), and the machine.

    `machine` is from the running dispatcher's view; None without a dispatcher.
    """

    active: tuple[JobRow, ...]
    ended: tuple[JobRow, ...]
    machine: MachineView | None
    gpus: tuple[GpuGlance, ...]
    gpu_problem: str | None
    found: JobList  # whether a dispatcher is running, whether it is paused, …
    problems: tuple[str, ...]
    at_ns: int
    shared: MachineSharing | None = None  # None: the machine is this spool's alone
    outlook: Outlook = UNKNOWN  # of the active jobs
    queued: tuple[int | None, ...] = ()  # how many jobs were in the queue, in the steps of the last half hour

    def count(self, *states: State) -> int:
        """Return how many jobs are in one of *states*."""
        found = counts(self.active)
        return sum(found[state] for state in states)


class OverviewReader:
    """Reads one spool on each call. Not for several threads at once."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._mark: tuple[object, ...] = ()
        self._last: Overview | None = None
        self._machine = Machine(0, 0)
        self._asked_at_ns = 0
        self._settings: Settings | None = None
        self._outlook = OutlookReader()

    def look(self, now_ns: int) -> Overview | None:
        """Return the present view; None if it has not changed since the last call. Raises SpoolUnusable."""
        spool = TolerantSpool.open(self._root)
        shared = self._shared(spool, now_ns)
        mark = (*_mark(spool), shared.gist if shared is not None else None)
        last = self._last
        if last is not None and mark == self._mark and now_ns - last.at_ns < _AT_LEAST_EVERY_NS:
            active = tuple(_with_progress(spool, last.active))
            if active == last.active:
                return None
            self._last = replace(last, active=active)
            return self._last
        self._mark = mark
        self._last = self._read(spool, now_ns, shared)
        return self._last

    def _shared(self, spool: Spool, now_ns: int) -> MachineSharing | None:
        if self._settings is None:
            self._settings = Settings(spool.root)
        self._settings.reload()
        return shared_machine(spool, now_ns, self._settings.config)

    def _read(self, spool: Spool, now_ns: int, shared: MachineSharing | None) -> Overview:
        found = list_jobs(spool, JobFilter(recent=_ENDED))
        view, _ = last_view(spool, now_ns) if found.dispatcher else (None, None)
        machine = view.machine if view is not None else None
        active = tuple(row for row in found.rows if not row.state.ended)
        recent = view.recent if view is not None else RecentUse()
        recent = recent.as_of(now_ns, counts(active)[State.QUEUED])
        if machine is not None and machine.gpus_at_ns is not None:
            seen = tuple(_glance(each.gpu(), each.jobs, shared) for each in machine.gpus)
            problem = machine.gpu_problem
        else:
            seen = self._asked(spool, active, now_ns, shared)
            problem = self._machine.gpu_problem
        refusal = in_words(machine.refusal, now_ns) if machine is not None else ""
        unread = spool.told() if isinstance(spool, TolerantSpool) else []
        return Overview(
            active=active,
            ended=tuple(row for row in reversed(found.rows) if row.state.ended),
            machine=machine,
            gpus=tuple(replace(each, recent=recent.gpus.get(each.gpu.uuid, ())) for each in seen),
            gpu_problem=problem,
            found=found,
            problems=tuple(dict.fromkeys(filter(None, (refusal, *problems_of(shared), *found.problems, *unread)))),
            at_ns=now_ns,
            shared=shared,
            queued=recent.queued,
            outlook=self._outlook.look(spool, active, now_ns, served=found.serves),
        )

    def _asked(
        self, spool: Spool, active: Sequence[JobRow], now_ns: int, shared: MachineSharing | None
    ) -> tuple[GpuGlance, ...]:
        """Return the GPUs without a dispatcher's view; NVML is not queried at every look."""
        if now_ns - self._asked_at_ns >= (_GPUS_EVERY_NS if self._machine.gpus else _NO_GPUS_EVERY_NS):
            self._machine, self._asked_at_ns = machine_now(spool, now_ns), now_ns
        jobs: dict[int, list[str]] = {}
        for row in active if self._machine.gpus else ():
            record = spool.grant(row.name, row.run) if row.run is not None else None
            for index in record.grant.gpu_indices if record is not None else ():
                jobs.setdefault(index, []).append(row.name)
        return tuple(_glance(gpu, jobs.get(gpu.index, ()), shared) for gpu in self._machine.gpus)


def _mark(spool: Spool) -> tuple[object, ...]:
    """Return a value that changes when the list of jobs may change."""

    def of(name: str) -> tuple[int, int, int] | None:
        try:
            status = os.stat(spool.layout.at(name))
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    return (spool.service(), *map(of, _WATCHED))


def _with_progress(spool: Spool, rows: Iterable[JobRow]) -> Iterable[JobRow]:
    for row in rows:
        goes_on = row.state is State.RUNNING and row.run is not None
        yield replace(row, progress=progress_of(spool, row.name, row.run or 0)) if goes_on else row


def _glance(gpu: Gpu, jobs: Collection[str], shared: MachineSharing | None) -> GpuGlance:
    leases = leases_on(gpu, shared, [None for _ in jobs])
    gpu = replace(gpu, foreign=without_users(gpu.foreign, leases)) if leases else gpu
    others = [lease_words(lease) for lease in leases]
    others += [stranger(one, show_size(one.memory_bytes or 0) if one.memory_bytes else "") for one in gpu.foreign]
    return GpuGlance(gpu, tuple(jobs), "; ".join(filter(None, (gpu.problem, *others))))


class Repeater(threading.Thread):
    """Calls *turn* again and again, each time after the seconds that it returned, or sooner when woken.

    Its error, which is a bug, is passed to *broken*, and ends the thread.
    """

    def __init__(self, turn: Callable[[], float], broken: Callable[[Exception], object]) -> None:
        super().__init__(daemon=True)
        self._turn = turn
        self._broken = broken
        self._woken = threading.Event()
        self._over = False

    def run(self) -> None:
        """Run until `end` is called."""
        try:
            while not self._over:
                self._woken.clear()
                self._woken.wait(self._turn())
        except Exception as error:
            self._broken(error)

    def wake(self) -> None:
        """Start the next turn at once."""
        self._woken.set()

    def end(self) -> None:
        """Start no further turn."""
        self._over = True
        self._woken.set()


class LogText:
    """The last lines of an output as a terminal would show them: a redrawn progress bar is one line."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._torn = b""

    def feed(self, data: bytes) -> None:
        """Append new output."""
        *whole, self._torn = (self._torn + data).split(b"\n")
        self._lines.extend(map(_drawn, whole))
        self._torn = self._torn[-(_LONGEST * 16) :]

    def lines(self) -> list[str]:
        """Return the lines, including an incomplete last one."""
        return [*self._lines, *([_drawn(self._torn)] if self._torn else ())]


def _drawn(line: bytes) -> str:
    r"""Return the visible rest of a line in which \r overwrites; without colours, controls escaped."""
    text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
    text = _ESCAPE.sub("", text).expandtabs(_TAB)
    return shown(text[:_LONGEST] + ("…" if len(text) > _LONGEST else ""))


class PaneSubject(Struct, frozen=True):
    """The content of the pane below the list: a job, in full or in brief."""

    row: JobRow
    fully: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """A value that changes when something else must be read."""
        row = self.row
        return row.name, row.place, row.run, row.state, self.fully, row.reason if row.state in WAITING else ""


class SubjectReader:
    """Reads the details of one job: why it waits, or its output so far."""

    def __init__(self, root: str, subject: PaneSubject) -> None:
        self.subject = subject
        self._root = root
        self._text = LogText()
        self._shown: list[str] | None = None
        self._follower: Follower | None = None
        self._pieces: Iterator[OutputPiece | End | None] = iter(())
        self._begun = False
        self._asked_at = 0.0

    def news(self) -> list[str] | None:
        """Return the lines if they have changed since the last call. For one thread."""
        try:
            lines = self._lines()
        except SpoolError as error:
            lines = [shown(str(error))]
        except OSError as error:
            lines = [f"cannot read it: {shown(error.strerror or str(error))}"]
        if lines == self._shown:
            return None
        self._shown = lines
        return lines

    def close(self) -> None:
        """Close the files."""
        if self._follower is not None:
            self._follower.close()

    def _lines(self) -> list[str]:
        row = self.subject.row
        if row.run is None or row.state in WAITING:
            now = time.monotonic()
            if self._shown is None or now - self._asked_at >= _AGAIN_S:
                self._asked_at = now
                return self._reasons(row)
            return self._shown
        if not self._begun:
            self._begun = True
            self._follower = Follower(Spool(self._root), (row.name,), only=row.run, lines=_LINES)
            self._pieces = self._follower.pieces()
        for piece in self._pieces:
            if piece is None:
                break
            if isinstance(piece, OutputPiece):
                self._text.feed(piece.data)
        if lines := self._text.lines():
            return lines
        if not row.state.ended:
            return ["no output yet"]
        return [why_never_begun(Spool(self._root), row.name, row.run) or "no output"]

    def _reasons(self, row: JobRow) -> list[str]:
        if not self.subject.fully or row.state is State.INVALID:
            return list(map(shown, row.reason.split("\n")))
        return list(map(shown, sentences(why(Spool(self._root), row.name))))
