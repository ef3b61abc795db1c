"""What submitit's jobs are in a spool, and how they are interrupted there."""

from __future__ import annotations

import itertools
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import spool
from submitit import AutoExecutor
from submitit.core import plugins
from submitit.core.utils import FailedJobError, UncompletedJobError

import deeds
from spool_submitit import SpoolExecutor, SpoolJob
from waiting import wait_for

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def executor(tmp_path: Path) -> AutoExecutor:
    """Give submitit's executor, with spool behind it."""
    return AutoExecutor(tmp_path / "logs", cluster="spool")


def job_file(root: Path, name: str) -> dict[str, Any]:
    """Return the keys of a job."""
    [path] = root.glob(f"*/{name}.toml")
    return tomllib.loads(path.read_text())


def command(*words: str) -> None:
    """Do a command of spool."""
    subprocess.run([sys.executable, "-m", "spool", *words], check=True, stdout=subprocess.DEVNULL)


# Which executor it is.


def test_submitit_finds_both_parts() -> None:
    """The entry points name the executor, and the environment of its jobs."""
    assert plugins.get_executors()["spool"] is SpoolExecutor
    assert "spool" in plugins.get_job_environments()


def test_it_is_taken_where_there_is_a_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster by name, submitit takes spool before its own local executor."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SpoolExecutor.affinity() == 2
    assert AutoExecutor.which() == "spool"


def test_slurm_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is an `srun`, submitit takes Slurm, and spool only if asked for."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SpoolExecutor.affinity() == 0
    assert AutoExecutor.which() == "slurm"


def test_without_a_spool_it_waits_to_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed where no spool was ever made, it changes nothing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SPOOL_DIR", str(tmp_path / "none"))
    assert SpoolExecutor.affinity() == 0
    assert AutoExecutor.which() == "local"
    assert not (tmp_path / "none").exists()


def test_old_programs_still_reach_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter without a prefix, which spool has too, goes where it went before this plugin was installed."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    executor = AutoExecutor(tmp_path / "logs")
    with pytest.warns(UserWarning, match="Use 'slurm_comment' instead"):
        executor.update_parameters(comment="mine", slurm_array_parallelism=3, spool_comment="other")
    assert executor.parameters == {"comment": "mine", "array_parallelism": 3}


# What a job is.


def test_parameters_become_keys(root: Path, executor: AutoExecutor) -> None:
    """Submitit's words become those of a job file, and every key with `spool_` before it is taken over."""
    executor.update_parameters(
        name="my train", timeout_min=30, cpus_per_task=2, mem_gb=0.5, spool_priority=30, spool_tags=["a"]
    )
    job = executor.submit(deeds.add, 1, 2)
    assert job.result() == 3
    assert job.job_id.startswith("my-train-")
    keys = job_file(root, job.job_id)
    assert (keys["cpus"], keys["memory"], keys["gpus"]) == (2, "536870912B", 0)
    assert (keys["time_limit"], keys["signal"]) == ("1800000ms", "USR2@90000ms")
    assert (keys["priority"], keys["tags"]) == (30, ["a"])


def test_a_batch_is_one_array(root: Path, executor: AutoExecutor) -> None:
    """All submissions of a batch, and all calls of a map, are the tasks of one array, in their order."""
    executor.update_parameters(spool_array_parallelism=2)
    with executor.batch():
        batch = [executor.submit(deeds.add, number, 1) for number in range(3)]
    mapped = executor.map_array(deeds.add, range(3), [10] * 3)
    assert [job.result() for job in batch] == [1, 2, 3]
    assert [job.result() for job in mapped] == [10, 11, 12]
    for jobs in (batch, mapped):
        array = jobs[0].job_id.rpartition("_")[0]
        assert [job.job_id for job in jobs] == [f"{array}_{at}" for at in range(3)]
        keys = job_file(root, array)
        assert (keys["array"], keys["max_running"]) == ("0-2", 2)


def test_a_job_knows_who_it_is(executor: AutoExecutor) -> None:
    """`JobEnvironment` gives its id, and in an array that of the array and the place there."""
    alone = executor.submit(deeds.identity)
    assert alone.result() == (alone.job_id, None, None, 1)
    first, second = executor.submit_array([deeds.identity, deeds.identity])
    array = first.job_id.removesuffix("_0")
    assert second.result() == (f"{array}_1", array, "1", 1)


def test_odd_folders_stay_what_they_are(tmp_path: Path) -> None:
    """Signs that mean something in a job file or a folder of submitit mean what submitit says, in arrays too."""
    executor = SpoolExecutor(tmp_path / "a $HOME 50% {index}" / "%A" / "%a" / "%j")
    executor.update_parameters(env={"ODD": "{index} $HOME"})
    jobs = executor.map_array(deeds.variable, ["ODD", "SPOOL_ARRAY_INDEX"])
    assert [job.result() for job in jobs] == ["{index} $HOME", "1"]
    for at, job in enumerate(jobs):
        array = job.job_id.rpartition("_")[0]
        assert job.paths.stdout.parent == tmp_path / "a $HOME 50% {index}" / array / str(at) / job.job_id
        assert "Job completed successfully" in (job.stdout() or "")


def test_each_job_has_gpus_of_its_own(root: Path, executor: AutoExecutor) -> None:
    """On a machine with two GPUs, four jobs of one GPU run two at a time, and never on the same one."""
    if not (root.parent / "nvml").exists():
        pytest.skip("no fake GPUs: no C compiler, or a copy without the tests of spool itself")
    executor.update_parameters(gpus_per_node=1)
    jobs = executor.map_array(deeds.gpu_alone, [0.5] * 4)
    spans: dict[str, list[tuple[float, float]]] = {}
    for job in jobs:
        gpu, begin, finish = job.result()
        spans.setdefault(gpu, []).append((begin, finish))
    assert spans.keys() == {"GPU-a", "GPU-b"}
    for times in spans.values():
        times.sort()
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(times))


def test_the_setup_is_of_the_job(tmp_path: Path, executor: AutoExecutor) -> None:
    """What the setup exports, the job sees; a setup command that fails ends it."""
    executor.update_parameters(spool_setup=["export FROM_SETUP='it is'"])
    assert executor.submit(deeds.variable, "FROM_SETUP").result() == "it is"
    executor.update_parameters(spool_setup=["false", f"touch {tmp_path}/after"])
    job = executor.submit(deeds.add, 1, 1)
    with pytest.raises(UncompletedJobError, match="FAILED"):
        job.result()
    assert not (tmp_path / "after").exists()


def test_a_mistake_is_said_at_once(root: Path, tmp_path: Path, executor: AutoExecutor) -> None:
    """A second node, an unknown parameter and a value that no job file takes are refused, and leave no files."""
    with pytest.raises(ValueError, match="one machine"):
        executor.update_parameters(nodes=2)
    with pytest.raises(NameError, match="spool_gpu_cores"):
        executor.update_parameters(spool_gpu_cores=3)
    with pytest.raises(ValueError, match="gpu_cores"):
        SpoolExecutor(tmp_path).update_parameters(gpu_cores=3)
    before = sorted(root.glob("*/*.toml"))
    executor.update_parameters(spool_priority="high")
    with pytest.raises(spool.InvalidJob, match="priority"):
        executor.submit(deeds.add, 1, 2)
    executor.update_parameters(spool_priority=1)
    big = AutoExecutor(tmp_path / "logs", cluster="spool", spool_max_pickle_size_gb=1e-9)
    with pytest.raises(RuntimeError, match="max_pickle_size_gb"):
        big.map_array(deeds.add, [1, 2], [3, 4])
    assert list((tmp_path / "logs").glob("*")) == []
    assert sorted(root.glob("*/*.toml")) == before


def test_the_example_of_the_readme_runs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line by line, with a `train` that returns its argument."""
    if not (root.parent / "nvml").exists():
        pytest.skip("no fake GPUs: no C compiler, or a copy without the tests of spool itself")
    page = (Path(__file__).parent.parent / "README.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"train": deeds.same}
    exec(code, names)
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"train-\w+ (PENDING|RUNNING|COMPLETED)", first)
    assert second == "0.1"
    assert [job.result() for job in names["jobs"]] == [0.1, 0.2, 0.3]
    assert job_file(root, names["jobs"][0].job_id)["priority"] == 20


def test_a_job_is_found_again(executor: AutoExecutor) -> None:
    """By its folder and its name, and from a pickle; its result is there in any process."""
    job = executor.submit(deeds.add, 20, 22)
    assert SpoolJob[int](executor.folder, job.job_id).result() == 42
    assert pickle.loads(pickle.dumps(job)).result() == 42


def test_a_spool_by_its_path(tmp_path: Path) -> None:
    """`spool_root` names another spool, for the submission and for the job."""
    other = tmp_path / "other"
    spool.Client(other, make=True)
    (other / "config.toml").write_text("autostart = false\n")
    executor = AutoExecutor(tmp_path / "logs", cluster="spool", spool_root=str(other))
    job = executor.submit(deeds.add, 1, 2)
    assert (other / "queued" / f"{job.job_id}.toml").exists()
    assert job.state == "PENDING"
    job.cancel()
    assert job.watcher.get_state(job.job_id, "force") == "CANCELLED"


# How it ends.


def test_a_failure_has_the_trace(executor: AutoExecutor) -> None:
    """What the function raises is a FailedJobError with its traceback, and the job has failed for spool too."""
    job = executor.submit(deeds.add, 1, "2")
    with pytest.raises(FailedJobError, match="unsupported operand"):
        job.result()
    wait_for(lambda: job.watcher.get_state(job.job_id, "force") == "FAILED")


def test_a_cancelled_job_ends_at_once(tmp_path: Path, executor: AutoExecutor) -> None:
    """`cancel` lets the function tidy up, does not wait for `kill_grace`, and leaves no result."""
    mark = tmp_path / "mark"
    job = executor.submit(deeds.tidy, mark)
    wait_for(mark.exists)
    wait_for(mark.read_text)
    job.cancel()
    with pytest.raises(UncompletedJobError, match="CANCELLED"):
        job.result()
    assert mark.read_text() == "tidied"


def test_a_withdrawn_job_is_over(root: Path, executor: AutoExecutor) -> None:
    """A job whose file was removed before it ran has no result, and submitit does not wait for one."""
    executor.update_parameters(spool_start_after="2099-01-01T00:00")
    job = executor.submit(deeds.add, 1, 2)
    assert job.state == "PENDING"
    (root / "queued" / f"{job.job_id}.toml").unlink()
    with pytest.raises(UncompletedJobError, match="CANCELLED"):
        job.result()


# How it is interrupted.


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("by", ["requeue", "hold"])
def test_a_stopped_job_continues_from_its_checkpoint(
    tmp_path: Path, executor: AutoExecutor, by: str, ranks: int
) -> None:
    """`spool requeue` and `spool hold` have the function leave a checkpoint, with which the next run begins."""
    mark = tmp_path / "mark"
    executor.update_parameters(tasks_per_node=ranks)
    job = executor.submit(deeds.Counting(mark))
    wait_for(lambda: mark.exists() and int(mark.read_text() or 0) >= 3)
    command(by, job.job_id)
    if by == "hold":
        wait_for(lambda: spool.Client().jobs(spool.JobFilter(names=(job.job_id,))).rows[0].state == spool.State.HELD)
        command("release", job.job_id)
    for count, runs in job.results():
        assert count >= 3
        assert runs == 1


def test_the_warning_before_the_time_limit_leads_to_a_checkpoint(tmp_path: Path, executor: AutoExecutor) -> None:
    """The job is queued again before its time limit, with a result from its second run, and none as a failure."""
    mark = tmp_path / "mark"
    job = executor.submit(deeds.Counting(mark))
    wait_for(lambda: mark.exists() and int(mark.read_text() or 0) >= 3)
    job._interrupt(timeout=True)
    count, runs = job.result()
    assert count >= 3
    assert runs == 1
    outcomes = [run.outcome for run in _ends(job.job_id)]
    assert outcomes == [spool.State.CANCELLED, spool.State.FINISHED]


def _ends(name: str) -> list[Any]:
    """Return how the runs of a job ended."""
    root = Path(spool.Client().root)
    wait_for((root / "jobs" / name / "2" / "result.toml").exists)
    texts = [(root / "jobs" / name / str(run) / "result.toml").read_text() for run in (1, 2)]
    return [spool.End(name, spool.State(tomllib.loads(text)["outcome"])) for text in texts]


def test_a_stopped_job_without_a_checkpoint_begins_again(tmp_path: Path, executor: AutoExecutor) -> None:
    """A function that leaves none is queued again too, and starts over."""
    mark = tmp_path / "mark"
    job = executor.submit(deeds.Pausing(mark))
    wait_for(mark.exists)
    job._interrupt()
    assert job.result() == "again"
