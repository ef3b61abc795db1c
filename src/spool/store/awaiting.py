"""Waiting for a job's end, by looking at the files: no dispatcher is asked, and none need live.

The end of a job is that its file lies in `done/` and nowhere else, and that its newest run says how it ended and not
that it goes on. Between two looks a file may move, and for a moment while it is cancelled there is none at all.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import islice

from spool.core import layout
from spool.core.errors import NoSuchJob, cannot
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import Result, State
from spool.store.gathering import standing
from spool.store.spool import Spool

GRACE_NS = 1_500_000_000  # how long the paperwork of an end may take before it is believed that none will come
_LINES = 1_000  # of the history, the newest, are looked through
_TASKS_EVERY_NS = 250_000_000  # an array may have ten thousand


@dataclass(frozen=True, slots=True)
class End:
    """How a job ended. INVALID: its file cannot be used, and `reason` says why."""

    name: str
    outcome: State
    exit_code: int | None = None
    reason: str = ""
    run: int | None = None


class Awaited:
    """One job that is waited for. Raises NoSuchJob at once if nothing is known of it."""

    def __init__(self, spool: Spool, name: str) -> None:
        self._spool = spool
        self.name = name
        self.held = False  # when it was looked at last: nothing goes on before it is released
        self._before: int | None = None  # the newest run that had ended when the job was seen waiting or running
        self._waiting = False
        self._absent_since_ns: int | None = None
        self._again_at_ns = 0  # when to ask again how the tasks of an array stand
        if not spool.places(name) and not spool.runs(name):
            raise NoSuchJob(cannot("wait for", f"job {name}", "no job of that name is in the spool"))

    def look(self) -> End | None:
        """Return how the job ended, None if it has not."""
        spool, name = self._spool, self.name
        places = spool.places(name)
        if places == [DONE] or not places:
            places = spool.places(name)  # it may have gone back while the places were looked at one by one
        self.held = HELD in places and QUEUED not in places and RUNNING not in places
        if any(place != DONE for place in places):
            return self._goes_on(places)
        result = self._newest()
        if result is not None and result.again is None and (result.run != self._before or not self._waiting):
            if places or self._patience_is_over():
                return self._ended(result)
            return None
        if result is None and ((spool.latest_run(name) is not None and not places) or spool.is_stopping(name)):
            return None  # its file was taken away, or will be: its run is being stopped
        if not self._patience_is_over():
            return None
        reason = "moved to done/ before it ran" if places else "its file was removed before it ran"
        return End(name, State.CANCELLED, reason=reason)

    def _ended(self, result: Result) -> End | None:
        """Return the end that *result* tells of; of an array that of its tasks, None if one of them runs again."""
        outcome, reason = result.outcome, result.reason
        if self._spool.array(self.name, result.run) is not None:
            if time.monotonic_ns() < self._again_at_ns:
                return None
            now = standing(self._spool, result)
            if now.outcome is None:
                self._again_at_ns = time.monotonic_ns() + _TASKS_EVERY_NS
                return None
            outcome, reason = now.outcome, now.reason
        return End(self.name, outcome, result.exit_code, reason, result.run)

    def _goes_on(self, places: list[str]) -> End | None:
        self._absent_since_ns = None
        if not self._waiting:
            # Of one that runs the newest run is this one, also if it has ended and only its file was not moved yet.
            result = self._newest() if RUNNING not in places else None
            self._before = result.run if result is not None else None
            self._waiting = True
        if QUEUED in places or HELD in places:
            problem = self._spool.problem_text(self.name)
            if problem is not None:
                return End(self.name, State.INVALID, reason=problem.strip())
        return None

    def _newest(self) -> Result | None:
        """Return how the newest run ended, by the history where its own record cannot be read."""
        spool, run = self._spool, self._spool.latest_run(self.name)
        if run is None:
            return None
        result = spool.result(self.name, run)
        if result is None and os.path.lexists(f"{spool.layout.metadir(self.name, run)}/{layout.RESULT}"):
            lines = islice(spool.accounts_since(None), _LINES)
            return next((each for each in lines if (each.job, each.run) == (self.name, run)), None)
        return result

    def _patience_is_over(self) -> bool:
        """Whether the job has looked ended for so long that no record of how will follow."""
        now = time.monotonic_ns()
        if self._absent_since_ns is None:
            self._absent_since_ns = now
        if not self._spool.dispatcher_lives() and not self._waiting:
            return True
        return now - self._absent_since_ns > GRACE_NS
