"""The client for Python programs and its jobs: each method does what the command of its name does."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spool
from served import Served
from spool.store.disk import Disk


@pytest.mark.parametrize("by", [str, lambda job: job], ids=["name", "job"])
def test_a_job_that_waits_is_held_released_listed_explained_and_cancelled(
    client: spool.Client, spool_root: Path, monkeypatch: pytest.MonkeyPatch, by: Callable[[spool.Job], str | spool.Job]
) -> None:
    """Each call does what the command of its name does, of a job or its name, and returns what has come of it."""
    monkeypatch.chdir(spool_root)
    job = by(client.submit(["true"], name="a", cpus=1, tags=["x"]))
    assert str(job) == "a"
    assert (spool_root / "queued" / "a.toml").exists()
    assert client.hold(job).kind == "held"
    assert [reason.code for reason in client.why(job).reasons] == ["held"]
    assert client.release(job).place == "held"
    assert client.wait(job, timeout_s=0) is None
    with pytest.raises(spool.SpoolError, match="it has not run yet"):
        client.output(job)
    assert [(row.name, row.state) for row in client.jobs(spool.JobFilter(tag="x")).rows] == [("a", "queued")]
    assert client.jobs().unserved
    assert [change.kind for change in client.cancel(job, "why")] == ["cancelled"]
    end = client.wait(job, timeout_s=30)
    assert end.outcome is spool.State.CANCELLED


def test_a_name_is_taken_until_its_job_is_replaced(client: spool.Client, spool_root: Path) -> None:
    """An error says where the other one is."""
    client.submit("true", name="a")
    with pytest.raises(spool.SpoolError, match="cannot submit job a: a job of that name is in queued/"):
        client.submit("false", name="a")
    client.submit("false", name="a", held=True, replace=True)
    assert not (spool_root / "queued" / "a.toml").exists()
    assert "false" in (spool_root / "held" / "a.toml").read_text()


def test_what_can_be_expected_to_fail_is_an_error_of_spool(client: spool.Client, tmp_path: Path) -> None:
    """No such job, a key that there is not, a name that cannot be, no spool, no place for one."""
    with pytest.raises(spool.NoSuchJob):
        client.wait("none")
    with pytest.raises(spool.NoSuchJob):
        client.cancel("none")
    with pytest.raises(spool.InvalidJob, match=r'cannot use job b: unknown key "cpuz", did you mean "cpus"\?$'):
        client.submit("true", name="b", cpuz=1)
    with pytest.raises(spool.InvalidValue, match="begins with a letter or a digit"):
        client.submit("true", name=".b")
    with pytest.raises(spool.SpoolUnusable):
        spool.Client(tmp_path / "elsewhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(spool.SpoolUnusable, match="cannot make a spool"):
        spool.Client(tmp_path / "file" / "spool", make=True)
    made = spool.Client(tmp_path / "new", make=True)
    assert made.root == str(tmp_path / "new")
    assert made.jobs().rows == ()


def test_a_fresh_name_is_one_that_no_job_has_had(client: spool.Client) -> None:
    """It begins with its stem, and is a name."""
    names = {client.fresh_name("fit.2") for _ in range(50)}
    assert all(name.startswith("fit.2-") for name in names)
    assert {client.submit("true", name=name, held=True).name for name in names} == names
    assert client.fresh_name("fit.2") not in names
    for stem in ("", "-x", "a/b", "a" * 300, "a\0"):
        with pytest.raises(spool.InvalidValue):
            client.fresh_name(stem)


def test_a_dry_run_says_what_would_be_done_and_keys_change_a_job_that_runs_again(
    client: spool.Client, spool_root: Path
) -> None:
    """Nothing is changed by the first; the second keeps the rest of the file, and refuses what is not valid."""
    done = spool_root / "done" / "a.toml"
    done.write_text('# mine\ncommand = "true"\ntime_limit = "1h"\n')
    (spool_root / "jobs" / "a" / "1").mkdir(parents=True)
    assert str(client.requeue("a", dry_run=True, cpus=2)) == "would be queued again"
    assert done.exists()
    with pytest.raises(spool.InvalidJob):
        client.requeue("a", cpus=-2)
    assert done.exists()
    assert client.requeue("a", cpus=2, time_limit=None).kind == "queued again"
    assert not done.exists()
    assert (spool_root / "queued" / "a.toml").read_text() == '# mine\ncommand = "true"\ncpus = 2\n'
    assert str(client.hold("a", dry_run=True)) == "would be held"
    assert [*map(str, client.cancel("a", dry_run=True))] == ["would be cancelled"]
    assert (spool_root / "queued" / "a.toml").exists()
    client.hold("a")
    assert str(client.release("a", dry_run=True)) == "would be released"
    with pytest.raises(spool.SpoolError, match="it is held"):
        client.suspend("a")


def test_a_job_is_suspended_and_goes_on(served: Served) -> None:
    """From a program as from the command line."""
    client = spool.Client()
    client.submit("sleep 100", name="long")
    served.until(lambda: served.places("long") == ["running"], "a run")
    assert str(client.suspend("long", dry_run=True)) == "would be suspended"
    assert client.suspend("long", "demo").kind == "suspended"
    served.until(lambda: "demo" in served.reason("long"), "a suspended job")
    (row,) = client.jobs().rows
    assert row.suspended_at_ns is not None
    assert client.go_on("long").kind == "continued"
    job = client.job("long")
    assert [change.kind for change in job.cancel("enough")] == ["is being stopped"]
    served.wait_done("long")
    assert "enough" in job.row().reason


def test_many_jobs_are_submitted_in_their_order(
    client: spool.Client, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands and mappings; what a mapping says overrides what is common. Two that draw one name have two."""
    jobs = client.submit_many(
        ["true", ("echo", "a b"), {"command": "false", "name": "one", "cpus": 3}], cpus=2, env={"A": "1"}
    )
    texts = [(spool_root / "queued" / f"{job}.toml").read_text() for job in jobs]
    assert [str(job)[:4] for job in jobs] == ["true", "echo", "one"]
    assert ["cpus = 2" in text for text in texts] == [True, True, False]
    assert "cpus = 3" in texts[2]
    assert 'command = ["echo", "a b"]' in texts[1]
    assert all('A = "1"' in text for text in texts)
    assert client.submit_many([]) == ()
    drawn, urandom = [bytes(4)] * 2, os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: drawn.pop() if size == 4 and drawn else urandom(size))
    assert len({*client.submit_many(["true"] * 5, held=True)}) == len([*(spool_root / "held").iterdir()]) == 5
    assert not drawn


def test_many_jobs_are_submitted_by_one_sync_of_the_directory(
    client: spool.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of a hundred jobs are on the disk after one sync, not after a hundred."""
    synced: list[list[str]] = []
    sync = Disk.sync_directories

    def counting(self: Disk, paths: Any) -> None:
        synced.append(list(paths))
        sync(self, synced[-1])

    monkeypatch.setattr(Disk, "sync_directories", counting)
    client.submit_many(["true"] * 100)
    assert [[Path(path).name for path in paths] for paths in synced] == [["queued"]]


@pytest.mark.parametrize(
    ("jobs", "error", "words"),
    [
        (["true", {"command": "true", "cpuz": 1}], spool.InvalidJob, "cpuz"),
        (["true", {"name": "x"}], spool.InvalidValue, "its command is NoneType"),
        (["true", {"command": lambda: 1}], spool.InvalidValue, "its command is function.*docs/PYTHON.md"),
        (["true", {"command": "true", "name": "-x"}], spool.InvalidValue, "begins with a letter"),
        ([{"command": "true", "name": "x"}] * 2, spool.InvalidValue, "two of the jobs have that name"),
        (["true", {"command": "true", "name": "taken"}], spool.SpoolError, "a job of that name is in queued/"),
        (["true", {"command": "true", "cpus": object()}], spool.InvalidValue, "object"),
        (["true", {"command": "a\ud800"}], spool.InvalidValue, "UTF-8"),
    ],
)
def test_if_one_of_many_is_wrong_none_is_submitted(
    client: spool.Client, spool_root: Path, jobs: list[Any], error: type[Exception], words: str
) -> None:
    """All are checked before the first is written."""
    client.submit("true", name="taken")
    with pytest.raises(error, match=words):
        client.submit_many(jobs)
    assert [path.name for path in (spool_root / "queued").iterdir()] == ["taken.toml"]


def test_an_error_between_two_jobs_says_which_are_in(client: spool.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk gets full after the second: the error has the names of the two, and the spool has their files."""
    link = Disk.link
    linked: list[str] = []

    def full(self: Disk, source: str, target: str) -> None:
        if len(linked) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", target)
        linked.append(target)
        link(self, source, target)

    monkeypatch.setattr(Disk, "link", full)
    jobs = [{"command": "true", "name": name} for name in "abcd"]
    with pytest.raises(spool.NotAllSubmitted, match=r"submit job c: .*No space.*; 2 of the 4 .* before it: a, b"):
        client.submit_many(jobs)
    with pytest.raises(OSError, match="No space"):
        client.submit("true", name="e")
    monkeypatch.undo()
    assert sorted(row.name for row in client.jobs().rows) == ["a", "b"]


def test_a_sweep_is_one_file_whose_tasks_carry_their_values(client: spool.Client, spool_root: Path) -> None:
    """They are known before the array is expanded, by their names too; other values than a file's become texts."""
    sweep = client.sweep("./train {lr} {data}", matrix={"lr": (0.1, 1), "data": [Path("/a"), "b"]}, name="s", cpus=2)
    assert [path.name for path in (spool_root / "queued").iterdir()] == ["s.toml"]
    tasks = sweep.tasks()
    assert [task.name for task in tasks] == ["s_0", "s_1", "s_2", "s_3"]
    assert [tuple(task.parameters.values()) for task in tasks] == [("0.1", "/a"), ("0.1", "b"), ("1", "/a"), ("1", "b")]
    assert client.job("s_3").tasks() == ()
    assert client.job("s_3").parameters == {"lr": "1", "data": "b"}
    assert tasks[0].outcome is None
    row = tasks[1].row()
    assert (row.state, row.reason, dict(row.parameters)["data"]) == ("queued", "not issued yet", "b")
    with pytest.raises(spool.NoSuchJob):
        client.job("s_4")
    sweep.cancel()
    row = tasks[1].row()
    assert (row.state, row.reason) == ("cancelled", "never issued")
    with pytest.raises(spool.NoSuchJob):
        client.wait("s_4")
    with pytest.raises(spool.InvalidJob, match="empty list"):
        client.sweep("true", matrix={"lr": []})


def test_a_job_is_found_by_its_name_in_any_spool(
    client: spool.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`spool.job` looks where the command line does, or in the spool that it is told."""
    mine = client.submit("true", name="a")
    assert spool.job("a") == client.job("a") == mine
    other = spool.Client(tmp_path / "other", make=True)
    with pytest.raises(spool.NoSuchJob):
        spool.job("a", other.root)
    yours = other.submit("true", name="a", held=True)
    assert spool.job("a", tmp_path / "other") == yours != mine
    assert len({mine, yours, client.job("a")}) == 2
    assert mine != "a"
    assert pickle.loads(pickle.dumps([mine, yours])) == [mine, yours]
    with pytest.raises(spool.InvalidValue):
        spool.job("../a")


def test_the_machine_the_plan_and_the_sums_are_those_of_the_commands(client: spool.Client) -> None:
    """Without a dispatcher they come from a fresh look."""
    client.submit("true", name="a", cpus=1)
    plan = client.plan()
    assert [each.job.name for each in (*plan.starts, *plan.waits)] == ["a"]
    assert client.stats(spool.RunFilter(since_at_ns=0)).total.runs == 0
    assert client.stats(by="user").groups == ()
    with pytest.raises(spool.InvalidValue, match="the groups are user, "):
        client.stats(by="moon")
    assert client.gpus().at_ns > 0


# A job: its end, its output, its tasks, by its name.


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
