"""Arrays in Slurm, where each task is a job, and what keeps jobs waiting there: every task runs once."""

from __future__ import annotations

from collections import Counter

from long.slurm.cluster import Cluster, engine_id, path_with
from served import Served
from support import wait_for

LEDGER = "echo $SPOOL_JOB >> ledger; "


def _begun(spool: Served) -> Counter[str]:
    ledger = spool.root.parent / "ledger"
    return Counter(ledger.read_text().split() if ledger.exists() else ())


def test_each_task_is_a_job_of_slurm(served: Served, slurm: Cluster) -> None:
    """With its output, its exit code, its id, and its own engine.log."""
    served.drop("sweep", LEDGER + "echo {index}; exit $((SPOOL_ARRAY_INDEX % 2))", array="0-9")
    served.wait_done("sweep")
    assert _begun(served) == {f"sweep_{index}": 1 for index in range(10)}
    for index in range(10):
        name = f"sweep_{index}"
        result = served.result(name)
        assert (result["exit_code"], served.log(name)) == (index % 2, f"{index}\n")
        assert (served.record(name, "jid") or "").split()[5] == f"slurm:{engine_id(served, name)}"
        assert (served.root / "jobs" / name / "1" / "engine.log").exists()


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
    """Each is a job of its own for every command, and for `scancel`."""
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


def test_tasks_that_wait_and_are_cancelled_in_slurm_do_not_run(served: Served, slurm: Cluster) -> None:
    """Some of an array, then all that a user has: none runs, and none runs again."""
    slurm.set_nodes("drain")
    served.drop("sweep", LEDGER + "true", array="0-4", retry={"max": 2})
    served.wait_reason("sweep_4", "PENDING")
    slurm.command("scancel", engine_id(served, "sweep_3"))
    served.wait_done("sweep_3")
    assert served.places("sweep_4") == ["running"]
    slurm.command("scancel", "--user=root")
    served.wait_done("sweep")
    slurm.resume()
    assert {served.outcome(f"sweep_{index}") for index in range(5)} == {"cancelled"}
    assert [served.runs(f"sweep_{index}") for index in range(5)] == [[1]] * 5
    assert _begun(served) == {}


def test_a_held_array_hands_over_no_more_tasks(served: Served, slurm: Cluster) -> None:
    """As many as may wait in Slurm begin there when it lets them; the others follow after the release."""
    slurm.set_nodes("drain")
    served.drop("sweep", LEDGER + "true", array="0-24")
    served.wait_reason("sweep_19", "PENDING")
    assert served.spool("hold", "sweep").returncode == 0
    served.wait_reason("sweep_24", "array sweep is held")
    slurm.resume()
    served.until(lambda: sum(_begun(served).values()) == 20, "those in Slurm to begin")
    served.looked()
    assert sum(_begun(served).values()) == 20
    assert served.spool("release", "sweep").returncode == 0
    served.wait_done("sweep")
    assert _begun(served) == {f"sweep_{index}": 1 for index in range(25)}


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
