"""submitit's view of a job in a spool: its state, in the words of Slurm, which submitit's users know."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import spool
from submitit.core import core
from submitit.core.job_environment import JobEnvironment

_WORDS = {
    "queued": "PENDING",
    "held": "PENDING",
    "submitted": "PENDING",
    "starting": "RUNNING",
    "running": "RUNNING",
    "stopping": "COMPLETING",
    "finished": "COMPLETED",
    "failed": "FAILED",
    "cancelled": "CANCELLED",
    "timeout": "TIMEOUT",
    "out_of_memory": "OUT_OF_MEMORY",
    "unschedulable": "DEADLINE",
    "lost": "NODE_FAIL",
    "preempted": "PREEMPTED",
    "invalid": "BOOT_FAIL",
}
_LOOK_EVERY_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0


class SpoolInfoWatcher(core.InfoWatcher):
    """The states of the jobs of one spool. They are read from its files, so each job is looked at for itself."""

    def __init__(self, root: str | None) -> None:
        super().__init__(delay_s=1)
        self._root = root
        self._jobs: dict[str, spool.Job] = {}
        self._seen: dict[str, tuple[float, str]] = {}

    @functools.cached_property
    def client(self) -> spool.Client:
        """The spool. Raises SpoolError."""
        return spool.Client(self._root)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return the state of a job; `mode="force"` reads it anew, and `mode="cache"` never does."""
        at, state = self._seen.get(job_id, (0.0, "UNKNOWN"))
        now = time.monotonic()
        if mode == "force" or (mode == "standard" and now - at >= _LOOK_EVERY_S):
            state = self._look(job_id)
            self._seen[job_id] = (now, state)
        return state

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, str]:
        """Return the id and the state of a job."""
        return {"JobID": job_id, "State": self.get_state(job_id, mode)}

    def update(self) -> None:
        """Read the states of all registered jobs anew."""
        for job_id in self._registered:
            self.get_state(job_id, "force")

    def clear(self) -> None:
        """Forget the states that were read."""
        super().clear()
        self._seen.clear()

    def _look(self, job_id: str) -> str:
        self._num_calls += 1
        try:
            job = self._jobs.setdefault(job_id, self.client.job(job_id))
            outcome = job.outcome
        except spool.NoSuchJob:
            return "CANCELLED"  # withdrawn: its file was removed before it ran
        if outcome is not None:
            return _WORDS.get(outcome, "FAILED")  # a later spool may have other outcomes
        try:
            return _WORDS[job.row().state]
        except spool.NoSuchJob:
            return "PENDING"  # a task has no file before its array issues it


@functools.cache
def _watcher_of(root: str | None) -> SpoolInfoWatcher:
    return SpoolInfoWatcher(root)


class SpoolJob(core.Job[core.R]):
    """A submitit job in a spool; `job_id` is its name there. *root*: the spool, if it is not the default one."""

    _results_timeout_s = 2  # for the result of a job that has ended: it is on this machine

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,), root: str | None = None) -> None:
        self._root = root
        super().__init__(folder, job_id, tasks)
        for each in self._sub_jobs:
            each.__dict__["_root"] = root

    @property
    def watcher(self) -> SpoolInfoWatcher:  # type: ignore[override]  # the base has one for all spools
        """What knows the states of the jobs of this spool."""
        return _watcher_of(self._root)

    def wait(self) -> None:
        """Wait until the job has ended."""
        pause = _FIRST_PAUSE_S
        while not self.done():
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)

    def cancel(self, check: bool = True) -> None:
        """Cancel the job. *check*: raise a SpoolError if that is not possible, as for a job that has ended."""
        with contextlib.nullcontext() if check else contextlib.suppress(spool.SpoolError, OSError):
            self.watcher.client.cancel(self.job_id)

    def _interrupt(self, timeout: bool = False) -> None:
        """Interrupt the job as spool does before its time limit, or *timeout* being false by queueing it again."""
        if timeout:
            name = JobEnvironment.USR_SIG
            command = [sys.executable, "-P", "-m", "spool", "--spool", self.watcher.client.root]
            subprocess.run([*command, "signal", name, self.job_id], check=True, stdout=subprocess.DEVNULL)
        else:
            self.watcher.client.requeue(self.job_id)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register_in_watcher()
