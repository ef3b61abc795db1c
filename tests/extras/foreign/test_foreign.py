"""Scripts for other schedulers: what each line becomes, what their commands find, and what is told of the rest."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import socket
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from calling import Command, put_job, spawned
from cli.records import queued
from spool.cli import submission
from spool.extras.foreign.lines import PIECES, SYSTEMS, Directive, convert
from spool.store.ownership import this_user


def written(tmp_path: Path, lines: str) -> Path:
    """Write a script with these lines, which does nothing else."""
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n{lines}\ntrue\n")
    return script


def converted(spool: Command, tmp_path: Path, lines: str, *words: str) -> tuple[dict[str, Any], str]:
    """Return the keys that a script with these lines becomes, and what was told."""
    script = written(tmp_path, lines)
    no_more = () if "--export" in lines else ("--export", "NONE")
    said = spool("submit", "--dry-run", *no_more, *words, script)
    assert said.code == 0, said.err
    keys = tomllib.loads(said.out)
    return {key: value for key, value in keys.items() if key not in ("command", "script", "workdir")}, said.err


SAME = [
    ("#SBATCH --time=90", {"time_limit": "1h30m"}),
    ("#SBATCH -t 1:30", {"time_limit": "1m30s"}),
    ("#SBATCH -t 2-12", {"time_limit": "2d12h"}),
    ("#SBATCH --time=UNLIMITED", {}),
    ("#SBATCH --mem=16000", {"memory": "16000M"}),
    ("#SBATCH -n 4", {"cpus": 4}),
    ("#SBATCH --ntasks=2 --cpus-per-task=4 --mem-per-cpu=1G", {"cpus": 8, "memory": "8G"}),
    ("#SBATCH --gres=gpu:2", {"gpus": 2}),
    ("#SBATCH --gres=gpu:a100:2(S:0)", {"gpus": 2, "gpu_type": "a100"}),
    ("#SBATCH --gpus=2 --mem-per-gpu=8G", {"gpus": 2, "memory": "16G"}),
    ("#SBATCH --gpus-per-node=a100:2 --cpus-per-gpu=4", {"cpus": 8, "gpus": 2, "gpu_type": "a100"}),
    ("#SBATCH -n 2 --gpus-per-task=1 --cpus-per-gpu=4 --mem-per-gpu=8G", {"cpus": 8, "gpus": 2, "memory": "16G"}),
    ("#SBATCH --gpus=2 --ntasks-per-gpu=1 -c 3", {"cpus": 6, "gpus": 2}),
    ("#SBATCH -d singleton,afterok:a --parsable", {"depends_on": ["a"]}),
    ("#SBATCH --array=0-9:3%2", {"array": "0-9:3%2"}),
    ("#SBATCH -d afterok:a:b,afterany:c", {"depends_on": {"all": ["a", "b"], "ended": ["c"]}}),
    ("#SBATCH -d afterok:a?afterok:b", {"depends_on": {"any": ["a", "b"]}}),
    ("#SBATCH -o slurm-%j.out", {"stdout": "slurm-%n.%r.out"}),
    ("#SBATCH -o %x-%j.out -e %x.err", {"stdout": "%n-%r.out", "stderr": "%n.err"}),
    ("#SBATCH -o %u-%x.%N.%t.out", {"stdout": f"{this_user()}-%n.{socket.gethostname().partition('.')[0]}.0.out"}),
    ("#SBATCH --mail-type=NONE --open-mode=append", {}),
    ("#SBATCH -a 1-2 -o log/%A_%a.out", {"array": "1-2", "stdout": "log/%n.out"}),
    ("#SBATCH -o log/%A_%4a.out", {"stdout": "log/%n.%r.out"}),
    ("#SBATCH --signal=B:USR1@120 -t 10", {"signal": "USR1@120s", "signal_to": "shell", "time_limit": "10m"}),
    ("#SBATCH -t 10 --signal=15@180", {"signal": "SIGTERM@180s", "signal_to": "main", "time_limit": "10m"}),
    ("#SBATCH --tasks-per-node 4 --cpus-per-task=2", {"cpus": 8}),
    ("#SBATCH --tasks=3 --nice --exclusive=user", {"cpus": 3}),
    ("#SBATCH --chdir=/data -A lab --no-requeue", {"workdir": "/data", "project": "lab", "requeue": False}),
    ("#SBATCH --export=NONE,A=1", {"env": {"A": "1"}}),
    ("#SBATCH --begin=now+60", {"start_after": "60s"}),
    ("#SBATCH --begin=now+1hour", {"start_after": "1h"}),
    ("#SBATCH --begin=now", {}),
    (
        "# GFLOW --gpus=2 --time=90 --memory=2048 --nice 20",
        {"gpus": 2, "time_limit": "1h30m", "memory": "2048M", "priority": 20},
    ),
    ("# GFLOW --array 1-4\n# GFLOW --max-concurrent 2 --max-retries 1", {"array": "1-4", "max_running": 2, "retry": 1}),
    (
        "#PBS -l nodes=1:ppn=4:gpus=2,walltime=1:30:00,mem=8gb",
        {"cpus": 4, "gpus": 2, "time_limit": "1h30m", "memory": "8G"},
    ),
    ("#PBS -l walltime=01:00:30:00", {"time_limit": "1d30m"}),
    (
        "#PBS -l select=1:ncpus=8:ngpus=1:mem=500mb\n#PBS -A lab -j oe",
        {"cpus": 8, "gpus": 1, "memory": "500M", "project": "lab"},
    ),
    ("#PBS -l select=ncpus=2:mem=1g:mpiprocs=2:ompthreads=1", {"cpus": 2, "memory": "1G"}),
    ("#PBS -o host:/logs/ -e err.txt", {"stdout": "/logs/%n.%r.out", "stderr": "err.txt"}),
    ("#PBS -J 1-4 -W depend=afterok:a", {"array": "1-4", "depends_on": ["a"]}),
    # What clusters call in their own ways: lines of Grid Engine, which it reads anywhere; GPUs called like models.
    (
        "#$ -cwd\n#$ -t 1-16\n#$ -l gpus=2\n#$ -l h_rt=48:00:00\n#$ -pe smp 4",
        {"array": "1-16", "gpus": 2, "time_limit": "2d", "cpus": 4},
    ),
    ("#$-t 1-10:3 -tc 2  # few at once", {"array": "1-10:3", "max_running": 2}),
    ("#$ -pe mpi 4-8 -l h_vmem=1.5G,mem_free=2G", {"cpus": 4, "memory": "6G"}),
    ("#$ -l mem_free=20G -l h_vmem=2G", {"memory": "20G"}),
    ("#$ -l tmem=4G -pe smp 2 -R y", {"cpus": 2, "memory": "8G"}),
    ("#$ -l gpu=true,h_rt=3600 -p -100", {"gpus": 1, "time_limit": "1h"}),
    ("#$ -l gpu=1 -l gpu_type=V100 -l gpu_c=7.0 -q gpu.q", {"gpus": 1, "gpu_type": "V100"}),
    ("#$ -l coproc_v100=2", {"gpus": 2, "gpu_type": "v100"}),
    (
        "#$ -N my-job -j y -o logs/$USER_$TASK_ID.log -e logs/ -t 1-2",
        {"array": "1-2", "stdout": f"logs/{this_user()}_%a.log"},
    ),
    ("#$ -o host:/logs/ -e /tmp", {"stdout": "/logs/%n.%r.out", "stderr": "/tmp/%n.%r.err"}),
    ("#$ -hold_jid first,second -r y -h", {"depends_on": {"ended": ["first", "second"]}, "requeue": True}),
    ("#$ -v A=1,B=2 -P lab -wd /data -S /bin/sh -b y", {"env": {"A": "1", "B": "2"}, "project": "lab"}),
    ("true\n#$ -pe smp 3", {"cpus": 3}),
    ("#PBS -l nodes=1:ppn=4:v100:gpus=1,pmem=2gb", {"cpus": 4, "gpus": 1, "gpu_type": "v100", "memory": "8G"}),
    ("#SBATCH --gres=rtx3090:2,lustre:1", {"gpus": 2, "gpu_type": "3090"}),
    ("#SBATCH --gres=nvme:1,scratch:10G", {}),
    ("#PBS -J 0-1 -o x.^array_index^ -e host:/tmp", {"array": "0-1", "stdout": "x.%a", "stderr": "/tmp/%n.%r.err"}),
    ("cd /\n# GFLOW --gpus 2", {"gpus": 2}),
    ("#SBATCH --depend=afterok:a --out x.log --tasks-per-node=2", {"depends_on": ["a"], "stdout": "x.log", "cpus": 2}),
]


@pytest.mark.parametrize(("lines", "keys"), SAME)
def test_what_has_a_counterpart_is_carried_over(
    spool: Command, tmp_path: Path, lines: str, keys: dict[str, Any]
) -> None:
    """Each option becomes what it means, and each is told."""
    found, told = converted(spool, tmp_path, lines)
    found.pop("workdir", None)
    keys = {key: value for key, value in keys.items() if key != "workdir"}
    assert found == keys
    assert told.count("line ") >= lines.count("\n#") + lines.startswith("#")
    assert "left out" not in told


@pytest.mark.parametrize(
    ("pattern", "stdout"),
    [
        ("%x_%a", "%n"),
        ("%u-%x-%4a", f"{this_user()}-nm-%4a"),
        ("%A_%a.out", "%n.out"),
        ("%x-%j", "nm-%a.%r"),
        ("%x-%A-%a", "nm-%r-%a"),
        ("%%x-%J", "%%x-%n.%r"),
    ],
)
def test_the_outputs_of_an_array_are_called_as_in_slurm(
    spool: Command, tmp_path: Path, pattern: str, stdout: str
) -> None:
    """%x is the name of the array, and not of its task, in a line of a script and on the command line."""
    for lines, words in ((f"#SBATCH -a 0-3 -o {pattern}", ()), ("#SBATCH -a 0-3", ("-o", pattern))):
        if words and "%u" in pattern:
            continue  # only sbatch fills in the user
        assert converted(spool, tmp_path, lines, "-n", "nm", *words)[0]["stdout"] == stdout


NUMBERED = [
    ("#SBATCH -o %x-%j.out\ncat $SLURM_JOB_NAME-$SLURM_JOB_ID.out", "%n-${SLURM_JOB_ID}.out"),
    ("#SBATCH -o %A.out\ncat $SLURM_JOBID.out", "${SLURM_JOBID}.out"),
    ("#SBATCH -a 1-2 -o %A_%a\necho $SLURM_ARRAY_JOB_ID", "${SLURM_ARRAY_JOB_ID}_%a"),
    ('mv slurm-"$SLURM_JOB_ID".out /x', "slurm-${SLURM_JOB_ID}.out"),
    ("mv slurm-*.out /x", "slurm-%n.%r.out"),
    (
        "#SBATCH -a 1-2\nmv slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.out /x",
        "slurm-${SLURM_ARRAY_JOB_ID}_%a.out",
    ),
    ("#SBATCH -o own\nmv slurm-${SLURM_JOB_ID}.out /x", "own"),
    ("#PBS -o $PBS_JOBID.out\ntrue", "$PBS_JOBID.out"),
    ("cat $PBS_JOBNAME.o${PBS_JOBID%%.*}", "%n.o${PBS_JOBID}"),
    ("srun -o %j.%t x\n#SBATCH\ncat slurm-$SLURM_JOB_ID.out", "slurm-${SLURM_JOB_ID}.out"),
]


@pytest.mark.parametrize(("lines", "stdout"), NUMBERED)
def test_the_number_in_a_path_is_the_one_that_the_script_reads(
    spool: Command, tmp_path: Path, lines: str, stdout: str
) -> None:
    """%j refers to the variable, and a script that moves what sbatch writes by default finds it."""
    found, told = converted(spool, tmp_path, lines)
    assert found["stdout"] == stdout
    for name in re.findall(r"\$\{?(\w+)", stdout):
        assert found["env"][name].removesuffix("{index}").isdecimal()
    assert ("goes to" in told) is not lines.startswith(("#SBATCH -o", "#SBATCH -a 1-2 -o", "#PBS -o"))


@pytest.mark.parametrize(
    ("lines", "why", "instead"),
    [
        ("#SBATCH --dependency=afterok:1234", "1234 is a job of the other scheduler", ("-d", "a")),
        ("#SBATCH -d expand:a", "give --depends-on NAME", ("-d", "a")),
        ("#SBATCH --gres=gpu:a100:1,gpu:h100:1", "more than one kind of GPU", ("-g", "1")),
        ("#SBATCH --gres", "it needs a value", ("-g", "1")),
        ("# GFLOW --depends-on 3", "give --depends-on NAME", ("-d", "a")),
        ("#PBS -W depend=afterok:12", "12 is a job", ("-d", "a")),
        ("#SBATCH --nodes=2", "there is only one node", None),
        ("#PBS -l select=4:ncpus=1", "there is only one node", None),
        ("# GFLOW --conda-env torch", "activate it", None),
        ("#$ -l gpu=0.5", "", ("-g", "1")),
        ("#$ -l tesla_nodes=yes", "", ("-g", "1")),
        ("#$ -pe gpu 2", "", ("-g", "1")),
        ("#$ -hold_jid 1234", "", ("-d", "a")),
        ("#$ -hold_jid prep*", "", ("-d", "a")),
        ("#$ -pe smp", "", None),
        ("#$ -i input.txt", "", None),
        ("#$ -t 1-$N", "", ("-a", "1-3")),
        ("#PBS -l feature=gpu", "", ("-g", "1")),
        ("#SBATCH --gres=gpus:1", "", ("-g", "1")),
        ("#SBATCH --gres=a100:all", "", ("-g", "1")),
        ("#SBATCH --gres=shard:2", "", ("-g", "1")),
        ("#SBATCH --depend=afterok:1234", "1234 is a job of the other scheduler", ("-d", "a")),
        ("#SBATCH --gpu=2", "unknown option", ("-g", "1")),
        ("#SBATCH --arrays=0-3", "unknown option", None),
        ("#SBATCH \u2013gres=gpu:1", "unknown option", None),
        ("#SBATCH --container-image=torch.sqsh", "--container IMAGE", None),
    ],
)
def test_what_changes_results_and_is_lost_is_an_error(
    spool: Command, spool_root: Path, tmp_path: Path, lines: str, why: str, instead: tuple[str, str] | None
) -> None:
    """`submit` refuses it, as its dry run does, unless the command line says it or the lines are ignored."""
    script = written(tmp_path, lines)
    for words in (("submit",), ("submit", "--dry-run")):
        said = spool(*words, script)
        assert (said.code in (2, 4), said.out, os.listdir(spool_root / "queued")) == (True, "", []), said.err
        assert why in said.err
        assert said.code == 4 or ("line 2" in said.err and "--ignore-directives" in said.err)
    assert spool("submit", "--dry-run", "--ignore-directives", script).code == 0
    if instead is not None:
        assert spool("submit", "--dry-run", *instead, script).code == 0


@pytest.mark.parametrize("name", ["my job (2)", "dem+rev", "_x/y", "é" * 3 + "a"])
def test_a_name_that_a_job_cannot_have_is_made_one(spool: Command, tmp_path: Path, name: str) -> None:
    """Slurm takes any text, and scripts have such names; what is left is a name, or the script's is taken."""
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n#SBATCH --job-name={shlex.quote(name)}\ntrue\n")
    said = spool("submit", "--hold", script)
    made = re.sub("[^a-z0-9]+", "-", name).strip("-")
    assert (said.code, said.out) == (0, f"{made}\n"), said.err
    script.write_text("#!/bin/sh\n#SBATCH --job-name='()'\ntrue\n")
    assert spool("submit", "--hold", script).out.startswith("job-")


def test_a_loop_submits_a_script_with_a_name_as_often_as_it_likes(
    spool: Command, spool_root: Path, tmp_path: Path
) -> None:
    """Jobs of Slurm can share a name. One that is stated here, or a singleton, is that of one job."""
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\n#SBATCH --job-name=train\ntrue\n")
    first, second, third = (spool("submit", "--hold", script, seed) for seed in "123")
    assert first.out == "train\n"
    for said in (second, third):
        assert re.fullmatch(r"train-\w{4}\n", said.out)
        assert said.out.strip() in said.err
    assert len({first.out, second.out, third.out}) == 3
    assert spool("submit", "--hold", "--replace", script, "4").out == "train\n"
    assert spool("submit", "--hold", "-n", "train", script).code == 1
    for line in ("#SBATCH --dependency=singleton", "#SPOOL --name train"):
        script.write_text(f"#!/bin/sh\n#SBATCH --job-name=train\n{line}\ntrue\n")
        assert spool("submit", "--hold", script).code == 1
    script.write_text(f"#!/bin/sh\n#SBATCH --job-name={'x' * 100}\ntrue\n")
    assert [spool("submit", "--hold", script).code for _ in "12"] == [0, 0]
    script.write_text("#!/bin/sh\n#SBATCH --job-name=a\ntrue\n")
    assert [spool("submit", "--hold", "-n", "a", script).code for _ in "12"] == [0, 1]
    assert sum(path.name.startswith("train") for path in (spool_root / "held").glob("*.toml")) == 3


@pytest.mark.parametrize("limit", ["", "-t 5m", "#SPOOL", "[defaults]"])
def test_a_warning_needs_a_limit(spool: Command, spool_root: Path, tmp_path: Path, limit: str) -> None:
    """Slurm's partitions have time limits. Where none is stated, the signal is left out; no script is refused."""
    if limit == "[defaults]":
        (spool_root / "config.toml").write_text('[defaults]\ntime_limit = "1h"\n')
    own = "\n#SPOOL --time-limit 5m" if limit == "#SPOOL" else ""
    words = limit.split() if limit.startswith("-") else []
    found, told = converted(spool, tmp_path, f"#SBATCH --signal=B:USR1@60 --requeue{own}", *words)
    assert found["requeue"] is True
    assert ("signal" in found) is (limit != "")
    assert ("ignored" in told) is (limit == "")


@pytest.mark.parametrize(
    "line",
    [
        "#$HOME is a directory", "#$ 5 dollars", "# @param x = 3", "#BSUBs", "#HQ", "#@title a",
        "#SBATCH", "##SBATCH -c 4", "# SBATCH -c 4", " #SBATCH -c 4", "#SBATCHED -c 4",
    ],
)  # fmt: skip
def test_a_comment_that_looks_like_another_scheduler_s_is_a_comment(spool: Command, tmp_path: Path, line: str) -> None:
    """Nothing is refused or told for it; what sbatch passes over is passed over here."""
    assert converted(spool, tmp_path, line) == ({}, "")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("#PBS -S /bin/bash\n#PBS -l ncpus=1\ntrue\n", "#!/bin/bash"),
        ("#$ -N a -S /bin/bash,/bin/sh@host\ntrue\n", "#!/bin/bash"),
        ("#!/bin/sh\n#$ -S /bin/bash\ntrue\n", "#!/bin/bash"),
        ("#$ -S /no/such/place/sh\ntrue\n", f"#!{shutil.which('sh')}"),
        ("#!/bin/bash -l\n#$ -S /bin/bash\ntrue\n", "#!/bin/bash -l"),
        ("#!/usr/bin/env python3\n#$ -S /bin/bash\nprint()\n", "#!/usr/bin/env python3"),
        ("#$ -cwd\ntrue\n", None),
        ("\n# about\n#PBS -N a\ntrue\n", None),
    ],
)
def test_a_script_runs_by_the_shell_that_its_scheduler_would_take(
    spool: Command, tmp_path: Path, text: str, line: str | None
) -> None:
    """By that of `-S`, else by its own, else by the login shell; every line of the script is in the copy."""
    script = tmp_path / "job.sh"
    script.write_text(text)
    said = spool("submit", "--dry-run", script)
    assert said.code == 0, said.err
    first, _, rest = tomllib.loads(said.out)["script"].partition("\n")
    assert first == line if line is not None else os.path.basename(first) in submission.SHELLS
    assert rest == (text.partition("\n")[2] if text.startswith("#!") else text)
    keys = tomllib.loads(spool("submit", "--dry-run", "--no-capture", script).out)
    assert keys["command"] == [*first[2:].split(None, 1), str(script)]
    said = spool("submit", "--hold", script, "an argument")
    assert said.code == 0, said.err


def test_a_script_on_stdin_that_asks_for_a_shell_is_a_script(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`qsub <<EOF` needs no `#!` line."""
    with (spool_root / "text").open("w+b") as file:
        file.write(b"#PBS -N mine\n#PBS -S /bin/bash\ntrue\n")
        file.seek(0)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
        assert spool("submit", "--hold", "-").out == "mine\n"
    assert tomllib.loads((spool_root / "held" / "mine.toml").read_text())["shell"] == "/bin/bash"


def test_own_lines_and_the_command_line_win(spool: Command, tmp_path: Path) -> None:
    """An option of spool is what counts, wherever it stands."""
    lines = "#SBATCH -t 10 -c 2 --export=A=1\n#SPOOL --time-limit 2h -e B=2"
    found, told = converted(spool, tmp_path, lines, "--cpus", "8", "-e", "C=3")
    assert found == {"cpus": 8, "time_limit": "2h", "env": {"A": "1", "B": "2", "C": "3"}}
    assert "time-limit" not in told


def test_a_script_of_grid_engine_finds_its_variables(spool: Command, tmp_path: Path) -> None:
    """Names that others use too mean that only in a script with lines for Grid Engine."""
    reads = "echo $SGE_TASK_ID $NSLOTS ${JOB_NAME}\ncd $SGE_O_WORKDIR\ncp x $TMPDIR\nqsub next.sh"
    found, told = converted(spool, tmp_path, f"#$ -t 1-2 -pe smp 4 -N a\n{reads}")
    assert found["env"].pop("SGE_O_WORKDIR") == os.getcwd()
    assert found["env"] == {"SGE_TASK_ID": "{index}", "NSLOTS": "$SPOOL_CPUS", "JOB_NAME": "a"}
    assert [name in told for name in ("$TMPDIR ", "qsub ")] == [True, True]
    assert converted(spool, tmp_path, "#$ -cwd\necho $SGE_TASK_ID")[0]["env"] == {"SGE_TASK_ID": "undefined"}
    assert converted(spool, tmp_path, "echo $NSLOTS $TMPDIR") == ({}, "")
    assert "TMPDIR" not in converted(spool, tmp_path, "#PBS -l ncpus=1\nTMPDIR=$(mktemp -d)\ncp x $TMPDIR")[1]


@pytest.mark.parametrize("lines", ['#SBATCH --comment="a', "# GFLOW --name it's", "#PBS -N 'a"])
@pytest.mark.parametrize("before", ["", "cd /\n"])
def test_a_quote_without_an_end_is_told(spool: Command, tmp_path: Path, lines: str, before: str) -> None:
    """As of a #SPOOL line, where the line counts at all; and ignored if one says so."""
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n{before}{lines}\n")
    said = spool("submit", script)
    if before and "GFLOW" not in lines:
        assert said.code == 0
        assert "line 3: " in said.err
    else:
        assert said.code == 2
        assert f"line {2 + bool(before)}: " in said.err
    assert spool("submit", "--ignore-directives", script).code == 0


def test_every_converter_survives_nonsense() -> None:
    """Whatever stands there becomes words or a reason."""
    for system, tables in SYSTEMS.items():
        for names in (*tables[0], *tables[1], *PIECES):
            for option in names.split():
                for value in (None, "", "-1", "1:2:3:4:5", "%", "a,b?c", "=", "gpu:", "٣", "9" * 30, "\udc80"):
                    (found, *_) = convert([Directive(1, system, option, value)]) or [None]
                    assert found is None or str(found)


def test_the_words_of_other_tools_are_taken(spool: Command, spool_root: Path) -> None:
    """What sbatch users type by habit means the same here, and the help lists our own words alone."""
    words = (
        "--mem 16G --time 1:30:00 -J x -o out.%n --error err -a 1-3 --begin 2h --chdir /tmp -d afterok:a:b,afterany:c"
    )
    more = ("--export", "NONE", "-G", "2", "--cpus-per-task", "4", "--wrap", "echo hi")
    assert spool("submit", *words.split(), *more).code == 0
    assert tomllib.loads((spool_root / "queued" / "x.toml").read_text()) == {
        "command": "echo hi",
        "workdir": "/tmp",
        "memory": "16G",
        "time_limit": "1:30:00",
        "depends_on": {"all": ["a", "b"], "ended": ["c"]},
        "start_after": "2h",
        "stdout": "out.%n",
        "stderr": "err",
        "array": "1-3",
        "gpus": 2,
        "cpus": 4,
    }
    assert spool("submit", "-H", "-J", "y", "--mem=1G", "--", "true").code == 0
    assert os.listdir(spool_root / "held") == ["y.toml"]
    assert "--mem " not in spool("submit", "--help").out


# What scripts and commands find in their jobs, and words of sbatch by habit.


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
