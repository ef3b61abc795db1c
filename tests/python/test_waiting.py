"""Waiting for many jobs: for one, for all, for each as it ends, and what a look costs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import spool
from served import Served
from spool.client.waiting import Waiter
from spool.store.spool import Spool

MANY = 20  # more than are looked at one by one


def _names(jobs: Any) -> list[str]:
    return [str(job) for job in jobs]


@pytest.mark.parametrize("count", [2, MANY])
def test_each_job_comes_when_it_has_ended(served: Served, tmp_path: Path, count: int) -> None:
    """A job that cannot end yet does not keep the others back, and comes last."""
    client = spool.Client()
    slow = client.submit(f"while ! test -e {tmp_path}/go; do sleep 0.01; done", name="slow")
    jobs = [slow, *client.submit_many(["true"] * (count - 1))]
    found = []
    for job in spool.as_completed(jobs):
        found.append(job)
        assert job.outcome is spool.State.FINISHED
        if len(found) == count - 1:
            (tmp_path / "go").touch()
    assert found[-1] is slow
    assert sorted(_names(found)) == sorted(_names(jobs))


def test_after_a_timeout_what_has_ended_is_known(client: spool.Client) -> None:
    """The end of a job that has not ended is None, or an error from the iterator."""
    waits, done = client.submit("true"), client.submit("true")
    client.cancel(done)
    ends = spool.wait_all([waits, done], timeout_s=0.01)
    assert ends[0] is None
    assert ends[1] is not None
    assert spool.wait_any([waits, done], timeout_s=0.01) == done
    assert spool.wait_any([waits], timeout_s=0.01) is None
    assert spool.wait_any([]) is None
    assert spool.wait_all([]) == ()
    with pytest.raises(TimeoutError, match=r"1 of 2 jobs have not ended in time"):
        list(spool.as_completed([waits, done], timeout_s=0.01))


def test_what_has_a_job_is_waited_for_as_the_job(client: spool.Client, tmp_path: Path) -> None:
    """Futures come back as they are; jobs of several spools can be waited for together; a name is no job."""
    other = spool.Client(tmp_path / "other", make=True)
    one, two = client.submit("true", name="a", held=True), other.submit("true", name="a", held=True)
    client.cancel(one)
    other.cancel(two)
    future = SimpleNamespace(job=one)
    assert {id(each) for each in spool.as_completed([future, two])} == {id(future), id(two)}
    with pytest.raises(TypeError, match="cannot wait for 'a'"):
        spool.wait_all(["a"])  # type: ignore[list-item]
    with pytest.raises(spool.NoSuchJob):
        spool.wait_any([SimpleNamespace(job=spool.Job(Spool(client.root), "none"))])


@pytest.mark.parametrize("count", [1, MANY])
def test_a_job_that_never_runs_has_an_end(client: spool.Client, spool_root: Path, count: int) -> None:
    """One whose file is removed or moved away is cancelled, and one whose file is wrong is invalid."""
    jobs = client.submit_many([{"command": "true", "name": f"job-{n}"} for n in range(3 * count)])
    seen = spool.as_completed(jobs, timeout_s=60)
    for number, job in enumerate(jobs):
        path = spool_root / "queued" / f"{job}.toml"
        if number % 3 == 0:
            path.unlink()
        elif number % 3 == 1:
            path.rename(spool_root / "done" / path.name)
        else:
            path.with_name(f"{path.name}.error").write_text("- wrong\n")
    found = _names(seen)
    assert sorted(found) == sorted(_names(jobs))


@pytest.mark.parametrize("count", [2, MANY])
def test_tasks_are_waited_for_before_they_are_issued(served: Served, count: int) -> None:
    """From the submission of their array on, before there is a file of theirs; those that fail come like the others."""
    served.stop()
    sweep = spool.Client().sweep("exit {n}", matrix={"n": range(count)}, name="s")
    tasks = sweep.tasks()
    assert spool.wait_all(tasks, timeout_s=0.05) == (None,) * count
    assert repr(tasks[0]) == "<spool.Job s_0: not issued yet>"
    served.start()
    assert [end.exit_code for end in spool.wait_all([*tasks, tasks[0]]) if end is not None] == [*range(count), 0]


@pytest.mark.parametrize("count", [2, MANY])
def test_tasks_of_an_array_that_is_submitted_again_are_new(served: Served, tmp_path: Path, count: int) -> None:
    """The ends of the earlier tasks of those names do not count, neither before they are issued nor afterwards."""
    client = spool.Client()
    for code in (3, 4):
        sweep = client.sweep("exit {code}", matrix={"code": [code], "n": range(count)}, name="s", replace=True)
        tasks = sweep.tasks()
        assert {task.parameters["code"] for task in tasks} == {str(code)}
        if code == 3:
            assert [end.exit_code for end in spool.wait_all(tasks) if end is not None] == [3] * count
            assert sweep.wait() is not None
            served.stop()
        else:
            assert spool.wait_all(tasks, timeout_s=0.05) == (None,) * count
            assert [task.outcome for task in tasks] == [None] * count
            served.start()
            assert [end.exit_code for end in spool.wait_all(tasks) if end is not None] == [4] * count


@pytest.mark.parametrize("count", [2, MANY])
def test_tasks_that_are_never_issued_have_an_end(served: Served, count: int) -> None:
    """Those of an array that is cancelled before, or while some of its tasks wait to be issued."""
    served.stop()
    client = spool.Client()
    early = client.sweep("sleep 100", matrix={"n": range(count)})
    tasks = early.tasks()
    early.cancel()
    ends = spool.wait_all(tasks, timeout_s=60)
    assert {end.outcome for end in ends if end is not None} == {spool.State.CANCELLED}
    served.start()
    late = client.sweep("sleep 100", matrix={"n": range(count)}, max_running=1)
    tasks = late.tasks()
    served.until(lambda: served.places(f"{late}_0") == ["running"], "a task that runs")
    late.cancel()
    ends = spool.wait_all(tasks)
    assert {end.outcome for end in ends if end is not None} == {spool.State.CANCELLED}
    assert len(ends) == count


def test_an_array_that_cannot_be_used_ends_its_tasks(client: spool.Client, spool_root: Path) -> None:
    """Each is invalid, for the reason that its array is."""
    sweep = client.sweep("exit {n}", matrix={"n": range(MANY)}, name="s")
    tasks = sweep.tasks()
    (spool_root / "queued" / "s.toml.error").write_text("- wrong\n")
    ends = spool.wait_all(tasks, timeout_s=60)
    assert {(end.outcome, end.reason) for end in ends if end is not None} == {(spool.State.INVALID, "- wrong")}


def test_a_look_at_thousands_of_jobs_does_not_look_at_each(
    client: spool.Client, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while nothing changes nor when one ends: a few calls for the directories, and some for that job."""
    for number in range(3_000):
        (spool_root / "queued" / f"j{number}.toml").write_text('command = "true"\n')
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*arguments, **options)

        return call

    for name in ("stat", "lstat", "listdir", "scandir", "open"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    watch = Waiter(Spool(client.root), [f"j{number}" for number in range(3_000)])
    assert watch.poll() == []
    assert calls < 100
    (spool_root / "queued" / "j7.toml").rename(spool_root / "done" / "j7.toml")
    (spool_root / "jobs" / "j7").mkdir()
    calls = 0
    ends = watch.poll() or watch.poll()
    while not ends:
        calls = 0
        ends = watch.poll()
    assert [end.name for end in ends] == ["j7"]
    assert calls < 100
    assert len(watch) == 2_999


def test_progress_is_told_to_a_function_to_tqdm_or_to_a_terminal(
    client: spool.Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By tqdm where it is installed; else by a line on stderr if that is a terminal, and nowhere if it is not."""
    jobs = client.submit_many(["true"] * 3, held=True)
    for job in jobs:
        job.cancel()
    told: list[tuple[int, int]] = []
    spool.wait_all(jobs, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]

    bars: list[Any] = []

    class Bar:
        def __init__(self, total: int, unit: str) -> None:
            self.seen: list[Any] = [total]
            bars.append(self)

        def update(self) -> None:
            self.seen.append("update")

        def close(self) -> None:
            self.seen.append("close")

    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Bar))
    spool.wait_all(jobs, progress=True)
    assert bars[0].seen == [3, "update", "update", "update", "close"]
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    spool.wait_all(jobs, progress=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    spool.wait_all(jobs, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    counts = re.findall(r"\r(\d) of 3", err)
    assert (counts[0], counts[-1]) == ("0", "3")


def test_an_iterator_that_is_left_leaves_the_jobs_alone(client: spool.Client) -> None:
    """The first that has ended is enough: the others go on waiting in the spool."""
    done, waits = client.submit_many(["true"] * 2, held=True)
    done.cancel()
    assert next(spool.as_completed([waits, done])) == done
    assert waits.outcome is None
    assert repr(waits).endswith(": held>")
