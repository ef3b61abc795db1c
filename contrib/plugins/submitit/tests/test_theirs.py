"""submitit's own tests of its local executor, with ours in its place.

They look at `_process`, the child that the local executor has for each job. The stand-in has one that looks at the job.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import spool
from submitit.conftest import weird_tmp_path
from submitit.core import plugins
from submitit.local import local, test_local
from submitit.local.test_local import (
    test_cancel,
    test_custom_checkpoint,
    test_get_first_task_error,
    test_killed,
    test_load_submission,
    test_local_error,
    test_local_job,
    test_local_map_array,
    test_local_submit_array,
    test_long_running_job,
    test_pickle_output_from_main,
    test_requeuing,
    test_setup,
    test_stdout,
    test_weird_dir,
)

from spool_submitit import SpoolExecutor, SpoolJob

__all__ = [
    "test_cancel",
    "test_custom_checkpoint",
    "test_get_first_task_error",
    "test_killed",
    "test_load_submission",
    "test_local_error",
    "test_local_job",
    "test_local_map_array",
    "test_local_submit_array",
    "test_long_running_job",
    "test_pickle_output_from_main",
    "test_requeuing",
    "test_setup",
    "test_stdout",
    "test_weird_dir",
    "weird_tmp_path",
]

_KEPT: set[str] = set()


class StandInProcess:
    """The process of a job, as far as the tests use it."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id

    def poll(self) -> int | None:
        """Return -2, as after SIGINT, for a cancelled job."""
        end = spool.Client().wait(self._job_id, timeout_s=0)
        return None if end is None else -signal.SIGINT if end.outcome == spool.State.CANCELLED else 0

    def send_signal(self, number: int) -> None:
        """End the job."""
        assert number == signal.SIGKILL
        end(self._job_id)


def end(job_id: str) -> None:
    """Cancel a job, and wait until it is over: the tests wait a tenth of a second."""
    spool.Client().cancel(job_id)
    assert spool.Client().wait(job_id, timeout_s=60) is not None


class StandInJob(SpoolJob[Any]):
    """A job that has the process and the states of a local one."""

    _process: StandInProcess | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._process = StandInProcess(self.job_id)

    @property
    def state(self) -> str:
        """The state, in the words of the local executor."""
        state = self.watcher.get_state(self.job_id, "force")
        return "INTERRUPTED" if state == "CANCELLED" else state

    def cancel(self, check: bool = True) -> None:
        """Cancel the job, and wait until it is over."""
        end(self.job_id)

    def __del__(self) -> None:
        super().__del__()
        if self.paths.result_pickle.exists():
            _KEPT.discard(self.job_id)

    def __getstate__(self) -> dict[str, Any]:
        _KEPT.add(self.job_id)
        return {**self.__dict__, "_process": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._process = StandInProcess(self.job_id) if self.job_id in _KEPT else None


class StandIn(SpoolExecutor):
    """The executor, under the name of the local one; a submitted job runs, as there."""

    @classmethod
    def name(cls) -> str:
        """Return what AutoExecutor looks for."""
        return "local"

    def _internal_process_submissions(self, delayed_submissions: list[Any]) -> list[Any]:
        jobs = super()._internal_process_submissions(delayed_submissions)
        ours = [StandInJob(job.paths._folder, job.job_id, range(job.num_tasks)) for job in jobs]
        for job in ours:
            while job.watcher.get_state(job.job_id, "force") == "PENDING":
                time.sleep(0.01)
        return ours


@pytest.fixture(autouse=True)
def _in_its_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(local, "LocalExecutor", StandIn)
    monkeypatch.setattr(local, "LocalJob", StandInJob)
    for cached in (plugins._get_plugins, plugins.get_executors):
        cached.cache_clear()
    assert plugins.get_executors()["local"] is StandIn
    yield
    for cached in (plugins._get_plugins, plugins.get_executors):
        cached.cache_clear()


def test_these_are_their_tests() -> None:
    """All of submitit's tests of the local executor are here, except the one of the function that starts its child."""
    theirs = {name for name in vars(test_local) if name.startswith("test_") and callable(getattr(test_local, name))}
    assert theirs - set(__all__) == {"test_make_subprocess"}
