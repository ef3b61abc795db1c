"""What a job's command meets: its arguments, environment, directories, outputs and exit codes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from served import Served
from spool.machine.host import login_environment

EXECUTORS = ("process", "tmux")

_SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))"


def _shown(served: Served, name: str, command: list[str], **keys: Any) -> tuple[list[str], dict[str, str], str]:
    result = served.completes(name, command, **keys)
    assert result["outcome"] == "finished", (result, served.log(name)[-500:])
    arguments, environment, directory = json.loads(served.log(name))
    return arguments, environment, directory


def test_the_environment_of_a_job_is_complete(shared: Served) -> None:
    """A job finds who it is and what it was given, and nothing of Slurm's; nothing of the wrapper's is handed on."""
    _, found, _ = _shown(shared, "complete", [sys.executable, "-c", _SHOW], cpus=2, memory="64M", env={"MINE": "1"})
    expected = {
        "SPOOL_DIR": str(shared.root),
        "SPOOL_JOB": "complete",
        "SPOOL_RUN": "1",
        "SPOOL_ATTEMPT": "1",
        "SPOOL_METADIR": str(shared.root / "jobs/complete/1"),
        "SPOOL_CPUS": "2",
        "SPOOL_MEMORY_MB": "64",
        "SPOOL_GPUS": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": "2",
        "MINE": "1",
        "HOME": os.environ["HOME"] if "HOME" not in shared.environment else shared.environment["HOME"],
    }
    assert {key: found.get(key) for key in expected} == expected
    assert not [key for key in found if key.startswith(("SLURM", "spool_"))]
    assert "SPOOL_ARRAY_INDEX" not in found
    assert "SPOOL_EXIT_CODE" not in found
    shells = {"PWD", "OLDPWD", "SHLVL", "_", "TERM", "LC_CTYPE"}  # the last is set by Python for itself
    assert found.keys() <= expected.keys() | login_environment().keys() | shells  # nothing of the starter's


@pytest.fixture(scope="module")
def odd_spool(tmp_path_factory: pytest.TempPathFactory, executor: str | None) -> Any:
    """Give a spool whose path wants quoting everywhere, served for the whole module."""
    served = Served(tmp_path_factory.mktemp("odd") / 'it\'s a "spool" $HOME `x` *ü\n-x', executor=executor)
    served.start()
    yield served
    served.close()


def test_a_spool_may_lie_anywhere(odd_spool: Served) -> None:
    """A spool path with spaces, quotes, dollars, newlines and letters of other languages runs jobs as any other."""
    _, found, directory = _shown(odd_spool, "anywhere", [sys.executable, "-c", _SHOW])
    assert found["SPOOL_DIR"] == str(odd_spool.root)
    assert directory == str(odd_spool.root.parent)
    odd_spool.up("stays", "echo up; setsid sleep 1000 & wait", kill_grace="1s")
    odd_spool.path("running", "stays").unlink()
    assert odd_spool.wait_done("stays")["outcome"] == "cancelled"


def test_a_workdir_may_be_called_anything(odd_spool: Served, tmp_path: Path) -> None:
    """The workdir may have any name, and `~` and variables in it expand."""
    workdir = tmp_path / "-a dir 'with' \"quotes\"; ü\n"
    workdir.mkdir()
    _, _, directory = _shown(odd_spool, "odd-workdir", [sys.executable, "-c", _SHOW], workdir=str(workdir))
    assert directory == str(workdir)
    _, _, directory = _shown(odd_spool, "home", [sys.executable, "-c", _SHOW], workdir="~/")
    assert os.path.samefile(directory, odd_spool.environment["HOME"])


def test_without_a_workdir_it_is_the_home_directory(shared: Served) -> None:
    """A job file that names no workdir runs in the home directory."""
    shared.completes("at-home", b'command = "pwd -P"\n')
    assert shared.log("at-home").strip() == os.path.realpath(shared.environment["HOME"])


def test_a_setup_of_the_configuration_is_for_every_job_without_one(served: Served) -> None:
    """A list that its shell could not run after a setup goes without, and so does a program for no shell."""
    (served.root / "config.toml").write_text('[defaults]\nsetup = "X=default; export X"\n')
    served.drop("given", ["printenv", "X"])
    served.drop("own", "echo $X", setup="X=own")
    served.drop("odd", ["sh", "-c", "echo $X."], shell="/usr/bin/python3")
    served.drop("python", "print('no shell')", shell=sys.executable)
    assert served.run() == 0
    logs = [served.log(name) for name in ("given", "own", "odd", "python")]
    assert logs == ["default\n", "own\n", ".\n", "no shell\n"]


def test_the_configurations_prolog_and_epilog_go_around_the_jobs(served: Served) -> None:
    """Those of the configuration are the outermost."""
    (served.root / "config.toml").write_text('prolog = "echo P"\nepilog = "echo E"\n')
    served.drop("inner", "echo command", prolog="echo p", epilog="echo e")
    assert served.run() == 0
    assert served.log("inner") == "P\np\ncommand\ne\nE\n"


def test_outputs_go_where_the_job_says(shared: Served, tmp_path: Path) -> None:
    """Placeholders become name, run and a percent sign; directories are made; later runs append beside."""
    shared.drop(
        "outputs",
        "echo out; echo err >&2",
        workdir=str(tmp_path),
        stdout="logs/%n/out %r 100%%.txt",
        stderr=f"{tmp_path}/err-%n-%r",
    )
    shared.wait_done("outputs")
    assert (tmp_path / "logs/outputs/out 1 100%.txt").read_text() == "out\n"
    assert (tmp_path / "err-outputs-1").read_text() == "err\n"
    assert shared.record("outputs", "log") is None


def test_a_job_finds_the_programs_of_whoever_submitted_it(served: Served, tmp_path: Path) -> None:
    """In a virtual environment `run -- PROGRAM` runs that one's, not the dispatcher's, and finds no secrets."""
    for whose in ("dispatcher", "caller"):
        (tmp_path / whose).mkdir()
        program = tmp_path / whose / "which-one"
        program.write_text(f'#!/bin/sh\necho {whose} "$VIRTUAL_ENV" "$API_TOKEN"\n')
        program.chmod(0o755)
    own = dict(served.environment)
    path = own["PATH"]
    served.environment |= {"PATH": f"{tmp_path}/dispatcher:{path}", "VIRTUAL_ENV": "/theirs", "API_TOKEN": "secret"}
    served.start()
    caller = own | {"PATH": f"{tmp_path}/caller:{path}", "VIRTUAL_ENV": "/mine", "API_TOKEN": "secret"}
    said = served.spool("run", "-q", "--", "which-one", env=caller)
    assert (said.returncode, said.stdout, said.stderr) == (0, "caller /mine \n", "")
    served.drop("dropped", ["which-one"])
    assert served.wait_outcome("dropped") == "failed"  # it is in nobody's PATH but that of the two
