"""What others do in Slurm to jobs of spool: administrators, jobs of more weight, and Slurm's own limits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from served import Served, alive, pids_in
from slurm.cluster import Cluster
from support import wait_for

LOYAL = "trap 'echo told; exit 9' TERM; echo up; while :; do sleep 0.1; done"
AGAIN = 'echo up; [ "$SPOOL_RUN" = 2 ] || while :; do sleep 0.1; done'


def _id(served: Served, name: str, run: int = 1) -> str:
    return served.until(lambda: (served.record(name, "engine", run) or "").split()[2:], f"the id of {name}")[0]


def _update(slurm: Cluster, job: str, *what: str) -> None:
    slurm.command("scontrol", "update", f"job={job}", *what)


def _states(slurm: Cluster) -> dict[str, str]:
    return {job["id"]: job["state"] for job in slurm.jobs()}


@pytest.mark.timeout(300)
def test_how_slurm_ends_a_job_is_its_outcome(served: Served, slurm: Cluster) -> None:
    """Slurm's own time limit, a deadline, too much memory, and a job of more weight, each with Slurm's word for it."""
    (served.root / "config.toml").write_text(
        'autostart = false\ndisk_floor = "0M"\nmax_requeues = 0\n[slurm]\npoll = "1s"\n'
    )
    served.drop("long", LOYAL, time_limit="1h")
    served.drop("never", "touch begun", time_limit="10s", executor_options=["--deadline=now+60"])
    served.drop("big", "echo up; exec tail /dev/zero", memory="50M", executor_options=["--nodelist=n3"])
    served.drop("light", AGAIN, executor_options=["--partition=low"])
    served.drop("lasting", LOYAL, executor_options=["--nodelist=n2"])
    for name in ("long", "light", "lasting"):
        served.says(name, "up")
    _update(slurm, _id(served, "long"), "EndTime=now")
    served.drop("heavy", "true", executor_options=["--partition=high", "--exclusive"])
    slurm.command("scontrol", "update", "nodename=n2", "state=drain", "reason=a test of spool")
    _update(slurm, _id(served, "lasting"), "name=other", "comment=theirs")
    expected = {"heavy": "finished", "big": "out_of_memory", "long": "timeout", "never": "timeout"}
    served.wait_done("light", *expected)
    assert {name: served.outcome(name) for name in expected} == expected
    assert not (served.root.parent / "begun").exists()
    assert "exceeded memory limit" in str((served.result("big") or {})["reason"])
    assert (served.result("big") or {})["peak_memory_bytes"] > 50 << 20
    assert "needs more than" in served.spool("seff", "big").stdout
    assert "TIMEOUT" in str((served.result("long") or {})["reason"])
    # No run counts as lost by itself: there may be none, by the configuration.
    assert [served.outcome("light", run) for run in served.runs("light")] == ["preempted", "finished"]
    assert str((served.result("light") or {})["reason"]).startswith("preempted: Slurm says PREEMPTED")
    # A node that takes no more jobs, another name and another comment change nothing for what runs.
    assert served.places("lasting") == ["running"]
    assert served.spool("cancel", "lasting").returncode == 0
    served.wait_done("lasting")
    assert served.log("lasting").count("told") == 1


def test_a_job_that_an_administrator_requeues_runs_again_and_once(served: Served, slurm: Cluster) -> None:
    """Slurm refuses that, unless somebody has allowed it: then it is preempted, and its rest in Slurm is ended."""
    names = ("back", "kept")
    for name in names:
        served.drop(name, f"echo begun >> {name}; {AGAIN}")
    for name in names:
        served.says(name, "up")
    ids = {name: _id(served, name) for name in names}
    assert "disabled" in slurm.command("scontrol", "requeue", ids["back"], check=False).stderr
    for name, verb in zip(names, ("requeue", "requeuehold"), strict=True):
        _update(slurm, ids[name], "requeue=1")
        slurm.command("scontrol", verb, ids[name])
    served.wait_done(*names)
    for name in names:
        assert [served.outcome(name, run) for run in served.runs(name)] == ["preempted", "finished"]
        assert "DUE TO JOB REQUEUE" in str((served.result(name) or {})["reason"])
        assert (served.root.parent / name).read_text() == "begun\nbegun\n"
    served.until(lambda: {_states(slurm)[job] for job in ids.values()} == {"CANCELLED"}, "their end in Slurm")


def test_a_job_that_slurm_suspends_stands_still_and_so_does_its_clock(served: Served, slurm: Cluster) -> None:
    """Its time limit passes without it, a new dispatcher knows that, and it goes on to its end when Slurm lets it."""
    served.drop("waits", "echo $$; until [ -e go ]; do sleep 0.1; done", time_limit="8s")
    served.drop("ends", "trap '' TERM; echo $$; while :; do sleep 0.1; done", kill_grace="1s")
    pid = pids_in(served.says("ends", "\n"))[0]
    served.says("waits", "\n")
    ids = [_id(served, name) for name in ("waits", "ends")]
    for job in ids:
        slurm.command("scontrol", "suspend", job)
    served.wait_reason("waits", "suspended by Slurm")
    served.kill()
    served.start()
    for name in ("waits", "ends"):
        served.until(lambda name=name: "suspended by Slurm" in served.spool("ls", name).stdout, name)
    assert served.spool("cancel", "ends").returncode == 0
    served.wait_done("ends")
    assert served.outcome("ends") == "cancelled"
    wait_for(lambda: not alive(pid), what="its command to be gone")
    over_ns = served.state()["jobs"]["waits"]["started_at_ns"] + 9_000_000_000
    served.until(lambda: time.time_ns() > over_ns, "more time than its limit")
    served.looked()
    assert served.places("waits") == ["running"]
    slurm.command("scontrol", "resume", ids[0])
    (served.root.parent / "go").touch()
    served.wait_done("waits")
    assert served.outcome("waits") == "finished"


@pytest.mark.timeout(300)
def test_what_keeps_a_job_waiting_in_slurm_is_told_and_it_can_be_taken_back(served: Served, slurm: Cluster) -> None:
    """A hold, a licence, a partition that is down, a reservation, a dependency that will never be satisfied."""
    wide = {"cpus": 8, "executor_options": ["--nodelist=n3"]}
    served.drop("first", LOYAL, cpus=8, executor_options=["--nodelist=n3", "--licenses=solver"])
    served.says("first", "up")
    slurm.command("scontrol", "update", "partitionname=small", "state=down")
    slurm.command(
        *("scontrol", "create", "reservation", "reservationname=theirs", "starttime=now+1hour", "duration=10"),
        *("nodes=n4", "users=root"),
    )
    try:
        served.drop("licence", "touch begun", executor_options=["--licenses=solver"])
        served.drop("down", "touch begun", executor_options=["--partition=small"])
        served.drop("reserved", "touch begun", executor_options=["--reservation=theirs"])
        served.drop("held", "true", **wide)
        served.drop("depends", "touch begun", **wide)
        slurm.command("scontrol", "hold", _id(served, "held"))
        slurm.command("scontrol", "top", _id(served, "depends"), check=False)
        _update(slurm, _id(served, "depends"), f"dependency=afternotok:{_id(served, 'first')}", "nice=100")
        told = {
            "licence": "Licenses",
            "down": "PartitionDown",
            "reserved": "Reservation",
            "held": "JobHeldAdmin",
            "depends": "Dependency",
        }
        for name, reason in told.items():
            served.wait_reason(name, f"PENDING ({reason})")
            assert reason in served.spool("why", name).stdout
        assert served.spool("cancel", *(name for name in told if name != "held")).returncode == 0
        served.wait_done(*(name for name in told if name != "held"))
        slurm.command("scontrol", "release", _id(served, "held"))
        assert served.spool("cancel", "first").returncode == 0
        served.wait_done("first", "held")
    finally:
        slurm.command("scontrol", "update", "partitionname=small", "state=up")
        slurm.command("scontrol", "delete", "reservationname=theirs")
    assert {name: served.outcome(name) for name in told} == dict.fromkeys(told, "cancelled") | {"held": "finished"}
    assert not Path(served.root.parent / "begun").exists()
