"""The list of jobs of a spool, from the files and the dispatcher's last view.

The place of a job's file is the truth. `state.json` saves reading ten thousand files and has the reason why each job
waits; an entry that the files contradict is ignored.
"""

from __future__ import annotations

import fnmatch
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from spool.client.autostart import is_starting
from spool.core import layout
from spool.core.arrays import array_of, cancelled_by, progress
from spool.core.errors import InvalidRecord
from spool.core.errors import shown as printable
from spool.core.gpuuse import GpuWatch
from spool.core.layout import DONE, HELD, LOCAL_EXECUTORS, QUEUED, RUNNING, is_pattern, natural, why_not_name
from spool.core.lifecycle import LastSigns, Verdict, exit_words, handed_to, shown, suspended_words
from spool.core.model import NOT_SUSPENDED, SECOND_NS, Result, State, Stop, StopKind, Suspension
from spool.core.reasons import instant
from spool.formats.capabilities import engine_title
from spool.formats.run_records import ArrayRecord, GrantRecord, RunFiles, job_of_line, parse_history_line
from spool.formats.state import of_spec
from spool.query.rows import (
    ALL_JOBS,
    ORDERS,
    JobFilter,
    JobList,
    JobRow,
    ListedState,
    cancelled_unseen,
    in_words,
    last_view,
    row_of_result,
    row_of_view,
    usual_order,
    with_what_it_tells,
)
from spool.store.arrays import array_outcome, still_to_issue
from spool.store.disk import status_of
from spool.store.spool import Service, Spool
from spool.store.tolerant import unreadable

if TYPE_CHECKING:
    from spool.machine.processes import MachineProber  # imported on demand: it needs modules for the machine
    from spool.query.look import Look

RECENT = 10
NOBODY = {False: "no dispatcher is running", True: "a dispatcher is starting"}
RECENT_NS = 24 * 3600 * SECOND_NS
# States of the dispatcher's view that fit a file in that place. `starting` is so short that it is read anew.
_FITTING = {
    QUEUED: frozenset({State.QUEUED, State.INVALID, State.STOPPING}),
    HELD: frozenset({State.HELD, State.INVALID, State.STOPPING}),
    RUNNING: frozenset({State.SUBMITTED, State.RUNNING, State.STOPPING}),
}
_BEGUN = _FITTING[RUNNING] | {State.STARTING}
_ORDER = {RUNNING: 0, QUEUED: 1, HELD: 2}  # for several files of one name
_TICK_NS = 20_000_000  # two changes of a directory this close may have the same time
_LOOKS = 5  # for a file that keeps moving
_HELD = "held"  # the reason, unless spool itself holds the job
_NO_JOB = (".", "#", "~")  # hidden files, and files of editors
_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory"}
_STATES = {QUEUED: State.QUEUED, HELD: State.HELD, RUNNING: State.RUNNING}


class ShownRun(Struct, frozen=True):
    """A run in every view. `state` None: withdrawn before it began. `end`: its result, or what is known of it."""

    state: State | None
    reason: str
    end: Result | None = None
    suspension: Suspension = NOT_SUSPENDED


def list_jobs(
    spool: Spool,
    wanted: JobFilter = ALL_JOBS,
    *,
    everything: bool = False,
    order: str | None = None,
    in_full: bool = True,
) -> JobList:
    """Return the selected jobs, in one of ORDERS; by default, ended ones come first and the next to start last.

    Only the last few ended jobs are included, unless *everything* is requested, or jobs by name or in an ended state.
    *in_full*: the output of running jobs is read for their progress, and the files of arrays for the parameters of
    their tasks.
    """
    names = wanted.names
    only = (lambda name: any(fnmatch.fnmatchcase(name, each) for each in names)) if names else None
    ended = bool(wanted.states) and all(state.ended for state in wanted.states)
    picky = wanted.recent is not None and wanted != JobFilter(recent=wanted.recent)
    everything = everything or ended or picky or wanted.since_at_ns is not None
    for _ in range(2):  # one that is missing may have moved between the reads
        found = JobLister(spool).listing(everything=everything, only=only, recent=wanted.recent)
        missing = {name for name in names if not is_pattern(name)} - {row.name for row in found.rows}
        if not missing:
            break
    to_come = [row for name in missing if (row := row_to_come(spool, name)) is not None]
    listed = (*found.rows, *to_come)
    selected = listed if wanted == ALL_JOBS else filter(wanted.wants, listed)  # the common case in a long list
    rows = sorted(selected, key=ORDERS[order] if order is not None else usual_order)
    if wanted.recent is not None:
        last = sorted((row.ended_at_ns or 0 for row in rows if row.state.ended), reverse=True)[: wanted.recent]
        rows = [row for row in rows if not row.state.ended or (last and (row.ended_at_ns or 0) >= last[-1])]
    if in_full:
        rows = with_what_it_tells(spool, rows)
    unknown = missing.difference(row.name for row in to_come)
    return replace(found, rows=tuple(rows), unknown=tuple(name for name in names if name in unknown))


def row_to_come(spool: Spool, name: str) -> JobRow | None:
    """Return the task *name* of an array that has still to issue it: with the array's values; None if it is none."""
    array = JobLister(spool).row(array_of(name)) if spool.is_to_come(name) else None
    return None if array is None else to_come(array, name)


def to_come(array: JobRow, task: str) -> JobRow:
    """Return a task that the array in that row has still to issue."""
    no_run = replace(array, place=None, run=None, started_at_ns=None, array=False)
    return replace(no_run, name=task, state=State.QUEUED, reason="not issued yet")


class _FileMovedError(Exception):
    """A file of a job moved between the reading of its directory and the look at it."""


class JobLister:
    """Reads the jobs of a spool at one moment."""

    def __init__(self, spool: Spool, now_ns: int | None = None) -> None:
        self._spool = spool
        self.at_ns = self._now_ns = time.time_ns() if now_ns is None else now_ns
        self.service = spool.service()
        self.dispatcher = self.service is not Service.NONE
        self.state, self.stale_ns = self._last_view if self.dispatcher else (None, None)
        self._views: Mapping[str, JobRow] = self.state.jobs if self.state is not None else {}
        self._starting = not self.dispatcher and is_starting(spool.root)
        self._ignored: list[Ignored] = []
        self._without_file: dict[str, int] = {}  # runs of jobs without a file in `running/`
        self._listed: list[tuple[str, list[str]]] = []  # what was read of the active directories
        self._unissued: dict[str, set[str]] = {}  # tasks of arrays
        self._begun_ns = 0  # when reading the directories began

    @cached_property
    def _last_view(self) -> tuple[ListedState | None, int | None]:
        return last_view(self._spool, self._now_ns)

    @cached_property
    def _prober(self) -> MachineProber:
        from spool.machine.processes import MachineProber

        return MachineProber()

    def row(self, name: str) -> JobRow | None:
        """Return job *name*, None if there is none; if several files have that name, the one that comes first."""
        return next(iter(self.listing(only=lambda other: other == name).rows), None)

    def listing(
        self, *, everything: bool = False, only: Callable[[str], bool] | None = None, recent: int | None = None
    ) -> JobList:
        """Return the active jobs whose names *only* accepts, and *everything* that has ended.

        Or only the last *recent* ended ones; by default, the last few of a day.
        """
        self._ignored.clear()
        self._begun_ns = time.time_ns()
        active = self._active_files(only)
        rows = [row for name, places in active.items() for row in self._of_name(name, places)]
        listed = {row.name for row in rows}  # a file that left during the reading is in done/ by now
        done = {name for name in self._spool.names(DONE) if name not in listed and (only is None or only(name))}
        since_ns = self._now_ns - RECENT_NS if recent is None else 0
        most = None if everything or only is not None else RECENT if recent is None else recent
        ended = list(self._ended(done, most, since_ns)) if most != 0 else []
        if most is not None and most and not self.dispatcher:
            unseen = map(self._cancelled, cancelled_unseen(self._spool, done - {row.name for row in ended}))
            ended += [row for row in unseen if row is not None and (row.ended_at_ns or 0) >= since_ns]
            ended = sorted(ended, key=lambda row: row.ended_at_ns or 0)[-most:]
        rows += [replace(row, place=DONE) for row in ended]
        goes_on = any(not row.state.ended and row.state is not State.HELD for row in rows)
        told = self.state.problems if self.state is not None else ()
        return JobList(
            tuple(rows),
            self.dispatcher,
            self._starting,
            self.stale_ns,
            self._spool.paused,
            (*(in_words(each, self._now_ns) for each in told), *_in_short(self._ignored)),
            self._now_ns,
            unserved=goes_on and not self.dispatcher and not self._starting,
        )

    def _active_files(self, only: Callable[[str], bool] | None) -> dict[str, list[str]]:
        """Return the places of active jobs' files: `running/` first, since every second file waits for that.

        Files may move while the directories are read. A file that enters a directory after its reading has left one
        that was read before, or is read next; so `queued/` and `held/` are read again if they have changed.
        """
        found: dict[str, list[str]] = {}
        marks: dict[str, tuple[int, int]] = {}
        self._listed, self._unissued = [], {}
        for name, job in self._views.items():
            if job.array and job.run is not None:  # read first: a task that is issued meanwhile is listed twice
                with suppress(OSError):  # reported where its row is made
                    self._unissued[name] = still_to_issue(self._spool, name, job.run)
        for place in (QUEUED, HELD, RUNNING, QUEUED, HELD):
            mark = 0, 0
            with suppress(OSError):  # reported when it is read
                mark = self._spool.mark_of(place) or mark
            if place in marks and marks[place] == mark and mark[1] < self._begun_ns - _TICK_NS:
                continue
            again = place in marks
            marks[place] = mark
            names, others = self._spool.names_and_others(place)
            self._listed.append((place, names))
            if place != RUNNING and not again:
                self._ignored += ignored_by_name(place, others)
            for name in names if only is None else filter(only, names):
                if place not in found.setdefault(name, []):
                    found[name].append(place)
        self._without_file = {name: run for name, run in self._begun() if RUNNING not in found.get(name, ())}
        for name, run in self._without_file.items():
            if (only is None or only(name)) and self._goes_on(name, run):
                found.setdefault(name, []).append(RUNNING)
        for places in found.values():
            if len(places) > 1:
                places.sort(key=_ORDER.__getitem__)
        return found

    def _of_name(self, name: str, places: list[str]) -> Iterable[JobRow]:
        """Return the rows of a name: most have one file. A second one waits for the run of the first to end."""
        view = self._views.get(name) if places == [QUEUED] else None
        if view is not None and view.state is State.QUEUED:
            return (row_of_view(name, view, self._now_ns, QUEUED),)  # the common case in a long list
        for _ in range(_LOOKS):
            try:
                if len(places) > 1:
                    places = self._different(name, places)
                    if places == [QUEUED, HELD] and self._held_array(name) is not None:
                        places.reverse()
                rows = [self._readable(name, place, places[0] if at else None) for at, place in enumerate(places)]
                return [row for row in rows if row is not None]
            except _FileMovedError:
                there = self._spool.places(name)
                places = [place for place in (RUNNING, QUEUED, HELD) if place in there]
        return ()

    def _different(self, name: str, places: list[str]) -> list[str]:
        """Return the *places* with distinct files of that name; a moving file may be in two.

        A run whose file was removed counts as one in `running/`.
        """
        found: dict[int, str] = {}
        for place in places:
            try:
                found.setdefault(os.lstat(self._spool.layout.job_file(place, name)).st_ino, place)
            except FileNotFoundError:
                continue
            except OSError:  # reported when it is read
                found[-len(found) - 1] = place
        there = list(found.values())
        if RUNNING in places and RUNNING not in there and self._runs_beside(name, found):
            there.insert(0, RUNNING)
        if not there:
            raise _FileMovedError
        return there

    def _runs_beside(self, name: str, inodes: Collection[int]) -> bool:
        """Whether a run or an array of that name goes on that began with a file not in *inodes*."""
        run = self._without_file.get(name)
        begun = self._spool.grant(name, run) or self._spool.array(name, run) if run is not None else None
        return begun is not None and begun.inode not in inodes and self._goes_on(name, begun.run)

    def _begun(self) -> Iterable[tuple[str, int]]:
        """Return the runs that a dispatcher has in view; without one, those that are not over in its journal."""
        if not self.dispatcher:
            return self._look.memory.open
        views = self._views.items()
        return ((name, job.run) for name, job in views if job.run is not None and job.state in _BEGUN)

    def _goes_on(self, name: str, run: int) -> bool:
        """Whether *run* is the newest run of a job, without a recorded end."""
        try:
            return self._spool.latest_run(name) == run and self._spool.record(name, run, layout.RESULT) is None
        except OSError:  # trust the dispatcher's view
            return True

    def _readable(self, name: str, place: str, beside: str | None) -> JobRow | None:
        """Return an active job; if its records are unreadable, from the other sources."""
        view = self._views.get(name) if beside is None else None
        try:
            if place == RUNNING or (not self.dispatcher and name in self._look.ran_before):
                self._spool.strict.latest_run(name)  # otherwise an unreadable record would count as missing
            return self._active(name, place, view) if beside is None else self._read(name, place, beside)
        except OSError as error:
            where = self._spool.layout.runs(name)
            self._spool.note(error, where)
            row = JobRow(name=name, state=_STATES[place]) if view is None else row_of_view(name, view, self._now_ns)
            return replace(row, place=place, reason=unreadable(error, where))

    def _active(self, name: str, place: str, view: JobRow | None) -> JobRow | None:
        if view is not None and view.array and view.run is not None and place != QUEUED:
            array = self._spool.array(name, view.run)
            if array is not None and self._goes_on(name, array.run):
                state, reason = self._of_array(array, place)
                return replace(row_of_view(name, view, self._now_ns, place), state=state, reason=reason)
        if view is None or view.state not in _FITTING[place] or self._has_gone_on(name, place, view):
            return self._read(name, place)
        return row_of_view(name, view, self._now_ns, place)

    def _has_gone_on(self, name: str, place: str, view: JobRow) -> bool:
        """Whether a run was ordered to stop, has begun in its engine or has ended since the dispatcher's view."""
        spool, run, state = self._spool, view.run or 0, view.state
        if state is State.STOPPING:
            return place != RUNNING and not spool.is_stopping(name)
        if state is State.SUBMITTED and spool.spoke_at_ns(name, run) is not None:
            return True
        return state in (State.SUBMITTED, State.RUNNING) and not spool.merely_goes_on(name, run)

    def _read(self, name: str, place: str, beside: str | None = None) -> JobRow | None:
        """Return a job from its files alone; None if the entry with its name is not a job. Raises _FileMovedError.

        *beside*: the place of the file of its name that comes first.
        """
        from spool.state.run import JobEntry  # a dispatcher's view has most jobs

        if place == RUNNING:
            return self._running(name)
        job = JobEntry(name)
        file = self._look.waiting(job, place)
        if file is None:
            status = status_of(self._spool.layout.job_file(place, name))
            if status is None:
                raise _FileMovedError
            self._ignored += filter(None, (ignored_by_kind(place, name, status.st_mode),))
            return None
        if place == HELD and (array := self._held_array(name)) is not None:
            return self._array_row(array, HELD)
        if place == HELD:
            reason = job.hold_reason or ("another job with this name is waiting" if beside == QUEUED else _HELD)
        elif beside is not None:
            reason = "another run of this name is running"
        else:
            reason = "just submitted" if self.dispatcher else NOBODY[self._starting]
        return JobRow(name=name, place=place, **job.row(file, reason))

    def _held_array(self, name: str) -> ArrayRecord | None:
        """Return the array whose file is that in `held/`: one that was expanded and goes on, not a second job."""
        record = self._spool.newest_array(name)
        if record is None or not self._goes_on(name, record.run) or RUNNING in self._spool.places(name):
            return None
        return record if self._spool.stop(name, record.run) is None else None

    @cached_property
    def _look(self) -> Look:
        from spool.query.look import Look
        from spool.store.glance import config_if

        config = config_if(self._spool.root, b"")  # its mistakes are told elsewhere
        return Look(self._spool, config, self._now_ns, served=self.dispatcher)

    def _running(self, name: str) -> JobRow:
        from spool.store.ownership import name_of

        spool, run = self._spool, self._spool.latest_run(name)
        status = status_of(spool.layout.job_file(RUNNING, name))
        if status is None and (run is None or not self._goes_on(name, run)):
            raise _FileMovedError
        if run is None:
            spec = spool.job_spec(RUNNING, name)
            user = name_of(status.st_uid) if status is not None else None
            told = of_spec(spec) if spec is not None else {}
            return JobRow(name=name, state=State.STARTING, user=user, place=RUNNING, **told)
        files = self.files(name, run)
        result, array = files.result, files.array
        if result is not None and result.again is None:  # its file will be moved at once, or by a dispatcher
            row = row_of_result(result if array is None else array_outcome(spool, result), array=array is not None)
            return replace(row, place=RUNNING)
        if array is not None:
            return self._array_row(array, RUNNING)
        found, live = self.shown(files), self._look.run(files)
        if live.spec.gpu_idle_ns is not None and (watch := self.gpu_watch(name, run)) is not None:
            live.gpus_watched(watch)
        reason = f"has ended ({result.outcome}); it runs again" if result is not None else found.reason
        row = JobRow(name=name, place=RUNNING, **live.row(found.state or State.STARTING, reason))
        suspended, node = found.suspension, files.so_far.node
        row = replace(row, node=node, suspended_ns=suspended.before_ns, suspended_at_ns=suspended.since_ns)
        if found.end is None:
            return row
        end = row_of_result(found.end)
        return replace(row, ended_at_ns=end.ended_at_ns, exit_code=end.exit_code, gpu_percent=end.gpu_percent)

    def _array_row(self, record: ArrayRecord, place: str) -> JobRow:
        from spool.state.load import load_array

        array, (state, reason) = load_array(self._spool, record), self._of_array(record, place)
        row = JobRow(name=record.job, state=state, reason=reason, run=record.run, user=record.user, array=True)
        row = row if array is None else JobRow(name=record.job, **array.row(state, reason))
        return replace(row, place=place)

    def _of_array(self, array: ArrayRecord, place: str) -> tuple[State, str]:
        """Return the state of an array in progress, and how far it is by the names that this list is made of.

        The dispatcher's view of it may be older, and would contradict its tasks.
        """
        unissued = self._unissued.get(array.job)
        unissued = still_to_issue(self._spool, array.job, array.run) if unissued is None else unissued
        prefix = f"{array.job}_"
        active, running = (
            {
                name
                for place, names in self._listed
                if place in among
                for name in names
                if name.startswith(prefix) and name[len(prefix) :].isdecimal()
            }
            for among in (_ORDER, (RUNNING,))
        )
        taken = sorted(unissued & active, key=natural)
        reason = progress(max(0, array.tasks - len(unissued | active)), array.tasks, len(running), taken)
        stop = self._spool.stop(array.job, array.run)
        if stop is None and place == RUNNING and self._spool.holds(array.inode or 0, array.job, DONE):
            from spool.store.ownership import mover  # few arrays are cancelled

            stop = Stop(StopKind.CANCEL, mover(self._spool.root, place), self._now_ns)  # as it will be recorded
        if stop is not None:
            return State.STOPPING, f"{cancelled_by(stop)}: {reason}"
        return _STATES[place], reason

    def files(self, name: str, run: int) -> RunFiles:
        """Return what the files of a run say, and what they prove."""
        return self._spool.load(name, run, self._prober)

    def _unrecorded(self, files: RunFiles, outcome: State) -> Result | None:
        """Return the result that a dispatcher will record: the time and kind of the end, and the resource use."""
        grant, left = files.grant, files.left
        if grant is None or grant.granted_at_ns is None:
            return None
        signs = LastSigns(
            grant.granted_at_ns,
            files.began_ns,
            exit_at_ns=left.at_ns if left is not None else None,
            served_ns=self._spool.served_until_ns() if grant.executor in LOCAL_EXECUTORS else None,
        )
        key = files.name, files.run
        end, used = self._spool.end(*key, signs, self._now_ns), self._spool.usage(*key)
        return replace(
            files.so_far,
            outcome=outcome,
            ended_at_ns=end.at_ns,
            end_is_bound=end.is_bound,
            peak_memory_bytes=used.peak_memory_bytes,
            cpu_time_ns=used.cpu_time_ns,
        )

    def shown(self, files: RunFiles, *, filed: bool = False) -> ShownRun:
        """Return how every view shows a run; *filed*: also if its end is recorded, and another follows."""
        grant, proof, stop, suspension = files.grant, files.proof, files.stop, files.suspension
        elsewhere = self._elsewhere(grant) if grant is not None and grant.executor not in LOCAL_EXECUTORS else None
        submitted = elsewhere if files.is_submitted else None
        # A dispatcher records an end at once; without one that may take days, and the end is shown all the same.
        final = filed or not self.dispatcher
        state, reason = shown(proof, filed=final, stop=stop, submitted=submitted, elsewhere=elsewhere)
        if proof.verdict is Verdict.ENDED and final and not filed:
            reason = (state is State.LOST and self._spool.why_copied(grant)) or reason
            reason = "not recorded yet" if state is State.FINISHED else f"{reason}; not recorded yet"
        end = (files.result or self._unrecorded(files, state)) if state is not None and state.ended else None
        if end is not None:
            suspension = Suspension(suspension.total_ns(end.ended_at_ns or 0))
        elif suspension.since_ns is not None:
            reason = reason or suspended_words(suspension, self._spool.suspend_order(files.name) or "")
        elif state is State.RUNNING and not reason and (ended := self._spool.command_exit(files.name, files.run)):
            reason = f"its command has ended with {exit_words(ended.code)}; its epilog is running"
        return ShownRun(state, reason, end, suspension)

    def gpu_watch(self, name: str, run: int) -> GpuWatch | None:
        """Return the GPU use of a live run so far, for every view.

        The dispatcher's view has it from each look; the record, which is rarely written, counts only without a
        dispatcher.
        """
        said = self._views.get(name) if self.stale_ns is None else None
        told = said.gpu_watch(self.state.at_ns) if self.state is not None and said is not None else None
        return told if said is not None and said.run == run and told is not None else self._spool.gpu_watch(name, run)

    def _elsewhere(self, record: GrantRecord) -> str:
        """Return the known state of a run on an engine, with its time if no dispatcher is asking the engine now."""
        name, run, title = record.job, record.run, engine_title(record.executor)
        view = self._last_view[0]  # without a dispatcher, that of one now gone
        said = view.jobs.get(name) if view is not None else None
        begun_ns = self._spool.spoke_at_ns(name, run)
        if said is not None and (said.run != run or (begun_ns is not None and said.state == State.SUBMITTED)):
            said = None  # from before that
        known = self._spool.engine(name, run)
        words = f"in {title} as job {known[2]}" if known is not None else handed_to(title)
        if self.dispatcher:
            return words if said is None else in_words(said.reason, self._now_ns)
        if said is not None and view is not None:
            what = said.reason.removeprefix(f"{title}: ") or said.state
            words += f", last seen at {instant(view.heartbeat_ns)}: {what}"
        elif begun_ns is not None:
            words += f", begun at {instant(begun_ns)}"
        return in_words(f"{words}; {NOBODY[self._starting]}", self._now_ns)

    def _ended(self, names: Collection[str], most: int | None, since_ns: int) -> Iterable[JobRow]:
        """Return the ended jobs among *names*, last ended first; with *most*, at most that many since *since_ns*."""
        left = set(names)
        rows: list[JobRow] = []
        newest: dict[str, int] = {}  # last end of a task of each array
        arrays: dict[str, Result | None] = {}  # results of ended arrays, as far as needed; None: not an array
        for line in self._spool.history() if left else ():
            try:
                result = parse_history_line(line)
            except InvalidRecord as error:
                if (name := job_of_line(line)) in left:
                    left.discard(name)
                    rows.append(JobRow(name=name, state=State.INVALID, reason=str(error)))
                continue
            newest.setdefault(array_of(result.job), result.ended_at_ns or 0)
            if most is not None and result.ended_at_ns is not None and result.ended_at_ns < since_ns:
                if (result.told_at_ns or 0) < since_ns:
                    return rows
                left.discard(result.job)  # it ended long before it was recorded
                continue
            if most is not None and (array := self._ended_array(result, left, arrays)) is not None:
                left.discard(result.job)  # its array represents it
                if array.job in left:
                    left.discard(array.job)
                    rows.append(row_of_result(self._present_end(array, newest), array=True))
            elif result.job in left:
                left.discard(result.job)
                rows.append(row_of_result(result))
                if not left or (most is not None and len(rows) >= most):
                    return rows
        if most is None:
            rows += [self._without_history(name, newest) for name in left]
        return rows

    def _ended_array(self, task: Result, names: Collection[str], known: dict[str, Result | None]) -> Result | None:
        """Return the result of this task's array, if it is among *names* and the task has not run again since."""
        name = array_of(task.job)
        if name not in known:
            record = self._spool.newest_array(name) if name in names else None
            known[name] = self._spool.result(name, record.run) if record is not None else None
        array = known[name]
        if array is None or (task.ended_at_ns or 0) > (array.ended_at_ns or 0):
            return None  # or a task that was run again separately
        return array

    def _present_end(self, result: Result, newest: Mapping[str, int]) -> Result:
        """Return the end of an array by its tasks' present states; *newest* has the last end of a task."""
        return array_outcome(self._spool, result, ran_again=newest.get(result.job, 0) > (result.ended_at_ns or 0))

    def _without_history(self, name: str, newest: Mapping[str, int]) -> JobRow:
        run = self._spool.latest_run(name)
        result = self._spool.known_end(name, run) if run is not None else None
        if isinstance(result, InvalidRecord):
            return JobRow(name=name, state=State.INVALID, run=run, reason=str(result))
        if result is not None and self._spool.array(name, result.run) is not None:
            return row_of_result(self._present_end(result, newest), array=True)
        if result is not None:
            return row_of_result(result)
        return self._cancelled(name) or JobRow(name=name, state=State.CANCELLED, run=run)

    def _cancelled(self, name: str) -> JobRow | None:
        """Return a job that was cancelled before any dispatcher saw it, as its record will have it; None if gone."""
        from spool.store.edited import Settings
        from spool.store.ownership import cancelled_by_mover, name_of

        try:
            status = os.lstat(self._spool.layout.job_file(DONE, name))
        except OSError:
            return None
        reason, at_ns = cancelled_by_mover(self._spool.root, QUEUED), status.st_ctime_ns
        row = JobRow(name=name, state=State.CANCELLED, reason=reason, user=name_of(status.st_uid), ended_at_ns=at_ns)
        spec = self._spool.job_spec(DONE, name, Settings(self._spool.root).config.defaults)
        told = of_spec(spec) | {"priority": None} if spec is not None else {}
        return replace(row, submitted_at_ns=min(status.st_mtime_ns, at_ns - 1), **told)


def counts(rows: Iterable[JobRow]) -> Counter[State]:
    """Return how many jobs are in each active state, as for every view: tasks count, not their arrays."""
    found = Counter(row.state for row in rows if not row.array and not row.state.ended)
    return Counter({state: found[state] for state in State if found[state]})


class Ignored(Struct, frozen=True):
    """A file in `queued/` or `held/` that looks like a job file and is not (FORMAT 2.1): why, and what to do.

    spool ignores it, and its user would wait for a job that never starts, so the commands report it. `path` is relative
    to the spool.
    """

    path: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path} is ignored: {self.why}; {self.remedy}"


def ignored_by_name(place: str, filenames: Iterable[str]) -> list[Ignored]:
    """Return the files among *filenames*, none of them a job's, whose names resemble a job's."""
    found = []
    for filename in filenames:
        if filename[-len(layout.JOB_SUFFIX) :].lower() != layout.JOB_SUFFIX or filename.startswith(_NO_JOB):
            continue
        stem, suffix = filename[: -len(layout.JOB_SUFFIX)], filename[-len(layout.JOB_SUFFIX) :]
        wrong = f"its name ends in {suffix}, not in {layout.JOB_SUFFIX}" if suffix != layout.JOB_SUFFIX else ""
        why = wrong or why_not_name(stem) or ""
        found.append(Ignored(_quoted(place, filename), why, "rename it"))
    return sorted(found, key=lambda each: each.path)


def ignored_by_kind(place: str, name: str, mode: int) -> Ignored | None:
    """Return an entry that has the name of a job file but, by its *mode*, is not a file; None if it is one."""
    if stat.S_ISREG(mode):
        return None
    kind = _KINDS.get(stat.S_IFMT(mode), "not a regular file")
    remedy = "put a copy of the file there" if stat.S_ISLNK(mode) else "remove it"
    return Ignored(_quoted(place, layout.file_of(name)), f"it is {kind}", remedy)


def _in_short(found: Sequence[Ignored]) -> list[str]:
    """Return a one-line list of all of them; empty if there are none."""
    if len(found) < 2:
        return [str(each) for each in found]
    first, *others = found
    return [f"{first.path} and {len(others):,} more are ignored: {first.why}; `spool doctor` lists them"]


def without_ending(place: str, filenames: Iterable[str]) -> list[str]:
    """Return further files among *filenames*, none of them a job's, that a user may have put there."""
    ours = (layout.ERROR_SUFFIX, layout.REASON_SUFFIX, layout.SUSPENDED_SUFFIX)
    left = [name for name in filenames if not name.startswith(_NO_JOB) and not name.endswith(("~", ".swp", *ours))]
    named = [name for name in left if name[-len(layout.JOB_SUFFIX) :].lower() != layout.JOB_SUFFIX]
    return [_quoted(place, name) for name in sorted(named) if not name.isdecimal()]  # vim creates a file 4913 as a test


def _quoted(place: str, filename: str) -> str:
    path = printable(os.path.join(place, filename))
    return repr(path) if " " in path else path
