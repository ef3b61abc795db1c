"""How a job in a real Slurm begins and ends, and what people see of it, with a dispatcher and without."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from long.slurm.cluster import Cluster, engine_id
from served import ENGINE_LOOKS, Served, alive, pids_in, remember
from support import PATIENCE_S, ROOT, wait_for

TIMED = int(os.environ.get("SLURM_TIMED", "3"))


def _in_slurm(slurm: Cluster, name: str) -> dict[str, str]:
    """Return the newest job of that name in Slurm, nothing while there is none. It keeps those of other tests, too."""
    return max((job for job in slurm.jobs() if job["name"] == name), key=lambda job: int(job["id"]), default={})


def test_a_job_finishes_on_a_node(served: Served, slurm: Cluster) -> None:
    """Its records say where it ran and under which id, its output is in its log, and Slurm knows it by the comment."""
    served.drop("hello", "echo hello from $SLURMD_NODENAME as $SPOOL_JOB/$SPOOL_RUN; echo not so well >&2")
    result = served.wait_done("hello")
    assert (result["outcome"], result["exit_code"]) == ("finished", 0)
    log = served.log("hello")
    match = re.match(r"hello from (n\d) as hello/1\n", log)
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
    slurm.set_nodes("drain")
    unserved.start()
    unserved.drop("waits", "true")
    unserved.until(lambda: told.exists() and told.read_text(), "the event")
    job = _in_slurm(slurm, "waits")
    assert job["state"] == "PENDING"
    assert told.read_text() == f"handed_over waits {job['id']}\n"
    slurm.resume()
    unserved.wait_done("waits")
    unserved.until(lambda: told.read_text().count("\n") == 2, "the next event")
    assert told.read_text().splitlines()[1] == f"started waits {job['id']}"


def test_a_job_that_ignores_the_request_is_ended_after_its_grace(served: Served, slurm: Cluster) -> None:
    """What ignores SIGTERM is ended by Slurm when `kill_grace` is over, with all its processes."""
    served.drop("deaf", "trap '' TERM; echo $$; while :; do sleep 0.1; done", kill_grace="1s")
    pid = pids_in(served.says("deaf", "\n"))[0]
    assert served.spool("cancel", "deaf").returncode == 0
    served.wait_done("deaf")
    assert served.outcome("deaf") == "cancelled"
    wait_for(lambda: not alive(pid), what="the end of the command")
    assert _in_slurm(slurm, "deaf").get("state", "") not in ("RUNNING", "PENDING")


def test_what_slurm_refuses_is_held_with_its_words(served: Served) -> None:
    """More memory than any node has, and more cores, whose refusal sounds like one of a network: both are in held/.

    Slurm keeps a record of them; a release submits anew.
    """
    served.drop("huge", "true", memory="900G")
    served.drop("wide", "true", executor_options=["--cores-per-socket=99"])
    for name in ("huge", "wide"):
        served.wait_place(name, "held")
        assert "configuration is not available" in served.spool("why", name).stdout
    assert len(served.runs("wide")) == 1
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


def test_what_a_job_asks_for_is_slurms_to_give(served: Served) -> None:
    """It finds in CUDA_VISIBLE_DEVICES what Slurm gave it, though this machine has no GPU; its options choose the node.

    What the job asks of the machine is in Slurm's own variables.
    """
    served.drop("gpu", "echo $CUDA_VISIBLE_DEVICES $SLURM_JOB_GPUS $SPOOL_GPUS", gpus=2)
    command = "echo $SLURMD_NODENAME $SLURM_CPUS_PER_TASK $SLURM_MEM_PER_NODE"
    served.drop("there", command, executor_options=["--nodelist=n3"], cpus=3, memory="100M")
    served.wait_done("gpu", "there")
    assert (served.log("gpu"), served.log("there")) == ("0,1 0,1 2\n", "n3 3 100\n")


@pytest.mark.timeout(600)
def test_runs_in_slurm_are_recorded_with_their_own_times_and_use(unserved: Served) -> None:
    """Each run ends when its wrapper wrote the exit code, not when Slurm was asked, and its use is known."""
    unserved.changes[ENGINE_LOOKS] = 2 * 10**9
    served = unserved.start()
    names = [f"short{number}" for number in range(TIMED)]
    for name in names:
        served.drop(name, ["sh", "-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"])
    served.patience = 300
    served.wait_done(*names)
    for name in names:
        metadir, result = served.root / "jobs" / name / "1", served.result(name)
        began_ns, left_ns = ((metadir / record).stat().st_mtime_ns for record in ("jid", "rc"))
        assert (result["started_at_ns"], result["ended_at_ns"]) == (began_ns, left_ns)
        lines = (line.partition(" = ") for line in (served.record(name, "usage") or "").splitlines())
        wrote = {key: int(number) for key, _, number in lines}
        assert result["cpu_time_ns"] == wrote["cpu_time_ns"] > 0
        assert result.get("peak_memory_bytes") == wrote.get("peak_memory_bytes")  # where Slurm makes control groups
        assert "ended_at_is" not in result


def test_each_task_is_a_job_of_slurm(served: Served, slurm: Cluster) -> None:
    """Begun once, with its output, its exit code, its id, and its own engine.log."""
    served.drop("sweep", "echo {index}; exit $((SPOOL_ARRAY_INDEX % 2))", array="0-9")
    served.wait_done("sweep")
    for index in range(10):
        name = f"sweep_{index}"
        assert served.runs(name) == [1]
        assert (served.result(name)["exit_code"], served.log(name)) == (index % 2, f"{index}\n")
        assert (served.record(name, "jid") or "").split()[5] == f"slurm:{engine_id(served, name)}"
        assert served.record(name, "engine.log") is not None


def test_a_cancelled_array_leaves_slurm(served: Served, slurm: Cluster) -> None:
    """Tasks that run are told to end, and those that wait never begin."""
    served.drop("sweep", "trap 'echo told; exit 3' TERM; echo up; while :; do sleep 0.1; done", array="0-5%2")
    served.says("sweep_0", "up")
    served.says("sweep_1", "up")
    assert served.spool("cancel", "sweep").returncode == 0
    served.wait_done("sweep")
    assert {served.outcome(f"sweep_{index}") for index in range(6)} == {"cancelled"}
    assert [served.log(f"sweep_{index}") for index in range(2)] == ["up\ntold\n"] * 2
    wait_for(lambda: not set(slurm.states().values()) & {"PENDING", "RUNNING"}, what="Slurm to be done")


def test_one_task_is_cancelled_and_the_others_go_on(served: Served, slurm: Cluster) -> None:
    """Each is a job of its own for every command, and for `scancel`."""
    served.drop("sweep", "echo up; sleep 60", array="0-2", kill_grace="1s")
    for index in range(3):
        served.says(f"sweep_{index}", "up")
    job = engine_id(served, "sweep_2")
    assert served.spool("cancel", "sweep_1").returncode == 0
    slurm.command("scancel", job)
    served.wait_done("sweep_1", "sweep_2")
    assert [served.outcome(f"sweep_{index}") for index in (1, 2)] == ["cancelled"] * 2
    assert served.places("sweep_0") == ["running"]


EXAMPLE = ROOT / "examples" / "slurm"


def test_the_example_runs_on_a_node(unserved: Served, slurm: Cluster) -> None:
    """The two lines of configuration are enough, and the job says on which node it was and as which of Slurm's."""
    lines = (EXAMPLE / "README.md").read_text().partition("```toml\n")[2].partition("```")[0]
    assert len(tomllib.loads(lines)) == len(lines.splitlines()) == 2
    assert lines in (ROOT / "docs" / "CLUSTER.md").read_text()
    (unserved.root / "config.toml").write_text(f'autostart = false\ndisk_floor = "0M"\n{lines}')
    unserved.start()
    submitted = unserved.spool("submit", "-f", str(EXAMPLE / "pi.toml"), "--wait")
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert re.fullmatch(r"on n\d, Slurm's job \d+\npi is 3\.141593\n", unserved.log("pi"))
    unserved.executor = None  # as one whose file says nothing of Slurm
    unserved.drop("plain", "echo $SLURMD_NODENAME")
    unserved.wait_done("plain")
    assert re.fullmatch(r"n\d\n", unserved.log("plain"))


UNTIL_TOLD = "until [ -e go ]; do sleep 0.1; done"


def _read(descriptor: int, until: str) -> str:
    """Return what a terminal shows, once it shows *until*."""
    shown, deadline = "", time.monotonic() + PATIENCE_S
    while until not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([descriptor], [], [], 0.2)[0]:
            shown += os.read(descriptor, 4096).decode(errors="replace")
    return shown


def test_attach_opens_a_shell_beside_the_job(served: Served, slurm: Cluster) -> None:
    """It is on the job's node and in its allocation; leaving it, or interrupting in it, does the job no harm."""
    served.drop("job", f"echo up; {UNTIL_TOLD}", executor_options=["--nodelist=n3"])
    served.says("job", "up")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "spool", "attach", "job"]
    with subprocess.Popen(command, env=served.environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        try:
            os.write(ours, b"stty -echo; echo ready\n")
            _read(ours, "ready\r\n")
            os.write(ours, b"echo $SLURM_JOB_ID $SLURMD_NODENAME; tty\n")
            assert f"{engine_id(served, 'job')} n3\r\n/dev/pts/" in _read(ours, "/dev/pts/")
            os.write(ours, b"exit 3\n")
            assert process.wait(PATIENCE_S) == 3
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)
    assert served.places("job") == ["running"]
    no_terminal = served.spool("attach", "job", stdin=subprocess.DEVNULL)
    assert no_terminal.returncode != 0
    assert "spool log -f job" in no_terminal.stderr
    assert "spool log -f job" in served.spool("attach", "--read-only", "job").stderr
    (served.root.parent / "go").touch()
    served.wait_done("job")
    ended = served.spool("attach", "job")
    assert ended.returncode != 0
    assert "has ended (finished)" in ended.stderr


def test_log_follows_a_job_from_its_wait_in_slurm_to_its_end(served: Served, slurm: Cluster) -> None:
    """`log -f` shows each line as it comes and ends with the job; Ctrl-C in it does the job no harm."""
    slurm.set_nodes("drain", "n4")
    served.drop("job", f"echo one; {UNTIL_TOLD}; echo two", executor_options=["--nodelist=n4"])
    served.wait_reason("job", "PENDING")
    command = [sys.executable, "-m", "spool", "log", "-f", "job"]
    pipe = {"env": served.environment, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    first, second = (subprocess.Popen(command, **pipe) for _ in range(2))  # type: ignore[call-overload]
    with first, second:
        assert second.stdout is not None
        slurm.resume("n4")
        assert [each.stdout.readline() for each in (first, second)] == ["one\n", "one\n"]
        second.send_signal(signal.SIGINT)
        second.wait(PATIENCE_S)
        assert served.places("job") == ["running"]
        (served.root.parent / "go").touch()
        assert first.stdout.read() == "two\n"
        assert first.wait(PATIENCE_S) == 0
    served.wait_done("job")


def test_jobs_in_slurm_are_edited_held_moved_and_signalled(served: Served, slurm: Cluster) -> None:
    """What can be done is done in Slurm too; what cannot be is refused and says what to do instead."""
    slurm.set_nodes("drain", "n4")
    served.drop("waits", "touch begun", executor_options=["--nodelist=n4"])
    served.drop("runs", f"trap 'echo heard' USR1; echo up; {UNTIL_TOLD}", time_limit="20m")
    served.says("runs", "up")
    served.wait_reason("waits", "PENDING")
    assert served.spool("edit", "runs", "--time-limit", "10m").stderr == ""
    longer = served.spool("edit", "runs", "--time-limit", "3h")
    assert longer.returncode == 0
    assert f"Slurm still ends job {engine_id(served, 'runs')} soon after 20m" in longer.stdout + longer.stderr
    for refused in (["edit", "waits", "--cpus", "2"], ["suspend", "runs"]):
        done = served.spool(*refused)
        assert done.returncode != 0, refused
        assert "waits" in done.stderr or "runs" in done.stderr
    told = served.spool("signal", "USR1", "runs").stderr
    assert f"scancel --batch --signal=USR1 {engine_id(served, 'runs')}" in told
    slurm.command("scancel", "--batch", "--signal=USR1", engine_id(served, "runs"))
    served.says("runs", "heard")
    assert served.spool("hold", "waits").returncode == 0
    served.wait_place("waits", "held")
    first = engine_id(served, "waits")
    served.until(lambda: slurm.states()[first] == "CANCELLED", "it to leave Slurm")
    slurm.resume("n4")
    assert served.spool("requeue", "runs").returncode == 0
    served.until(lambda: served.outcome("runs", 1), "its first end")
    (served.root.parent / "go").touch()
    assert served.spool("release", "waits").returncode == 0
    served.wait_done("waits", "runs")
    assert [served.outcome("runs", run) for run in served.runs("runs")] == ["cancelled", "finished"]
    assert Path(served.root.parent / "begun").exists()
