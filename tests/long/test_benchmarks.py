"""What `benchmarks/` rests on: the table that compares policies over traces, the floor, and the counting of calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import pytest

from spool.core.model import SECOND_NS, Machine, Policy, Request, Spec
from spool.extras.simulate.simulation import SimulatedJob, figures, simulate
from support import PATIENCE_S, ROOT

SCRIPT = ROOT / "benchmarks" / "policies"
LINE = "{} {} -1 100 {} -1 -1 {} 120 -1 1 {} 1 1 1 -1 -1 -1\n"


def run(*words: object, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    """Run a script on this source."""
    if not SCRIPT.exists():
        pytest.skip("this copy of the project is without its benchmarks/")
    return subprocess.run(
        [sys.executable, script, *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        timeout=PATIENCE_S,
    )


def table(lines: Iterable[str]) -> list[list[str]]:
    """Return the cells of a table in Markdown, its head too."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_learnt_sizes_kill_fewer_runs_and_waste_less_than_one_number() -> None:
    """The replay prints a row for each way to request memory, with the shares of killed runs and of wasted memory."""
    said = run("--jobs", 150, script=SCRIPT.with_name("memory"))
    assert said.returncode == 0, said.stderr
    rows = table(said.stdout.splitlines())[2:]
    figures = {row[0]: [float(cell.split()[0]) for cell in row[1:]] for row in rows}
    auto, small, large = figures['`memory = "auto"`'], figures["4G for each job"], figures["16G for each job"]
    assert auto[0] < small[0]
    assert auto[1] < large[1]


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Write a trace that names its machine, a CSV that does not, and something else."""
    lines = [LINE.format(at, at * 20, 1 + at % 3, 1 + at % 3, at % 4) for at in range(1, 13)]
    (tmp_path / "small.swf").write_text("; MaxProcs: 4\n" + "".join(lines))
    rows = [f"{at * 30},100,{1 + at % 2},150,user{at % 4}\n" for at in range(12)]
    (tmp_path / "gpus.csv").write_text("submit,run_time,gpus,time_limit,user\n" + "".join(rows))
    (tmp_path / "README.md").write_text("Not a trace.\n")
    return tmp_path


def test_every_policy_is_compared_with_easy_on_every_trace(traces: Path) -> None:
    """A row for each trace, load, share of limits and policy, and their geometric means, as a Markdown table."""
    said = run(traces, "gpus=2,2", "--jobs", 2, "--loads", "own", "85")
    assert said.returncode == 0, said.stderr
    rows = table(said.stdout.splitlines())
    assert rows[0] == ["trace", "load", "limits", "policy", "slowdown", "mean wait", "99% wait", "longest wait"]
    assert {len(row) for row in rows} == {8}
    assert len(rows) == 2 + 2 * 12 + 12
    assert [row[0] for row in rows[2:26:12]] == ["gpus (12 jobs)", "small (12 jobs)"]
    assert [row[1] for row in rows[2:14]][6:] == ["85 %"] * 6
    assert [(row[2], row[3]) for row in rows[2:8]] == [
        (limits, policy) for limits in ("all", "half", "none") for policy in ("easy", "spool")
    ]
    assert all(cell.endswith("(1.00)") for cell in rows[2][4:])
    assert rows[26] == ["geometric mean of 2", "own", "all", "easy", *["**1.00**"] * 4]


def test_a_trace_without_limits_stands_apart(traces: Path) -> None:
    """Nobody can be drawn to state a limit there, and as EASY has none either, it is in no mean with the others."""
    (traces / "gpus.csv").write_text("submit,run_time,gpus\n0,100,1\n10,100,2\n")
    said = run(traces, "gpus=2,2", "--loads", "own")
    rows = table(said.stdout.splitlines())[2:]
    assert [row[2:4] for row in rows if row[0].startswith("gpus")] == [["none", "easy"], ["none", "spool"]]
    assert [row[0] for row in rows[-8:]] == ["geometric mean of 1"] * 6 + ["geometric mean of 1 without limits"] * 2
    assert rows[-2][4:] == ["**1.00**"] * 4


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "specify gpus=CPUS"),
        (("gpus=2,2", "gone=4"), "there is no trace gone"),
        (("gpus=two",), "is not NAME=CPUS"),
        (("gpus=2,2", "--loads", "full"), "neither a percentage nor own"),
    ],
)
def test_mistakes_are_told(traces: Path, words: tuple[str, ...], why: str) -> None:
    """Before anything is simulated, and without a traceback."""
    said = run(traces, *words)
    assert said.returncode != 0
    assert why in said.stderr
    assert "Traceback" not in said.stderr


@pytest.fixture
def spoolbench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the modules of the benchmarks importable."""
    if not SCRIPT.exists():
        pytest.skip("this copy of the project is without its benchmarks/")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "spoolbench"]:
        del sys.modules[name]


@pytest.mark.usefixtures("spoolbench")
def test_a_box_is_compared_as_it_is_with_a_flood_and_with_a_liar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case with and without limits under five policies; the same seed draws the same jobs."""
    from spoolbench import box

    for name, value in {"DAYS": 3, "FLOOD": 30, "FLOOD_AT_S": 86_400, "LASTS_S": 86_400}.items():
        monkeypatch.setattr(box, name, value)
    rows = table(box.markdown(1))
    assert {len(row) for row in rows} == {9}
    assert [row[:3] for row in rows[2:]] == [
        [case, limits, policy]
        for limits in ("none", "all")
        for case in ("as it is", "a flood", "a liar")
        for policy in ("fifo", "skip", "easy", "multifactor", "spool")
    ]
    jobs = box.jobs_of(1, limits=False)
    assert jobs == box.jobs_of(1, limits=False) != box.jobs_of(2, limits=False)
    assert len(box.flooded(jobs, limits=True)) - len(jobs) == 30
    assert len(box.lying(jobs)) - len(jobs) == 3 * sum(each.user == box.LIAR for each in jobs)
    assert (box.jain([2, 2]), box.jain([4, 0, 0, 0])) == (1, 0.25)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.usefixtures("spoolbench")
@pytest.mark.parametrize("column", ["floor, sh", "floor, compiled"])
def test_the_floor_leaves_what_spool_leaves(tmp_path: Path, column: str) -> None:
    """Every job runs once, in a session of its own, and its records, history and journal are as spool orders them."""
    from spoolbench.floor import floors
    from spoolbench.tools import Scratch, await_stamps, until

    scratch = Scratch(str(tmp_path))
    (engine,) = [engine for engine in floors(scratch) if engine.name == column]
    engine.start(2)
    try:
        file = scratch.fresh("stamps")
        assert engine.run(engine.bulk(5, [scratch.stamp, file]))[0] == 0
        assert engine.run(engine.submit([scratch.stamp, file]))[0] == 0
        assert await_stamps(file, 6, PATIENCE_S)
        (root,) = [path for path in scratch.path.iterdir() if path.name.startswith("floor-")]
        until(lambda: len(os.listdir(root / "done")) == 6, PATIENCE_S, "the last move")
        until(lambda: (root / ".journal").read_text().count("over") == 6, PATIENCE_S, "the last line")
    finally:
        engine.stop()
    assert os.listdir(root / "queued") == os.listdir(root / "running") == []
    for metadir in root.glob("jobs/*/1"):
        names = ["grant.toml", "jid", "job.toml", "log", "rc", "result.toml", "run.sh", "status"]
        assert sorted(os.listdir(metadir)) == names
        assert [(metadir / name).read_text() for name in ("log", "rc", "status")] == ["", "0\n", "finished\n"]
    assert (root / "history.jsonl").read_text().count('"exit_code":0') == 6
    assert (root / ".journal").read_text().count("started") == 6
    scratch.close()


@pytest.mark.usefixtures("spoolbench")
def test_calls_are_counted_up_to_the_command() -> None:
    """A call that is cut in two counts once, signals and ends not at all, and what the command does is its own."""
    from spoolbench.calls import _counted

    log = """\
10    read(3, ""..., 8 <unfinished ...>
11    futex(0x7f, FUTEX_WAKE_PRIVATE, 1) = 1
10    <... read resumed>) = 8
10    --- SIGCHLD {si_signo=SIGCHLD, si_code=CLD_EXITED, si_pid=20} ---
20    execve("/bin/sh", [""..., ""...], 0x7f /* 9 vars */) = 0
20    clone(child_stack=NULL, flags=SIGCHLD) = 21
21    execve("/usr/bin/env", [""...], 0x7f /* 9 vars */) = 0
21    execve("/tmp/stamp", [""...], 0x7f /* 9 vars */ <unfinished ...>
20    wait4(-1,  <unfinished ...>
21    <... execve resumed>) = 0
21    write(3, ""..., 42) = 42
21    +++ exited with 0 +++
20    <... wait4 resumed>[{WIFEXITED(s) && WEXITSTATUS(s) == 0}], 0, NULL) = 21
""".splitlines()
    dispatcher, wrapper = _counted(log, {10, 11}, "/tmp/stamp")
    assert dispatcher == {"read": 1, "futex": 1}
    assert wrapper == {"execve": 3, "clone": 1, "wait4": 1}


def _imagined(user: str, count: int, at_s: int, seconds: int, cpus: int = 1) -> list[SimulatedJob]:
    """Return jobs of a user that arrive at once."""
    spec = Spec("true", request=Request(cpus=cpus))
    return [
        SimulatedJob(f"{user}-{number}", spec, at_s * SECOND_NS + number, seconds * SECOND_NS, user)
        for number in range(count)
    ]


@pytest.mark.usefixtures("spoolbench")
@pytest.mark.parametrize("seconds", [1, 600, 3600])
def test_a_flood_leaves_light_users_their_share(seconds: int) -> None:
    """Beside 200 jobs of another user, who came first, each has 0.8 of an equal share of the machine or more."""
    from spoolbench.sharing import SharedMachine

    coming = [
        *_imagined("alina", 200, 0, seconds),
        *_imagined("bob", 20, 1, seconds),
        *_imagined("carol", 20, 1, seconds),
    ]
    outcomes = list(SharedMachine(coming, Machine(2, 1 << 40), Policy()).run())
    assert len(outcomes) == 240
    spans = [(each.job.user, each.started_at_ns or 0, each.ended_at_ns or 0) for each in outcomes]
    since = SECOND_NS
    until = min(max(end for who, _, end in spans if who == user) for user in ("bob", "carol"))
    used = dict.fromkeys(("alina", "bob", "carol"), 0)
    for user, start, end in spans:
        used[user] += max(min(end, until) - max(start, since), 0)
    whole = sum(used.values())
    assert min(used["bob"], used["carol"]) / whole >= 0.8 / 3


@pytest.mark.usefixtures("spoolbench")
@pytest.mark.parametrize("seed", range(3))
def test_spools_of_their_own_are_as_good_as_one(seed: int) -> None:
    """The mean slowdown of ten users who ask an arbiter is at most 1.1 of that in one spool with all jobs."""
    from spoolbench.sharing import SharedMachine

    dice = Random(seed)
    coming, at = [], 0
    for number in range(800):
        at += int(dice.expovariate(1 / 430))
        spec = Spec("true", request=Request(cpus=dice.choice((1, 1, 1, 2, 4, 8, 16))))
        user = f"user{min(int(dice.expovariate(0.4)), 9)}"
        coming.append(
            SimulatedJob(f"{number:05}", spec, at * SECOND_NS, int(dice.lognormvariate(5.5, 1.8)) * SECOND_NS, user)
        )
    machine = Machine(16, 1 << 40)
    one = figures(list(simulate(coming, machine, Policy())), 16).mean_bounded_slowdown
    shared = figures(list(SharedMachine(coming, machine, Policy()).run()), 16).mean_bounded_slowdown
    assert one is not None
    assert one > 1.5  # many wait
    assert shared is not None
    assert shared <= 1.1 * one
