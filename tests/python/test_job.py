"""A job for Python programs: its end, its output, its tasks, by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

import spool
from served import Served


def test_a_job_says_how_it_is(client: spool.Client, spool_root: Path) -> None:
    """Short, and true at that moment; also of a job that is gone, or whose spool is."""
    job = client.submit("true", name="a")
    assert repr(job) == "<spool.Job a: queued>"
    client.hold(job)
    assert repr(job) == "<spool.Job a: held>"
    assert f"{job}" == "a"
    client.cancel(job)
    assert repr(job) == "<spool.Job a: cancelled>"
    assert repr(client).startswith("<spool.Client /")
    assert repr(client.jobs(everything=True)) == "<spool.JobList: 1 cancelled>"
    (spool_root / "done" / "a.toml").unlink()
    assert repr(spool.Client().jobs()) == "<spool.JobList: no jobs>"


def test_a_job_that_has_run_has_its_end_its_output_and_its_runs(served: Served) -> None:
    """By the object that `submit` returned, and by one that another program gets by the name."""
    job = spool.Client().submit("for i in 1 2 3; do echo line $i; done; exit 3", name="a")
    assert job.outcome is None or job.outcome is spool.State.FAILED
    end = job.wait()
    assert (end.outcome, end.exit_code) == (spool.State.FAILED, 3)
    for same in (job, spool.job("a")):
        assert same.outcome is spool.State.FAILED
        assert same.output() == same.output(1) == b"line 1\nline 2\nline 3\n"
        assert same.tail(2) == "line 2\nline 3\n"
        assert b"".join(same.follow()) == same.output()
        assert [run.record.exit_code for run in same.runs()] == [3]
        assert (same.row().state, same.row().exit_code) == ("failed", 3)
        assert repr(same) == "<spool.Job a: failed>"
        assert same.parameters == {}
        assert same.tasks() == ()
    with pytest.raises(spool.NoSuchJob):
        job.output(2)
    assert (job.why().outcome, [each.text for each in job.why().reasons]) == ("failed", ["exit code 3"])


def test_a_job_that_runs_again_has_not_ended(served: Served, tmp_path: Path) -> None:
    """The object asks anew: after a requeue it has no outcome, and then that of the second run."""
    job = spool.Client().submit(f"test -e {tmp_path}/go || exit 1", name="a")
    assert job.wait() is not None
    assert job.outcome is spool.State.FAILED
    served.stop()
    spool.Client().requeue(job)
    assert job.outcome is None
    (tmp_path / "go").touch()
    served.start()
    end = job.wait()
    assert (end.outcome, end.run) == (spool.State.FINISHED, 2)
    assert job.outcome is spool.State.FINISHED


def test_output_is_followed_while_it_appears(served: Served, tmp_path: Path) -> None:
    """The first piece comes before the job has ended: it ends because of that piece."""
    job = spool.Client().submit(f"echo first; while ! test -e {tmp_path}/go; do sleep 0.01; done; echo last", name="a")
    pieces = job.follow()
    found = next(pieces)
    assert found == b"first\n"
    (tmp_path / "go").touch()
    assert b"".join(pieces) == b"last\n"


def test_each_task_of_a_sweep_has_its_parameters_in_every_view(served: Served) -> None:
    """While it waits, and when it has ended: in a list, in its row, in its output, and in that of its array."""
    client = spool.Client()
    sweep = client.sweep("echo {lr} of {seed}; exit {seed}", matrix={"lr": [0.1, 0.2], "seed": [0, 3]}, name="s")
    ends = spool.wait_all(sweep.tasks())
    assert [(end.name, end.exit_code) for end in ends if end is not None] == [
        ("s_0", 0), ("s_1", 3), ("s_2", 0), ("s_3", 3)]  # fmt: skip
    end = sweep.wait()
    assert end.reason == "2 of 4 finished, 2 failed"
    for task in sweep.tasks():
        lr, seed = task.parameters["lr"], task.parameters["seed"]
        assert task.tail() == f"{lr} of {seed}\n"
        assert dict(task.row().parameters) == spool.job(task.name).parameters == {"lr": lr, "seed": seed}
    listed = {row.name: dict(row.parameters) for row in client.jobs(everything=True).rows}
    assert listed == {"s": {}, **{task.name: task.parameters for task in sweep.tasks()}}
    assert sweep.output().startswith(b"==> s_0 <==\n0.1 of 0\n==> s_1 <==\n")
