"""The ends of jobs, waiting for them, and following output until then, from the files; no dispatcher is needed.

A job has ended when its file is in `done/` and nowhere else, and its newest run has a final outcome. A file may move
between two looks, and during a cancel there is briefly none at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from msgspec import Struct

from spool.client.output import ArrayOutput, OutputPiece, Stream, Tail, outputs
from spool.core import layout
from spool.core.arrays import array_of
from spool.core.errors import InvalidRecord, NoSuchJob
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import Result, State
from spool.store.arrays import array_outcome, still_to_issue
from spool.store.disk import status_of
from spool.store.ownership import cancelled_by_mover
from spool.store.spool import Service, Spool

POLL_S = 0.025
"""How long to wait before new output is looked for again."""

PATIENCE_S = 3.0  # a dispatcher just started in the background is running by then
GRACE_NS = 1_500_000_000  # how long to wait for the record of an end before assuming that none will come
_TASKS_EVERY_NS = 250_000_000  # an array may have ten thousand
_STATE_EVERY_NS = 1_000_000_000  # how often to read a dispatcher's view to find out whether it knows a run
_PLACES = (QUEUED, HELD, RUNNING)
_FEW = 8  # jobs that are looked at in the time of one look at the directories
_TICK_NS = 20_000_000  # two changes of a directory this close may have the same time
_ANYWAY_NS = 1_000_000_000  # how often to read the directories even if nothing seems to have changed
_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 1.0
_SHARE = 20  # of the time of a look between two looks


class End(Struct, frozen=True):
    """The end of a job. INVALID: its file cannot be used, and `reason` says why."""

    name: str
    outcome: State
    exit_code: int | None = None
    reason: str = ""
    run: int | None = None


class Waiter:
    """Waits for jobs of one spool to end.

    A job that has ended has no file in `queued/`, `held/` and `running/`. So of many jobs, only those that are in none
    of these directories are looked at one by one, and the directories are read when they have changed. The tasks of an
    array are awaited by name before they are issued.
    """

    def __init__(self, spool: Spool, names: Collection[str] = (), *, seen: bool = False) -> None:
        """Await *names*, as `add` does. Raises NoSuchJob for the first that is unknown."""
        self._spool = spool
        self.root = spool.root
        self._left: dict[str, _Awaited] = {}
        self._unissued: dict[str, set[str]] = {}  # by array, the awaited tasks that it has not issued yet
        self._new: set[str] = set()  # those of `_left` that no look has seen
        self._absent: set[str] = set()  # those that were in no active directory, or have an error, when these were read
        self._marks: dict[str, tuple[int, int] | None] = {}
        self._places: dict[str, set[str]] = {place: set() for place in _PLACES}
        self._complaints: set[str] = set()
        self._read_ns = 0
        self._cost_s = 0.0
        self._since = time.monotonic()
        for error in self.add(names, seen=seen).values():
            raise error

    def __len__(self) -> int:
        return len(self._left) + sum(map(len, self._unissued.values()))

    @property
    def names(self) -> list[str]:
        """The jobs that have not ended."""
        return [*self._left, *chain.from_iterable(self._unissued.values())]

    @property
    def held(self) -> set[str]:
        """The jobs that were held at the last look: nothing happens before they are released."""
        if len(self) > _FEW:
            return (self._places[HELD] & self._left.keys()) - self._places[QUEUED] - self._places[RUNNING]
        return {name for name, job in self._left.items() if job.held}

    @property
    def is_unserved(self) -> bool:
        """Whether no dispatcher is running, although one that was started just before the wait would be by now."""
        return time.monotonic() - self._since > PATIENCE_S and not self._spool.dispatcher_lives()

    @property
    def pause_s(self) -> float:
        """How long to wait before the next look."""
        return min(_LONGEST_PAUSE_S, max(_PAUSE_S, _SHARE * self._cost_s))

    def add(self, names: Collection[str], *, seen: bool = False) -> dict[str, NoSuchJob]:
        """Await *names* too, and return the errors of those that are unknown, by name.

        *seen*: the caller has seen them waiting or running before any run of them had ended. A task of an array in
        progress counts as known, whether it was issued or not.
        """
        unknown: dict[str, NoSuchJob] = {}
        new = [name for name in dict.fromkeys(names) if name not in self._left]
        with_runs: set[str] | None = None
        active: set[str] = set()
        if len(new) > _FEW:
            with_runs = set(self._spool.jobs_with_runs())
            active = self._read()
        issuing: dict[str, bool] = {}
        for name in new:
            array = array_of(name)
            if array and array not in issuing:
                may_be = with_runs is None or array in with_runs or array in active
                issuing[array] = may_be and self._is_active(array) and self._is_array(array)
            if array and issuing[array]:
                self._unissued.setdefault(array, set()).add(name)
            elif with_runs is not None and name in active and name not in with_runs:
                self._left[name] = _Awaited(self._spool, name, seen=True)
            elif seen or self._spool.places(name) or self._spool.runs(name):
                self._await(name, seen=seen)
            elif array and self._is_array(array):
                self._unissued.setdefault(array, set()).add(name)  # its array has ended before it was issued
            else:
                unknown[name] = self._spool.no_such_job("wait for", f"job {name}", name)
        return unknown

    def discard(self, name: str) -> None:
        """Await a job no longer."""
        self._left.pop(name, None)
        self._new.discard(name)
        self._absent.discard(name)
        for names in self._unissued.values():
            names.discard(name)

    def wait(self, timeout_s: float | None = None) -> list[End]:
        """Wait until a job has ended, and return the ends since the last look; none after a timeout, or for no jobs."""
        return [end for _, end in wait_for_ends((self,), timeout_s)]

    def poll(self) -> list[End]:
        """Return the ends of the jobs that have ended since the last look; they are awaited no longer."""
        begun = time.monotonic()
        ends: list[End] = []
        if len(self) > _FEW:
            if self._changed():
                active = self._read()
                ends += self._issued()
                self._absent = (self._left.keys() - active) | (self._complaints & self._left.keys())
            looked_at = self._absent | self._new
        else:
            ends += self._issued()
            looked_at = set(self._left)
        self._new.clear()
        ends += [end for name in looked_at if (end := self._left[name].poll()) is not None]
        for end in ends:
            self.discard(end.name)
        self._cost_s = time.monotonic() - begun
        return ends

    def _await(self, name: str, *, seen: bool = False) -> None:
        self._left[name] = _Awaited(self._spool, name, seen=seen)
        self._new.add(name)

    def _changed(self) -> bool:
        """Whether a file may have entered or left an active directory since they were read."""
        if time.time_ns() - self._read_ns >= _ANYWAY_NS:
            return True
        marks = {place: self._spool.mark_of(place) for place in _PLACES}
        settled = all(mark is None or mark[1] < self._read_ns - _TICK_NS for mark in self._marks.values())
        return marks != self._marks or not settled

    def _read(self) -> set[str]:
        """Read the active directories, and return the jobs in them."""
        self._read_ns = time.time_ns()
        self._marks = {place: self._spool.mark_of(place) for place in _PLACES}
        self._complaints.clear()
        tail = layout.JOB_SUFFIX + layout.ERROR_SUFFIX
        for place in _PLACES:
            names, others = self._spool.names_and_others(place)
            self._places[place] = set(names)
            if place != RUNNING:
                self._complaints.update(name.removesuffix(tail) for name in others if name.endswith(tail))
        return set().union(*self._places.values())

    def _is_active(self, name: str) -> bool:
        return any(place in _PLACES for place in self._spool.places(name))

    def _is_array(self, name: str) -> bool:
        if self._spool.newest_array(name) is not None:
            return True
        specs = (self._spool.job_spec(place, name) for place in self._spool.places(name))
        return any(spec is not None and spec.is_array for spec in specs)

    def _issued(self) -> Iterable[End]:
        """Await the tasks that have been issued as jobs, and return the ends of those that never will be."""
        ends: list[End] = []
        for array, awaited in list(self._unissued.items()):
            waiting, reason = self._waiting(array)
            if waiting is None and not reason:
                continue
            for task in awaited if waiting is None else awaited - waiting:
                if waiting is None:
                    ends.append(End(task, State.INVALID, reason=reason))
                elif self._spool.places(task) or self._spool.runs(task):
                    self._await(task)
                else:
                    ends.append(End(task, State.CANCELLED, reason="never issued"))
            awaited &= waiting or set()
            if not awaited:
                del self._unissued[array]
        return ends

    def _waiting(self, name: str) -> tuple[set[str] | None, str]:
        """Return the tasks that an array has not issued yet, None for all; and why it never will, as far as known."""
        record = self._spool.newest_array(name)
        if record is not None and self._spool.result(name, record.run) is None:
            return still_to_issue(self._spool, name, record.run), ""
        if self._is_active(name):
            return None, (self._spool.problem_text(name) or "").strip()
        return set(), ""


def wait_for_ends(waiters: Collection[Waiter], timeout_s: float | None = None) -> list[tuple[Waiter, End]]:
    """Wait until a job of one of *waiters* has ended, and return each end; none after a timeout, or for no jobs."""
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        ends = [(waiter, end) for waiter in waiters if waiter for end in waiter.poll()]
        left_s = until - time.monotonic()
        if ends or left_s <= 0 or not any(waiters):
            return ends
        time.sleep(min(left_s, max(waiter.pause_s for waiter in waiters if waiter)))


class _Awaited:
    """One awaited job."""

    __slots__ = ("_absent_since_ns", "_again_at_ns", "_before", "_place", "_seen", "_spool", "held", "name")

    def __init__(self, spool: Spool, name: str, *, seen: bool) -> None:
        self._spool = spool
        self.name = name
        self.held = False  # at the last look
        self._before: int | None = None  # the newest run that had ended when the job was seen waiting or running
        self._seen = seen
        self._place = QUEUED  # where it was seen last
        self._absent_since_ns: int | None = None
        self._again_at_ns = 0  # when to check the tasks of an array again

    def poll(self) -> End | None:
        """Return the end of the job, None if it has not ended."""
        spool, name = self._spool, self.name
        before = None if self._seen else self._newest()  # ahead of its places: between two reads it may run and end
        places = spool.places(name)
        if places == [DONE] or not places:
            places = spool.places(name)  # it may have moved back while the places were checked one by one
        self.held = HELD in places and QUEUED not in places and RUNNING not in places
        if any(place != DONE for place in places):
            return self._goes_on(places, before)
        result = self._newest()
        if isinstance(result, InvalidRecord):
            return End(name, State.INVALID, reason=f"job {name}: {result}") if self._patience_is_over() else None
        if result is not None and result.again is None and (result.run != self._before or not self._seen):
            if places or self._patience_is_over():
                return self._ended(result)
            return None
        if result is None and self._has_begun():
            return self._unrecorded()  # its file was removed, or will be: its run is being stopped
        if not self._patience_is_over():
            return None
        reason = cancelled_by_mover(spool.root, self._place) if places else "its file was removed before it ran"
        return End(name, State.CANCELLED, reason=reason)

    def _has_begun(self) -> bool:
        """Whether the newest run of the job was prepared by a dispatcher, so that one will end it."""
        spool, name = self._spool, self.name
        run = spool.latest_run(name)
        traces = (layout.GRANT, layout.JID, layout.ARRAY, layout.STOP)
        return run is not None and any(spool.record(name, run, trace) is not None for trace in traces)

    def _unrecorded(self) -> End | None:
        """Return None while a dispatcher records the end of the newest run, or the next one will.

        A running dispatcher has found every run that is not over. A run that it does not list has lost its result: the
        history has its end, or no record ever will.
        """
        now = time.monotonic_ns()
        if not self._patience_is_over() or now < self._again_at_ns:
            return None
        self._again_at_ns = now + _STATE_EVERY_NS
        if self._spool.service() is not Service.SERVED or self._is_known():
            return None
        run = self._spool.latest_run(self.name)
        known = self._spool.account_of(self.name, run, None) if run is not None else None
        if known is not None:
            return self._ended(known)
        return End(self.name, State.LOST, reason="no record says how it ended, and the dispatcher does not know it")

    def _is_known(self) -> bool:
        """Whether the dispatcher lists the job, or has not written its view since the job seemed to end."""
        from spool.formats.state import parse_state  # imported here, because hardly any wait needs it

        status = status_of(self._spool.layout.at(layout.STATE))
        absent_ns = time.monotonic_ns() - (self._absent_since_ns or 0)
        if status is None or status.st_mtime_ns < time.time_ns() - absent_ns:
            return True
        view = parse_state(self._spool.file(layout.STATE) or b"")
        return view is None or self.name in view.jobs

    def _ended(self, result: Result) -> End | None:
        """Return the end in *result*; for an array that of its tasks, None if one of them runs again."""
        outcome, reason = result.outcome, result.reason
        if self._spool.array(self.name, result.run) is not None:
            if time.monotonic_ns() < self._again_at_ns:
                return None
            now = array_outcome(self._spool, result)
            if not now.outcome.ended:
                self._again_at_ns = time.monotonic_ns() + _TASKS_EVERY_NS
                return None
            outcome, reason = now.outcome, now.reason
        return End(self.name, outcome, result.exit_code, reason, result.run)

    def _goes_on(self, places: list[str], before: Result | InvalidRecord | None) -> End | None:
        self._absent_since_ns = None
        self._place = next(place for place in places if place != DONE)
        if not self._seen:
            # The newest run of a running job is this one, even if it has ended and only its file was not moved yet.
            self._before = before.run if isinstance(before, Result) and RUNNING not in places else None
            self._seen = True
        if QUEUED in places or HELD in places:
            problem = self._spool.problem_text(self.name)
            if problem is not None:
                return End(self.name, State.INVALID, reason=problem.strip())
        return None

    def _newest(self) -> Result | InvalidRecord | None:
        """Return the result of the newest run, None if no end is recorded, or the error of an unreadable record."""
        run = self._spool.latest_run(self.name)
        return self._spool.known_end(self.name, run) if run is not None else None

    def _patience_is_over(self) -> bool:
        """Whether the job has seemed ended for so long that no record of its end will follow."""
        now = time.monotonic_ns()
        if self._absent_since_ns is None:
            self._absent_since_ns = now
        if not self._spool.dispatcher_lives() and not self._seen:
            return True
        return now - self._absent_since_ns > GRACE_NS


class _Wanted(Struct, frozen=True):
    """What of a job is followed."""

    only: int | None
    after: int | None
    lines: int | None
    apart: bool


class Follower:
    """Reads the output of jobs from the newest run of each on; for an array that of each task once it has ended.

    *only*: this run alone; *after*: runs later than this one; *lines*: at first only the last lines of each job. Beside
    other jobs, the output of a task is under its own name. `waiter` awaits the jobs.
    """

    def __init__(
        self,
        spool: Spool,
        names: Collection[str],
        *,
        only: int | None = None,
        after: int | None = None,
        lines: int | None = None,
    ) -> None:
        """Follow the jobs *names*. Raises NoSuchJob for the first that is unknown."""
        self.waiter = Waiter(spool, names)
        wanted = _Wanted(only, after, lines, apart=len(set(names)) > 1)
        self._jobs = [_FollowedJob(spool, name, wanted) for name in dict.fromkeys(names)]

    def pieces(self) -> Iterator[OutputPiece | End | None]:
        """Yield output as it appears, the end of each job after its output, and None when there is nothing new.

        After a None it is time to wait for `POLL_S`. Ends with the last job, or run.
        """
        left = self._jobs
        while left:
            ends = {end.name: end for end in self.waiter.poll()}
            for job in left:
                yield from job.news(ends.get(job.name))
            left = [job for job in left if not job.is_over]
            if left:
                yield None

    def close(self) -> None:
        """Close the files."""
        for job in self._jobs:
            job.close()


class _FollowedJob:
    """One job that is followed."""

    def __init__(self, spool: Spool, name: str, wanted: _Wanted) -> None:
        self._spool = spool
        self.name = name
        self.is_over = False
        self._wanted = wanted
        self._only = wanted.only is not None
        newest = spool.latest_run(name) if wanted.only is None and wanted.after is None else wanted.only
        self._from = newest or (wanted.after or 0) + 1
        self._run: int | None = None
        self._tails: dict[Stream, Tail] = {}
        self._array: ArrayOutput | None = None
        self._tasks = Waiter(spool)  # those of the array whose output has not been told
        self._end: End | None = None

    def news(self, end: End | None) -> Iterator[OutputPiece | End]:
        """Yield the new output, and *end* once there is no more; it is the end of the job if it has just ended."""
        self._end = self._end or end
        while True:
            newest = self._spool.latest_run(self.name) or 0
            if self._run is None and (self._only or newest >= self._from):
                yield self._begin()
            is_over = self._end is not None or (self._run is not None and self._has_ended(self._run, newest))
            yield from self._drained()
            if self._only or self._run is None or not is_over or newest <= self._run:
                break
            self._from = self._run + 1
            yield self._begin()
        self.is_over = self._end is not None or (is_over and self._only)
        if self._end is not None:
            yield self._end

    def _has_ended(self, run: int, newest: int) -> bool:
        return newest > run or self._spool.record(self.name, run, layout.RESULT) is not None

    def _begin(self) -> OutputPiece:
        """Begin with the next run, and return the empty piece that says so."""
        run = self._from if self._only else min(run for run in self._spool.runs(self.name) if run >= self._from)
        begun = OutputPiece(self.name, run, Stream.OUT, b"")
        if self._spool.array(self.name, run) is not None:
            self._run = run
            lines, apart = self._wanted.lines, self._wanted.apart
            self._array = ArrayOutput(self._spool, self.name, run, lines=lines, apart=apart)
            self._tasks = Waiter(self._spool)
            self._tasks.add(self._array.tasks)
            return begun
        where = outputs(self._spool, self.name, run)
        paths = {Stream.OUT: where.stdout, Stream.ERR: where.stderr}
        for stream, path in paths.items():
            tail = self._tails.get(stream)
            if tail is not None and tail.path == path:
                continue  # every run appends to it: continue here
            if tail is not None:
                self._tails.pop(stream).close()
            if path is not None:
                self._tails[stream] = Tail(path)
                if self._wanted.lines is not None and self._run is None:
                    self._tails[stream].skip_to_last(self._wanted.lines)
        self._run = run
        return begun

    def _drained(self) -> Iterator[OutputPiece]:
        if self._array is not None:
            is_over = self._end is not None
            over = self._tasks.names if is_over else [end.name for end in self._tasks.poll()]
            for task in sorted(over, key=layout.natural):
                yield from self._array.of(task)
            if is_over:
                self._tasks = Waiter(self._spool)
        for stream, tail in self._tails.items():
            while data := tail.read():
                yield OutputPiece(self.name, self._run or 0, stream, data)

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails.values():
            tail.close()
