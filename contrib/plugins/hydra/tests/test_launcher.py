"""What a sweep is in a spool, and what a Hydra program sees of its jobs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import spool

from hydra_plugins.hydra_spool_launcher.spool_launcher import _parameters
from waiting import PATIENCE_S, wait_for

PROGRAM = """
    import os, sys, time
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    class Odd:
        def __init__(self, value):
            self.value = value

    @hydra.main(version_base="1.3", config_path=None, config_name=None)
    def train(cfg: DictConfig):
        print("training with", OmegaConf.to_container(cfg))
        Path("began-" + HydraConfig.get().job.id).touch()
        if cfg.get("sleep"):
            time.sleep(cfg.sleep)
        if cfg.get("fail"):
            raise LookupError(f"no data for {cfg.x}")
        return Odd(cfg.x)

    train()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Give a Hydra program."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


def sweep(program: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end, with this launcher."""
    return subprocess.run(command(program, *overrides), cwd=program.parent, capture_output=True, text=True, check=False)


def command(program: Path, *overrides: str) -> list[str]:
    """Return the command of a sweep."""
    return [sys.executable, str(program), "-m", "hydra/launcher=spool", "hydra.sweep.dir=out", *overrides]


def job_file(root: Path, name: str) -> dict[str, Any]:
    """Return the keys of a job."""
    [path] = root.glob(f"*/{name}.toml")
    return tomllib.loads(path.read_text())


def array_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the array that a sweep says it has made."""
    [line] = [line for line in done.stderr.splitlines() + done.stdout.splitlines() if " jobs in " in line]
    return line.rpartition(" ")[2]


def test_a_sweep_is_one_array(root: Path, program: Path) -> None:
    """Its combinations are the tasks of one array that is called after the program, each with its log."""
    done = sweep(program, "+x=1,2,3", "hydra.launcher.max_running=2")
    assert done.returncode == 0, done.stderr
    array = array_of(done)
    assert array.startswith("train-")
    assert job_file(root, array)["max_running"] == 2
    for at in range(3):
        assert (program.parent / f"began-{array}_{at}").exists()
        assert f"training with {{'x': {at + 1}}}" in spool.Client().output(f"{array}_{at}").decode()
        assert (program.parent / "out" / str(at) / ".hydra" / "config.yaml").read_text() == f"x: {at + 1}\n"


def test_a_job_shows_its_overrides(root: Path, program: Path) -> None:
    """As the parameters of its task, by keys that a job file can have; not those of Hydra itself."""
    done = sweep(program, "+x=1,2", "+optimizer.lr=0.1", "+index=7", f"+long={'n' * 99}")
    assert done.returncode == 0, done.stderr
    tasks = spool.Client().job(array_of(done)).tasks()
    shared = {"optimizer_lr": "0.1", "_index": "7", "long": "n" * 60}
    assert [task.parameters for task in tasks] == [{"x": "1", **shared}, {"x": "2", **shared}]


def test_any_overrides_make_parameters_that_a_job_file_has() -> None:
    """Deletions, groups, keys of some jobs alone, no value; none at all, or too many, are not shown."""
    shown = _parameters([["+db@a.b=x", "~c"], ["c=1,2=3", "hydra.job.name=n"]])
    assert shown == [{"db_a_b": "x", "c": ""}, {"db_a_b": "", "c": "1,2=3"}]
    assert _parameters([["hydra.job.name=n"], []]) is None
    long = ["k" * 99 + "=" + "\a" * 99]
    assert _parameters([long] * 1000) == [{"k" * 64: "\a" * 60}] * 1000
    assert _parameters([long] * 2000) is None


def test_the_configuration_has_the_keys_of_a_job(root: Path, program: Path) -> None:
    """Resources and the rest are set in `hydra.launcher`, any other key of a job file below `more`."""
    wanted = ("cpus=2", "memory=2G", "time_limit=10m", "priority=30", "project=vision", "tags=[a,b]", "name=my.sweep")
    more = ("+hydra.launcher.env.MODE=fast", "+hydra.launcher.retry.max=1", "+hydra.launcher.more.kill_grace=5s")
    done = sweep(program, "+x=1", *(f"hydra.launcher.{each}" for each in wanted), *more)
    assert done.returncode == 0, done.stderr
    array = array_of(done)
    assert array.startswith("my.sweep-")
    keys = job_file(root, array)
    said = {key: keys[key] for key in ("cpus", "memory", "time_limit", "priority", "project", "tags", "kill_grace")}
    assert json.loads(json.dumps(said)) == {
        "cpus": 2,
        "memory": "2G",
        "time_limit": "10m",
        "priority": 30,
        "project": "vision",
        "tags": ["a", "b"],
        "kill_grace": "5s",
    }
    assert keys["env"]["MODE"] == "fast"
    assert keys["retry"] == {"max": 1}


def test_the_examples_of_the_readme_run(root: Path, program: Path) -> None:
    """The command for the shell, and the configuration file."""
    if not (root.parent / "nvml").exists():
        pytest.skip("no fake GPUs: no C compiler, or a copy without the tests of spool itself")
    page = (Path(__file__).parent.parent / "README.md").read_text()
    [words] = re.findall(r"\n    python (train\.py(?:.*\\\n)*.*)\n", page)
    [config] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    text = program.read_text().replace("cfg.x", "cfg.lr")
    program.write_text(text.replace("config_path=None, config_name=None", 'config_path=".", config_name="config"'))
    (program.parent / "config.yaml").write_text("lr: 0\n")
    command = [sys.executable, *shlex.split(words.replace("\\\n", " "))]
    first = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert job_file(root, array_of(first))["gpus"] == 1
    (program.parent / "config.yaml").write_text(f"{config}lr: 0\n")
    command = [sys.executable, "train.py", "-m", "lr=1,2"]
    second = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    keys = job_file(root, array_of(second))
    assert (keys["max_running"], keys["retry"]) == (4, {"max": 2, "on": ["failed", "timeout"]})


def test_a_wrong_key_is_said_before_anything_runs(root: Path, program: Path) -> None:
    """A value that no job file takes ends the program with the reason, and submits nothing."""
    before = sorted(root.glob("*/*.toml"))
    done = sweep(program, "+x=1", "hydra.launcher.memory=lots")
    assert done.returncode == 1
    assert "memory" in done.stderr
    assert "lots" in done.stderr
    assert sorted(root.glob("*/*.toml")) == before


def test_an_exception_of_a_job_is_the_program_s(program: Path) -> None:
    """What the function raises in one job fails the sweep with its own words; the other jobs ran."""
    done = sweep(program, "+x=1,2", "+fail=true")
    assert done.returncode == 1
    assert "LookupError: no data for 1" in done.stderr
    assert len(list(program.parent.glob("began-*"))) == 2


def test_a_job_that_was_stopped_has_failed(program: Path) -> None:
    """One that reached its time limit has no return: the program fails and says why."""
    done = sweep(program, "+x=1", "+sleep=600", "hydra.launcher.time_limit=2s", "+hydra.launcher.more.kill_grace=1s")
    assert done.returncode == 1
    assert "timeout" in done.stderr


def test_an_interrupted_program_leaves_its_jobs(program: Path) -> None:
    """After Ctrl-C the jobs go on, and the program has said how to end them."""
    with subprocess.Popen(
        command(program, "+x=1", "+sleep=600"), cwd=program.parent, stdout=subprocess.PIPE, text=True
    ) as running:
        wait_for(lambda: list(program.parent.glob("began-*")))
        running.send_signal(2)
        said, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode != 0
    [line] = [line for line in said.splitlines() if "spool cancel" in line]
    array = line.rpartition(" ")[2]
    assert spool.Client().wait(array, timeout_s=0) is None
    spool.Client().cancel(array)
    end = spool.Client().wait(array, timeout_s=PATIENCE_S)
    assert end is not None
    assert end.outcome == spool.State.CANCELLED


def test_other_programs_pay_nothing() -> None:
    """Hydra imports every launcher in every program: this one imports nothing of spool before a sweep."""
    code = """
        import sys
        from hydra.core.plugins import Plugins
        Plugins.instance()
        assert "hydra_plugins.hydra_spool_launcher.spool_launcher" in sys.modules
        print([name for name in sys.modules if name.partition(".")[0] in ("spool", "cloudpickle")])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
