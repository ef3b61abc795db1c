"""What people see of their jobs in Slurm, and do with them, with and without a dispatcher."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from long.slurm.cluster import Cluster, engine_id
from served import Served
from support import PATIENCE_S, wait_for

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


@pytest.mark.timeout(300)
def test_every_view_tells_of_jobs_in_slurm(served: Served, slurm: Cluster) -> None:
    """One waits there and one runs, and each view says so; without a dispatcher none of them calls a job lost."""
    slurm.set_nodes("drain", "n4")
    served.drop("waits", "true", executor_options=["--nodelist=n4"])
    served.drop("runs", f"echo up; {UNTIL_TOLD}")
    served.drop("after", "true", depends_on=["runs"])
    served.says("runs", "up")
    served.wait_reason("waits", "PENDING")
    ids = {name: engine_id(served, name) for name in ("waits", "runs")}

    def rows() -> dict[str, dict[str, object]]:
        return {row["name"]: row for row in json.loads(served.spool("ls", "--json").stdout)["jobs"]}

    served.until(lambda: rows()["runs"]["state"] == "running", "it to run")
    assert rows()["waits"]["state"] == "submitted"
    assert "PENDING" in str(rows()["waits"]["reason"])
    assert rows()["after"]["state"] == "queued"
    for name, job in ids.items():
        assert f"job {job}" in served.spool("show", name).stdout
    for verb in (["why", "waits"], ["plan"], ["info"]):
        said = served.spool(*verb)
        assert (said.returncode, said.stderr) == (0, ""), verb
    served.kill()
    said = rows()
    assert (said["waits"]["state"], said["runs"]["state"]) == ("submitted", "running")
    for verb in (["ls"], ["why", "waits"], ["plan"], ["show", "runs"]):
        done = served.spool(*verb)
        assert done.returncode == 0, (verb, done.stderr)
        assert "lost" not in done.stdout
    (served.root.parent / "go").touch()
    slurm.resume("n4")
    wait_for(lambda: {slurm.states()[job] for job in ids.values()} == {"COMPLETED"}, 60, "both to end")
    said = rows()
    for name in ids:
        assert (said[name]["state"], said[name]["reason"]) == ("finished", "not recorded yet"), name
    served.start()
    served.wait_done("waits", "runs", "after")


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
    for refused in (["edit", "waits", "--cpus", "2"], ["move", "waits", "--first"], ["suspend", "runs"]):
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
