"""What the plugin needs of spool: submit a batch, see which jobs have ended, cancel."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from spool import Client, End, InvalidJob, Job, NoSuchJob, SpoolError

_PLACES = ("queued", "held", "running")
_TICK_NS = 20_000_000  # two changes of a directory this close may have the same time
_ANYWAY_NS = 1_000_000_000  # how often to look even if nothing seems to have changed
_PAUSE_S = 0.05
_SHARE = 20  # of the time of a look between two looks

Keys = Mapping[str, object]
"""The keys of a job file, `command` and `name` among them."""


def submit(client: Client, jobs: Sequence[Keys]) -> list[Job | InvalidJob]:
    """Submit jobs as one batch; return each, or why the spool does not take it, in their order."""
    try:
        return list(client.submit_many(jobs))
    except InvalidJob as error:
        if len(jobs) == 1:
            return [error]
    return [found for job in jobs for found in submit(client, [job])]


def cancel(client: Client, names: Iterable[str], reason: str) -> None:
    """Cancel jobs; those that have ended stay as they are."""
    for name in names:
        with suppress(SpoolError):  # it has just ended
            client.cancel(name, reason)


def active(client: Client, name: str) -> Job | None:
    """Return the job of that name if it waits, is held or runs."""
    try:
        job = client.job(name)
        return job if job.outcome is None else None
    except NoSuchJob:
        return None


def newest_run(client: Client, name: str) -> int:
    """Return the number of the newest run of a job, 0 if it has none."""
    try:
        return max((int(run) for run in os.listdir(f"{client.root}/jobs/{name}") if run.isdigit()), default=0)
    except FileNotFoundError:
        return 0


class Ends:
    """The ends of many jobs, found by looking at the directories of the spool when they change."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.Lock()  # one thread submits, another looks
        self._awaited: dict[str, Job] = {}
        self._marks: list[int] = []
        self._at_ns = self._absent = 0
        self._cost_s = 0.0

    def add(self, job: Job) -> None:
        """Await a job that has been submitted."""
        _ = job.outcome  # a job that waits now ends with a later run than those that it has had
        with self._lock:
            self._awaited[job.name] = job
            self._marks = []

    @property
    def pause_s(self) -> float:
        """How long to wait before the next look."""
        return max(_PAUSE_S, _SHARE * self._cost_s)

    def poll(self) -> list[End]:
        """Return the ends of the jobs that have ended since the last call."""
        with self._lock:
            if not self._awaited or not self._has_changed():
                return []
            began = time.perf_counter()
            active = set().union(*(os.listdir(f"{self._root}/{place}") for place in _PLACES))
            absent = [job for job in self._awaited.values() if f"{job.name}.toml" not in active]
            ends = [end for job in absent if job.outcome is not None and (end := job.wait()) is not None]
            for end in ends:
                del self._awaited[end.name]
            self._absent = len(absent) - len(ends)
            self._cost_s = time.perf_counter() - began
            return ends

    def _has_changed(self) -> bool:
        """Whether a job may have left the directories since they were last listed."""
        now_ns = time.time_ns()
        marks = [os.stat(f"{self._root}/{place}").st_mtime_ns for place in _PLACES]
        settled = marks == self._marks and max(marks) < self._at_ns - _TICK_NS and not self._absent
        if settled and now_ns - self._at_ns < _ANYWAY_NS:
            return False
        self._marks, self._at_ns = marks, now_ns
        return True
