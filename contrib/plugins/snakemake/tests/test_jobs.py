"""What becomes of the steps of a workflow in the spool."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from spool import Client, State

from snakemake_executor_plugin_spool import job_keys
from waiting import PATIENCE_S, wait_for


def started(workflow: Path, text: str, *words: str) -> subprocess.Popen[str]:
    """Begin to run a Snakefile in its own directory."""
    workflow.mkdir(exist_ok=True)
    (workflow / "Snakefile").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "snakemake", "--executor", "spool", "--jobs", "10", *words]
    return subprocess.Popen(command, cwd=workflow, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(workflow: Path, text: str, *words: str) -> tuple[int, str]:
    """Run a Snakefile in its own directory; return the exit code and what Snakemake said."""
    process = started(workflow, text, *words)
    output, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output


def job_files(spool: Path, place: str = "done") -> dict[str, dict[str, Any]]:
    """Return the job files in a directory of the spool, by name."""
    return {path.stem: tomllib.loads(path.read_text()) for path in sorted((spool / place).glob("*.toml"))}


def outcomes(spool: Path) -> list[State | None]:
    """Return the outcomes of all jobs that have ended."""
    client = Client(spool)
    ends = [client.wait(name, timeout_s=PATIENCE_S) for name in job_files(spool)]
    return [end and end.outcome for end in ends]


def test_a_step_has_the_resources_of_its_rule(spool: Path, tmp_path: Path) -> None:
    """Threads, memory, run time and keys of spool reach the job, and its Snakemake has as many cores."""
    code, output = run(
        tmp_path / "w",
        """
rule all:
    input: "x-7.out"
rule step:
    output: "x-{sample}.out"
    threads: 2
    resources: mem_mb=300, runtime="2h", spool_priority=20, spool_tags="['mine', 'yours']"
    shell: "echo {resources.mem_mb} $SPOOL_CPUS {threads} > {output}"
""",
    )
    assert code == 0, output
    [(name, job)] = job_files(spool).items()
    assert name.startswith("step-7-")
    expected = {"cpus": 2, "memory": "556M", "time_limit": "120m", "priority": 20, "tags": ["mine", "yours"]}
    assert {key: job.get(key) for key in expected} == expected
    assert "--cores 2" in job["command"]
    assert (tmp_path / "w" / "x-7.out").read_text().split()[::2] == ["300", "2"]
    assert f"{spool}/jobs/{name}/1/log" in output


def test_gpus_are_those_of_the_resource() -> None:
    """The resources gpu and gpu_model become the keys gpus and gpu_type."""
    rule = SimpleNamespace(name="train")
    resources = {"_cores": 4, "gpu": 2, "gpu_model": "A100", "spool_gpu_memory": "8G"}
    job: Any = SimpleNamespace(rule=rule, is_group=lambda: False, threads=4, output=["m.pt"], resources=resources)
    keys = job_keys(job, 256)
    assert (keys["gpus"], keys["gpu_type"], keys["gpu_memory"], keys["cpus"]) == (2, "A100", "8G", 4)
    assert "memory" not in keys


def test_each_try_is_a_run_with_the_resources_of_its_attempt(spool: Path, tmp_path: Path) -> None:
    """A step that fails once runs a second time, with the memory that the rule asks for then."""
    code, output = run(
        tmp_path / "w",
        """
rule step:
    output: "x.out"
    retries: 1
    resources: mem_mb=lambda wildcards, attempt: 300 * attempt
    shell: "test -e once && touch {output} || {{ touch once; exit 3; }}"
""",
    )
    assert code == 0, output
    [name] = job_files(spool)
    runs = [tomllib.loads((spool / "jobs" / name / run / "job.toml").read_text()) for run in ("1", "2")]
    assert [job["memory"] for job in runs] == ["556M", "856M"]
    assert f"{spool}/jobs/{name}/2/log" in output
    assert outcomes(spool) == [State.FINISHED]


def test_a_failure_says_what_happened_and_where_the_log_is(spool: Path, tmp_path: Path) -> None:
    """The message of a failed step has the outcome of its job, and the path of its log."""
    text = """
rule step:
    output: "x.out"
    shell: "echo so it goes; exit 3"
"""
    code, output = run(tmp_path / "w", text)
    [name] = job_files(spool)
    assert code == 1
    assert f"Job {name} of the spool: failed, exit code 1" in output
    log = spool / "jobs" / name / "1" / "log"
    assert output.count(str(log)) >= 2
    assert "so it goes" in log.read_text()


def test_a_step_at_its_limit_says_so(spool: Path, tmp_path: Path) -> None:
    """A step that takes more memory than it has asked for fails, and the message names the reason."""
    text = """
rule step:
    output: "x.out"
    resources: mem_mb=1
    shell: "{python} -c 'import time; x = bytes(1 << 30); x = bytearray(x); time.sleep(100)'"
""".replace("{python}", sys.executable)
    code, output = run(tmp_path / "w", text)
    assert code == 1
    assert outcomes(spool) == [State.OUT_OF_MEMORY]
    assert "of the spool: out_of_memory" in output


def test_a_key_that_is_none_fails_its_step_alone(spool: Path, tmp_path: Path) -> None:
    """A misspelt key is the failure of its step, with spool's own words; the other step runs."""
    text = """
rule all:
    input: "x.out", "y.out"
rule bad:
    output: "x.out"
    resources: spool_priorty=1
    shell: "touch {output}"
rule good:
    output: "y.out"
    shell: "touch {output}"
"""
    code, output = run(tmp_path / "w", text, "--keep-going")
    assert code == 1
    assert "priorty" in output
    assert (tmp_path / "w" / "y.out").exists()
    assert [name.rpartition("-")[0] for name in job_files(spool)] == ["good"]


def test_secrets_are_in_no_command_line(spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that a workflow declares reach its steps by the environment."""
    monkeypatch.setenv("MY_TOKEN", "swordfish")
    text = """
envvars: "MY_TOKEN"
rule step:
    output: "x.out"
    shell: "echo $MY_TOKEN > {output}"
"""
    code, output = run(tmp_path / "w", text)
    assert code == 0, output
    [job] = job_files(spool).values()
    assert "swordfish" not in job["command"]
    assert (tmp_path / "w" / "x.out").read_text() == "swordfish\n"


SLOW = """
rule all:
    input: "1.out", "2.out", "3.out"
rule step:
    output: "{n}.out"
    threads: 2
    shell: "echo $$ >> {wildcards.n}.runs; while [ ! -e go ]; do sleep 0.05; done; touch {output}"
"""


def test_an_interrupt_cancels_what_runs_and_what_waits(spool: Path, tmp_path: Path) -> None:
    """After Ctrl-C every job of the workflow is cancelled."""
    process = started(tmp_path / "w", SLOW)
    wait_for(lambda: len(list((tmp_path / "w").glob("*.runs"))) > 0)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0, output
    wait_for(lambda: len(job_files(spool)) == 3)
    assert outcomes(spool) == [State.CANCELLED] * 3


def test_a_killed_snakemake_starts_no_step_twice(spool: Path, tmp_path: Path) -> None:
    """The next Snakemake waits for the jobs of one that was killed, and each step runs once."""
    workflow = tmp_path / "w"
    process = started(workflow, SLOW)
    wait_for(lambda: len(list(workflow.glob("*.runs"))) > 0)
    wait_for(lambda: len(job_files(spool, "queued")) + len(job_files(spool, "running")) == 3)
    process.kill()
    process.communicate()
    run(workflow, SLOW, "--unlock")
    again = started(workflow, SLOW)
    lines: list[str] = []
    assert again.stdout is not None
    while sum("goes on as job" in line for line in lines) < 3:
        lines.append(again.stdout.readline())
        assert lines[-1], "".join(lines)
    (workflow / "go").touch()
    output, _ = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, output
    assert len(job_files(spool)) == 3
    assert [len(path.read_text().splitlines()) for path in workflow.glob("*.runs")] == [1, 1, 1]
