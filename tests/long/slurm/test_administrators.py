"""What others do in Slurm to jobs of spool: administrators, jobs of more weight, and Slurm's own limits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from long.slurm.cluster import NODES, Cluster
from served import Served, alive, pids_in
from support import wait_for

LOYAL = "trap 'echo told; exit 9' TERM; echo up; while :; do sleep 0.1; done"
AGAIN = 'echo up; [ "$SPOOL_RUN" = 2 ] || while :; do sleep 0.1; done'
UNTIL_TOLD = "until [ -e go ]; do sleep 0.1; done"


def _id(served: Served, name: str, run: int = 1) -> str:
    return served.until(lambda: (served.record(name, "engine", run) or "").split()[2:], f"the id of {name}")[0]


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


def _set(slurm: Cluster, state: str, *nodes: str) -> None:
    slurm.command("scontrol", "update", f"nodename={','.join(nodes)}", f"state={state}", "reason=a test of spool")


def _resume(slurm: Cluster, *nodes: str) -> None:
    """Bring nodes back. What is well already refuses that, and a node may not have answered a new controller yet."""

    def are_back() -> bool:
        for node in nodes:
            slurm.command("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        states = slurm.command("sinfo", "-h", "-N", "-p", "main", "-n", ",".join(nodes), "-o", "%T").stdout.split()
        return set(states) <= {"idle", "mixed", "allocated"}

    wait_for(are_back, what=f"{nodes} to be back")


@contextlib.contextmanager
def _partition(slurm: Cluster, name: str, changed: str, back: str = "state=up") -> Iterator[None]:
    slurm.command("scontrol", "update", f"partitionname={name}", changed)
    try:
        yield
    finally:
        slurm.command("scontrol", "update", f"partitionname={name}", back)


@contextlib.contextmanager
def _reservation(slurm: Cluster, name: str, *what: str) -> Iterator[None]:
    slurm.command("scontrol", "create", "reservation", f"reservationname={name}", "duration=60", "users=root", *what)
    try:
        yield
    finally:
        slurm.command("scontrol", "delete", f"reservationname={name}")


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


# Nodes.


def test_a_drain_lets_jobs_end_and_holds_back_the_others_until_it_is_over(served: Served, slurm: Cluster) -> None:
    """All nodes are drained: what runs goes on, what comes waits and says so, and begins once when they are back."""
    served.drop("runs", _noted(f"echo up; {UNTIL_TOLD}"))
    served.says("runs", "up")
    _set(slurm, "drain", *NODES)
    served.drop("waits", _noted("true"))
    served.wait_reason("waits", "DRAINED")
    assert served.spool("wait", "--timeout", "1s", "waits").returncode != 0
    assert served.places("runs") == ["running"]
    _let_go(served)
    served.wait_done("runs")
    assert served.places("waits") == ["running"]
    assert "submitted" in served.spool("ls", "waits").stdout
    _resume(slurm, *NODES)
    served.wait_done("waits")
    _check_once(served, "runs", "waits")


@pytest.mark.timeout(300)
def test_a_job_of_a_node_that_is_set_down_runs_again_when_its_processes_are_gone(
    served: Served, slurm: Cluster
) -> None:
    """Slurm ends the processes of a job on a node that is set down; the second run begins when none is left."""
    command = 'echo $$; [ "$SPOOL_RUN" = 2 ] || while :; do sleep 0.1; done'
    served.drop("moved", _noted(command), executor_options=["--nodelist=n2"])
    pid = pids_in(served.says("moved", "\n"))[0]
    _set(slurm, "down", "n2")
    wait_for(lambda: not alive(pid), what="its command to be gone")
    _resume(slurm, "n2")
    served.wait_done("moved")
    assert [served.outcome("moved", run) for run in served.runs("moved")] == ["lost", "finished"]
    assert _noted_runs(served) == ["moved 1", "moved 2"]


def test_a_node_whose_prolog_fails_costs_no_job(served: Served, slurm: Cluster, tmp_path: Path) -> None:
    """Slurm drains the node and cancels the job there, which nobody has cancelled: it runs on another node, once."""
    fails = tmp_path / "prolog"
    fails.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" != n1 ]\n')
    fails.chmod(0o755)
    with slurm.configured("Prolog", str(fails)):
        served.drop("job", _noted("true"), executor_options=["--exclude=n3,n4"])
        served.drop("sweep", _noted("true"), array="0-3", executor_options=["--exclude=n3,n4"])
        served.wait_done("job", "sweep")
    tasks = [f"sweep_{index}" for index in range(4)]
    names = sorted(["job", *tasks])
    ends = [served.result(name, served.runs(name)[-1]) or {} for name in names]
    assert [(end["outcome"], end["node"]) for end in ends] == [("finished", "n2")] * 5
    assert sorted(line.split()[0] for line in _noted_runs(served)) == names


# Jobs.


def test_a_held_job_waits_over_a_new_dispatcher_and_runs_once_when_it_is_released(
    served: Served, slurm: Cluster
) -> None:
    """The user sees that a user of Slurm holds it; holding what runs already changes nothing."""
    _set(slurm, "drain", "n4")
    served.drop("held", _noted("true"), executor_options=["--nodelist=n4"])
    served.drop("runs", _noted(f"echo up; {UNTIL_TOLD}"))
    served.says("runs", "up")
    slurm.command("scontrol", "uhold", _id(served, "held"))
    slurm.command("scontrol", "hold", _id(served, "runs"), check=False)
    _resume(slurm, "n4")
    served.wait_reason("held", "PENDING (JobHeldUser)")
    served.kill()
    served.start()
    served.wait_reason("held", "PENDING (JobHeldUser)")
    assert served.places("runs") == ["running"]
    slurm.command("scontrol", "release", _id(served, "held"))
    _let_go(served)
    served.wait_done("held", "runs")
    _check_once(served, "held", "runs")


def test_a_scancel_of_all_jobs_of_a_user_cancels_each_and_runs_none_again(served: Served, slurm: Cluster) -> None:
    """One waits, one leaves in order, one ignores the signal: none is tried again, though each may be three times."""
    _set(slurm, "drain", "n4")
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


def test_a_signal_from_scancel_reaches_the_command_and_ends_nothing(served: Served, slurm: Cluster) -> None:
    """The command hears it once and goes on; its exit code and outcome are its own."""
    served.drop("hears", _noted(f"trap 'echo heard' USR1; echo up; {UNTIL_TOLD}"))
    served.says("hears", "up")
    slurm.command("scancel", "--batch", "--signal=USR1", _id(served, "hears"))
    served.says("hears", "heard")
    assert served.places("hears") == ["running"]
    _let_go(served)
    served.wait_done("hears")
    assert served.log("hears").count("heard") == 1
    _check_once(served, "hears")


def test_time_limits_that_are_changed_in_slurm_leave_spools_own(served: Served, slurm: Cluster) -> None:
    """Over its partition's lowered limit a job waits and says so; raised in Slurm, it ends at the limit of its file."""
    with _partition(slurm, "small", "maxtime=1", "maxtime=5"):
        served.drop("long", _noted(LOYAL), time_limit="2s", executor_options=["--partition=small"])
        served.wait_reason("long", "PENDING (PartitionTimeLimit)")
        _update(slurm, _id(served, "long"), "TimeLimit=60")
    served.wait_done("long")
    assert (served.outcome("long"), served.runs("long")) == ("timeout", [1])
    assert _states(slurm)[_id(served, "long")] != "TIMEOUT"  # spool has asked it to end, before or after its first line


def test_a_job_without_its_comment_is_known_by_its_id(served: Served, slurm: Cluster) -> None:
    """The comments of one that waits and one that runs are changed and emptied; a new dispatcher knows both."""
    _set(slurm, "drain", "n4")
    served.drop("waits", _noted("true"), executor_options=["--nodelist=n4"])
    served.drop("runs", _noted(f"echo up; {UNTIL_TOLD}"))
    served.says("runs", "up")
    served.wait_reason("waits", "PENDING")
    for name, comment in (("waits", "another"), ("runs", "")):
        _update(slurm, _id(served, name), f"comment={comment}")
    served.kill()
    served.start()
    served.wait_reason("waits", "PENDING")
    served.looked()
    assert served.places("runs") == served.places("waits") == ["running"]
    _let_go(served)
    _resume(slurm, "n4")
    served.wait_done("waits", "runs")
    _check_once(served, "waits", "runs")
    assert [job["id"] for job in slurm.jobs() if job["comment"] == "another"] == [_id(served, "waits")]


def test_priorities_in_slurm_decide_which_job_it_starts_first(served: Served, slurm: Cluster) -> None:
    """Of three jobs for one node, the one that is raised goes first, and the one that is nice goes last."""
    wide: dict[str, Any] = {"cpus": 8, "executor_options": ["--nodelist=n3"]}
    served.drop("first", _noted(f"echo up; {UNTIL_TOLD}"), **wide)
    served.says("first", "up")
    for name in ("nice", "plain", "raised"):
        served.drop(name, _noted("true"), **wide)
        served.wait_reason(name, "PENDING")
    _update(slurm, _id(served, "nice"), "nice=1000")
    _update(slurm, _id(served, "raised"), "priority=4294960000")
    _let_go(served)
    served.wait_done("nice", "plain", "raised")
    assert _noted_runs(served) == ["first 1", "raised 1", "plain 1", "nice 1"]
    _check_once(served, "first", "nice", "plain", "raised")


def test_a_job_that_is_moved_to_another_time_and_partition_is_followed(served: Served, slurm: Cluster) -> None:
    """A start that is put off is the reason that the user sees; then it runs, once, in the partition of the change."""
    _set(slurm, "drain", "n1")
    served.drop("moved", _noted("echo $SLURM_JOB_PARTITION"), executor_options=["--partition=small"])
    served.wait_reason("moved", "PENDING")
    _update(slurm, _id(served, "moved"), "StartTime=now+1hour", "Partition=main")
    served.wait_reason("moved", "PENDING (BeginTime)")
    assert "BeginTime" in served.spool("why", "moved").stdout
    _update(slurm, _id(served, "moved"), "StartTime=now")
    served.wait_done("moved")
    assert served.log("moved") == "main\n"
    _check_once(served, "moved")


# Partitions, reservations, licences.


def test_a_partition_that_is_down_keeps_jobs_and_starts_them_when_it_is_up(served: Served, slurm: Cluster) -> None:
    """What runs there goes on; what waits says why, and begins once."""
    with _partition(slurm, "small", "state=down"):
        served.drop("waits", _noted("true"), executor_options=["--partition=small"])
        served.wait_reason("waits", "PENDING (PartitionDown)")
        assert _noted_runs(served) == []
    served.wait_done("waits")
    _check_once(served, "waits")


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


def test_a_reservation_of_all_nodes_is_a_reason_until_it_is_gone(served: Served, slurm: Cluster) -> None:
    """Maintenance soon: a job that would reach into it waits and says so, and begins once when it is called off."""
    with _reservation(slurm, "upkeep", f"nodes={','.join(NODES)}", "starttime=now+2minutes", "flags=maint"):
        served.drop("long", _noted("true"), time_limit="1h")
        served.wait_reason("long", "PENDING (ReqNodeNotAvail")
        assert "ReqNodeNotAvail" in served.spool("why", "long").stdout
        assert _noted_runs(served) == []
    served.wait_done("long")
    _check_once(served, "long")


def test_a_job_that_is_taken_out_of_its_reservation_runs_at_once(served: Served, slurm: Cluster) -> None:
    """It waits for a reservation of tomorrow and says so, until an administrator removes that from the job."""
    with _reservation(slurm, "theirs", "nodes=n4", "starttime=now+1day"):
        served.drop("waits", _noted("true"), executor_options=["--reservation=theirs"])
        served.wait_reason("waits", "PENDING (Reservation)")
        _update(slurm, _id(served, "waits"), "reservationname=")
    served.wait_done("waits")
    _check_once(served, "waits")


def test_a_licence_that_is_used_up_is_waited_for(served: Served, slurm: Cluster) -> None:
    """Three jobs share the one licence: one after the other has it, and those that wait for it say so."""
    licence: dict[str, Any] = {"executor_options": ["--licenses=solver"]}
    served.drop("first", _noted(f"echo up; {UNTIL_TOLD}; echo over >> over"), **licence)
    served.says("first", "up")
    for name in ("second", "third"):
        served.drop(name, _noted("cat over"), **licence)
    for name in ("second", "third"):
        served.wait_reason(name, "PENDING (Licenses)")
    _let_go(served)
    served.wait_done("first", "second", "third")
    assert (served.log("second"), served.log("third")) == ("over\n", "over\n")
    _check_once(served, "first", "second", "third")


def test_a_partition_of_more_weight_ends_a_job_that_runs_again_when_it_is_over(served: Served, slurm: Cluster) -> None:
    """The preempted run leaves in order and costs no retry; the second one waits for the job of more weight."""
    served.drop("light", _noted(f"trap 'echo told; exit 9' TERM; {AGAIN}"), executor_options=["--partition=low"])
    served.says("light", "up")
    heavy = _noted(f"echo up; {UNTIL_TOLD}")
    served.drop("heavy", heavy, executor_options=["--partition=high", "--exclusive"])
    served.says("heavy", "up")
    assert served.wait_outcome("light") == "preempted"
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
    _set(slurm, "drain", "n4")
    served.drop("waits", _noted("true"), executor_options=["--nodelist=n4"])
    served.drop("held", _noted("true"), executor_options=["--nodelist=n4"])
    served.drop("runs", _noted(f"echo up; {UNTIL_TOLD}"))
    served.says("runs", "up")
    slurm.command("scontrol", "hold", _id(served, "held"))
    served.wait_reason("held", "JobHeldAdmin")
    slurm.command("scontrol", "reconfigure")
    slurm.kill_controller()
    slurm.start_controller()
    served.wait_reason("held", "PENDING (JobHeldAdmin)")
    served.wait_reason("waits", "PENDING")
    slurm.command("scontrol", "release", _id(served, "held"))
    _resume(slurm, "n4")
    _let_go(served)
    served.wait_done("waits", "held", "runs")
    _check_once(served, "waits", "held", "runs")


@pytest.mark.timeout(300)
def test_jobs_that_slurm_forgets_at_once_keep_their_outcomes(served: Served, slurm: Cluster) -> None:
    """A controller that remembers ended jobs for a moment only: exit codes and a `scancel` are still told apart."""
    slurm.forget_after(2)
    served.drop("well", _noted(f"echo up; {UNTIL_TOLD}"))
    served.drop("badly", _noted(f"echo up; {UNTIL_TOLD}; exit 5"), retry={"max": 1})
    served.drop("theirs", _noted("echo up; while :; do sleep 0.1; done"))
    names = ("well", "badly", "theirs")
    for name in names:
        served.says(name, "up")
    slurm.command("scancel", _id(served, "theirs"))
    _let_go(served)
    served.wait_done(*names)
    wait_for(lambda: not slurm.jobs(), what="Slurm to forget all")
    served.looked()
    assert {name: [served.outcome(name, run) for run in served.runs(name)] for name in names} == {
        "well": ["finished"],
        "badly": ["failed", "failed"],
        "theirs": ["cancelled"],
    }
    assert sorted(_noted_runs(served)) == ["badly 1", "badly 2", "theirs 1", "well 1"]


@pytest.mark.timeout(300)
def test_a_job_that_is_cancelled_and_forgotten_before_it_begins_is_handed_over_again(
    unserved: Served, slurm: Cluster
) -> None:
    """No dispatcher saw the `scancel`, Slurm has no trace of it, and neither has the disk: the job runs, once."""
    slurm.forget_after(2)
    unserved.start()
    _set(slurm, "drain", "n4")
    unserved.drop("waits", _noted("true"), executor_options=["--nodelist=n4"])
    unserved.wait_reason("waits", "PENDING")
    job = _id(unserved, "waits")
    unserved.kill()
    slurm.command("scancel", job)
    wait_for(lambda: job not in _states(slurm), what="Slurm to forget it")
    _resume(slurm, "n4")
    unserved.start()
    unserved.wait_done("waits")
    run = unserved.runs("waits")[-1]
    assert (unserved.outcome("waits", run), unserved.record("waits", "jid", 1)) == ("finished", "void\n")
    assert _noted_runs(unserved) == [f"waits {run}"]


def test_a_job_that_slurm_would_start_again_after_its_node_went_is_not(served: Served, slurm: Cluster) -> None:
    """An administrator allowed Slurm to requeue it: spool ends that job in Slurm, and starts a run of its own."""
    served.drop("moved", _noted(AGAIN), executor_options=["--nodelist=n2"])
    served.says("moved", "up")
    job = _id(served, "moved")
    _update(slurm, job, "requeue=1")
    _set(slurm, "down", "n2")
    _resume(slurm, "n2")
    served.wait_done("moved")
    assert served.outcome("moved", served.runs("moved")[-1]) == "finished"
    served.until(lambda: _states(slurm)[job] == "CANCELLED", "its end in Slurm")
    assert _noted_runs(served) == ["moved 1", "moved 2"]
    assert served.runs("moved") == [1, 2]
