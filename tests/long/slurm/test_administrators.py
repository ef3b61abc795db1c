"""What others do in Slurm to jobs of spool: administrators, jobs of more weight, and Slurm's own limits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from long.slurm.cluster import Cluster, engine_id
from served import Served, alive, pids_in
from support import wait_for

LOYAL = "trap 'echo told; exit 9' TERM; echo up; while :; do sleep 0.1; done"
AGAIN = 'echo up; [ "$SPOOL_RUN" = 2 ] || while :; do sleep 0.1; done'
UNTIL_TOLD = "until [ -e go ]; do sleep 0.1; done"


def _update(slurm: Cluster, job: str, *what: str) -> None:
    slurm.command("scontrol", "update", f"job={job}", *what)


def _noted(command: str) -> str:
    """Return a command that notes first that this run of its job has begun."""
    return f'echo "$SPOOL_JOB $SPOOL_RUN" >> ledger; {command}'


def _noted_runs(served: Served) -> list[str]:
    """Return the runs that have begun, as "JOB RUN", in their order."""
    path = served.root.parent / "ledger"
    return path.read_text().splitlines() if path.exists() else []


def _check_once(served: Served, *names: str) -> None:
    """Assert that each job has begun once, in its first run, and finished."""
    assert {name: served.outcome(name) for name in names} == dict.fromkeys(names, "finished")
    assert sorted(_noted_runs(served)) == sorted(f"{name} 1" for name in names)


def _let_go(served: Served) -> None:
    """End what waits in `UNTIL_TOLD`."""
    (served.root.parent / "go").touch()


@contextlib.contextmanager
def _partition(slurm: Cluster, name: str, changed: str, back: str = "state=up") -> Iterator[None]:
    slurm.command("scontrol", "update", f"partitionname={name}", changed)
    try:
        yield
    finally:
        slurm.command("scontrol", "update", f"partitionname={name}", back)


@pytest.mark.timeout(300)
def test_how_slurm_ends_a_job_is_its_outcome(served: Served, slurm: Cluster) -> None:
    """Slurm's own time limit, a deadline, and too much memory, each with Slurm's word for it."""
    served.drop("long", LOYAL, time_limit="1h")
    served.drop("never", "touch begun", time_limit="10s", executor_options=["--deadline=now+60"])
    served.drop("big", "echo up; exec tail /dev/zero", memory="50M", executor_options=["--nodelist=n3"])
    served.drop("lasting", LOYAL, executor_options=["--nodelist=n2"])
    for name in ("long", "lasting"):
        served.says(name, "up")
    _update(slurm, engine_id(served, "long"), "EndTime=now+2")  # a second may pass on the way
    slurm.set_nodes("drain", "n2")
    _update(slurm, engine_id(served, "lasting"), "name=other", "comment=theirs")
    expected = {"big": "out_of_memory", "long": "timeout", "never": "timeout"}
    served.wait_done(*expected)
    assert {name: served.outcome(name) for name in expected} == expected
    assert not (served.root.parent / "begun").exists()
    assert "exceeded memory limit" in str((served.result("big") or {})["reason"])
    assert (served.result("big") or {})["peak_memory_bytes"] > 50 << 20
    assert "needs more than" in served.spool("seff", "big").stdout
    assert "TIMEOUT" in str((served.result("long") or {})["reason"])
    # A node that takes no more jobs, another name and another comment change nothing for what runs.
    assert served.places("lasting") == ["running"]
    assert served.spool("cancel", "lasting").returncode == 0
    served.wait_done("lasting")
    assert served.log("lasting").count("told") == 1


@pytest.mark.timeout(400)
def test_a_job_that_an_administrator_would_requeue_begins_once(served: Served, slurm: Cluster) -> None:
    """Slurm refuses that; if somebody has allowed it, the second start, two minutes later, leaves at once."""
    served.patience = 300
    served.drop("back", f"echo begun >> back; {AGAIN}")
    served.says("back", "up")
    job = engine_id(served, "back")
    assert "disabled" in slurm.command("scontrol", "requeue", job, check=False).stderr
    _update(slurm, job, "requeue=1")
    slurm.command("scontrol", "requeue", job)
    served.wait_done("back")
    assert served.outcome("back", served.runs("back")[-1]) == "finished"
    assert (served.root.parent / "back").read_text() == "begun\nbegun\n"


def test_a_job_that_slurm_suspends_stands_still_and_so_does_its_clock(served: Served, slurm: Cluster) -> None:
    """Its time limit passes without it, a new dispatcher knows that, and it goes on to its end when Slurm lets it."""
    served.drop("waits", "echo $$; until [ -e go ]; do sleep 0.1; done", time_limit="8s")
    served.drop("ends", "trap '' TERM; echo $$; while :; do sleep 0.1; done", kill_grace="1s")
    pid = pids_in(served.says("ends", "\n"))[0]
    served.says("waits", "\n")
    ids = [engine_id(served, name) for name in ("waits", "ends")]
    for job in ids:
        slurm.command("scontrol", "suspend", job)
    served.wait_reason("waits", "suspended by Slurm")
    served.kill()
    served.start()
    for name in ("waits", "ends"):
        served.until(lambda name=name: "suspended by Slurm" in served.spool("ls", name).stdout, name)
    assert "which alone suspends it" in served.spool("continue", "waits").stderr
    assert "spool continue" not in served.spool("why", "waits").stdout
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
def test_what_keeps_a_job_waiting_in_slurm_is_told_until_it_is_over(served: Served, slurm: Cluster) -> None:
    """A hold, a licence, a partition that is down, a reservation: told, and then each job begins, and once.

    A dependency that will never be satisfied is taken back; to hold what runs changes nothing.
    """
    wide = {"cpus": 8, "executor_options": ["--nodelist=n3"]}
    served.drop("first", LOYAL, cpus=8, executor_options=["--nodelist=n3", "--licenses=solver"])
    served.says("first", "up")
    reservation = ("reservationname=theirs", "starttime=now+1hour", "duration=10", "nodes=n4", "users=root")
    slurm.command("scontrol", "create", "reservation", *reservation)
    try:
        with _partition(slurm, "small", "state=down"):
            served.drop("licence", _noted("true"), executor_options=["--licenses=solver"])
            served.drop("down", _noted("true"), executor_options=["--partition=small"])
            served.drop("reserved", _noted("true"), executor_options=["--reservation=theirs"])
            for name in ("held", "ours", "depends"):
                served.drop(name, _noted("true"), **wide)
            ids = {name: engine_id(served, name) for name in ("first", "held", "ours", "depends")}
            slurm.command("scontrol", "hold", ids["held"])
            slurm.command("scontrol", "hold", ids["first"], check=False)
            slurm.command("scontrol", "uhold", ids["ours"])
            _update(slurm, ids["depends"], f"dependency=afternotok:{ids['first']}", "nice=100")
            told = {
                "licence": "Licenses",
                "down": "PartitionDown",
                "reserved": "Reservation",
                "held": "JobHeldAdmin",
                "ours": "JobHeldUser",
                "depends": "Dependency",
            }
            for name, reason in told.items():
                served.wait_reason(name, f"PENDING ({reason})")
            assert told["held"] in served.spool("why", "held").stdout
            assert served.places("first") == ["running"]
            assert _noted_runs(served) == []
            assert served.spool("cancel", "depends").returncode == 0
            served.wait_done("depends")
        _update(slurm, engine_id(served, "reserved"), "reservationname=")
        for name in ("held", "ours"):
            slurm.command("scontrol", "release", engine_id(served, name))
        assert served.spool("cancel", "first").returncode == 0
        served.wait_done("first", *told)
    finally:
        slurm.command("scontrol", "delete", "reservationname=theirs")
    assert served.outcome("depends") == "cancelled"
    _check_once(served, *(name for name in told if name != "depends"))


# Jobs.


def test_a_scancel_of_all_jobs_of_a_user_cancels_each_and_runs_none_again(served: Served, slurm: Cluster) -> None:
    """One waits, one leaves in order, one ignores the signal: none is tried again, though each may be three times."""
    slurm.set_nodes("drain", "n4")
    served.drop("waits", _noted("true"), executor_options=["--nodelist=n4"], retry={"max": 3})
    served.drop("leaves", _noted(LOYAL), retry={"max": 3})
    served.drop("deaf", _noted("trap '' TERM; echo up; while :; do sleep 0.1; done"), retry={"max": 3})
    for name in ("leaves", "deaf"):
        served.says(name, "up")
    served.wait_reason("waits", "PENDING")
    slurm.command("scancel", "--user=root")
    names = ("waits", "leaves", "deaf")
    served.wait_done(*names)
    assert {name: (served.outcome(name), served.runs(name)) for name in names} == dict.fromkeys(
        names, ("cancelled", [1])
    )
    assert all("Slurm says CANCELLED" in str((served.result(name) or {})["reason"]) for name in names)
    assert sorted(_noted_runs(served)) == ["deaf 1", "leaves 1"]


def test_time_limits_that_are_changed_in_slurm_leave_spools_own(served: Served, slurm: Cluster) -> None:
    """Over its partition's lowered limit a job waits and says so; raised in Slurm, it ends at the limit of its file."""
    with _partition(slurm, "small", "maxtime=1", "maxtime=5"):
        served.drop("long", _noted(LOYAL), time_limit="2s", executor_options=["--partition=small"])
        served.wait_reason("long", "PENDING (PartitionTimeLimit)")
        _update(slurm, engine_id(served, "long"), "TimeLimit=60")
    served.wait_done("long")
    assert (served.outcome("long"), served.runs("long")) == ("timeout", [1])
    # Spool has asked it to end, before or after its first line.
    assert slurm.states()[engine_id(served, "long")] != "TIMEOUT"


def test_a_job_that_is_moved_to_another_time_and_partition_is_followed(served: Served, slurm: Cluster) -> None:
    """A start that is put off is the reason that the user sees; then it runs, once, in the partition of the change."""
    slurm.set_nodes("drain", "n1")
    served.drop("moved", _noted("echo $SLURM_JOB_PARTITION"), executor_options=["--partition=small"])
    served.wait_reason("moved", "PENDING")
    _update(slurm, engine_id(served, "moved"), "StartTime=now+1hour", "Partition=main")
    served.wait_reason("moved", "PENDING (BeginTime)")
    assert "BeginTime" in served.spool("why", "moved").stdout
    _update(slurm, engine_id(served, "moved"), "StartTime=now")
    served.wait_done("moved")
    assert served.log("moved") == "main\n"
    _check_once(served, "moved")


# Partitions, reservations, licences.


def test_a_partition_that_takes_no_new_jobs_has_them_held_with_slurms_words(served: Served, slurm: Cluster) -> None:
    """A partition is drained: what it has goes on to its end, what comes is held, and runs once after a release."""
    served.drop("before", _noted(f"echo up; {UNTIL_TOLD}"), executor_options=["--partition=small"])
    served.says("before", "up")
    with _partition(slurm, "small", "state=drain"):
        served.drop("after", _noted("true"), executor_options=["--partition=small"])
        served.wait_place("after", "held")
        assert "partition not available" in served.spool("why", "after").stdout
        _let_go(served)
        served.wait_done("before")
    assert served.spool("release", "after").returncode == 0
    served.wait_done("after")
    assert served.outcome("after", served.runs("after")[-1]) == "finished"
    assert _noted_runs(served) == ["before 1", f"after {served.runs('after')[-1]}"]


def test_a_partition_of_more_weight_ends_a_job_that_runs_again_when_it_is_over(served: Served, slurm: Cluster) -> None:
    """The preempted run leaves in order and costs no retry; the second one waits for the job of more weight."""
    served.drop("light", _noted(f"trap 'echo told; exit 9' TERM; {AGAIN}"), executor_options=["--partition=low"])
    served.says("light", "up")
    heavy = _noted(f"echo up; {UNTIL_TOLD}")
    served.drop("heavy", heavy, executor_options=["--partition=high", "--exclusive"])
    served.says("heavy", "up")
    assert served.wait_outcome("light") == "preempted"
    assert str((served.result("light") or {})["reason"]).startswith("preempted: Slurm says PREEMPTED")
    served.wait_reason("light", "PENDING")
    assert _noted_runs(served) == ["light 1", "heavy 1"]
    _let_go(served)
    served.wait_done("heavy", "light")
    assert [served.outcome("light", run) for run in served.runs("light")] == ["preempted", "finished"]
    assert (served.result("light", served.runs("light")[-1]) or {})["attempt"] == 1
    assert _noted_runs(served) == ["light 1", "heavy 1", "light 2"]


# The controller.


@pytest.mark.timeout(300)
def test_a_controller_that_is_configured_anew_or_restarted_forgets_no_job(served: Served, slurm: Cluster) -> None:
    """Jobs that wait, run and are held are there afterwards, and each begins once."""
    slurm.set_nodes("drain", "n4")
    served.drop("waits", _noted("true"), executor_options=["--nodelist=n4"])
    served.drop("held", _noted("true"), executor_options=["--nodelist=n4"])
    served.drop("runs", _noted(f"echo up; {UNTIL_TOLD}"))
    served.says("runs", "up")
    slurm.command("scontrol", "hold", engine_id(served, "held"))
    served.wait_reason("held", "JobHeldAdmin")
    slurm.command("scontrol", "reconfigure")
    slurm.kill_controller()
    slurm.start_controller()
    served.wait_reason("held", "PENDING (JobHeldAdmin)")
    served.wait_reason("waits", "PENDING")
    slurm.command("scontrol", "release", engine_id(served, "held"))
    slurm.resume("n4")
    _let_go(served)
    served.wait_done("waits", "held", "runs")
    _check_once(served, "waits", "held", "runs")
