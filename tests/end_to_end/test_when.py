"""When things happened, and what was used: ends that no dispatcher saw, in every record, view and sum."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from served import Served, alive, marked
from support import wait_for

_ALL = pytest.mark.executors("process", "tmux", "sh")
_HOUR_S = 3600


def _left(served: Served, name: str, command: str | list[str], **keys: Any) -> float:
    """Have a run begin under a dispatcher that leaves, and end without one; return when it left its exit code."""
    gate = served.root.parent / f"{name}.gate"
    served.drop(name, command, prolog=f"until [ -e {gate} ]; do sleep 0.01; done", **keys)
    assert served.run("--once") == 0
    gate.touch()
    rc = served.root / "jobs" / name / "1" / "rc"
    wait_for(rc.exists, 60, what="its exit code")
    wait_for(lambda: not alive(served.pid(name)), 60, what="the end of its wrapper")
    return rc.stat().st_mtime


def _age(served: Served, name: str, by_s: int, run: int = 1) -> None:
    """Let a run have happened earlier: its records and their instants are that much older."""
    metadir = served.root / "jobs" / name / str(run)
    grant = metadir / "grant.toml"
    text = grant.read_text()
    at_ns = int(next(line for line in text.splitlines() if line.startswith("granted_at_ns")).split("=")[1])
    lines = [line for line in text.splitlines() if not line.startswith("granted_at")]
    earlier = datetime.fromtimestamp(at_ns // 10**9 - by_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    at = [f"granted_at = {earlier}", f"granted_at_ns = {at_ns - by_s * 10**9}"]
    grant.write_text("\n".join([*at, *lines]) + "\n")
    os.utime(grant, ns=(at_ns - by_s * 10**9, at_ns - by_s * 10**9))
    for record in metadir.iterdir():
        if record != grant:
            before = record.stat().st_mtime_ns - by_s * 10**9
            os.utime(record, ns=(before, before))


def _at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _row(served: Served, name: str) -> dict[str, Any]:
    rows = json.loads(served.spool("ls", "--all", "--json").stdout)["jobs"]
    return next(row for row in rows if row["name"] == name)


@_ALL
def test_an_end_that_nobody_saw_is_that_of_the_exit_code(served: Served) -> None:
    """A run that ended between two passes has ended when it left its exit code, and has its CPU time.

    While no dispatcher runs, ls and show say how and when it ended; the next one records the same.
    """
    command = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; exit 7"
    left_at = _left(served, "short", ["sh", "-c", command])
    _age(served, "short", _HOUR_S)
    row = _row(served, "short")
    run = json.loads(served.spool("show", "short", "--json").stdout)["runs"][-1]
    assert [(each["state"], each["exit_code"]) for each in (row, run)] == [("failed", 7)] * 2
    assert [_at(each["ended_at"]) for each in (row, run)] == [pytest.approx(left_at - _HOUR_S, abs=0.001)] * 2
    assert "not recorded yet" in served.spool("show", "short").stdout
    assert served.run("--once") == 0
    after = _row(served, "short")
    assert (after["state"], after["exit_code"], after["ended_at"]) == ("failed", 7, row["ended_at"])
    result, (line,) = served.result("short"), served.history()
    assert (result["outcome"], result["ended_at_ns"] / 1e9) == ("failed", pytest.approx(left_at - _HOUR_S, abs=0.001))
    assert "ended_at_is" not in result
    assert result["cpu_time_ns"] > 0
    assert _at(line["ended_at"]) == pytest.approx(left_at - _HOUR_S, abs=0.001)
    assert _at(line["recorded_at"]) > left_at
    assert "peak_process" not in (served.record("short", "usage") or "") or result["peak_memory_bytes"] > 0


def test_a_retry_waits_from_the_end_and_not_from_the_look(served: Served) -> None:
    """The delay of a retry counts from the end of the run, so that a late look makes nobody wait anew."""
    left_at = _left(served, "again", "exit 1", retry={"max": 1, "delay": "2h", "max_delay": "3h"})
    _age(served, "again", _HOUR_S)
    assert served.run("--once") == 0
    result = served.result("again")
    assert result["again_at_ns"] / 1e9 == pytest.approx(left_at + _HOUR_S, abs=0.001)


@_ALL
def test_a_run_without_an_exit_code_ended_at_its_last_proof_of_life_or_later(served: Served) -> None:
    """Of a run that was killed while nobody watched, the last thing that it wrote is known, and the record says so."""
    served.drop("gone", "echo $$; echo begun; exec sleep 1000", requeue=False)
    assert served.run("--once") == 0
    served.says("gone", "begun")
    os.kill(served.pid("gone"), signal.SIGKILL)
    os.kill(int(served.log("gone").split()[0]), signal.SIGKILL)
    wait_for(lambda: not alive(served.pid("gone")), 60, what="the end of its wrapper")
    _age(served, "gone", _HOUR_S)
    os.utime(served.root / "state.json", (time.time() - 2 * _HOUR_S,) * 2)
    wrote_at = (served.root / "jobs/gone/1/log").stat().st_mtime
    row = _row(served, "gone")
    assert row["state"] == "lost"
    assert served.run("--once") == 0
    result = served.result("gone")
    assert (result["outcome"], result["ended_at_is"]) == ("lost", "earliest")
    assert result["ended_at_ns"] / 1e9 == pytest.approx(wrote_at, abs=0.1)
    assert _at(row["ended_at"]) == pytest.approx(result["ended_at_ns"] / 1e9, abs=0.001)
    assert served.history()[-1]["ended_at_is"] == "earliest"
    assert "or later" in served.spool("show", "gone").stdout


@pytest.mark.parametrize("ahead_s", [-7200, 7200])
def test_the_clock_of_another_machines_file_system_does_not_count(served: Served, ahead_s: int) -> None:
    """Where the file system's clock is hours off, an end is as long after its grant as that clock says."""
    left_at = _left(served, "skewed", "true")
    for record in ("grant.toml", "jid", "rc"):
        path = served.root / "jobs/skewed/1" / record
        os.utime(path, (path.stat().st_mtime + ahead_s,) * 2)
    _age(served, "skewed", _HOUR_S) if ahead_s > 0 else None
    if ahead_s > 0:
        grant = served.root / "jobs/skewed/1/grant.toml"
        os.utime(grant, (grant.stat().st_mtime + ahead_s,) * 2)
        left_at -= _HOUR_S
    assert served.run("--once") == 0
    assert served.result("skewed")["ended_at_ns"] / 1e9 == pytest.approx(left_at, abs=1)


def test_a_cancel_by_a_move_is_dated_by_the_move(served: Served) -> None:
    """A waiting file that is moved to done/ while no dispatcher runs ended the job when it was moved."""
    served.drop("moved", "true", start_after="1h")
    assert served.run("--once") == 0
    served.move("moved", "queued", "done")
    moved_ns = served.path("done", "moved").stat().st_ctime_ns
    assert served.run("--once") == 0
    result = served.result("moved")
    assert (result["outcome"], result["ended_at_ns"]) == ("cancelled", moved_ns)


def test_an_array_ends_with_the_last_of_its_tasks(live: Served) -> None:
    """An array whose tasks ended while no dispatcher ran has ended when the last of them did."""
    go = live.root.parent / "go"
    live.drop("many", f"until [ -e {go} ]; do sleep 0.01; done", array="0-1", cpus=0)
    live.until(lambda: len(marked(live.root, "many_0")) and len(marked(live.root, "many_1")), "two tasks")
    live.kill()
    go.touch()
    live.until(lambda: all(live.record(f"many_{index}", "rc") for index in range(2)), "two exit codes")
    live.start()
    result = live.wait_done("many")
    ends = [live.result(f"many_{index}") for index in range(2)]
    assert result["ended_at_ns"] == max(end["ended_at_ns"] for end in ends if end is not None)


def said(served: Served, *words: str) -> dict[str, Any]:
    """Return the JSON that a command prints."""
    done = served.spool(*words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_real_jobs_used_is_known_also_of_one_that_outlived_its_dispatcher(served: Served) -> None:
    """Peak memory and CPU time are known of runs under one dispatcher, and of one that outlived its dispatcher."""
    (served.root / "config.toml").write_text("cpus = 4\n")
    # Started by a program that is larger than the job, as a notebook may be.
    large = "import os, sys; x = b'x' * (400 << 20); os.execv(sys.argv[1], sys.argv[1:])"
    served.start(prefix=[sys.executable, "-c", large])
    served.drop("eats", [sys.executable, "-c", "b = bytearray(150 << 20); sum(range(3_000_000))"], cpus=2)
    served.drop("fails", "exit 3", retry={"max": 1})
    served.wait_done("eats", "fails")
    found = said(served, "seff", "eats")
    assert found["peak_memory_bytes"] >= 150 << 20
    assert found["cpu_time_ns"] > 0
    assert found["cpu_efficiency"] > 0
    assert found["advice"]["memory_bytes"] >= 180 << 20

    gate = served.root.parent / "gate"
    works = "n=0; until [ $n -eq 100000 ]; do n=$((n + 1)); done"  # for more than a tick of the kernel's count
    waits = f"until [ -e {gate} ]; do sleep 0.05; done"
    served.up("outlives", f"{works}; echo up; {waits}", memory="1G", time_limit="1h")
    served.kill()
    now = said(served, "seff", "outlives")
    assert (now["state"], now["so_far"], now["time_limit_ns"]) == ("running", True, 3600 * 10**9)
    assert now["memory_now_bytes"] > 0
    assert now["run_time_ns"] > 0
    assert now["cpu_time_ns"] is not None
    served.start()
    gate.touch()
    served.wait_done("outlives")
    after = said(served, "seff", "outlives")
    assert after["state"] == "finished"
    assert after["cpu_time_ns"] > 0
    assert after["cpu_efficiency"] is not None

    whole = said(served, "stats", "--since", "1d", "--by", "state")
    assert (whole["total"]["runs"], whole["total"]["jobs"], whole["total"]["retries"]) == (4, 3, 1)
    assert whole["total"]["success_rate"] == 2 / 3
    assert (whole["total"]["cpu_used_runs"], whole["unreadable_lines"]) == (4, 0)
    assert {each["state"]: each["runs"] for each in whole["groups"]} == {"finished": 2, "failed": 2}
    assert 2 <= whole["total"]["peak_cpus"] <= 4
