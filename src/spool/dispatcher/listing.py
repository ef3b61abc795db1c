"""The jobs of a spool as a list for people: what the files say, and what the dispatcher last said beside it.

Where a job's file lies is the truth. `state.json` saves reading ten thousand files and knows why each job waits; an
entry of it that the files contradict is passed over.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from spool.core import layout
from spool.core.errors import InvalidJob, InvalidRecord
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.lifecycle import Verdict
from spool.core.model import SECOND_NS, Result, Spec, State
from spool.dispatcher.array import array_of
from spool.dispatcher.background import is_starting
from spool.dispatcher.refusals import why_held, why_kept
from spool.dispatcher.rows import Row, row_of_result, row_of_spec, row_of_view
from spool.dispatcher.table import user_name
from spool.formats import ends, jobfile
from spool.formats.state import StateView, parse_state
from spool.machine.identity import MachineProber
from spool.store.spool import Spool, history_lines, read_bytes

STALE_NS = 35 * SECOND_NS  # three heartbeats and a little
RECENT = 10
NOBODY = {False: "no dispatcher runs", True: "a dispatcher is starting"}
RECENT_NS = 24 * 3600 * SECOND_NS
_MAX_STATE = 1 << 30
# What the dispatcher may have said of a file that lies there. `starting` lasts so short that it is asked anew.
_FITTING = {
    QUEUED: frozenset({State.QUEUED, State.INVALID, State.STOPPING}),
    HELD: frozenset({State.HELD, State.INVALID, State.STOPPING}),
    RUNNING: frozenset({State.RUNNING, State.STOPPING}),
}


@dataclass(frozen=True, slots=True)
class Listing:
    """The jobs, and what is to be known about the list itself."""

    rows: tuple[Row, ...]
    dispatcher: bool  # one lives
    starting: bool  # one was started a moment ago
    stale_ns: int | None  # how long it has been silent, where that is too long
    paused: bool
    problems: tuple[str, ...]
    at_ns: int


class Lister:
    """One look at a spool."""

    def __init__(self, spool: Spool, now_ns: int | None = None) -> None:
        self._spool = spool
        self._now_ns = time.time_ns() if now_ns is None else now_ns
        self.dispatcher = spool.dispatcher_lives()
        self.state, self.stale_ns = self._read_state()
        self._starting = not self.dispatcher and is_starting(spool.root)
        self._prober = MachineProber()
        self._complaints: dict[str, set[str]] = {}

    def listing(
        self, *, everything: bool = False, only: Callable[[str], bool] | None = None, recent: int = RECENT
    ) -> Listing:
        """Return the jobs whose name *only* accepts: those that go on, and the *recent* last ended or *everything*."""
        active: dict[str, str] = {}
        for place in (RUNNING, QUEUED, HELD):
            for name in self._spool.names(place):
                if only is None or only(name):
                    active.setdefault(name, place)
        for name in self._without_file():
            if only is None or only(name):
                active.setdefault(name, RUNNING)
        rows = [row for name, place in active.items() if (row := self._active(name, place)) is not None]
        done = {name for name in self._spool.names(DONE) if name not in active and (only is None or only(name))}
        rows += self._ended(done, None if everything or only is not None else recent)
        return Listing(
            tuple(rows),
            self.dispatcher,
            self._starting,
            self.stale_ns,
            self._spool.paused,
            self.state.problems if self.state is not None else (),
            self._now_ns,
        )

    def _read_state(self) -> tuple[StateView | None, int | None]:
        """Return the dispatcher's view, and how long it has been silent if that is too long."""
        path = self._spool.layout.at(layout.STATE)
        if not self.dispatcher:
            return None, None
        try:
            silent = self._now_ns - os.stat(path).st_mtime_ns
        except OSError:
            return None, None
        data = read_bytes(path, _MAX_STATE)
        return (parse_state(data) if data else None), (silent if silent > STALE_NS else None)

    def _without_file(self) -> list[str]:
        """Return the jobs that the dispatcher still sees run or stop, though their files were taken away."""
        views = self.state.jobs.items() if self.state is not None else ()
        live = [name for name, view in views if view.run is not None and _word(view.state) in _FITTING[RUNNING]]
        return [name for name in live if self._spool.is_stopping(name)]

    def _active(self, name: str, place: str) -> Row | None:
        view = self.state.jobs.get(name) if self.state is not None else None
        if view is not None:
            state = _word(view.state)
            if state is State.RUNNING and self._spool.is_stopping(name):
                state = State.STOPPING  # since the dispatcher has spoken
            if state is State.STOPPING and place != RUNNING and not self._spool.is_stopping(name):
                state = None  # it has ended since
            if state is not None and state in _FITTING[place]:
                return row_of_view(name, state, view)
        return self._read(name, place)

    def _read(self, name: str, place: str) -> Row | None:
        """Return a job as its files alone show it; None for what is no job, though its name is that of one."""
        spool = self._spool
        path = spool.layout.job_file(place, name)
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                return None
            user, since = user_name(status.st_uid), status.st_ctime_ns
            held = why_held(spool.layout, name, status.st_mtime_ns) if place == HELD else ""
        except OSError:
            user, since, held = None, None, ""
        spec = self._spec(name, place)
        if place == RUNNING:
            return self._running(name, user, spec)
        state = State.HELD if place == HELD else State.QUEUED
        reason = held if place == HELD else "not looked at yet" if self.dispatcher else NOBODY[self._starting]
        if spec is None or name in self._complained(place):
            state, reason = State.INVALID, _first_complaint(spool.problem_text(name)) or "its file is not valid"
        return row_of_spec(Row(name, state, user=user, submitted_at_ns=since, reason=reason), spec)

    def _running(self, name: str, user: str | None, spec: Spec | None) -> Row:
        spool = self._spool
        run = spool.latest_run(name)
        proof = spool.prove(name, run, self._prober) if run is not None else None
        grant = spool.grant(name, run) if run is not None else None
        array = spool.array(name, run) if run is not None else None
        state, reason = State.RUNNING, ""
        if array is not None:
            reason = f"{array.tasks} tasks"
        elif proof is None or proof.verdict is Verdict.STARTING:
            state = State.STARTING
        elif proof.verdict is Verdict.STOPPING:
            state = State.STOPPING
        elif proof.verdict is Verdict.UNREACHABLE:
            reason = "on another host, as far as can be told here"
        elif proof.outcome is not None:
            state, reason = State.STOPPING, f"has ended ({proof.outcome}); to be filed by a dispatcher"
        else:
            reason = why_kept(spool, name, run) if run is not None else ""
        row = Row(
            name,
            state,
            run=run,
            attempt=grant.attempt if grant else None,
            user=(grant.user if grant else None) or user,
            submitted_at_ns=grant.submitted_at_ns if grant else None,
            started_at_ns=grant.granted_at_ns if grant else None,
            reason=reason,
        )
        return row_of_spec(row, spec)

    def _spec(self, name: str, place: str) -> Spec | None:
        text = self._spool.job_text(place, name)
        try:
            return jobfile.parse(text, name=name) if text is not None else None
        except InvalidJob:
            return None

    def _complained(self, place: str) -> set[str]:
        if place not in self._complaints:
            tail = layout.JOB_SUFFIX + layout.ERROR_SUFFIX
            try:
                listed = os.listdir(self._spool.layout.at(place))
            except OSError:
                listed = []
            self._complaints[place] = {file.removesuffix(tail) for file in listed if file.endswith(tail)}
        return self._complaints[place]

    def _ended(self, names: Collection[str], most: int | None) -> Iterable[Row]:
        """Return the jobs of *names*, last ended first; with *most*, no more than that and only recent ones."""
        left = set(names)
        rows: list[Row] = []
        arrays: dict[str, Result | None] = {}  # that have ended, as far as they were asked for; None: it is none
        for line in history_lines(self._spool.root) if left else ():
            try:
                result = ends.parse_history_line(line)
            except InvalidRecord:
                continue
            if most is not None and result.ended_at_ns is not None and self._now_ns - result.ended_at_ns > RECENT_NS:
                return rows
            if most is not None and (array := self._ended_array(result, left, arrays)) is not None:
                left.discard(result.job)  # its array stands for it
                if array.job in left:
                    left.discard(array.job)
                    rows.append(replace(row_of_result(array), reason=array.reason))
            elif result.job in left:
                left.discard(result.job)
                rows.append(row_of_result(result))
                if not left or (most is not None and len(rows) >= most):
                    return rows
        if most is None:
            rows += [self._without_history(name) for name in left]
        return rows

    def _ended_array(self, task: Result, names: Collection[str], known: dict[str, Result | None]) -> Result | None:
        """Return how the array among *names* ended of which this is the run of a task."""
        name = array_of(task.job)
        if name not in known:
            run = self._spool.latest_run(name) if name in names else None
            known[name] = None
            if run is not None and self._spool.array(name, run) is not None:
                known[name] = self._spool.result(name, run)
        array = known[name]
        if array is None or (task.ended_at_ns or 0) > (array.ended_at_ns or 0):
            return None  # or a task that was run again by itself
        return array

    def _without_history(self, name: str) -> Row:
        run = self._spool.latest_run(name)
        result = self._spool.result(name, run) if run is not None else None
        if result is not None:
            return row_of_result(result)
        return Row(name, State.CANCELLED, run=run, reason="moved to done/ before it ran")


def _word(text: str) -> State | None:
    try:
        return State(text)
    except ValueError:
        return None


def _first_complaint(text: str | None) -> str:
    """Return the first thing that is wrong, of the text of an `.error` file."""
    lines = [line.removeprefix("- ") for line in (text or "").splitlines() if line.startswith("- ")]
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return lines[0] + more if lines else (text or "").strip()
