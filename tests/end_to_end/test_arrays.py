"""Many jobs in one file, with a real dispatcher: expanded, limited, held, cancelled, depended on."""

from __future__ import annotations

import json
import time
import tomllib

import pytest

from served import Served, overlap
from support import wait_for


def _ledger(served: Served, pattern: str) -> list[dict[str, object]]:
    return [line for line in served.history() if str(line["job"]).startswith(pattern)]


def test_an_array_runs_all_its_tasks_and_no_more_at_once_than_it_says(shared: Served) -> None:
    """A hundred tasks run once each, at most four of them at once, and then the array's file comes to done/."""
    file = shared.drop("hundred", "echo $SPOOL_ARRAY_INDEX {index}; sleep 0.02", cpus=0, array="0-99%4")
    text = file.read_bytes()
    result = shared.wait_done("hundred")
    assert (result["outcome"], result["reason"]) == ("finished", "100 of 100 finished")
    lines = _ledger(shared, "hundred_")
    assert sorted(str(line["job"]) for line in lines) == sorted(f"hundred_{index}" for index in range(100))
    assert overlap(lines) <= 4
    assert all(shared.log(f"hundred_{index}") == f"{index} {index}\n" for index in (0, 7, 99))
    assert shared.path("done", "hundred").read_bytes() == text
    assert "hundred" not in {line["job"] for line in shared.history()}, "an array is no run"


def test_the_result_of_a_task_has_its_parameters_and_its_metrics(shared: Served) -> None:
    """Also where the task runs again after the array is over, and where a job has no right to its metrics."""
    command = 'echo "loss = 0.$SPOOL_PARAM_LR" >> $SPOOL_METADIR/metrics; echo "a = b" > $SPOOL_METADIR/x'
    shared.drop("s", command, matrix={"lr": [3, 4]})
    shared.drop("odd", 'ln -s /etc/passwd "$SPOOL_METADIR/metrics"')
    for name in ("s", "odd"):
        shared.wait_done(name)
    shared.move("s_1", "done", "queued")
    shared.wait_outcome("s_1", 2)
    for run in (1, 2):
        result = tomllib.loads((shared.root / f"jobs/s_1/{run}/result.toml").read_text())
        assert (result["parameters"], result["metrics"]) == ({"lr": "4"}, {"loss": "0.4"})
    result = tomllib.loads((shared.root / "jobs/odd/1/result.toml").read_text())
    assert not {"parameters", "metrics"} & result.keys()


def test_a_task_can_be_cancelled_alone(shared: Served) -> None:
    """Cancelling one task leaves the others, and the array has not finished.

    Moving the file of an array in progress to queued/ neither stops it nor makes its tasks again.
    """
    shared.drop("alone", "echo up; test {index} != 1 || exec sleep 1000", cpus=0, array="0-2")
    shared.says("alone_1", "up")
    shared.move("alone", "running", "queued")
    shared.wait_place("alone", "running")
    shared.path("running", "alone_1").unlink()
    result = shared.wait_done("alone")
    assert (result["outcome"], result["reason"]) == ("failed", "2 of 3 finished, 1 cancelled")
    assert [shared.runs(f"alone_{index}") for index in range(3)] == [[1]] * 3


@pytest.mark.parametrize("killed", ["", "killed", "killed, and the next one cannot read its records at first"])
def test_a_task_whose_file_is_taken_away_counts_as_cancelled(served: Served, killed: str) -> None:
    """It has no record; what depends on it or on its array goes on all the same, under the next dispatcher too."""
    (served.root / "config.toml").write_text("cpus = 2\n")
    gate = served.root.parent / "gate"
    served.drop("w", f"until [ -e {gate} ]; do sleep 0.05; done", array="0-3")
    served.drop("after", "true", depends_on={"ended": ["w"]})
    served.drop("otherwise", "true", depends_on={"failed": ["w_2"]})
    served.drop("each", "true", array="0-3", depends_on={"each": "w"})
    served.start()
    served.until(served.path("queued", "w_2").exists, "the task")
    if killed:
        served.kill()
    served.path("queued", "w_2").unlink()
    records = served.root / "jobs/w_2"
    if "records" in killed:
        records.symlink_to(records)
    if killed:
        served.start()
    if "records" in killed:
        served.until(lambda: served.path("running", "w_0").exists(), "a start")
        records.unlink()
    gate.touch()
    for name in ("w", "after", "otherwise", "each"):
        served.wait_done(name)
    assert [served.outcome(name) for name in ("w", "after", "otherwise", "each")] == [
        "failed", "finished", "finished", "failed",
    ]  # fmt: skip
    listed = served.spool("ls", "w", "-s", "cancelled", "-q").stdout.split()
    assert listed == ["w_2"]


def test_an_array_that_has_ended_is_one_row_of_the_list(live: Served) -> None:
    """It stands for its tasks as they ended last, also for one that was run again; all are there when asked for."""
    live.completes("row", "test {index} != 1 || test $SPOOL_RUN = 2", cpus=0, array="0-2")
    assert live.spool("wait", "row").returncode == 1
    live.drop("row_9", "true", cpus=0)
    live.move("row_1", "done", "queued")
    live.wait_outcome("row_1", 2)
    live.wait_done("row_9")
    rows = {row["name"]: row for row in json.loads(live.spool("ls", "--json").stdout)["jobs"]}
    assert set(rows) == {"row", "row_1", "row_9"}
    assert (rows["row"]["state"], rows["row"]["reason"]) == ("finished", "3 of 3 finished")
    assert json.loads(live.spool("ls", "row", "--json").stdout)["jobs"] == [rows["row"]]
    shown = json.loads(live.spool("show", "row", "--json").stdout)
    assert shown["row"] == rows["row"]
    assert (shown["runs"][-1]["state"], shown["runs"][-1]["reason"]) == ("finished", "3 of 3 finished")
    assert live.spool("wait", "row").returncode == 0
    live.drop("next", "true", cpus=0, depends_on="row")
    live.wait_outcome("next")
    assert live.outcome("next") == "finished"
    live.move("row_0", "done", "held")
    assert live.spool("wait", "row", "--timeout", "300ms").returncode == 124
    [row] = json.loads(live.spool("ls", "row", "--json").stdout)["jobs"]
    assert (row["state"], row["reason"][:6]) == ("running", "2 of 3")
    live.move("row_0", "held", "done")
    live.wait_outcome("row_0", 2)
    [row] = json.loads(live.spool("ls", "row", "--json").stdout)["jobs"]
    assert (row["state"], row["reason"]) == ("failed", "2 of 3 finished, 1 cancelled")
    everything = json.loads(live.spool("ls", "--all", "--json").stdout)["jobs"]
    assert {row["name"] for row in everything} == {"next", "row", "row_0", "row_1", "row_2", "row_9"}


def test_an_array_runs_again_from_done(shared: Served) -> None:
    """Moved from done/ to queued/ it is expanded again, edits and all; earlier runs keep their metadirs."""
    shared.completes("again", "true", cpus=0, array="0-2")
    shared.drop("again", "true", cpus=0, array="0-1")
    wait_for(lambda: shared.result("again", 2), what="the second run")
    shared.wait_done("again")
    assert [shared.runs(f"again_{index}") for index in range(3)] == [[1, 2], [1, 2], [1]]
    assert shared.result("again", 2)["reason"] == "2 of 2 finished"  # type: ignore[index]


@pytest.mark.parametrize("order", [("m", "m_0"), ("m_0", "m")], ids=" ".join)
def test_a_task_that_is_queued_again_together_with_its_array_runs_once(served: Served, order: tuple[str, ...]) -> None:
    """The file that waits is the task's; one whose text differs by now is another job, and runs beside that."""
    (served.root / "config.toml").write_text("autostart = false\n")
    served.drop("m", "true", array="0-2")
    assert served.run("--until-idle") == 0
    for name in order:
        assert served.spool("requeue", name).returncode == 0
    served.path("done", "m_1").rename(served.path("queued", "m_1"))
    served.path("queued", "m_1").write_text('command = "exit 0"\n[task]\narray = "m"\nindex = 1\n')
    served.path("done", "m_2").rename(served.path("held", "m_2"))
    served.start()
    served.until(lambda: served.result("m_1", 3), "the task beside the other job of its name")
    assert served.spool("release", "m_2").returncode == 0
    served.wait_done("m")
    served.stop()
    assert [served.runs(f"m_{index}") for index in range(3)] == [[1, 2], [1, 2, 3], [1, 2]]
    assert served.result("m", 2)["reason"] == "3 of 3 finished"  # type: ignore[index]


@pytest.mark.parametrize("order", [("m", "m_0"), ("m_0", "m")], ids=" ".join)
def test_an_array_and_its_task_that_one_command_moves_run_once(served: Served, order: tuple[str, ...]) -> None:
    """However slowly `mv done/m*.toml queued/` goes on, while the dispatcher starts what has come."""
    go = served.root.parent / "go"
    served.drop("m", f"until [ -e {go} ]; do sleep 0.01; done", array="0-1", cpus=0)
    go.touch()
    assert served.run("--until-idle") == 0
    go.unlink()
    served.start()
    for name in order:
        served.move(name, "done", "queued")
        time.sleep(0.1)
    served.until(served.path("running", "m_1").exists, "the start of the other task")
    go.touch()
    served.wait_done("m")
    served.stop()
    assert served.run("--until-idle") == 0
    assert [served.runs(f"m_{index}") for index in range(2)] == [[1, 2]] * 2


def test_the_commands_treat_an_array_as_a_whole(served: Served) -> None:
    """`hold`, `release`, `wait`, `cancel` and `ls` take an array's name for all of it."""
    (served.root / "config.toml").write_text("cpus = 1\n")
    go = served.root.parent / "go"
    served.drop("whole", f"echo up; until [ -e {go} ]; do sleep 0.01; done", array="0-2")
    served.start()
    served.says("whole_0", "up")
    assert served.spool("requeue", "whole").returncode != 0
    assert served.spool("hold", "whole").stdout == "whole held\n"
    served.wait_reason("whole_1", "array whole is held")
    assert "array whole " in served.spool("why", "whole_1").stdout
    assert served.spool("release", "whole").stdout == "whole released\n"
    served.wait_place("whole", "running")
    served.wait_reason("whole", "0 of 3 done, 1 running")
    rows = json.loads(served.spool("ls", "whole*", "--json").stdout)["jobs"]
    assert {row["name"]: row["state"] for row in rows} == {
        "whole": "running",
        "whole_0": "running",
        "whole_1": "queued",
        "whole_2": "queued",
    }
    assert served.spool("cancel", "whole", "--reason", "enough").returncode == 0
    assert served.spool("wait", "whole").returncode == 130
    assert "enough" in served.result("whole")["reason"]
    assert served.places("whole_2") == ["done"]
    again = served.spool("requeue", "whole")
    assert (again.returncode, "whole has 3 tasks, and all run again" in again.stderr) == (0, True)
    go.touch()
    assert served.spool("wait", "whole").returncode == 0
    assert [served.runs(f"whole_{index}") for index in range(3)] == [[1, 2]] * 3


def test_how_many_tasks_run_at_once_can_be_changed_while_they_do(live: Served) -> None:
    """A higher `max_running` starts more of the tasks that are issued, a lower one waits, also after a restart."""
    live.drop("sweep", "exec sleep 1000", array="0-5", max_running=1, cpus=0)
    live.pid("sweep_0")
    live.wait_reason("sweep_5", "array limit: 1 of 1 running")
    assert live.spool("edit", "sweep", "--set", "max_running=3").returncode == 0
    live.wait_reason("sweep_5", "array limit: 3 of 3 running")
    assert "limit: 3 of 3 " in live.spool("why", "sweep_5").stdout
    live.restart()
    live.wait_reason("sweep_5", "array limit: 3 of 3 running")
    assert live.spool("edit", "sweep", "--set", "max_running=2").returncode == 0
    live.wait_reason("sweep_5", "array limit: 3 of 2 running")
    live.path("running", "sweep").write_text("array = [")
    live.looked()
    assert "limit: 3 of 2 " in live.reason("sweep_5")


def test_a_job_with_the_name_of_an_earlier_array_stands_for_itself(live: Served) -> None:
    """What depends on it goes by the newest end of that name, also if the job was cancelled before it started."""
    live.drop("prep", "true", cpus=0, array="0-1")
    live.drop("first", "true", cpus=0, depends_on="prep")
    assert live.wait_outcome("first") == "finished"
    (live.root / "paused").touch()
    live.drop("prep", "true", cpus=0)
    live.wait_reason("prep", "paused")
    live.move("prep", "queued", "done")
    live.wait_outcome("prep", 2)
    (live.root / "paused").unlink()
    live.drop("second", "true", cpus=0, depends_on="prep")
    assert live.wait_outcome("second") == "cancelled"
