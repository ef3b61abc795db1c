"""How a job in a real Slurm begins and ends, and that spool says so: its files, Slurm's word, and who ended it."""

from __future__ import annotations

import os
import re

import pytest

from long.slurm.cluster import NODES, Cluster
from served import Served, alive, pids_in, remember
from support import wait_for

TIMED = int(os.environ.get("SLURM_TIMED", "20"))


def _in_slurm(slurm: Cluster, name: str) -> dict[str, str]:
    """Return the newest job of that name in Slurm, nothing while there is none. It keeps those of other tests, too."""
    return max((job for job in slurm.jobs() if job["name"] == name), key=lambda job: int(job["id"]), default={})


def _state(slurm: Cluster, name: str) -> str:
    return _in_slurm(slurm, name).get("state", "")


def _drain(slurm: Cluster) -> None:
    slurm.command("scontrol", "update", f"nodename={','.join(NODES)}", "state=drain", "reason=a test of spool")


def test_a_job_finishes_on_a_node(served: Served, slurm: Cluster) -> None:
    """Its records say where it ran and under which id, its output is in its log, and Slurm knows it by the comment."""
    served.drop("hello", "echo hello from $SLURMD_NODENAME as $SPOOL_JOB/$SPOOL_RUN; echo not so well >&2")
    result = served.wait_done("hello")
    assert result is not None
    assert (result["outcome"], result["exit_code"]) == ("finished", 0)
    log = served.log("hello")
    match = re.match(r"hello from (n\d) as hello/1\n", log)
    assert match is not None
    assert "not so well" in log
    engine = (served.record("hello", "engine") or "").split()
    jid = (served.record("hello", "jid") or "").split()
    assert engine[:2] == ["slurm", slurm.name]
    assert (jid[4], jid[5]) == (match.group(1), f"slurm:{engine[2]}")
    known = _in_slurm(slurm, "hello")
    assert (known["id"], known["node"]) == (engine[2], match.group(1))
    assert re.fullmatch(r"spool:\w+:hello:1", known["comment"])
    assert result["node"] == match.group(1) != result["host"]
    assert served.spool("ls", "--columns", "name,node").stdout.split() == ["NAME", "NODE", "hello", match.group(1)]


def test_a_hook_hears_that_slurm_has_accepted_a_job_before_it_begins(unserved: Served, slurm: Cluster) -> None:
    """The event has Slurm's job id while the job waits there, and comes once."""
    told = unserved.root.parent / "told"
    (unserved.root / "hooks").mkdir()
    for event in ("handed_over", "started"):
        hook = unserved.root / "hooks" / event
        hook.write_text(f'#!/bin/sh\necho "$SPOOL_EVENT $SPOOL_JOB $SPOOL_ENGINE_ID" >> {told}\n')
        hook.chmod(0o755)
    _drain(slurm)
    unserved.start()
    unserved.drop("waits", "true")
    unserved.until(lambda: told.exists() and told.read_text(), "the event")
    job = _in_slurm(slurm, "waits")
    assert job["state"] == "PENDING"
    assert told.read_text() == f"handed_over waits {job['id']}\n"
    for node in NODES:
        slurm.command("scontrol", "update", f"nodename={node}", "state=resume")
    unserved.wait_done("waits")
    unserved.until(lambda: told.read_text().count("\n") == 2, "the next event")
    assert told.read_text().splitlines()[1] == f"started waits {job['id']}"


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 3", 3), ("kill -SEGV $$", 139), ("/nonexistent/program", 127)],
)
def test_a_job_fails_with_its_exit_code(served: Served, command: str, code: int) -> None:
    """The exit code is that of the command; 128 and the number of the signal that ended it."""
    served.drop("bad", command)
    result = served.wait_done("bad")
    assert result is not None
    assert (result["outcome"], result["exit_code"]) == ("failed", code)


def test_a_failed_job_is_tried_again_by_spool(served: Served) -> None:
    """Retries are spool's: the second run is another job in Slurm."""
    served.drop("again", '[ "$SPOOL_ATTEMPT" = 2 ]', retry={"max": 2, "delay": "100ms"})
    served.wait_done("again")
    assert [served.outcome("again", run) for run in served.runs("again")] == ["failed", "finished"]
    assert served.record("again", "engine", 1) != served.record("again", "engine", 2)


def test_a_dependency_is_kept_by_spool(served: Served, slurm: Cluster) -> None:
    """What waits for another job is not in Slurm until that has finished."""
    served.drop("second", "cat told", depends_on=["first"])
    served.drop("first", "until [ -e go ]; do sleep 0.1; done; echo told > told")
    served.until(lambda: _state(slurm, "first") == "RUNNING", "the first job")
    assert not _in_slurm(slurm, "second")
    (served.root.parent / "go").touch()
    served.wait_done("second")
    assert served.log("second") == "told\n"


def test_a_running_job_is_cancelled(served: Served, slurm: Cluster) -> None:
    """`spool cancel` has the wrapper end the command, which is told once and leaves in order; Slurm has it no more."""
    served.drop("long", "trap 'echo told; exit 9' TERM; echo up; while :; do sleep 0.1; done")
    served.says("long", "up")
    assert served.spool("cancel", "long").returncode == 0
    result = served.wait_done("long")
    assert result is not None
    assert result["outcome"] == "cancelled"
    assert served.log("long").count("told") == 1
    assert _state(slurm, "long") in ("FAILED", "CANCELLED")


def test_a_job_that_ignores_the_request_is_ended_after_its_grace(served: Served, slurm: Cluster) -> None:
    """What ignores SIGTERM is ended by Slurm when `kill_grace` is over, with all its processes."""
    served.drop("deaf", "trap '' TERM; echo $$; while :; do sleep 0.1; done", kill_grace="1s")
    pid = pids_in(served.says("deaf", "\n"))[0]
    assert served.spool("cancel", "deaf").returncode == 0
    served.wait_done("deaf")
    assert served.outcome("deaf") == "cancelled"
    wait_for(lambda: not alive(pid), what="the end of the command")
    assert _state(slurm, "deaf") not in ("RUNNING", "PENDING")


def test_a_job_that_waits_in_slurm_is_cancelled_and_never_begins(served: Served, slurm: Cluster) -> None:
    """A job that waits for a node (Slurm's reason has blanks) leaves Slurm's queue."""
    _drain(slurm)
    served.drop("waits", "touch begun")
    served.until(lambda: _state(slurm, "waits") == "PENDING", "it to wait in Slurm")
    assert served.spool("cancel", "waits").returncode == 0
    result = served.wait_done("waits")
    assert result is not None
    assert result["outcome"] == "cancelled"
    served.until(lambda: _state(slurm, "waits") == "CANCELLED", "its end in Slurm")
    assert not (served.root.parent / "begun").exists()


def test_one_job_that_waits_holds_up_no_other(served: Served, slurm: Cluster) -> None:
    """While one job waits for a node that is drained, another ends and is seen to end."""
    slurm.command("scontrol", "update", "nodename=n4", "state=drain", "reason=a test of spool")
    served.drop("waits", "true", executor_options=["--nodelist=n4"])
    served.until(lambda: _state(slurm, "waits") == "PENDING", "it to wait in Slurm")
    served.drop("other", "true")
    served.wait_done("other")
    assert served.places("waits") == ["running"]
    slurm.command("scontrol", "update", "nodename=n4", "state=resume")
    served.wait_done("waits")
    assert served.outcome("waits") == "finished"


def test_a_time_limit_is_spools_own_and_exact(served: Served, slurm: Cluster) -> None:
    """A job over its limit is asked to end after seconds, where Slurm counts in minutes, and is a timeout."""
    served.drop("slow", "trap 'echo told; exit 0' TERM; echo up; while :; do sleep 0.1; done", time_limit="2s")
    result = served.wait_done("slow")
    assert result is not None
    assert result["outcome"] == "timeout"
    assert served.log("slow").count("told") == 1
    assert _state(slurm, "slow") != "TIMEOUT"


def test_a_warning_comes_before_the_time_limit(served: Served) -> None:
    """The signal that the job has asked for reaches its command, once, and it may end by itself."""
    command = "trap 'echo warned; exit 0' USR1; echo up; while :; do sleep 0.1; done"
    served.drop("warned", command, time_limit="60s", signal="USR1@58s")
    result = served.wait_done("warned")
    assert result is not None
    assert result["outcome"] == "finished"
    assert served.log("warned").count("warned") == 1


def test_scancel_of_a_running_job_is_a_cancelled_run(served: Served, slurm: Cluster) -> None:
    """A job that somebody ends by scancel is cancelled, whatever exit code the signal leaves, and not run again."""
    served.drop("theirs", "trap 'exit 9' TERM; echo up; while :; do sleep 0.1; done", retry={"max": 3})
    served.says("theirs", "up")
    slurm.command("scancel", _in_slurm(slurm, "theirs")["id"])
    result = served.wait_done("theirs")
    assert result is not None
    assert result["outcome"] == "cancelled"
    assert "Slurm" in result["reason"]
    assert served.runs("theirs") == [1]


def test_scancel_of_a_job_that_waits_is_a_cancelled_run(served: Served, slurm: Cluster) -> None:
    """A job that never began and that somebody has taken out of Slurm's queue is cancelled, and not submitted anew."""
    _drain(slurm)
    served.drop("theirs", "touch begun")
    served.until(lambda: _state(slurm, "theirs") == "PENDING", "it to wait in Slurm")
    slurm.command("scancel", _in_slurm(slurm, "theirs")["id"])
    result = served.wait_done("theirs")
    assert result is not None
    assert result["outcome"] == "cancelled"
    assert not (served.root.parent / "begun").exists()


def test_what_slurm_refuses_is_held_with_its_words(served: Served, slurm: Cluster) -> None:
    """More memory than any node has: the job is in held/ and says so, though Slurm keeps a record of it."""
    served.drop("huge", "true", memory="900G")
    served.wait_place("huge", "held")
    said = served.spool("why", "huge").stdout
    assert "configuration is not available" in said
    assert served.spool("release", "huge").returncode == 0
    served.until(lambda: len(served.runs("huge")) >= 2 and served.places("huge") == ["held"], "the second refusal")
    assert all(served.outcome("huge", run) is None for run in served.runs("huge"))


def test_memory_that_spool_works_out_is_asked_for(unserved: Served) -> None:
    """By the peaks of earlier runs, for each task of an array, and twice as much after a run that had too little."""
    remember(unserved, "sweep_9", 100)
    unserved.start()
    unserved.drop("sweep", "echo $SLURM_MEM_PER_NODE", array="0-1", memory="auto")
    grows = "echo $SLURM_MEM_PER_NODE; [ $SPOOL_ATTEMPT != 1 ] || exec tail /dev/zero"
    unserved.drop("grows", grows, memory="50M", retry={"max": 1, "memory_factor": 2})
    unserved.wait_done("sweep", "grows")
    assert [unserved.log(f"sweep_{index}") for index in (0, 1)] == ["256\n"] * 2
    assert (unserved.outcome("grows", 1), unserved.log("grows", 2)) == ("out_of_memory", "100\n")


def test_a_refusal_that_speaks_of_sockets_is_a_refusal(served: Served) -> None:
    """Cores of which no processor has as many: Slurm's words sound like those of a network, and the job is held."""
    served.drop("wide", "true", executor_options=["--cores-per-socket=99"])
    served.wait_place("wide", "held")
    assert "configuration is not available" in served.spool("why", "wide").stdout
    assert len(served.runs("wide")) == 1


def test_a_gpu_is_slurms_to_give(served: Served) -> None:
    """The job finds in CUDA_VISIBLE_DEVICES what Slurm gave it, though this machine has no GPU."""
    served.drop("gpu", "echo $CUDA_VISIBLE_DEVICES $SLURM_JOB_GPUS $SPOOL_GPUS; env | grep -c CUDA", gpus=2)
    served.wait_done("gpu")
    assert served.log("gpu").splitlines()[0].split() == ["0,1", "0,1", "2"]


def test_options_of_the_job_reach_sbatch(served: Served) -> None:
    """`executor_options` chooses the node; what the job asks of the machine is in Slurm's own variables."""
    command = "echo $SLURMD_NODENAME $SLURM_CPUS_PER_TASK $SLURM_MEM_PER_NODE"
    served.drop("there", command, executor_options=["--nodelist=n3"], cpus=3, memory="100M")
    served.wait_done("there")
    assert served.log("there") == "n3 3 100\n"


def test_jobs_take_nothing_of_this_machine(served: Served, slurm: Cluster) -> None:
    """More processors than this machine has, at once, and more jobs: all run in Slurm at the same time."""
    for number in range(4):
        served.drop(f"wide{number}", "until [ -e go ]; do sleep 0.1; done", cpus=8)
    served.until(lambda: [job["state"] for job in slurm.jobs()].count("RUNNING") == 4, "all to run")
    (served.root.parent / "go").touch()
    served.wait_done(*(f"wide{number}" for number in range(4)))


@pytest.mark.timeout(600)
def test_runs_in_slurm_are_recorded_with_their_own_times_and_use(served: Served) -> None:
    """Each run ends when its wrapper wrote the exit code, not when Slurm was asked, and its use is known."""
    (served.root / "config.toml").write_text('autostart = false\ndisk_floor = "0M"\n[slurm]\npoll = "5s"\n')
    names = [f"short{number}" for number in range(TIMED)]
    for name in names:
        served.drop(name, ["sh", "-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"])
    served.patience = 300
    served.wait_done(*names)
    for name in names:
        metadir, result = served.root / "jobs" / name / "1", served.result(name)
        assert result is not None
        began_ns, left_ns = ((metadir / record).stat().st_mtime_ns for record in ("jid", "rc"))
        assert (result["started_at_ns"], result["ended_at_ns"]) == (began_ns, left_ns)
        lines = (line.partition(" = ") for line in (served.record(name, "usage") or "").splitlines())
        wrote = {key: int(number) for key, _, number in lines}
        assert result["cpu_time_ns"] == wrote["cpu_time_ns"] > 0
        assert result.get("peak_memory_bytes") == wrote.get("peak_memory_bytes")  # where Slurm makes control groups
        assert "ended_at_is" not in result
