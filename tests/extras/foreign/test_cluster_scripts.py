"""Scripts as clusters document them, submitted as they are, and run to their end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from plugins.fake_nvml import FakeNvml
from served import Served

_MODULE = '() {  [ "$1" = load ] && export LOADED="${LOADED-}${LOADED:+:}$2"\n}'
_PROGRAMS = {
    "Rscript": 'echo "R runs $1 with ${2-}" && cat "$1"',
    "mpirun": '[ "$1" = -n ] && for rank in $(seq "$2"); do shift_="$3"; "$shift_"; done',
    "solver": 'echo "solver of rank ${SLURM_PROCID-none}"',
}


@dataclass(frozen=True)
class Case:
    """A script, how it is submitted, and what its job prints; `told` is said about it, and nothing else is wrong."""

    text: str
    prints: tuple[str, ...]
    told: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()  # if they are not one job named as the script says
    variables: dict[str, str] = field(default_factory=dict)
    stdin: bool = False


CASES = {
    "gpu-training": Case(
        """#!/bin/bash
#SBATCH --job-name=gpu-training
#SBATCH --partition=gpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-gpu=3
#SBATCH --mem=1G
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.out

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export MASTER_PORT=$(expr 10000 + $(echo -n $SLURM_JOBID | tail -c 4))
echo "Job $SLURM_JOB_NAME on $SLURM_JOB_NODELIST"
echo "$SLURM_GPUS_ON_NODE GPUs, $OMP_NUM_THREADS threads, $SLURM_MEM_PER_NODE MB"
[ "$MASTER_PORT" -ge 10000 ] && [ "$(echo $CUDA_VISIBLE_DEVICES | tr , '\\n' | wc -l)" = 2 ] && echo "port and GPUs"
srun --unbuffered python3 -c 'from os import environ as e; print("rank", e["SLURM_PROCID"], "of", e["SLURM_NTASKS"])'
""",
        ("\n2 GPUs, 6 threads, 1024 MB\n", "Job gpu-training on ", "port and GPUs\n", "rank 0 of 1\n"),
        ("a spool has no partitions", "launchers such as PyTorch Lightning"),
    ),
    "array": Case(
        """#!/bin/bash
#SBATCH -J array
#SBATCH --array=1-3%2
#SBATCH -o logs/%A_%a.out
params=(0 0.1 0.01 0.001)
lr=${params[$SLURM_ARRAY_TASK_ID]}
echo "task $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT in ${SLURM_ARRAY_JOB_ID:+its array}: lr $lr"
""",
        ("task 1 of 3 in its array: lr 0.1\n", "task 2 of 3", "task 3 of 3 in its array: lr 0.001\n"),
        jobs=("array_1", "array_2", "array_3"),
    ),
    "r-job": Case(
        """#!/bin/bash
#SBATCH --job-name r-job
#SBATCH --cpus-per-task 2
#SBATCH --mem-per-cpu=100M
#SBATCH --licenses=matlab:1 --mail-type=ALL --mail-user=me@example.org
module purge
module load R/4.3.1
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
cat > analysis.R <<'EOF'
print(parallel::detectCores())
EOF
Rscript analysis.R "$OMP_NUM_THREADS $LOADED"
""",
        ("R runs analysis.R with 2 R/4.3.1\n", "print(parallel::detectCores())"),
        ("give --notify me@example.org",),
        variables={"BASH_FUNC_module%%": _MODULE},
    ),
    "ddp": Case(
        """#!/bin/bash
#SBATCH --job-name=ddp
#SBATCH --gres=gpu:2,nvme:1
#SBATCH --tasks-per-node=1
#SBATCH --signal=B:USR1@120
module load cuda
source venv/bin/activate
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
[ "$MASTER_ADDR" = "$(hostname)" ] && echo "rendezvous for $SLURM_GPUS_ON_NODE with $LOADED"
""",
        ("rendezvous for 2 with cuda\n",),
        ("--gres=nvme:1 is ignored", "it warns before a time limit, and there is none"),
        variables={"BASH_FUNC_module%%": _MODULE},
    ),
    "mpi": Case(
        """#!/bin/bash
#SBATCH --job-name=mpi
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --time=0-00:05
echo "on $SLURM_NNODES node"
mpirun -n $SLURM_NTASKS solver
srun -N1 -n1 --mpi=pmix solver
srun -N 1 --exact -l -n 2 solver || echo "refused: $?"
""",
        (
            "on 1 node\nsolver of rank none\nsolver of rank none\nsolver of rank 0\n",
            "cannot start solver",
            "refused: 1\n",
        ),
        ("launchers such as PyTorch Lightning",),
    ),
    "checkpoint": Case(
        """#!/bin/bash
#SBATCH --job-name=checkpoint
#SBATCH --signal=B:USR1@60
#SBATCH --time=00:01:01
#SBATCH --requeue
#SBATCH --open-mode=append
save() { echo "saving step $step"; echo $step > "ckpt_$SLURM_JOB_NAME"; exit 0; }
trap save USR1
step=0
[ -f "ckpt_$SLURM_JOB_NAME" ] && step=$(cat "ckpt_$SLURM_JOB_NAME") && echo "resuming at $step"
step=$((step + 7))
sleep 50 &
wait
""",
        ("saving step 7\n",),
    ),
    "chain": Case(
        """#!/bin/bash
#SBATCH --job-name=chain
#SBATCH --dependency=singleton
echo "chain ends"
""",
        ("chain ends\n",),
        words=("--parsable", "--dependency=afterok:prepare"),
        jobs=("prepare", "chain"),
    ),
    "heredoc": Case(
        """#!/bin/bash
#SBATCH --job-name=heredoc
#SBATCH --chdir=.
for i in 1 2; do
    srun --ntasks=1 -c1 --exclusive sh -c "echo step $i" &
done
wait
""",
        ("step 1\n", "step 2\n"),
        stdin=True,
    ),
}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give every program in the PATH but those of Slurm and pyenv, which a machine of ours may have."""
    directory = tmp_path_factory.mktemp("usual")
    for place in os.get_exec_path():
        for name in os.listdir(place) if os.path.isdir(place) else ():
            if name not in ("srun", "sbatch", "scontrol", "activate") and not os.path.lexists(directory / name):
                (directory / name).symlink_to(os.path.join(place, name))
    return directory


@pytest.fixture
def cluster(fake_nvml: FakeNvml, usual: Path, tmp_path: Path) -> Iterator[Served]:
    """Give a spool with two GPUs, a licence, and the programs that the scripts call in the caller's PATH."""
    for at in range(2):
        fake_nvml.gpu(f"GPU-{at:08d}-1111-2222-3333-444444444444", bus=at)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in _PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "logs").mkdir()
    with Served(tmp_path / "spool", fake_nvml.variables) as spool:
        spool.environment["PATH"] = f"{programs}:{usual}"
        (spool.root / "config.toml").write_text(
            'cpus = 16\nautostart = false\nnotifier = "true"\n[resources]\nmatlab = 1\n'
        )
        yield spool


def _submitted(cluster: Served, case: Case, *words: str) -> subprocess.CompletedProcess[str]:
    here = cluster.root.parent
    (here / "job.sh").write_text(case.text)
    given = (*case.words, *words, *(() if case.stdin else ("job.sh",)))
    options = {"input": case.text} if case.stdin else {}
    return cluster.spool("submit", *given, cwd=here, env=cluster.environment | case.variables, **options)


@pytest.mark.parametrize("name", CASES)
def test_a_script_of_a_cluster_runs_as_it_is(cluster: Served, name: str) -> None:
    """Nothing in it is changed; what it prints is right, and only what has no equivalent is said."""
    case = CASES[name]
    if "prepare" in case.jobs:
        assert cluster.spool("submit", "--parsable", "--name", "prepare", "--wrap", "true").stdout == "prepare\n"
    done = _submitted(cluster, case, "-v")
    assert (done.returncode, done.stdout) == (0, f"{name}\n"), done.stderr
    plain = (" becomes ", " is not needed here", "autostart is off", "no equivalent in spool")
    others = [line for line in done.stderr.splitlines() if not any(part in line for part in plain)]
    assert len(others) >= len(case.told)
    for line in others:
        assert any(part in line for part in case.told), line
    assert cluster.run() == 0
    assert {line["outcome"] for line in cluster.history()} == {"finished"}
    jobs = case.jobs or (name,)
    printed = "".join(cluster.spool("log", job).stdout for job in jobs)
    for part in case.prints:
        assert part in printed, printed


def test_a_checkpoint_is_resumed_by_the_next_submission(cluster: Served) -> None:
    """The signal comes before the limit, the script saves its state, and finds it when it is submitted again."""
    for part in ("saving step 7\n", "resuming at 7\nsaving step 14\n"):
        assert _submitted(cluster, CASES["checkpoint"]).returncode == 0
        assert cluster.run() == 0
        assert cluster.spool("log", "checkpoint").stdout.endswith(part)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("true", 0, ""),
        ("-n1 -c 4 --mem=1G --label --gres gpu:1 -N 1 -- echo -n x", 0, "x"),
        ("--export=ALL --chdir / pwd", 0, "/\n"),
        ("-o out --error=err sh -c 'echo y' && srun cat out err", 0, "y\n"),
        ("-n 4 x", 1, "srun: cannot start x: --ntasks 4 asks for 4 tasks, and a job of spool is one"),
        ("--multi-prog x.conf", 1, "--multi-prog is not supported"),
        ("-o out.%2t%%.%u%N sh -c 'echo y' && cat out.00%*", 0, "y\n"),
        ("-o o echo x; srun -o o echo y; srun -o o --open-mode=a echo z; cat o", 0, "y\nz\n"),
        ("-o out.%q x", 1, "%q in the name out.%q has no meaning here"),
        ("--export=ALL,X=1,Y='a b' sh -c 'echo $X $Y $KEPT'", 0, "1 a b kept\n"),
        ("--export NONE sh -c 'echo ${KEPT-no} ${SPOOL_JOB}'", 0, "no a\n"),
        ("--export KEPT,X=2 sh -c 'echo $KEPT$X${OTHER-.}'", 0, "kept2.\n"),
        ("--bcast --compress --kill-on-bad-exit=1 -K -u --cpu-bind=none --gres gpu:1 echo x", 0, "x\n"),
        ("", 1, "given no command"),
    ],
)
def test_srun_is_one_task(cluster: Served, words: str, code: int, said: str) -> None:
    """Options of one task are understood or do not matter; more tasks are refused in words."""
    given = ("-e", "KEPT=kept", "-e", "OTHER=x")
    cluster.spool("submit", "-n", "a", *given, "-", input=f"srun {words}\n", cwd=cluster.root.parent)
    cluster.run()
    assert cluster.result("a").get("exit_code") == code
    assert said in cluster.log("a")


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ("#SBATCH -o logs/%x-%j.out\necho x; cp logs/$SLURM_JOB_NAME-$SLURM_JOB_ID.out copy", {"copy": "x\n"}),
        ("echo x; mv slurm-${SLURM_JOB_ID}.out moved", {"moved": "x\n"}),
        ("#PBS -o logs\necho x; cp logs/$PBS_JOBNAME.*.out copy", {"copy": "x\n"}),
        ("srun -o %j.%t echo x; mv $SLURM_JOBID.0 moved", {"moved": "x\n"}),
        (
            "#SBATCH -a 7,8\necho x; mv slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.out moved$SPOOL_ARRAY_INDEX",
            {"moved7": "x\n", "moved8": "x\n"},
        ),
        ("#SBATCH -a 7-8 -o logs/%x-%3a\necho x", {"logs/nm-007": "x\n", "logs/nm-008": "x\n"}),
    ],
)
def test_a_script_finds_its_output(cluster: Served, lines: str, left: dict[str, str]) -> None:
    """The number in the name of an output is the one in the variables, also in what srun writes."""
    (cluster.root.parent / "job.sh").write_text(f"#!/bin/bash\nset -e\n{lines}\n".replace("set -e\n#", "#"))
    assert cluster.spool("submit", "-n", "nm", "job.sh", cwd=cluster.root.parent).returncode == 0
    assert cluster.run() == 0
    assert {name: (cluster.root.parent / name).read_text() for name in left} == left
    assert {line["outcome"] for line in cluster.history()} == {"finished"}


def test_scontrol_runs_the_job_again(cluster: Served) -> None:
    """A script that saves its state and requeues itself by its number goes on; other orders are refused."""
    program = cluster.root.parent / "programs" / "spool"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m spool "$@"\n')
    program.chmod(0o755)
    text = """#!/bin/bash
#SBATCH -J again -a 5
if [ ! -e saved ]; then
    touch saved
    scontrol show job $SLURM_JOB_ID || echo "refused: $?"
    trap 'scontrol requeue ${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}; exit 0' USR1
    kill -USR1 $$
fi
echo "goes on as $SPOOL_RUN"
"""
    (cluster.root.parent / "job.sh").write_text(text)
    assert cluster.spool("submit", "job.sh", cwd=cluster.root.parent).stdout == "again\n"
    assert cluster.run() == 0
    assert [line["outcome"] for line in cluster.history() if line["job"] == "again_5"][-1] == "finished"
    assert "refused: 1\n" in cluster.log("again_5", 1)
    assert cluster.log("again_5", 2) == "goes on as 2\n"
