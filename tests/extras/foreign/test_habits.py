"""What scripts and commands for other schedulers find in their jobs, and words of sbatch by habit."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from calling import Command, put_job, spawned


def queued(root: Path, name: str) -> dict[str, Any]:
    """Return a waiting job's keys."""
    return tomllib.loads((root / "queued" / f"{name}.toml").read_text())


def piped(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Call `spool submit` with *text* on a pipe as its stdin."""
    return spawned("submit", *words, input=text)


def test_a_script_on_stdin_needs_no_word(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """`spool submit <<EOF` submits the script, with its lines; a text without `#!` is refused."""
    (spool_root / "config.toml").write_text("autostart = false\n")
    done = piped("#!/bin/bash\n#SBATCH -J here -c 2\necho hi\n")
    assert (done.returncode, done.stdout) == (0, "here\n")
    assert queued(spool_root, "here")["cpus"] == 2
    done = piped("#!/usr/bin/python3\nprint(1)\n", "-n", "py", "--cpus", "3")
    assert (done.returncode, done.stdout) == (0, "py\n")
    assert queued(spool_root, "py")["script"] == "#!/usr/bin/python3\nprint(1)\n"
    for text in ("echo hi\n", ""):
        done = piped(text)
        assert done.returncode == 2
    with (tmp_path / "s.sh").open("w+") as file:
        file.write("#!/bin/sh\ntrue\n")
        file.seek(0)
        assert spawned("submit", "-n", "file", "/dev/stdin", stdin=file).returncode == 0
    assert sorted(os.listdir(spool_root / "queued")) == ["file.toml", "here.toml", "py.toml"]


def test_singleton_is_not_needed(spool: Command, spool_root: Path) -> None:
    """It is said once, and the job has its other dependencies; a job of that name is a dependency like any other."""
    put_job(spool_root, "a")
    said = spool("submit", "-n", "b", "--dependency=singleton", "-d", "a", "--", "true")
    assert (said.code, said.err.count("not needed here")) == (0, 1)
    assert queued(spool_root, "b")["depends_on"] == ["a"]
    assert spool("submit", "-n", "c", "-d", "afterok:a,singleton", "--", "true").code == 0
    assert queued(spool_root, "c")["depends_on"] == ["a"]
    put_job(spool_root, "singleton")
    assert spool("submit", "-n", "d", "-d", "singleton", "--", "true").err == ""
    assert queued(spool_root, "d")["depends_on"] == ["singleton"]


READ = {
    "SLURM_JOB_NAME": "$SPOOL_JOB",
    "SLURM_CPUS_PER_TASK": "$SPOOL_CPUS",
    "SLURM_CPUS_ON_NODE": "$SPOOL_CPUS",
    "SLURM_MEM_PER_NODE": "$SPOOL_MEMORY_MB",
    "SLURM_GPUS_ON_NODE": "$SPOOL_GPUS",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "1",
    "SLURM_JOB_NODELIST": socket.gethostname(),
    "PBS_JOBNAME": "$SPOOL_JOB",
    "PBS_NP": "$SPOOL_CPUS",
    "NCPUS": "$SPOOL_CPUS",
}


def surrounded(spool: Command, text: str, *words: str) -> tuple[dict[str, Any], str]:
    """Return the `env` of a job with this script, without what the caller passes on, and what was told."""
    Path("job.sh").write_text(text)
    said = spool("submit", "--dry-run", "--export", "NONE", "-n", "train", *words, "job.sh")
    assert said.code == 0, said.err
    return tomllib.loads(said.out).get("env", {}), said.err


@pytest.mark.parametrize("name", READ)
def test_a_variable_of_slurm_is_there_if_the_script_reads_it(spool: Command, name: str) -> None:
    """It stands in `env`, as what is constant or as a reference to what the run is granted; no other is there."""
    for text in (f"echo ${{{name}:-4}}", f"python -c 'os.environ[\"{name}\"]'"):
        assert surrounded(spool, f"#!/bin/bash\n#SBATCH -t 10\n{text}\n")[0] == {name: READ[name]}
    assert surrounded(spool, f"#!/bin/bash\n# reads ${name}\necho x{name} {name}x\n")[0] == {}
    assert surrounded(spool, f"#!/bin/bash\necho ${name}\n", "-e", f"{name}=own")[0] == {name: "own"}
    assert surrounded(spool, f"#!/bin/bash\necho ${name}\n", "--executor", "slurm")[0] == {}


def test_an_id_of_slurm_is_a_number_of_its_own(spool: Command) -> None:
    """Each submission has another, and it stays as it is when the job runs again; so do the directory and the host."""
    text = "#!/bin/bash\necho $SLURM_JOB_ID $SLURM_JOBID $SLURM_SUBMIT_DIR $SLURM_ARRAY_TASK_ID\n"
    (one, _), (two, _) = surrounded(spool, text), surrounded(spool, text)
    assert one["SLURM_JOB_ID"] == one["SLURM_JOBID"] != two["SLURM_JOB_ID"]
    assert one["SLURM_JOB_ID"].isdecimal()
    assert one["SLURM_SUBMIT_DIR"] == os.getcwd()
    assert "SLURM_ARRAY_TASK_ID" not in one


def test_the_variables_of_an_array_are_those_of_slurm(spool: Command) -> None:
    """The index, its range, the id of the whole, and an id of each task; the name is that of the array."""
    names = "JOB_NAME ARRAY_TASK_ID ARRAY_TASK_COUNT ARRAY_TASK_MIN ARRAY_TASK_MAX ARRAY_JOB_ID JOB_ID"
    text = "#!/bin/bash\n#SBATCH -a 2-8:2%1\necho " + " ".join(f"$SLURM_{name}" for name in names.split()) + "\n"
    env, _ = surrounded(spool, text)
    whole = env.pop("SLURM_ARRAY_JOB_ID")
    assert env == {
        "SLURM_JOB_NAME": "train",
        "SLURM_ARRAY_TASK_ID": "{index}",
        "SLURM_ARRAY_TASK_COUNT": "4",
        "SLURM_ARRAY_TASK_MIN": "2",
        "SLURM_ARRAY_TASK_MAX": "8",
        "SLURM_JOB_ID": f"{whole}{{index}}",
    }


@pytest.mark.parametrize(
    ("array", "step"), [("0-20:10", "10"), ("1,3,7-9", "1"), ("4", "1"), ("9,5,1", "4"), ("0-3%2", "1")]
)
def test_the_range_of_an_array_is_there_under_each_name(spool: Command, array: str, step: str) -> None:
    """Slurm's and Grid Engine's variables for first, last and step have the numbers of the array."""
    names = "SLURM_ARRAY_TASK_STEP SGE_TASK_STEPSIZE SLURM_ARRAY_TASK_MIN SGE_TASK_FIRST SLURM_ARRAY_TASK_MAX"
    env, told = surrounded(spool, f"#!/bin/bash\necho ${' $'.join(names.split())} $SGE_TASK_LAST\n", "-a", array)
    indices = [int(text) for text in re.findall("[0-9]+", array.partition("%")[0].partition(":")[0])]
    assert [env[name] for name in names.split()] == [step, step, *[str(min(indices))] * 2, str(max(indices))]
    assert (env["SGE_TASK_LAST"], told) == (str(max(indices)), "")


@pytest.mark.parametrize("before", [("-c",), ("--",), ("--", "sh", "-c")])
@pytest.mark.parametrize("array", [("-a", "1-2"), ()])
def test_a_command_is_searched_like_a_script(
    spool: Command, spool_root: Path, array: tuple[str, ...], before: tuple[str, ...]
) -> None:
    """What its text reads is set, on the fast way too, and what does not exist is told."""
    words = (*before, "echo t=$SLURM_ARRAY_TASK_ID ${PBS_JOBID}")
    said = spool("submit", "--hold", "-n", "a", "--export", "PATH", *array, *words)
    assert (said.code, said.err) == (0, "")
    env = tomllib.loads((spool_root / "held" / "a.toml").read_text())["env"]
    assert env.get("SLURM_ARRAY_TASK_ID") == ("{index}" if array else None)
    assert env["PBS_JOBID"].removesuffix("{index}").isdecimal()
    assert "$SLURM_TMPDIR " in spool("submit", "--hold", "-c", "rm -r $SLURM_TMPDIR/x").err
    assert spool("submit", "--hold", "-c", "module load x").err == ""
    Path("lines").write_text("echo $SLURM_ARRAY_TASK_ID\necho $SLURM_TMPDIR\n")
    said = spool("submit", "--dry-run", "--lines", "lines")
    assert 'SLURM_ARRAY_TASK_ID = "{index}"' in said.out
    assert "line 2: $SLURM_TMPDIR " in said.err


def test_tasks_are_counted_as_in_slurm(spool: Command) -> None:
    """`mpirun -n $SLURM_NTASKS` starts as many as were asked for, each with its CPUs; a line says what launchers do."""
    env, told = surrounded(
        spool, "#!/bin/bash\n#SBATCH -n 4 -c 2\nmpirun -n $SLURM_NTASKS x --threads $SLURM_CPUS_PER_TASK\n"
    )
    assert env == {"SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "2"}
    assert told.count("line 3: $SLURM_NTASKS ") == 1


@pytest.mark.parametrize("function", ["module", "ml"])
def test_shell_functions_go_along_if_the_script_calls_them(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """`module load` works as for the caller; one line says if it cannot, unless the script sets it up itself."""
    Path("job.sh").write_text(f"#!/bin/bash\n{function} load cuda\n")
    monkeypatch.setenv("MODULEPATH", "/modules")
    said = spool("submit", "-n", "a", "job.sh")
    assert f"line 2: `{function}` " in said.err
    monkeypatch.setenv(f"BASH_FUNC_{function}%%", "() {  echo '{index}' $1\n}")
    said = spool("submit", "-n", "b", "job.sh")
    assert (said.code, said.err) == (0, "")
    env = queued(spool_root, "b")["env"]
    assert env[f"BASH_FUNC_{function}%%"] == "() {  echo '{index}' $1\n}"
    assert env["MODULEPATH"] == "/modules"
    Path("other.sh").write_text("#!/bin/bash\ntrue\n")
    assert spool("submit", "-n", "other", "other.sh").code == 0
    assert "MODULEPATH" not in queued(spool_root, "other")["env"]
    assert f"`{function}` " in spool("submit", "-n", "c", "--export", "NONE", "job.sh").err
    Path("job.sh").write_text(f"#!/bin/sh\n{function} load cuda\n")
    assert f"`{function}` " in spool("submit", "-n", "d", "job.sh").err
    for first in ("#!/bin/bash -l", "#!/bin/bash\nsource /etc/profile.d/modules.sh", "#!/bin/sh\n. /opt/lmod/init/sh"):
        Path("job.sh").write_text(f"{first}\n{function} load cuda\n")
        assert spool("submit", "--dry-run", "--export", "NONE", "job.sh").err == ""


@pytest.mark.parametrize("also", ["~/venv/bin/activate", "activate torch"])
def test_what_sets_up_conda_does_not_set_up_modules(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch, also: str
) -> None:
    """Most scripts with modules activate an environment too; `module` goes along, or is said to be missing."""
    Path("job.sh").write_text(f"#!/bin/bash\nmodule load cuda\nsource {also}\nconda activate torch\n")
    assert "`module` " in spool("submit", "--dry-run", "job.sh").err
    monkeypatch.setenv("BASH_FUNC_module%%", "() {  echo $1\n}")
    assert "module" not in spool("submit", "-n", "a", "job.sh").err
    assert "BASH_FUNC_module%%" in queued(spool_root, "a")["env"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("seff $SLURM_JOB_ID", "use spool seff $SPOOL_JOB"),
        ("left=$(squeue -h -j 1 -o %L)", "use spool show $SPOOL_JOB"),
        ("qdel $PBS_JOBID", "use spool cancel $SPOOL_JOB"),
        ("micromamba activate torch", '`eval "$(micromamba shell hook --shell bash)"`'),
        ("conda activate torch", '`eval "$(conda shell.bash hook)"`'),
        ("CUDA_VISIBLE_DEVICES=0 python x.py", "may be in use"),
        ("export CUDA_VISIBLE_DEVICES=$((SLURM_ARRAY_TASK_ID % 4))", "may be in use"),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '1'", "may be in use"),
        ("CUDA_VISIBLE_DEVICES= python x.py  # none", ""),
        ('echo "$CUDA_VISIBLE_DEVICES 1"; eval "$(mamba shell hook --shell bash)"; mamba activate x', ""),
    ],
)
def test_what_a_script_will_miss_is_told_before_it_waits(spool: Command, line: str, told: str) -> None:
    """A program of another scheduler, a missing shell function and a GPU taken by its number are told at once."""
    Path("job.sh").write_text(f"#!/bin/bash\n#SBATCH --time=1:00:00\n{line}\n")
    said = spool("submit", "--hold", "--array", "0-3", "-n", "a", "job.sh")
    assert said.code == 0
    assert [each for each in said.err.splitlines() if "line 3" in each and told in each] or not told
    assert told or "line 3" not in said.err


def test_the_index_of_lsf_and_hyperqueue_is_there(spool: Command, spool_root: Path) -> None:
    """A text of -c that reads its index as under another scheduler has it; a script of LoadLeveler is refused."""
    assert spool("submit", "--hold", "-n", "a", "--array", "1-3", "-c", "./x $LSB_JOBINDEX $HQ_TASK_ID").err == ""
    env = tomllib.loads((spool_root / "held" / "a.toml").read_text())["env"]
    assert (env["LSB_JOBINDEX"], env["HQ_TASK_ID"]) == ("{index}", "{index}")
    Path("job.sh").write_text("#!/bin/bash\n# @ job_type = serial\n# @ queue\ntrue\n")
    assert "line 3: `# @ queue`" in spool("submit", "job.sh").err


@pytest.mark.parametrize(("guard", "told"), [("case $- in *i*) ;; *) return;; esac\n", True), ("# return\n", False)])
def test_a_bashrc_that_returns_in_scripts_sets_up_nothing(
    spool: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guard: str, told: bool
) -> None:
    """`source ~/.bashrc` brings conda only where the file does not end before its lines, as it does on Ubuntu."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bashrc").write_text(f"{guard}# >>> conda initialize >>>\nconda() {{ return 0; }}\n")
    Path("job.sh").write_text("#!/bin/bash\nsource ~/.bashrc\nconda activate torch\n")
    assert ("line 3: `conda activate` needs" in spool("submit", "--hold", "job.sh").err) == told
