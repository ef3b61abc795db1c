"""The backend by itself: what its jobs have, and what becomes of them."""

from __future__ import annotations

import os
import time
import tomllib
from pathlib import Path
from typing import Any

import joblib
import pytest
from spool import Client, State

import joblib_spool
from waiting import PATIENCE_S, wait_for


def jobs(spool: Path) -> dict[str, dict[str, Any]]:
    """Return the files of the jobs that have ended, by name."""
    return {path.stem: tomllib.loads(path.read_text()) for path in (spool / "done").glob("*.toml")}


def test_the_options_are_the_keys_of_the_jobs(spool: Path) -> None:
    """What `parallel_config` is given reaches each job, and the results come back in order."""
    with joblib.parallel_config(backend="spool", n_jobs=2, cpus=2, memory="1G", name="fit"):
        found = joblib.Parallel(batch_size=1)(joblib.delayed(divmod)(n, 3) for n in range(3))
    assert found == [(0, 0), (0, 1), (0, 2)]
    wait_for(lambda: set(jobs(spool)) == {"fit-1", "fit-2", "fit-3"})
    assert {(job["cpus"], job["memory"]) for job in jobs(spool).values()} == {(2, "1G")}


def test_an_unknown_option_is_refused(spool: Path) -> None:
    """A misspelt key is an error in spool's own words, before any job."""
    with pytest.raises(Exception, match="memry"), joblib.parallel_config(backend="spool", n_jobs=2, memry="1G"):
        joblib.Parallel()(joblib.delayed(abs)(n) for n in range(3))
    assert not list((spool / "queued").iterdir())


def test_the_threads_of_libraries_are_limited(spool: Path) -> None:
    """`inner_max_num_threads` is what the numerical libraries of a job see."""
    with joblib.parallel_config(backend="spool", n_jobs=2, inner_max_num_threads=3):
        found = joblib.Parallel()(joblib.delayed(os.getenv)("OPENBLAS_NUM_THREADS") for _ in range(2))
    assert found == ["3", "3"]


def fail_or_wait(place: str, number: int) -> None:
    """Fail as the first of some tasks, once another has begun."""
    with open(f"{place}/{number}", "w"):
        pass
    while not os.path.exists(f"{place}/1"):
        time.sleep(0.01)
    if number == 0:
        raise KeyError("the first")
    time.sleep(1000)


def test_a_failure_cancels_the_other_jobs(spool: Path, tmp_path: Path) -> None:
    """When a task fails, its exception comes back with its traceback, and no other job of the call goes on."""
    with joblib.parallel_config(backend="spool", n_jobs=4), pytest.raises(KeyError, match="the first") as caught:
        joblib.Parallel(batch_size=1)(joblib.delayed(fail_or_wait)(str(tmp_path), n) for n in range(4))
    assert "fail_or_wait" in str(caught.value.__cause__)
    wait_for(lambda: len(jobs(spool)) == 4)
    client = Client(spool)
    ends = [client.wait(name, timeout_s=PATIENCE_S) for name in jobs(spool)]
    assert sorted(str(end and end.outcome) for end in ends) == [*["cancelled"] * 3, "failed"]


def test_a_job_that_takes_too_much_says_so(spool: Path) -> None:
    """A task that reaches its limit raises the type of that failure."""
    limits = joblib.parallel_config(backend="spool", n_jobs=2, time_limit="1s", kill_grace="1s")
    with limits, pytest.raises(Exception, match=State.TIMEOUT.value) as caught:
        joblib.Parallel()(joblib.delayed(time.sleep)(1000) for _ in range(2))
    assert type(caught.value).__name__ == "TimedOut"


def test_the_backend_may_be_an_object(spool: Path) -> None:
    """`SpoolBackend(...)` is taken where a backend is, and names its own spool."""
    backend = joblib_spool.SpoolBackend(root=spool, name="own")
    assert joblib.Parallel(n_jobs=2, backend=backend)(joblib.delayed(abs)(n) for n in (-1, -2)) == [1, 2]
    wait_for(lambda: bool(jobs(spool)))
    assert all(name.startswith("own-") for name in jobs(spool))


def processes(depth: int) -> set[int]:
    """Return the process of a task, and those of the tasks that it has run by the backend, to a depth of calls."""
    tasks = [joblib.delayed(processes)(depth - 1)] * 2
    return {os.getpid()}.union(*joblib.Parallel(n_jobs=2, backend="spool", cpus=1)(tasks) if depth else ())


def test_a_task_that_names_the_backend_waits_for_no_other_job(spool: Path) -> None:
    """Its own calls stay in its process, however deep, so that two such tasks cannot wait for each other."""
    found = joblib.Parallel(n_jobs=2, backend="spool", batch_size=1)([joblib.delayed(processes)(3)] * 2)
    assert [len(pids) for pids in found] == [1, 1]
    wait_for(lambda: len(jobs(spool)) == 2)


def test_threads_of_a_program_may_name_the_backend(spool: Path) -> None:
    """A program that is no job keeps nothing while it waits: its nested calls are jobs."""
    [pids] = joblib.Parallel(n_jobs=2, backend="threading")([joblib.delayed(processes)(1)])
    assert len(pids) > 1


def test_a_task_knows_the_backend(spool: Path) -> None:
    """A task can name the backend in calls of its own, without the import."""
    question = "'spool' in __import__('joblib').parallel.BACKENDS"
    assert joblib.Parallel(n_jobs=2, backend="spool")([joblib.delayed(eval)(question)] * 2) == [True, True]
    wait_for(lambda: bool(jobs(spool)))
    assert all(name.startswith("eval-") for name in jobs(spool))
