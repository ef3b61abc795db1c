"""The runs of a period, for pictures: rows of CPUs and GPUs, their use, waits and memory.

A picture has columns, intervals of equal length, and so do these values: a hundred thousand runs are reduced to the
cells. The history has the GPUs of a run and its number of CPUs, and which these are only if it was pinned. The CPUs of
the others are laid out: in the order of their starts, runs take the lowest free rows, adjacent ones if possible.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from spool.core.accounting import GROUP_KEYS, By, ReadyTimes, RunFilter, StepFunction
from spool.core.errors import UsageError
from spool.core.layout import RUNNING, engine_of
from spool.core.model import SECOND_NS, Grant, Machine, RunAccount
from spool.core.units import LARGEST, cpus_in, nearest_rank
from spool.formats.run_records import GrantRecord, compacted
from spool.query.jobs import RECENT_NS, JobLister
from spool.query.rows import JobRow
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
_SHORTEST_NS = 600 * SECOND_NS  # of a period that ends now


class TimelineRun(Struct, frozen=True):
    """One run that has started, and when its wait began: at its submission, or at the end of the previous run."""

    account: RunAccount
    started_at_ns: int
    ready_at_ns: int | None

    @property
    def job(self) -> str:
        """The name of its job."""
        return self.account.job

    @property
    def ended_at_ns(self) -> int | None:
        """When it ended; None: it goes on."""
        return self.account.ended_at_ns

    @property
    def elsewhere(self) -> str | None:
        """The engine of another machine that ran it; None: this machine."""
        return engine_of(self.account.executor)


class LaneBar(Struct, frozen=True):
    """Adjacent columns of a row, `first` up to, not including, `last`; mostly of one run.

    `busy` is the share of the row's CPUs, and of the time, that runs had. `alone`: no other run had any.
    """

    first: int
    last: int
    busy: float
    run: TimelineRun
    alone: bool


class TimelineRow(Struct, frozen=True):
    """A row of a chart: some CPUs, a GPU, or one of the tracks of a shared GPU."""

    label: str
    track: int  # 0: the first row of a GPU, mostly the only one
    bars: tuple[LaneBar, ...]


class WaitTimes(Struct, frozen=True):
    """Waits of runs before their start."""

    runs: int
    median_ns: int
    p90_ns: int
    longest_ns: int


class UsageCurve(Struct, frozen=True):
    """Resource use: the mean over each column, the mean over the whole period, and the maximum."""

    columns: tuple[float, ...]
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
    """The runs of a period. Column *n* begins at `since_at_ns + n * step_ns`.

    For memory in use, each run counts with its peak, if known, from its start to its end.
    """

    since_at_ns: int
    until_at_ns: int
    step_ns: int
    at_ns: int  # the time of the look
    by: By
    groups: tuple[str, ...]  # the largest first, OTHERS last
    cpus: int  # the machine's total for jobs, as for its memory
    gpus: int
    memory_bytes: int
    runs: int
    elsewhere: dict[str, int]  # runs on each engine of another machine: these are in no row and no curve
    going_on: int
    cpu_rows: tuple[TimelineRow, ...]
    gpu_rows: tuple[TimelineRow, ...]
    cpus_used: UsageCurve
    gpus_used: UsageCurve
    memory_asked: UsageCurve  # in bytes
    memory_used: UsageCurve  # in bytes
    waits: tuple[WaitTimes | None, ...]  # of the runs that started in that column
    all_waits: WaitTimes | None
    unreadable: int = 0  # lines of the history
    problems: tuple[str, ...] = ()

    def group_of(self, run: TimelineRun) -> str:
        """Return the group of a run, one of `groups`."""
        key = _group(run, self.by)
        return key if key in self.groups else OTHERS


def timeline(spool: Spool, wanted: RunFilter, frame: Frame, now_ns: int | None = None) -> Timeline:
    """Return the timeline of a period: the selected runs, cut at its edges.

    By default a period begins a day before its end, from the first run on; without an end it goes up to the last run.
    Raises UsageError for an empty period.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    until_ns = now_ns if wanted.until_at_ns is None else min(wanted.until_at_ns, now_ns)
    since_ns = until_ns - RECENT_NS if wanted.since_at_ns is None else wanted.since_at_ns
    if since_ns >= until_ns:
        raise UsageError("cannot draw runs: the period is empty; --since must be before --until, and before now")
    seen, history = _Seen(now_ns), History(spool.root)
    rows = _going_on(spool, wanted, now_ns)  # read before the history, which has those that end meanwhile
    ended = list(seen.ended(history.since(since_ns), wanted))
    runs = _within([*ended, *seen.going_on(spool, rows)], since_ns, until_ns)
    if runs and wanted.since_at_ns is None:
        since_ns = max(since_ns, min(_ready(run) for run in runs))
        if wanted.until_at_ns is None and all(run.ended_at_ns is not None for run in runs):
            until_ns = max(since_ns + 1, *(run.ended_at_ns or 0 for run in runs))
    machine = machine_now(spool, now_ns, patience_ns=_PATIENCE_NS)
    drawn = _drawn(runs, _Axis(since_ns, until_ns, frame.columns), frame, seen, machine)
    return replace(drawn, unreadable=history.unreadable, problems=tuple(history.problems))


def last_day(
    ended: Iterable[RunAccount], going_on: Iterable[TimelineRun], machine: Machine, frame: Frame, now_ns: int
) -> Timeline:
    """Return the timeline of the last day, from its first run on, from runs that are known already; reads nothing."""
    seen, since_ns = _Seen(now_ns), now_ns - RECENT_NS
    runs = list(seen.ended(ended, RunFilter()))
    runs = _within(
        [*runs, *(run for run in going_on if not seen.has_ended(run.job, run.account.run))], since_ns, now_ns
    )
    if runs:
        since_ns = max(since_ns, min(now_ns - _SHORTEST_NS, *map(_ready, runs)))
    return _drawn(runs, _Axis(since_ns, now_ns, frame.columns), frame, seen, machine)


def _within(runs: Iterable[TimelineRun], since_ns: int, until_ns: int) -> list[TimelineRun]:
    """Return the runs that overlap the period, in the order of their starts."""
    found = [run for run in runs if _overlaps(run, since_ns, until_ns)]
    return sorted(found, key=lambda run: (run.started_at_ns, run.job, run.account.run))


def _drawn(runs: Sequence[TimelineRun], axis: _Axis, frame: Frame, seen: _Seen, machine: Machine) -> Timeline:
    """Return the timeline of these runs, which are in the order of their starts."""
    gpus = seen.gpus | {gpu.uuid: gpu.index for gpu in machine.gpus}
    here = [run for run in runs if run.elsewhere is None]
    by = frame.by if frame.by is not None else By.STATE if len({run.account.user for run in runs}) < 2 else By.USER
    waits: dict[int, list[int]] = {}
    for run in runs:
        if run.ready_at_ns is not None and axis.begin_ns <= run.started_at_ns and run.ready_at_ns <= run.started_at_ns:
            waits.setdefault(axis.column(run.started_at_ns), []).append(run.started_at_ns - run.ready_at_ns)
    return Timeline(
        since_at_ns=axis.begin_ns,
        until_at_ns=axis.end_ns,
        step_ns=axis.step_ns,
        at_ns=seen.now_ns,
        by=by,
        groups=_groups(here, by, axis),
        cpus=machine.cpus,
        gpus=len(gpus),
        memory_bytes=machine.memory_bytes,
        runs=len(runs),
        elsewhere=dict(Counter(run.elsewhere for run in runs if run.elsewhere is not None)),
        going_on=sum(run.ended_at_ns is None for run in runs),
        cpu_rows=_cpu_rows(here, axis, machine.cpus, frame.cpu_rows),
        gpu_rows=_gpu_rows(here, axis, gpus),
        cpus_used=axis.usage((*axis.cut(run), run.account.cpus) for run in here),
        gpus_used=axis.usage((*each, 1) for each in _gpu_use(here, axis)),
        memory_asked=axis.usage((*axis.cut(run), run.account.memory_bytes or 0) for run in here),
        memory_used=axis.usage((*axis.cut(run), run.account.peak_memory_bytes or 0) for run in here),
        waits=tuple(_summary(waits.get(at, ())) for at in range(axis.columns)),
        all_waits=_summary([wait for listed in waits.values() for wait in listed]),
    )


class _Seen:
    """Facts from the runs so far: the ended ones, the begin of the waits of others, and the GPUs."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.gpus: dict[str, int] = {}  # the last known index of each; below 0: unknown
        self._clock = ReadyTimes()
        self._ended: set[tuple[str, int]] = set()

    def ended(self, history: Iterable[RunAccount], wanted: RunFilter) -> Iterator[TimelineRun]:
        """Yield the selected runs of a history, each once."""
        clock, seen = self._clock, set()
        for run in history:
            if run.started_at_ns is None or run.ended_at_ns is None or not wanted.wants(run):
                clock.of(run)
                continue
            mark = run.job, run.run, run.started_at_ns
            if mark not in seen and 0 <= run.ended_at_ns - run.started_at_ns <= LARGEST:
                seen.add(mark)
                self._ended.add(mark[:2])
                found = TimelineRun(compacted(run), run.started_at_ns, clock.of(run))
                if run.gpus and found.elsewhere is None:
                    self._note(run.gpus, run.gpu_indices)
                yield found

    def has_ended(self, job: str, run: int | None) -> bool:
        """Whether that run was among those that have ended."""
        return (job, run) in self._ended

    def going_on(self, spool: Spool, rows: Iterable[tuple[JobRow, GrantRecord]]) -> Iterator[TimelineRun]:
        """Yield the runs that have not ended since they were listed."""
        for row, record in rows:
            if not self.has_ended(row.name, row.run):
                self._note(record.grant.gpu_uuids, record.grant.gpu_indices)
                first = record.attempt == 1 and not record.requeues
                ready_ns = self._clock.going_on.get(row.name, record.submitted_at_ns if first else None)
                spec = spool.spec(row.name, record.run)
                group = spec.group if spec is not None else None
                if (run := live_run(row, record.grant, record.executor, ready_ns, group)) is not None:
                    yield run

    def _note(self, uuids: Sequence[str], indices: Sequence[int]) -> None:
        known = len(uuids) == len(indices)
        self.gpus.update(zip(uuids, indices, strict=True) if known else dict.fromkeys(uuids, -1))


def _going_on(spool: Spool, wanted: RunFilter, now_ns: int) -> list[tuple[JobRow, GrantRecord]]:
    """Return the selected runs of the jobs in `running/`."""
    found = []
    for row in JobLister(spool, now_ns).listing(recent=0).rows:
        if row.place == RUNNING and row.run is not None and wanted.wants(row):
            record = spool.grant(row.name, row.run)
            if record is not None and row.started_at_ns is not None and row.started_at_ns <= now_ns:
                found.append((row, record))
    return found


def live_run(
    row: JobRow, grant: Grant, executor: str | None, ready_ns: int | None, group: str | None = None
) -> TimelineRun | None:
    """Return the run of *row*, which goes on; None if it has not started."""
    if row.run is None or row.started_at_ns is None:
        return None
    account = RunAccount(
        row.name,
        row.run,
        row.state.value,
        cpus=grant.cpus,
        gpus=grant.gpu_uuids,
        memory_bytes=grant.memory_bytes,
        cpu_list=grant.cpu_list,
        user=row.user,
        project=row.project,
        group=group,
        executor=executor,
    )
    return TimelineRun(account, row.started_at_ns, ready_ns)


def _overlaps(run: TimelineRun, since_ns: int, until_ns: int) -> bool:
    """Whether part of a run is in the period; for a run without duration, its instant."""
    end = until_ns if run.ended_at_ns is None else run.ended_at_ns
    return run.started_at_ns < until_ns and (end > since_ns or end == run.started_at_ns == since_ns)


def _ready(run: TimelineRun) -> int:
    return run.started_at_ns if run.ready_at_ns is None else min(run.ready_at_ns, run.started_at_ns)


def _summary(waits: Sequence[int]) -> WaitTimes | None:
    ordered = sorted(waits)
    median, p90 = nearest_rank(ordered, 50), nearest_rank(ordered, 90)
    return None if median is None or p90 is None else WaitTimes(len(ordered), median, p90, ordered[-1])


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

    def cut(self, run: TimelineRun) -> tuple[int, int]:
        """Return the part of a run within the period."""
        end_ns = self.end_ns if run.ended_at_ns is None else min(run.ended_at_ns, self.end_ns)
        return max(run.started_at_ns, self.begin_ns), end_ns

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

    def usage(self, amounts: Iterable[tuple[int, int, int]]) -> UsageCurve:
        """Return the sum of *amounts*, each present from one instant to another."""
        changes: Counter[int] = Counter()
        for start_ns, end_ns, amount in amounts:
            if amount and start_ns < end_ns:
                changes[start_ns] += amount
                changes[end_ns] -= amount
        edges = [self.begin_ns + at * self.step_ns for at in range(self.columns)]
        steps = StepFunction(changes)
        areas = steps.areas([*edges, self.end_ns])
        means = tuple(area / self.length(at) for at, area in enumerate(areas))
        return UsageCurve(means, sum(areas) / (self.end_ns - self.begin_ns), steps.highest)


def _group(run: TimelineRun, by: By) -> str:
    key = GROUP_KEYS[by](run.account)
    return NO_GROUP if key is None else key


def _groups(runs: Iterable[TimelineRun], by: By, axis: _Axis) -> tuple[str, ...]:
    """Return the groups with the largest use: of GPUs, or if equal, of CPUs."""
    held: dict[str, tuple[int, int]] = {}
    for run in runs:
        start_ns, end_ns = axis.cut(run)
        key = _group(run, by)
        gpu_ns, cpu_ns = held.get(key, (0, 0))
        held[key] = (
            gpu_ns + len(run.account.gpus) * (end_ns - start_ns),
            cpu_ns + run.account.cpus * (end_ns - start_ns),
        )
    ordered = sorted(held, key=lambda key: (-held[key][0], -held[key][1], key))
    few = by is By.STATE or len(ordered) <= _MOST_GROUPS
    return tuple(ordered) if few else (*ordered[: _MOST_GROUPS - 1], OTHERS)


def _gpu_use(runs: Iterable[TimelineRun], axis: _Axis) -> Iterator[tuple[int, int]]:
    """Yield the intervals in which GPUs were in use; a GPU shared by several runs counts once."""
    use: dict[str, list[tuple[int, int]]] = {}  # of each GPU, in the order of starts, disjoint
    for run in runs:
        start_ns, end_ns = axis.cut(run)
        for gpu in run.account.gpus:
            spans = use.setdefault(gpu, [])
            if spans and start_ns <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(spans[-1][1], end_ns)
            else:
                spans.append((start_ns, end_ns))
    for spans in use.values():
        yield from spans


class _GridCell:
    """One column of a row: how much was in use, and by which run most."""

    __slots__ = ("alone", "busy_ns", "most_ns", "run")

    def __init__(self, run: TimelineRun) -> None:
        self.run = run
        self.busy_ns = self.most_ns = 0
        self.alone = True

    def add(self, run: TimelineRun, held_ns: int) -> None:
        self.busy_ns += held_ns
        if run is not self.run:
            self.alone = False
        if held_ns > self.most_ns:
            self.run, self.most_ns = run, held_ns


class _GridRow:
    """The cells of a row that were in use."""

    def __init__(self, axis: _Axis) -> None:
        self._axis = axis
        self._cells: dict[int, _GridCell] = {}

    def add(self, run: TimelineRun, lanes: int = 1) -> None:
        """Count a run that had *lanes* of the row."""
        for column, held_ns in self._axis.parts(*self._axis.cut(run)):
            cell = self._cells.get(column)
            if cell is None:
                cell = self._cells[column] = _GridCell(run)
            cell.add(run, held_ns * lanes)

    def bars(self, lanes: int) -> tuple[LaneBar, ...]:
        """Return the row, which has that many lanes, as bars: adjacent columns that look the same are merged."""
        found: list[LaneBar] = []
        for column in sorted(self._cells):
            cell = self._cells[column]
            share = cell.busy_ns / (lanes * self._axis.length(column))
            busy = max(round(min(share, 1.0) * _SHADES), 1) / _SHADES
            bar = LaneBar(column, column + 1, busy, cell.run, cell.alone)
            if found and replace(found[-1], first=column, last=column + 1) == bar and found[-1].last == column:
                bar = replace(bar, first=found.pop().first)
            found.append(bar)
        return tuple(found)


def _cpu_rows(runs: Sequence[TimelineRun], axis: _Axis, cpus: int, most: int) -> tuple[TimelineRow, ...]:
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
    found, begin = [], 0 if any(run.account.cpu_list for run in runs) else 1  # the kernel counts them from 0
    for at, row in enumerate(rows):
        first, last = at * each + begin, min((at + 1) * each, lanes) + begin - 1
        label = f"CPU {first}" if first == last else f"CPU {first}-{last}"
        found.append(TimelineRow(label, 0, row.bars(last - first + 1)))
    return tuple(found)


def _placed(runs: Iterable[TimelineRun]) -> Iterator[tuple[TimelineRun, int]]:
    """Yield each run with its lanes as bits: its own CPUs, or the lowest free ones, adjacent if there is room.

    There are as many lanes as needed, since the machine's size at that time is unknown.
    """
    taken = 0
    ends: list[tuple[int, int]] = []  # with the lanes that are free from then on
    for run in runs:
        while ends and ends[0][0] <= run.started_at_ns:
            taken &= ~heapq.heappop(ends)[1]
        if not run.account.cpus:
            continue
        lanes = _own(run.account) or _free(taken, run.account.cpus)
        taken |= lanes
        heapq.heappush(ends, (LARGEST if run.ended_at_ns is None else run.ended_at_ns, lanes))
        yield run, lanes


def _own(run: RunAccount) -> int:
    """Return the CPUs that a run was pinned to, as bits; 0 if it was not pinned."""
    if not run.cpu_list:
        return 0
    cpus = cpus_in(run.cpu_list)
    return sum(1 << cpu for cpu in cpus) if len(cpus) == run.cpus else 0


def _free(taken: int, count: int) -> int:
    """Return the lowest *count* adjacent bits not in *taken*, within its length if possible."""
    length = max(taken.bit_length(), count)
    free = ~taken & ((1 << length) - 1)
    starts, have = free, 1  # bits that begin a group of *have* free ones
    while have < count and starts:
        more = min(have, count - have)
        starts &= starts >> more
        have += more
    if starts:
        return ((1 << count) - 1) * (starts & -starts)
    if free.bit_count() < count:
        free |= ((1 << count - free.bit_count()) - 1) << length
    lanes = 0
    for _ in range(count):
        lanes |= free & -free
        free &= free - 1
    return lanes


def _gpu_rows(runs: Iterable[TimelineRun], axis: _Axis, gpus: Mapping[str, int]) -> tuple[TimelineRow, ...]:
    """Return a row for each GPU, and one more for each run beside others that shared it."""
    tracks: dict[str, list[_GridRow]] = {uuid: [_GridRow(axis)] for uuid in gpus}
    ends: dict[str, list[int]] = {uuid: [0] for uuid in gpus}
    for run in runs:
        end_ns = LARGEST if run.ended_at_ns is None else run.ended_at_ns
        for gpu in run.account.gpus:
            free = next((at for at, end in enumerate(ends[gpu]) if end <= run.started_at_ns), len(ends[gpu]))
            track = min(free, _TRACKS - 1)
            if track == len(ends[gpu]):
                ends[gpu].append(0)
                tracks[gpu].append(_GridRow(axis))
            ends[gpu][track] = max(end_ns, ends[gpu][track])
            tracks[gpu][track].add(run)
    known = Counter(gpus.values())
    found = []
    for uuid in sorted(gpus, key=lambda uuid: (gpus[uuid] < 0, gpus[uuid], uuid)):
        index = gpus[uuid]
        short = uuid.removeprefix("GPU-")[:8]
        label = f"GPU {index}" if index >= 0 and known[index] == 1 else f"GPU {index} {short}" if index >= 0 else short
        found += [TimelineRow(label, at, cells.bars(1)) for at, cells in enumerate(tracks[uuid])]
    return tuple(found)
