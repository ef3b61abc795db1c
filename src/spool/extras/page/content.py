"""The content of the status page, as values: the dispatcher's last view, and the history of the last day.

No job file is read, but for the parameters of an array: `state.json` has the jobs, and only runs on the page are asked
for their progress. The lists are limited, so that the page of a large spool is no larger than a screen can use.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice

from msgspec import Struct, field
from msgspec.structs import replace

from spool.client.output import last_words_of, progress_of
from spool.core import layout
from spool.core.accounting import By, GroupSums, Ledger, RunFilter, Totals
from spool.core.errors import SpoolError
from spool.core.gpuuse import RecentUse
from spool.core.layout import natural
from spool.core.model import ALIVE, OUTCOMES, Grant, Machine, Result, RunAccount, State
from spool.core.runtimes import part_done
from spool.formats.config import Config
from spool.formats.state import GpuView, JobView, MachineView, StateView, parse_state
from spool.query.details import FAILURES
from spool.query.jobs import RECENT_NS, with_parameters
from spool.query.listing import ListedJob, Outlook, OutlookReader, folded
from spool.query.rows import JobRow, in_words, row_of_result, row_of_view
from spool.query.shared import GpuLease, MachineSharing, leases_on, problems_of, shared_machine, without_users
from spool.query.timeline import Frame, Timeline, TimelineRun, last_day, live_run
from spool.store.edited import Settings
from spool.store.history import RecentHistory
from spool.store.reading import read_bytes
from spool.store.tolerant import TolerantSpool

MOST_RUNS = 60
MOST_WAITING = 100
MOST_HELD = 40
MOST_ENDED = 15
MOST_USERS = 12
COLUMNS = 192  # of the timeline: seven and a half minutes each
CPU_ROWS = 16
_DEEP = 2000  # of the waiting jobs: only this many are read to find those on the page
_DEEP_ENDED = 300  # likewise of the ended ones
_MOST_HISTORY = 20_000  # runs of the last day that are counted: 10 MB
_MOST_STATE = 1 << 30
_DAY_SHARE = 100  # counting the last day may use one part in N of a processor
_HEAD = 256  # bytes of state.json: they contain the time of its writing
_WAIT = frozenset({State.QUEUED, State.SUBMITTED})
_BIG = 1 << 62


class RunShown(Struct, frozen=True):
    """A run. `gpus` are the indices of its GPUs, `percent` is the progress that it reports as a number.

    `gpu_mean_percent`: the share of its time in which its GPUs computed, on average.
    """

    row: JobRow
    gpus: tuple[int, ...]
    time_limit_ns: int | None
    gpu_mean_percent: int | None = None
    percent: int | None = None


class Shown(Struct, frozen=True):
    """The first of some jobs, and the number of all of them."""

    jobs: tuple[ListedJob, ...] = ()
    total: int = 0

    @property
    def left_out(self) -> int:
        """The number of jobs that are not shown."""
        return self.total - sum(job.count for job in self.jobs)


class UserDay(Struct, frozen=True):
    """The runs of one user within the last day, those that go on counted as if they had ended now, and what waits."""

    user: str
    totals: Totals
    waiting: int

    @property
    def ended(self) -> int:
        """The number of runs that have ended."""
        return sum(self.totals.outcomes.values())

    @property
    def running(self) -> int:
        """The number of runs that go on."""
        return self.totals.runs - self.ended

    @property
    def failed(self) -> int:
        """The number of runs that did not finish, without cancelled ones."""
        return self.ended - self.totals.outcomes[State.FINISHED] - self.totals.outcomes[State.CANCELLED]


class Day(Struct, frozen=True):
    """The history of the last 24 hours. `totals` counts runs that go on as if they had ended now."""

    totals: Totals = GroupSums().totals()
    users: tuple[UserDay, ...] = ()
    users_left_out: int = 0
    last: tuple[ListedJob, ...] = ()  # newest first
    timeline: Timeline | None = None  # None: there were no runs
    cut: bool = False  # more runs have ended than are counted


class PageContent(Struct, frozen=True):
    """The content of the page at one moment."""

    spool: str
    host: str
    at_ns: int  # the time of this content
    served: bool  # a dispatcher is running
    view_at_ns: int | None  # of the dispatcher's view; None: there is none
    paused: bool
    problems: tuple[str, ...]
    counts: Mapping[str, int]  # jobs by state, arrays apart
    machine: MachineView | None
    gpus: tuple[GpuView, ...]  # by index, as seen last
    gpus_watched: bool  # else no job needs one, and the dispatcher does not look at them
    runs: tuple[RunShown, ...]
    runs_left_out: int
    waiting: Shown
    held: Shown  # and invalid ones
    day: Day
    shared: MachineSharing | None = None  # None: the machine is this spool's alone
    leases: Mapping[str, tuple[GpuLease, ...]] = field(default_factory=dict)  # of others, by the UUID of the GPU
    outputs: Mapping[tuple[str, int | None], tuple[str, ...]] = field(default_factory=dict)  # last lines of failed runs
    recent: RecentUse = RecentUse()

    @property
    def active(self) -> int:
        """The number of jobs that wait or run."""
        return sum(self.counts.get(state, 0) for state in (*_WAIT, *ALIVE))


class ContentReader:
    """Builds the page's content repeatedly, and reads only the changes.

    *config* returns the configuration in force; without it, that is read when it is needed.
    """

    def __init__(self, root: str, config: Callable[[], Config | None] = lambda: None) -> None:
        self._root = root
        self._config = config
        self._spool = TolerantSpool(root)  # a new one for each look
        self._history = RecentHistory(root, RECENT_NS, _MOST_HISTORY)
        self._view: StateView | None = None
        self._seen: object = None  # of the file that `_view` was read from
        self._damaged = ""
        self._gpus: tuple[GpuView, ...] = ()  # seen last
        self._day = Day()
        self._outputs: dict[tuple[str, int | None], tuple[str, ...]] = {}
        self._day_due_ns = 0
        self._day_problem = ""
        self._outlook = OutlookReader()
        self.aside_ns = 0  # processor time of the last look for work that has its own pace

    def changed(self) -> bool:
        """Whether the dispatcher has written a newer view than the one that was read."""
        return self._identity() != self._seen

    def read(self, now_ns: int, *, served: bool, with_output: bool = False) -> PageContent:
        """Return the content at *now_ns*. Read errors are part of it.

        *with_output*: also the last lines of failed runs, for a page that only the owner can read.
        """
        self._spool = TolerantSpool(self._root)
        self._read_view()
        view = self._view
        jobs = view.jobs if view is not None else {}
        rows = {name: row_of_view(name, _state(each.state), each, now_ns) for name, each in jobs.items()}
        waiting = [row for row in rows.values() if row.state in _WAIT]
        held = [row for row in rows.values() if row.state in (State.HELD, State.INVALID)]
        active = sorted((row for row in rows.values() if row.state in ALIVE), key=_by_start)
        real = [row for row in rows.values() if not row.array]
        self._read_day(now_ns, real)
        active, total = active[:MOST_RUNS], len(active)
        waiting.sort(key=_by_turn)
        asked = [*active, *waiting[:_DEEP]]
        outlook = self._outlook.look(self._spool, asked, now_ns, served=served and not self._spool.paused)
        self.aside_ns += self._outlook.took_ns
        runs = tuple(self._run(row, jobs[row.name], outlook, now_ns) for row in with_parameters(self._spool, active))
        waiting[:_DEEP] = [outlook.of(row, now_ns) for row in waiting[:_DEEP]]
        machine = view.machine if view is not None else None
        counts = Counter[State]()
        for word, number in (view.counts() if view is not None else {}).items():
            counts[_state(word)] += number
        lists = self._shown(waiting, MOST_WAITING), self._shown(held, MOST_HELD)
        shared = self._shared(now_ns)
        leases = self._leases(shared)
        return PageContent(
            spool=self._spool.root,
            host=view.host if view is not None else "",
            at_ns=now_ns,
            served=served,
            view_at_ns=view.at_ns if view is not None else None,
            paused=self._spool.paused,
            problems=(*problems_of(shared), *(in_words(each, now_ns) for each in self._problems())),
            counts={state.value: counts[state] for state in State if counts[state]},
            machine=machine,
            gpus=tuple(_without_users(gpu, leases) for gpu in self._gpus) if leases else self._gpus,
            gpus_watched=machine is not None and machine.gpus_at_ns is not None,
            runs=runs,
            runs_left_out=total - len(active),
            waiting=lists[0],
            held=lists[1],
            day=self._day,
            shared=shared,
            leases=leases,
            outputs=self._last_lines() if with_output else {},
            recent=view.recent.as_of(now_ns, counts[State.QUEUED] if served else None)
            if view is not None
            else RecentUse(),
        )

    def _last_lines(self) -> Mapping[tuple[str, int | None], tuple[str, ...]]:
        """Return the last lines of the failed runs among those that ended last; each is read once."""
        failed = [(job.row.name, job.row.run) for job in self._day.last if job.count == 1 and job.row.state in FAILURES]
        self._outputs = {
            (name, run): self._outputs.get((name, run)) or last_words_of(self._spool, name, run)
            for name, run in failed
            if run is not None
        }
        return {run: lines for run, lines in self._outputs.items() if lines}

    def _shared(self, now_ns: int) -> MachineSharing | None:
        """Return the other users' part, if the dispatcher's view says that the machine is shared."""
        machine = self._view.machine if self._view is not None else None
        if machine is None or machine.shared is None:
            return None
        return shared_machine(self._spool, now_ns, self._config() or Settings(self._spool.root).config)

    def _leases(self, shared: MachineSharing | None) -> dict[str, tuple[GpuLease, ...]]:
        if shared is None:
            return {}
        return {gpu.uuid: leases_on(gpu.gpu(), shared, [None for _ in gpu.jobs]) for gpu in self._gpus}

    def _problems(self) -> Iterator[str]:
        view = self._view
        if view is not None and view.machine is not None and view.machine.refusal:
            yield f"nothing starts: {view.machine.refusal}"
        yield from filter(None, (self._damaged, self._day_problem))
        yield from view.problems if view is not None else ()
        yield from self._spool.told()

    def _identity(self) -> object:
        """Return a value that differs between versions of `state.json`; its times change with each heartbeat."""
        path = self._spool.layout.at(layout.STATE)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(fd)
                return status.st_ino, status.st_size, os.pread(fd, _HEAD, 0)
            finally:
                os.close(fd)
        except OSError:
            return None

    def _read_view(self) -> None:
        seen = self._identity()
        if seen == self._seen and seen is not None:
            return
        data = read_bytes(self._spool.layout.at(layout.STATE), _MOST_STATE)
        view = parse_state(data) if data else None
        self._damaged = ""
        if data is None:
            self._view = None
        elif view is None:
            self._damaged = "state.json is not readable; the page shows the jobs of the last readable one, if any"
        else:
            self._view = view
            if view.machine is not None and view.machine.gpus_at_ns is not None:
                self._gpus = tuple(sorted(view.machine.gpus, key=lambda gpu: gpu.index))
        self._seen = seen

    def _shown(self, rows: list[JobRow], most: int) -> Shown:
        rows.sort(key=_by_turn)
        first = sorted(rows[:_DEEP], key=lambda row: (*_by_turn(row), natural(row.name)))
        return Shown(tuple(islice(folded(self._spool, first), most)), len(rows))

    def _run(self, row: JobRow, view: JobView, outlook: Outlook, now_ns: int) -> RunShown:
        index = {gpu.uuid: gpu.index for gpu in self._gpus}
        gpus = tuple(sorted(index[uuid] for uuid in view.gpu_uuids if uuid in index))
        if row.state is State.RUNNING and row.run is not None and not row.array:
            row.progress = progress_of(self._spool, row.name, row.run)
        done = part_done(row.progress)
        percent = round(100 * done) if done is not None else None
        row = outlook.of(row, now_ns)
        known = [use.mean_percent for use in view.gpu_use if use.mean_percent is not None]
        mean_percent = round(sum(known) / len(known)) if known else None
        return RunShown(row, gpus, view.time_limit_ns, mean_percent, percent)

    def _read_day(self, now_ns: int, rows: Collection[JobRow]) -> None:
        """Count the last day, unless that takes so long that it is postponed."""
        self.aside_ns = 0
        if now_ns < self._day_due_ns:
            return
        begun_ns = time.thread_time_ns()
        self._day_problem = ""
        try:
            self._day = self._counted(self._history.look(now_ns), rows, now_ns)
        except (OSError, SpoolError) as error:
            self._day_problem = f"the history cannot be read: {error}"
        self.aside_ns = time.thread_time_ns() - begun_ns
        self._day_due_ns = now_ns + _DAY_SHARE * self.aside_ns

    def _counted(self, ended: Collection[RunAccount], rows: Iterable[JobRow], now_ns: int) -> Day:
        view = self._view
        live = (
            list(filter(None, (_drawn(row, view.jobs[row.name]) for row in rows if row.state in ALIVE))) if view else []
        )
        waiting = Counter(row.user or "?" for row in rows if row.state in _WAIT)
        ledger = Ledger(RunFilter(since_at_ns=now_ns - RECENT_NS), By.USER)
        ledger.add(ended)
        ledger.add(
            replace(run.account, started_at_ns=run.started_at_ns, ended_at_ns=now_ns)
            for run in live
            if run.started_at_ns <= now_ns
        )
        found = ledger.statistics()
        groups = {user or "?": totals for user, totals in found.groups}
        users = [UserDay(user, groups.get(user, Day().totals), waiting[user]) for user in {*groups, *waiting}]
        users.sort(key=lambda each: (-each.totals.gpu_hours, -each.totals.cpu_hours, -each.ended, each.user))
        last = [_ended(result) for result in islice(self._spool.strict.accounts_since(None), _DEEP_ENDED)]
        drawn = None
        if view is not None and (machine := view.machine) is not None:
            gpus = tuple(gpu.gpu() for gpu in self._gpus)
            there = Machine(machine.cpus, machine.memory_bytes, gpus=gpus)
            drawn = last_day(ended, live, there, Frame(COLUMNS, CPU_ROWS), now_ns)
        return Day(
            totals=found.total,
            users=tuple(users[:MOST_USERS]),
            users_left_out=max(0, len(users) - MOST_USERS),
            last=tuple(folded(self._spool, last, OUTCOMES)[:MOST_ENDED]),
            timeline=drawn if drawn is not None and drawn.runs else None,
            cut=len(ended) >= _MOST_HISTORY,
        )


def _without_users(gpu: GpuView, leases: Mapping[str, tuple[GpuLease, ...]]) -> GpuView:
    return replace(gpu, foreign_processes=without_users(gpu.foreign_processes, leases[gpu.uuid]))


def _drawn(row: JobRow, view: JobView) -> TimelineRun | None:
    grant = Grant(row.cpus or 0, row.memory_bytes, view.gpu_uuids)
    return live_run(row, grant, view.engine, row.submitted_at_ns)


def _ended(result: Result) -> JobRow:
    row = row_of_result(result)
    return replace(row, reason="; ".join(filter(None, (row.reason, "runs again")))) if result.again else row


def _state(text: str) -> State:
    try:
        return State(text)
    except ValueError:  # written by a later version
        return State.QUEUED


def _by_turn(row: JobRow) -> tuple[bool, int, int]:
    return row.state is State.INVALID, -(row.priority or 0), row.submitted_at_ns or _BIG


def _by_start(row: JobRow) -> tuple[int, object]:
    return row.started_at_ns or _BIG, natural(row.name)
