"""The end of a job, and waiting for it, from the files alone; no dispatcher is needed.

A job has ended when its file is in `done/` and nowhere else, and its newest run has a final outcome. A file may move
between two looks, and during a cancel there is briefly none at all.
"""

from __future__ import annotations

import time

from msgspec import Struct
from msgspec.structs import replace

from spool.core import layout
from spool.core.arrays import Tasks, array_of, in_words, outcome_of
from spool.core.errors import InvalidJob, InvalidRecord
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import Result, State
from spool.formats.run_records import ArrayRecord
from spool.store.disk import status_of
from spool.store.ownership import cancelled_by_mover
from spool.store.spool import Service, Spool

GRACE_NS = 1_500_000_000  # how long to wait for the record of an end before assuming that none will come
_TASKS_EVERY_NS = 250_000_000  # an array may have ten thousand
_STATE_EVERY_NS = 1_000_000_000  # how often to read a dispatcher's view to find out whether it knows a run


class End(Struct, frozen=True):
    """The end of a job. INVALID: its file cannot be used, and `reason` says why."""

    name: str
    outcome: State
    exit_code: int | None = None
    reason: str = ""
    run: int | None = None


class Awaited:
    """One awaited job. Raises NoSuchJob at once if it is unknown.

    *waited*: the caller has seen it waiting or running, before any run of it had ended.
    """

    def __init__(self, spool: Spool, name: str, *, waited: bool = False) -> None:
        self._spool = spool
        self.name = name
        self.held = False  # at the last look: nothing happens before it is released
        self._before: int | None = None  # the newest run that had ended when the job was seen waiting or running
        self._waiting = waited
        self._absent_since_ns: int | None = None
        self._again_at_ns = 0  # when to check the tasks of an array again
        if not waited and not spool.places(name) and not spool.runs(name):
            raise spool.no_such_job("wait for", f"job {name}", name)

    def poll(self) -> End | None:
        """Return the end of the job, None if it has not ended."""
        spool, name = self._spool, self.name
        places = spool.places(name)
        if places == [DONE] or not places:
            places = spool.places(name)  # it may have moved back while the places were checked one by one
        self.held = HELD in places and QUEUED not in places and RUNNING not in places
        if any(place != DONE for place in places):
            return self._goes_on(places)
        result = self._newest()
        if isinstance(result, InvalidRecord):
            return End(name, State.INVALID, reason=f"job {name}: {result}") if self._patience_is_over() else None
        if result is not None and result.again is None and (result.run != self._before or not self._waiting):
            if places or self._patience_is_over():
                return self._ended(result)
            return None
        if result is None and self._has_begun():
            return self._unrecorded()  # its file was removed, or will be: its run is being stopped
        if not self._patience_is_over():
            return None
        reason = cancelled_by_mover(spool.root, QUEUED) if places else "its file was removed before it ran"
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

    def _goes_on(self, places: list[str]) -> End | None:
        self._absent_since_ns = None
        if not self._waiting:
            # The newest run of a running job is this one, even if it has ended and only its file was not moved yet.
            result = self._newest() if RUNNING not in places else None
            self._before = result.run if isinstance(result, Result) else None
            self._waiting = True
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
        if not self._spool.dispatcher_lives() and not self._waiting:
            return True
        return now - self._absent_since_ns > GRACE_NS


def array_outcome(spool: Spool, result: Result, *, ran_again: bool | None = None) -> Result:
    """Return the end of an array that ended with *result*: each task counts by its last end, as for a dependency.

    *ran_again*: whether a task has ended since; None: look into the history. A cancelled array stays cancelled, and one
    with a task that is active again is `running`.
    """
    name = result.job
    if result.outcome is State.CANCELLED:
        return result
    ended_at_ns = result.ended_at_ns or 0
    active = {task for place in (QUEUED, HELD, RUNNING) for task in spool.names(place) if array_of(task) == name}
    if ran_again is None:
        later = (known for known in spool.accounts_since(ended_at_ns) if (known.ended_at_ns or 0) > ended_at_ns)
        ran_again = any(array_of(known.job) == name for known in later)
    if not active and not ran_again:
        return result
    names = task_names(spool, name, result.run, spool.array(name, result.run))
    going_on = len(active.intersection(names))
    ends = [_end(spool, task, result.submitted_at_ns or 0) for task in names if task not in active]
    outcomes = [outcome for outcome, _ in ends]
    words = in_words(outcomes, len(names), going_on)
    if going_on:
        return replace(result, outcome=State.RUNNING, reason=words, ended_at_ns=None)
    last_ns = max((at_ns for _, at_ns in ends), default=0)
    outcome = outcome_of(outcomes, len(names))
    return replace(result, outcome=outcome, reason=words, ended_at_ns=max(last_ns, ended_at_ns))


def _end(spool: Spool, task: str, since_ns: int) -> tuple[State, int]:
    """Return how and when a task last ended; one that has not run since it was submitted was withdrawn.

    INVALID: its record cannot be parsed.
    """
    run = spool.latest_run(task)
    result = spool.known_end(task, run) if run is not None else None
    if isinstance(result, InvalidRecord):
        return State.INVALID, 0
    if result is None or (result.submitted_at_ns or 0) < since_ns:
        return State.CANCELLED, 0
    return result.outcome, result.ended_at_ns or 0


def task_names(spool: Spool, name: str, run: int, record: ArrayRecord | None) -> tuple[str, ...]:
    """Return the tasks of an expanded array, in order; *record* is that of its run."""
    from spool.formats import jobfile  # imported here, because a list without arrays does not need it

    text = spool.record(name, run, layout.SPEC_COPY)
    try:
        return Tasks(name, jobfile.parse(text or b"", name=name)).names()
    except InvalidJob:  # emptied by a power cut
        return tuple(f"{name}_{index}" for index in range(record.tasks if record is not None else 0))
