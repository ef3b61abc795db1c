"""Arrays of spool as arrays of Slurm: one submission for many tasks, and every task runs once, whatever happens."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from long.slurm.cluster import Cluster, engine_id, path_with
from served import Served
from support import wait_for

LEDGER = "echo $SPOOL_JOB >> ledger; "


def _begun(spool: Served) -> Counter[str]:
    ledger = spool.root.parent / "ledger"
    return Counter(ledger.read_text().split() if ledger.exists() else ())


def _log_sbatch(spool: Served) -> Path:
    """Have every sbatch leave a line of its arguments."""
    calls = spool.root.parent / "calls"
    calls.touch()
    text = f'echo "$*" >> {calls}\nexec "$real" "$@"'
    spool.environment["PATH"] = path_with(spool.root.parent / "before", "sbatch", text)
    return calls


def _arrays(calls: Path) -> list[str]:
    return [match[1] for line in calls.read_text().splitlines() if (match := re.search(r"--array=(\S+)", line))]


def test_an_array_is_one_array_of_slurm(unserved: Served, slurm: Cluster) -> None:
    """One submission; each task has its output, its exit code, its id, and its own engine.log."""
    calls = _log_sbatch(unserved)
    unserved.start()
    unserved.drop("sweep", LEDGER + "echo {index}; exit $((SPOOL_ARRAY_INDEX % 2))", array="0-9")
    unserved.wait_done("sweep")
    assert _arrays(calls) == ["0-9"]
    assert len(calls.read_text().splitlines()) == 1
    assert _begun(unserved) == {f"sweep_{index}": 1 for index in range(10)}
    (job,) = {(unserved.record(f"sweep_{index}", "engine") or "").split()[2].partition("_")[0] for index in range(10)}
    for index in range(10):
        name = f"sweep_{index}"
        result = unserved.result(name)
        assert (result["exit_code"], unserved.log(name)) == (index % 2, f"{index}\n")
        assert (unserved.record(name, "jid") or "").split()[5] == f"slurm:{job}_{index}"
        assert (unserved.root / "jobs" / name / "1" / "engine.log").exists()


def test_an_array_may_be_larger_than_slurm_s(unserved: Served, slurm: Cluster) -> None:
    """Indices beyond MaxArraySize are elements of further arrays, and find their own runs."""
    calls = _log_sbatch(unserved)
    unserved.start()
    unserved.drop("sweep", LEDGER + "echo {index}", array="997-1003,2000,12345", cpus=0)
    unserved.wait_done("sweep")
    indices = [*range(997, 1004), 2000, 12345]
    assert _begun(unserved) == {f"sweep_{index}": 1 for index in indices}
    assert sorted(_arrays(calls)) == ["0-3", "997-999"]  # and two go alone
    assert all(unserved.log(f"sweep_{index}") == f"{index}\n" for index in indices)
    assert (unserved.root / "jobs" / "sweep_1003" / "1" / "engine.log").exists()


def test_slurm_keeps_the_limit_of_running_tasks(unserved: Served, slurm: Cluster) -> None:
    """All tasks are there at once, with the limit, which can be changed; no more run at any moment."""
    calls = _log_sbatch(unserved)
    unserved.start()
    go = unserved.root.parent / "go"
    unserved.drop("sweep", LEDGER + f"until [ -e {go} ]; do sleep 0.05; done", array="0-9", max_running=2)
    wait_for(lambda: sum(_begun(unserved).values()) == 2, what="two tasks to run")
    assert _arrays(calls) == ["0-9%2"]
    wait_for(lambda: [job["state"] for job in slurm.jobs()].count("RUNNING") == 2, what="Slurm to say so")
    assert unserved.spool("edit", "sweep", "--max-running", "4").returncode == 0
    wait_for(lambda: sum(_begun(unserved).values()) == 4, what="four tasks to run")
    assert [job["state"] for job in slurm.jobs()].count("RUNNING") <= 4
    go.touch()
    unserved.wait_done("sweep")
    assert _begun(unserved) == {f"sweep_{index}": 1 for index in range(10)}


def test_a_cancelled_array_leaves_slurm(served: Served, slurm: Cluster) -> None:
    """Tasks that run are told to end, and those that wait never begin."""
    served.drop("sweep", "trap 'echo told; exit 3' TERM; echo up; while :; do sleep 0.1; done", array="0-5%2")
    served.says("sweep_0", "up")
    served.says("sweep_1", "up")
    assert served.spool("cancel", "sweep").returncode == 0
    served.wait_done("sweep")
    assert {served.outcome(f"sweep_{index}") for index in range(6)} == {"cancelled"}
    assert [served.log(f"sweep_{index}") for index in range(2)] == ["up\ntold\n"] * 2
    wait_for(lambda: not {job["state"] for job in slurm.jobs()} & {"PENDING", "RUNNING"}, what="Slurm to be done")


def test_one_task_is_cancelled_and_the_others_go_on(served: Served, slurm: Cluster) -> None:
    """An element is a job of its own for every command, and for `scancel ID_INDEX`."""
    served.drop("sweep", "echo up; sleep 60", array="0-2", kill_grace="1s")
    for index in range(3):
        served.says(f"sweep_{index}", "up")
    job = engine_id(served, "sweep_2")
    assert served.spool("cancel", "sweep_1").returncode == 0
    slurm.command("scancel", job)
    served.wait_done("sweep_1", "sweep_2")
    assert served.outcome("sweep_1") == "cancelled"
    result = served.result("sweep_2") or {}
    assert (result["outcome"], result["reason"].split(":")[0]) == ("cancelled", "cancelled, and not by spool")
    assert served.places("sweep_0") == ["running"]


def test_elements_that_wait_and_are_cancelled_in_slurm_do_not_run(served: Served, slurm: Cluster) -> None:
    """Some of an array, then all that a user has: Slurm keeps no trace of the elements, and none runs again."""
    go = served.root.parent / "go"
    served.drop("sweep", LEDGER + f"until [ -e {go} ]; do sleep 0.1; done", array="0-9%2", retry={"max": 2})
    served.until(lambda: sum(_begun(served).values()) == 2, "two tasks to run")
    served.wait_reason("sweep_9", "PENDING")
    job = (served.record("sweep_9", "engine") or "").split()[2].partition("_")[0]
    slurm.command("scancel", f"{job}_[3-5]", f"{job}_8")
    names = [f"sweep_{index}" for index in (3, 4, 5, 8)]
    served.wait_done(*names)
    assert "out of its array" in str((served.result("sweep_4") or {})["reason"])
    assert served.places("sweep_9") == ["running"]
    slurm.command("scancel", "--user=root")
    served.wait_done("sweep")
    assert {served.outcome(f"sweep_{index}") for index in range(10)} == {"cancelled"}
    assert [served.runs(f"sweep_{index}") for index in range(10)] == [[1]] * 10
    assert _begun(served) == {"sweep_0": 1, "sweep_1": 1}


def test_a_held_array_starts_no_task_that_waits_in_slurm(unserved: Served, slurm: Cluster) -> None:
    """What runs goes on to its end; the rest is taken back, also by the next dispatcher, and runs after the release."""
    go = unserved.root.parent / "go"
    unserved.start()
    unserved.drop("sweep", LEDGER + f"until [ -e {go} ]; do sleep 0.1; done", array="0-9%2")
    unserved.until(lambda: sum(_begun(unserved).values()) == 2, "two tasks to run")
    unserved.wait_reason("sweep_9", "PENDING")
    assert unserved.spool("hold", "sweep").returncode == 0
    unserved.kill()
    unserved.start()
    unserved.wait_reason("sweep_9", "array sweep is held")
    unserved.until(lambda: not any(job["state"] == "PENDING" for job in slurm.jobs()), "nothing to wait in Slurm")
    assert "release sweep" in unserved.spool("why", "sweep").stdout
    go.touch()
    running = list(_begun(unserved))
    unserved.wait_done(*running)
    unserved.looked()
    assert _begun(unserved) == dict.fromkeys(running, 1)
    assert unserved.spool("release", "sweep").returncode == 0
    unserved.wait_done("sweep")
    assert _begun(unserved) == {f"sweep_{index}": 1 for index in range(10)}
    assert unserved.outcome("sweep") == "finished"


def test_an_array_may_have_fewer_elements_than_indices(unserved: Served, slurm: Cluster) -> None:
    """`max_array_tasks` is lowered after the dispatcher has asked for it: the array goes in parts, and none is held."""
    calls = _log_sbatch(unserved)
    unserved.start()
    unserved.drop("before", LEDGER + "true", array="0-9")
    unserved.wait_done("before")
    settings = slurm.setting("SchedulerParameters")
    with slurm.configured("SchedulerParameters", f"{settings},max_array_tasks=4"):
        unserved.drop("sweep", LEDGER + "true", array="0-9")
        unserved.wait_done("sweep")
    assert _begun(unserved) == {f"{array}_{index}": 1 for array in ("before", "sweep") for index in range(10)}
    assert unserved.runs("sweep_9") == [1]
    assert len(_arrays(calls)) > 2


def test_what_cannot_start_lets_others_pass(unserved: Served, slurm: Cluster) -> None:
    """Four jobs wait for a drained node, and no more than four may be in Slurm: an urgent one starts all the same."""
    config = unserved.root / "config.toml"
    config.write_text('autostart = false\ndisk_floor = "0M"\n[slurm]\nmax_in_flight = 4\nmax_pending = 4\n')
    slurm.set_nodes("drain", "n2")
    unserved.start()
    for number in range(4):
        unserved.drop(f"blocked{number}", "true", executor_options=["--nodelist=n2"])
    for number in range(4):
        unserved.until(lambda number=number: "n2" in unserved.reason(f"blocked{number}"), "Slurm's reason")
    unserved.drop("urgent", "true", priority=100)
    unserved.wait_done("urgent")
    assert [unserved.places(f"blocked{number}") for number in range(4)] == [["running"]] * 4
    slurm.resume("n2")
    unserved.wait_done(*[f"blocked{number}" for number in range(4)])


def test_a_controller_that_has_too_many_jobs_is_not_waited_for(unserved: Served, slurm: Cluster) -> None:
    """Sbatch would sleep and try again for two minutes: it is ended, no run is void, and the job says why it waits."""
    full = unserved.root.parent / "full"
    full.touch()
    text = f"""
    if [ -e {full} ]; then
        echo "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying" >&2
        sleep 120
    fi
    exec "$real" "$@"
    """
    unserved.environment["PATH"] = path_with(unserved.root.parent / "before", "sbatch", text)
    unserved.start()
    unserved.drop("x", LEDGER + "true")
    unserved.until(lambda: "takes no more jobs for now" in unserved.reason("x"), "the reason")
    assert (unserved.runs("x"), unserved.record("x", "jid")) == ([1], None)
    full.unlink()
    assert unserved.spool("cancel", "x").returncode == 0
    unserved.wait_done("x")
    assert _begun(unserved) == {}
