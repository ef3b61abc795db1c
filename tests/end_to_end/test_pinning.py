"""Runs with CPUs of their own, with real dispatchers under each executor of this machine."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from served import LOOKS, Served
from spool.core.reasons import ranges_of
from spool.core.units import cpus_in
from support import ROOT, wait_for

EXECUTORS = ("process", "sh", "tmux")
OURS = sorted(os.sched_getaffinity(0))
HAS = 'python3 -c \'import os; print("has", *sorted(os.sched_getaffinity(0)), os.environ.get("SPOOL_CPU_LIST"))\''

pytestmark = pytest.mark.skipif(len(OURS) < 2, reason="there is only one CPU here")


@pytest.fixture
def gate(served: Served) -> Path:
    """Give the file that jobs wait for, in a spool that pins."""
    (served.root / "config.toml").write_text("cpu_pinning = true\n")
    served.changes[LOOKS] = 10**9
    return served.root.parent / "gate"


def until(gate: Path) -> str:
    """Return the text of a job that tells its CPUs and runs until *gate* is there."""
    return f"{HAS}; until [ -e {gate} ]; do sleep 0.02; done"


def has(served: Served, name: str) -> tuple[list[int], str]:
    """Return the affinity that a job told, and its `SPOOL_CPU_LIST`."""
    line = next(line for line in served.says(name, "has").splitlines() if line.startswith("has "))
    *cpus, told = line.split()[1:]
    return [int(cpu) for cpu in cpus], told


def test_no_two_runs_have_a_cpu_also_after_the_dispatcher_was_killed(served: Served, gate: Path) -> None:
    """Each has its own, in its affinity, its environment, its record and the views; the next gives out only others."""
    served.start()
    served.drop("one", until(gate))
    first, told = has(served, "one")
    assert (len(first), told) == (1, ranges_of(first))
    assert f'cpu_list = "{told}"' in (served.record("one", "grant.toml") or "")
    served.kill()
    rest = len(OURS) - 1
    served.drop("two", until(gate), cpus=rest)
    served.drop("wide", HAS, cpus=len(OURS))
    served.start()
    second, told = has(served, "two")
    assert (sorted(first + second), cpus_in(told)) == (OURS, tuple(second))
    wait_for(lambda: served.state()["jobs"].get("two", {}).get("cpu_list") == told, what="its CPUs in state.json")
    gate.touch()
    served.wait_done("one", "two", "wide")
    assert has(served, "wide") == (OURS, ranges_of(OURS))
    assert (served.result("two") or {})["grant"]["cpu_list"] == told
    assert {line["job"]: line["cpu_list"] for line in served.history()} == {
        "one": ranges_of(first), "two": told, "wide": ranges_of(OURS),
    }  # fmt: skip
    listed = served.spool("ls", "--columns", "name,cpu_list").stdout.splitlines()
    assert {tuple(line.split()) for line in listed[1:]} == {
        (each["job"], each["cpu_list"]) for each in served.history()
    }
    assert f"1 CPU ({first[0]})" in served.spool("show", "one").stdout


def test_it_is_switched_on_and_off_while_jobs_run(served: Served, gate: Path) -> None:
    """Runs keep what they began with, and count; those that begin afterwards are pinned, or no longer."""
    config = served.root / "config.toml"
    pins = config.read_text()
    config.write_text("")
    served.start()
    served.drop("old", until(gate), cpus=len(OURS) - 1)
    assert has(served, "old") == (OURS, "None")
    config.write_text(pins)
    wait_for(lambda: served.said().count("the configuration has changed") == 1, what="the new configuration")
    served.drop("new", until(gate))
    served.drop("third", HAS)
    cpus, told = has(served, "new")
    assert (len(cpus), told) == (1, ranges_of(cpus))
    assert "0 free" in served.wait_reason("third", "cpus: needs 1")
    config.write_text("")
    wait_for(lambda: served.said().count("the configuration has changed") == 2, what="the old configuration")
    gate.touch()
    served.wait_done("old", "new", "third")
    assert has(served, "third") == (OURS, "None")


def test_more_cpus_than_there_are_count_as_those_that_there_are(served: Served, gate: Path) -> None:
    """With `cpus` above those of the dispatcher no CPU is given out twice; the log and `info` say so, and no list."""
    config = served.root / "config.toml"
    config.write_text(f"{config.read_text()}cpus = {10 * len(OURS)}\n")
    served.start()
    served.drop("wide", until(gate), cpus=len(OURS))
    assert has(served, "wide")[0] == OURS
    served.drop("more", "true")
    served.wait_reason("more", "cpus: needs 1, 0 free")
    words = f"cpus = {10 * len(OURS)} counts as {len(OURS)}: with cpu_pinning no two runs share a CPU"
    wait_for(lambda: served.said().count(words) == 1, what="the warning")
    assert words in served.spool("info").stdout
    assert "counts as" not in served.spool("ls").stderr
    gate.touch()
    served.wait_done("wide", "more")


def test_a_dispatcher_gives_out_only_cpus_that_it_may_use(served: Served, gate: Path) -> None:
    """Under `taskset` or in a cpuset, its runs have its CPUs."""
    served.start(prefix=("python3", "-c", f"import os, sys; os.sched_setaffinity(0, {{{OURS[-1]}}}); "
                         "os.execvp(sys.argv[1], sys.argv[1:])"))  # fmt: skip
    served.drop("one", HAS)
    served.drop("two", HAS, cpus=2)
    served.wait_done("one")
    assert has(served, "one") == ([OURS[-1]], str(OURS[-1]))
    served.wait_reason("two", "never fits: needs 2 CPUs, the machine has 1")


@pytest.mark.executors("process")
def test_a_command_in_a_pinned_job_sees_the_whole_machine(served: Served, gate: Path) -> None:
    """What it says of the machine, and of jobs that wait for room, does not depend on where it runs."""
    served.start()
    served.completes("job", f"{sys.executable} -m spool info --json", env={"PYTHONPATH": str(ROOT / "src")})
    assert json.loads(served.log("job"))["cpus"] == len(OURS)


@pytest.mark.executors("process")
def test_a_dispatcher_that_a_pinned_job_starts_is_not_pinned(served: Served, gate: Path) -> None:
    """It serves others as well: it has all CPUs, as if the job's user had started it."""
    other = served.root.parent / "other"
    served.start()
    spool = f"{sys.executable} -m spool --spool {other}"
    text = f"{spool} submit --name inner -c {shlex.quote(HAS)} && {spool} wait inner"
    served.completes("job", text, env={"PYTHONPATH": str(ROOT / "src")})
    assert served.outcome("job") == "finished", served.log("job")
    text = (other / "jobs/inner/1/log").read_text()
    assert text.split()[1:-1] == list(map(str, OURS))
    pid = json.loads((other / "state.json").read_text())["pid"]
    os.kill(pid, 15)
