"""The runs of a period, for pictures: rows of CPUs and GPUs, and how much of them was in use.

A picture has columns, intervals of equal length, and so do these values: a hundred thousand runs are reduced to the
cells. The history has the GPUs of a run and its number of CPUs, and which these are only if it was pinned. The CPUs of
the others are laid out: in the order of their starts, runs take the lowest free rows, adjacent ones if possible.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from msgspec import Struct
from msgspec.structs import replace

from spool.core.accounting import GROUP_KEYS, By, RunFilter
from spool.core.errors import UsageError
from spool.core.layout import RUNNING, engine_of
from spool.core.model import SECOND_NS, Machine, Result
from spool.core.units import LARGEST, cpus_in
from spool.query.jobs import RECENT_NS, JobLister
from spool.query.snapshot import machine_now
from spool.store.history import History
from spool.store.spool import Spool

OTHERS = "others"
"""The group of all runs outside the largest groups."""

NO_GROUP = "-"
"""The group of the runs without a project, or without a value of another grouping."""

GROUPINGS = (By.USER, By.PROJECT, By.STATE, By.GROUP, By.EXECUTOR)
"""The groupings for a timeline: each run is in one group."""

_MOST_GROUPS = 7  # more colours cannot be told apart
_SHADES = 8  # of bars that are partly in use
_TRACKS = 4  # the most rows for a shared GPU
_PATIENCE_NS = 3 * SECOND_NS


class LaneBar(Struct, frozen=True):
    """Adjacent columns of a row, `first` up to, not including, `last`; mostly of one run.

    `busy` is the share of the row's CPUs, and of the time, that runs had. `alone`: no other run had any.
    """

    first: int
    last: int
    busy: float
    run: Result
    alone: bool


class TimelineRow(Struct, frozen=True):
    """A row of a chart: some CPUs, a GPU, or one of the tracks of a shared GPU."""

    label: str
    track: int  # 0: the first row of a GPU, mostly the only one
    bars: tuple[LaneBar, ...]


class TimelineUse(Struct, frozen=True):
    """How much was in use: the mean over the whole period, and the maximum."""

    mean: float
    highest: int


class Frame(Struct, frozen=True):
    """The form of a timeline: the columns of the picture, its most CPU rows, the meaning of colours.

    `by` None: by user, or by outcome if all runs are of one user.
    """

    columns: int
    cpu_rows: int
    by: By | None = None


class Timeline(Struct, frozen=True):
    """The runs of a period. Column *n* begins at `since_at_ns + n * step_ns`."""

    since_at_ns: int
    until_at_ns: int
    step_ns: int
    columns: int
    by: By
    groups: tuple[str, ...]  # the largest first, OTHERS last
    cpus: int  # the machine's total for jobs
    gpus: int
    runs: int
    elsewhere: dict[str, int]  # runs on each engine of another machine: these are in no row
    going_on: int
    cpu_rows: tuple[TimelineRow, ...]
    gpu_rows: tuple[TimelineRow, ...]
    cpus_used: TimelineUse
    gpus_used: TimelineUse
    unreadable: int = 0  # lines of the history
    problems: tuple[str, ...] = ()

    def group_of(self, run: Result) -> str:
        """Return the group of a run, one of `groups`."""
        key = _group(run, self.by)
        return key if key in self.groups else OTHERS


def timeline(
    spool: Spool, wanted: RunFilter, frame: Frame, now_ns: int | None = None, machine: Machine | None = None
) -> Timeline:
    """Return the timeline of a period: the selected runs, cut at its edges.

    By default a period begins a day before its end, from the first run on; without an end it goes up to the last run.
    Raises UsageError for an empty period.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    until_ns = now_ns if wanted.until_at_ns is None else min(wanted.until_at_ns, now_ns)
    since_ns = until_ns - RECENT_NS if wanted.since_at_ns is None else wanted.since_at_ns
    if since_ns >= until_ns:
        raise UsageError("cannot draw runs: the period is empty; --since must be before --until, and before now")
    history = History(spool.root)
    going_on = _going_on(spool, wanted, now_ns)  # read before the history, which has those that end meanwhile
    ended = _ended(history.since(since_ns), wanted)
    over = {(run.job, run.run) for run in ended}
    found = [*ended, *(run for run in going_on if (run.job, run.run) not in over)]
    runs = sorted((run for run in found if _overlaps(run, since_ns, until_ns)), key=lambda run: (_start(run), run.job))
    if runs and wanted.since_at_ns is None:
        since_ns = max(since_ns, _start(runs[0]))
        if wanted.until_at_ns is None and all(run.ended_at_ns is not None for run in runs):
            until_ns = max(since_ns + 1, *(run.ended_at_ns or 0 for run in runs))
    machine = machine if machine is not None else machine_now(spool, now_ns, patience_ns=_PATIENCE_NS)
    drawn = _drawn(runs, _Axis(since_ns, until_ns, frame.columns), frame, machine)
    return replace(drawn, unreadable=history.unreadable, problems=tuple(history.problems))


def _drawn(runs: Sequence[Result], axis: _Axis, frame: Frame, machine: Machine) -> Timeline:
    """Return the timeline of these runs, which are in the order of their starts."""
    elsewhere = Counter(name for run in runs if (name := engine_of(run.executor)) is not None)
    here = [run for run in runs if engine_of(run.executor) is None]
    gpus: dict[str, int] = {}  # the last known index of each; below 0: unknown
    for run in here:
        known = len(run.gpus) == len(run.grant.gpu_indices)
        gpus.update(zip(run.gpus, run.grant.gpu_indices, strict=True) if known else dict.fromkeys(run.gpus, -1))
    gpus |= {gpu.uuid: gpu.index for gpu in machine.gpus}
    by = frame.by if frame.by is not None else By.STATE if len({run.user for run in runs}) < 2 else By.USER
    return Timeline(
        since_at_ns=axis.begin_ns,
        until_at_ns=axis.end_ns,
        step_ns=axis.step_ns,
        columns=axis.columns,
        by=by,
        groups=_groups(here, by, axis),
        cpus=machine.cpus,
        gpus=len(gpus),
        runs=len(runs),
        elsewhere=dict(elsewhere),
        going_on=sum(run.ended_at_ns is None for run in runs),
        cpu_rows=_cpu_rows(here, axis, machine.cpus, frame.cpu_rows),
        gpu_rows=_gpu_rows(here, axis, gpus),
        cpus_used=axis.usage((*axis.cut(run), run.grant.cpus) for run in here),
        gpus_used=axis.usage((*each, 1) for each in _gpu_use(here, axis)),
    )


def _ended(history: Iterable[Result], wanted: RunFilter) -> Collection[Result]:
    """Return the selected runs of a history that have started, each once."""
    found: dict[tuple[object, ...], Result] = {}
    for run in history:
        start_ns, end_ns = run.started_at_ns, run.ended_at_ns
        if start_ns is not None and end_ns is not None and 0 <= end_ns - start_ns <= LARGEST and wanted.wants(run):
            found.setdefault((run.job, run.run, start_ns), run)
    return found.values()


def _going_on(spool: Spool, wanted: RunFilter, now_ns: int) -> list[Result]:
    """Return the selected runs of the jobs in `running/`."""
    found = []
    for row in JobLister(spool, now_ns).listing(recent=0).rows:
        record = spool.grant(row.name, row.run) if row.place == RUNNING and row.run is not None else None
        if record is None or row.started_at_ns is None or row.started_at_ns > now_ns or not wanted.wants(row):
            continue
        spec = spool.spec(row.name, record.run)
        run = Result(
            row.name, record.run, record.attempt, row.state, "", started_at_ns=row.started_at_ns, user=row.user,
            project=row.project, group=spec.group if spec is not None else None, grant=record.grant,
            executor=record.executor,
        )  # fmt: skip
        found.append(run)
    return found


def _start(run: Result) -> int:
    return run.started_at_ns or 0


def _overlaps(run: Result, since_ns: int, until_ns: int) -> bool:
    """Whether part of a run is in the period; for a run without duration, its instant."""
    end = until_ns if run.ended_at_ns is None else run.ended_at_ns
    return _start(run) < until_ns and (end > since_ns or end == run.started_at_ns == since_ns)


class _Axis:
    """The period, in columns of equal length; the last may extend beyond its end."""

    def __init__(self, begin_ns: int, end_ns: int, columns: int) -> None:
        self.begin_ns = begin_ns
        self.end_ns = end_ns
        self.step_ns = max(-(-(end_ns - begin_ns) // columns), 1)
        self.columns = -(-(end_ns - begin_ns) // self.step_ns)

    def column(self, at_ns: int) -> int:
        """Return the column of an instant within the period."""
        return min(max(at_ns - self.begin_ns, 0) // self.step_ns, self.columns - 1)

    def length(self, column: int) -> int:
        """Return the part of the period in a column, in ns."""
        return min(self.step_ns, self.end_ns - self.begin_ns - column * self.step_ns)

    def cut(self, run: Result) -> tuple[int, int]:
        """Return the part of a run within the period."""
        end_ns = self.end_ns if run.ended_at_ns is None else min(run.ended_at_ns, self.end_ns)
        return max(_start(run), self.begin_ns), end_ns

    def parts(self, start_ns: int, end_ns: int) -> Iterator[tuple[int, int]]:
        """Yield the columns of an interval, with its ns in each; at least one."""
        first, last = self.column(start_ns), self.column(max(start_ns, end_ns - 1))
        if first == last:
            yield first, max(end_ns - start_ns, 1)
            return
        yield first, self.begin_ns + (first + 1) * self.step_ns - start_ns
        for between in range(first + 1, last):
            yield between, self.step_ns
        yield last, end_ns - self.begin_ns - last * self.step_ns

    def usage(self, amounts: Iterable[tuple[int, int, int]]) -> TimelineUse:
        """Return the sum of *amounts*, each present from one instant to another."""
        changes: Counter[int] = Counter()
        within = 0
        for start_ns, end_ns, amount in amounts:
            if amount and start_ns < end_ns:
                changes[start_ns] += amount
                changes[end_ns] -= amount
                within += amount * max(min(end_ns, self.end_ns) - max(start_ns, self.begin_ns), 0)
        highest = max(accumulate(changes[at_ns] for at_ns in sorted(changes)), default=0)
        return TimelineUse(within / (self.end_ns - self.begin_ns), highest)


def _group(run: Result, by: By) -> str:
    key = GROUP_KEYS[by](run)
    return NO_GROUP if key is None else key


def _groups(runs: Iterable[Result], by: By, axis: _Axis) -> tuple[str, ...]:
    """Return the groups with the largest use: of GPUs, or if equal, of CPUs."""
    held: dict[str, tuple[int, int]] = {}
    for run in runs:
        start_ns, end_ns = axis.cut(run)
        key = _group(run, by)
        gpu_ns, cpu_ns = held.get(key, (0, 0))
        held[key] = (
            gpu_ns + len(run.gpus) * (end_ns - start_ns),
            cpu_ns + run.grant.cpus * (end_ns - start_ns),
        )
    ordered = sorted(held, key=lambda key: (-held[key][0], -held[key][1], key))
    few = by is By.STATE or len(ordered) <= _MOST_GROUPS
    return tuple(ordered) if few else (*ordered[: _MOST_GROUPS - 1], OTHERS)


def _gpu_use(runs: Iterable[Result], axis: _Axis) -> Iterator[tuple[int, int]]:
    """Yield the intervals in which GPUs were in use; a GPU shared by several runs counts once."""
    use: dict[str, list[tuple[int, int]]] = {}  # of each GPU, in the order of starts, disjoint
    for run in runs:
        start_ns, end_ns = axis.cut(run)
        for gpu in run.gpus:
            spans = use.setdefault(gpu, [])
            if spans and start_ns <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(spans[-1][1], end_ns)
            else:
                spans.append((start_ns, end_ns))
    for spans in use.values():
        yield from spans


class _GridRow:
    """The cells of a row that were in use: for each column the runs that had some of it, and for how long."""

    def __init__(self, axis: _Axis) -> None:
        self._axis = axis
        self._cells: dict[int, list[tuple[int, Result]]] = {}
        self.end_ns = 0  # of its last run

    def add(self, run: Result, lanes: int = 1) -> None:
        """Count a run that had *lanes* of the row."""
        self.end_ns = max(self.end_ns, LARGEST if run.ended_at_ns is None else run.ended_at_ns)
        for column, held_ns in self._axis.parts(*self._axis.cut(run)):
            self._cells.setdefault(column, []).append((held_ns * lanes, run))

    def bars(self, lanes: int) -> tuple[LaneBar, ...]:
        """Return the row, which has that many lanes, as bars: adjacent columns that look the same are merged."""
        found: list[LaneBar] = []
        for column in sorted(self._cells):
            held = self._cells[column]
            share = sum(ns for ns, _ in held) / (lanes * self._axis.length(column))
            busy = max(round(min(share, 1.0) * _SHADES), 1) / _SHADES
            bar = LaneBar(column, column + 1, busy, max(held, key=lambda each: each[0])[1], len(held) == 1)
            if found and replace(found[-1], first=column, last=column + 1) == bar and found[-1].last == column:
                bar = replace(bar, first=found.pop().first)
            found.append(bar)
        return tuple(found)


def _cpu_rows(runs: Sequence[Result], axis: _Axis, cpus: int, most: int) -> tuple[TimelineRow, ...]:
    """Return the CPUs in at most *most* rows; with fewer rows than CPUs, only as many as were in use."""
    placed = list(_placed(runs))
    used = max((lanes.bit_length() for _, lanes in placed), default=0)
    lanes = max(used, min(cpus, most))
    each = max(-(-lanes // most), 1)  # lanes of a row
    rows = [_GridRow(axis) for _ in range(0, lanes, each)]
    for run, mask in placed:
        while mask:
            at = ((mask & -mask).bit_length() - 1) // each
            part = (mask >> at * each) & ((1 << each) - 1)
            rows[at].add(run, part.bit_count())
            mask &= ~(part << at * each)
    found, begin = [], 0 if any(run.grant.cpu_list for run in runs) else 1  # the kernel counts them from 0
    for at, row in enumerate(rows):
        first, last = at * each + begin, min((at + 1) * each, lanes) + begin - 1
        label = f"CPU {first}" if first == last else f"CPU {first}-{last}"
        found.append(TimelineRow(label, 0, row.bars(last - first + 1)))
    return tuple(found)


def _placed(runs: Iterable[Result]) -> Iterator[tuple[Result, int]]:
    """Yield each run with its lanes as bits: its own CPUs, or the lowest free ones, adjacent if there is room.

    There are as many lanes as needed, since the machine's size at that time is unknown.
    """
    taken = 0
    ends: list[tuple[int, int]] = []  # with the lanes that are free from then on
    for run in runs:
        while ends and ends[0][0] <= _start(run):
            taken &= ~heapq.heappop(ends)[1]
        if not run.grant.cpus:
            continue
        lanes = _own(run) or _free(taken, run.grant.cpus)
        taken |= lanes
        heapq.heappush(ends, (LARGEST if run.ended_at_ns is None else run.ended_at_ns, lanes))
        yield run, lanes


def _own(run: Result) -> int:
    """Return the CPUs that a run was pinned to, as bits; 0 if it was not pinned."""
    cpus = cpus_in(run.grant.cpu_list) if run.grant.cpu_list else ()
    return sum(1 << cpu for cpu in cpus) if len(cpus) == run.grant.cpus else 0


def _free(taken: int, count: int) -> int:
    """Return the lowest *count* adjacent bits not in *taken*, within its length; the lowest of all if it has none."""
    wanted, lanes = (1 << count) - 1, 0
    for at in range(taken.bit_length() - count + 1):
        if not taken & wanted << at:
            return wanted << at
    while lanes.bit_count() < count:
        lanes |= ~(taken | lanes) & (taken | lanes) + 1
    return lanes


def _gpu_rows(runs: Iterable[Result], axis: _Axis, gpus: Mapping[str, int]) -> tuple[TimelineRow, ...]:
    """Return a row for each GPU, and one more for each run beside others that shared it."""
    tracks: dict[str, list[_GridRow]] = {uuid: [_GridRow(axis)] for uuid in gpus}
    for run in runs:
        for gpu in run.gpus:
            free = next((row for row in tracks[gpu] if row.end_ns <= _start(run)), None)
            if free is None and len(tracks[gpu]) < _TRACKS:
                tracks[gpu].append(_GridRow(axis))
            (free or tracks[gpu][-1]).add(run)
    known = Counter(gpus.values())
    found = []
    for uuid in sorted(gpus, key=lambda uuid: (gpus[uuid] < 0, gpus[uuid], uuid)):
        index = gpus[uuid]
        short = uuid.removeprefix("GPU-")[:8]
        label = f"GPU {index}" if index >= 0 and known[index] == 1 else f"GPU {index} {short}" if index >= 0 else short
        found += [TimelineRow(label, at, cells.bars(1)) for at, cells in enumerate(tracks[uuid])]
    return tuple(found)
