"""Waiting for many jobs at once: a look reads the directories that have changed, and no file of each job.

A job that has ended has no file in `queued/`, `held/` and `running/`; so only the jobs that are in none of them are
looked at one by one. The tasks of an array are awaited by name before they are issued.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

from spool.client.waiting import Awaited, End
from spool.core import layout
from spool.core.arrays import array_of
from spool.core.errors import NoSuchJob
from spool.core.layout import HELD, QUEUED, RUNNING
from spool.core.model import State
from spool.store.spool import Spool

_PLACES = (QUEUED, HELD, RUNNING)
_FEW = 8  # jobs that are looked at in the time of one look at the directories
_TICK_NS = 20_000_000  # two changes of a directory this close may have the same time
_ANYWAY_NS = 1_000_000_000  # how often to read the directories even if nothing seems to have changed
_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 1.0
_SHARE = 20  # of the time of a look between two looks


class EndWatch:
    """Awaits jobs of one spool."""

    def __init__(self, spool: Spool, names: Collection[str] = ()) -> None:
        """Await *names*. Raises NoSuchJob for the first that is unknown."""
        self._spool = spool
        self._left: dict[str, Awaited | None] = {}  # None: in an active directory, and never run before
        self._unissued: dict[str, set[str]] = {}  # by array, the awaited tasks that it has not issued yet
        self._new: set[str] = set()  # those of `_left` that no look has seen
        self._absent: set[str] = set()  # those that were in no active directory, or have an error, when these were read
        self._marks: dict[str, tuple[int, int] | None] = {}
        self._active: set[str] = set()
        self._complaints: set[str] = set()
        self._read_ns = 0
        self._cost_s = 0.0
        for error in self.add(names).values():
            raise error

    def __len__(self) -> int:
        return len(self._left) + sum(map(len, self._unissued.values()))

    @property
    def pause_s(self) -> float:
        """How long to wait before the next look."""
        return min(_LONGEST_PAUSE_S, max(_PAUSE_S, _SHARE * self._cost_s))

    def add(self, names: Collection[str]) -> dict[str, NoSuchJob]:
        """Await *names* too, and return the errors of those that are unknown, by name.

        A task of an array in progress counts as known, whether it was issued or not.
        """
        unknown: dict[str, NoSuchJob] = {}
        new = [name for name in dict.fromkeys(names) if name not in self._left]
        known: set[str] | None = None
        if len(new) > _FEW:
            known = set(self._spool.jobs_with_runs())
            self._read()
        arrays: dict[str, bool] = {}
        for name in new:
            array = array_of(name)
            if array and array not in arrays:
                arrays[array] = (known is None or array in known or array in self._active) and self._issues(array)
            if array and arrays[array]:
                self._unissued.setdefault(array, set()).add(name)
            elif known is not None and name in self._active and name not in known:
                self._left[name] = None
            else:
                try:
                    self._await(name, array)
                except NoSuchJob as error:
                    unknown[name] = error
        return unknown

    def _await(self, name: str, array: str) -> None:
        try:
            self._left[name] = Awaited(self._spool, name)
            self._new.add(name)
        except NoSuchJob:
            if not array or not self._is_array(array):
                raise
            self._unissued.setdefault(array, set()).add(name)  # its array has ended before it was issued

    def discard(self, name: str) -> None:
        """Await a job no longer."""
        self._left.pop(name, None)
        self._new.discard(name)
        self._absent.discard(name)
        for names in self._unissued.values():
            names.discard(name)

    def poll(self) -> list[End]:
        """Return the ends of the jobs that have ended since the last look; they are awaited no longer."""
        begun = time.monotonic()
        ends: list[End] = []
        if len(self) > _FEW:
            if self._changed():
                self._read()
                ends += self._issued()
                self._absent = {name for name in self._left if name not in self._active}
                self._absent |= self._complaints & self._left.keys()
            looked_at = self._absent | self._new
        else:
            ends += self._issued()
            looked_at = set(self._left)
        self._new.clear()
        ends += [end for name in looked_at if (end := self._look(name)) is not None]
        for end in ends:
            self.discard(end.name)
        self._cost_s = time.monotonic() - begun
        return ends

    def _look(self, name: str) -> End | None:
        awaited = self._left[name]
        if awaited is None:
            awaited = self._left[name] = Awaited(self._spool, name, waited=True)
        return awaited.poll()

    def _changed(self) -> bool:
        """Whether a file may have entered or left an active directory since they were read."""
        if time.time_ns() - self._read_ns >= _ANYWAY_NS:
            return True
        marks = {place: self._spool.mark_of(place) for place in _PLACES}
        settled = all(mark is None or mark[1] < self._read_ns - _TICK_NS for mark in self._marks.values())
        return marks != self._marks or not settled

    def _read(self) -> None:
        self._read_ns = time.time_ns()
        self._marks = {place: self._spool.mark_of(place) for place in _PLACES}
        self._active.clear()
        self._complaints.clear()
        tail = layout.JOB_SUFFIX + layout.ERROR_SUFFIX
        for place in _PLACES:
            names, others = self._spool.names_and_others(place)
            self._active.update(names)
            if place != RUNNING:
                self._complaints.update(name.removesuffix(tail) for name in others if name.endswith(tail))

    def _issues(self, name: str) -> bool:
        """Whether *name* is an array in progress: one whose tasks are not all known as jobs yet."""
        return any(place in _PLACES for place in self._spool.places(name)) and self._is_array(name)

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
                    continue
                try:
                    self._left[task] = Awaited(self._spool, task)
                    self._new.add(task)
                except NoSuchJob:
                    ends.append(End(task, State.CANCELLED, reason="never issued"))
            awaited &= waiting or set()
            if not awaited:
                del self._unissued[array]
        return ends

    def _waiting(self, name: str) -> tuple[set[str] | None, str]:
        """Return the tasks that an array has not issued yet, None for all; and why it never will, as far as known."""
        record = self._spool.newest_array(name)
        if record is not None and self._spool.result(name, record.run) is None:
            path = f"{self._spool.layout.metadir(name, record.run)}/{layout.TASKS}"
            with suppress(FileNotFoundError):
                return set(layout.jobs_of(os.listdir(path))), ""
            return set(), ""
        if any(place in _PLACES for place in self._spool.places(name)):
            return None, (self._spool.problem_text(name) or "").strip()
        return set(), ""
