"""The cluster of the tests is a real one: it runs jobs, has GPUs, and outlives its controller's death."""

from __future__ import annotations

from pathlib import Path

from long.slurm.cluster import Cluster
from support import wait_for


def _submit(slurm: Cluster, *words: str) -> str:
    return slurm.command("sbatch", "--parsable", "--output=/dev/null", *words).stdout.strip().split(";")[0]


def test_a_job_runs_on_a_node_and_finds_its_gpu(slurm: Cluster, tmp_path: Path) -> None:
    """A job gets a node of the cluster and one of its GPUs."""
    told = tmp_path / "told"
    _submit(
        slurm, "--gres=gpu:1", f"--wrap=echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES > {told}.new; mv {told}.new {told}"
    )
    wait_for(told.exists)
    assert told.read_text() == "n1 0\n"


def test_the_controller_can_die_and_come_back(slurm: Cluster) -> None:
    """A job that runs is still known after the controller was killed and started again."""
    job = _submit(slurm, "--wrap=sleep 1000")
    wait_for(lambda: [j for j in slurm.jobs() if j["id"] == job and j["state"] == "RUNNING"])
    slurm.kill_controller()
    slurm.start_controller()
    assert [j["state"] for j in slurm.jobs() if j["id"] == job] == ["RUNNING"]
