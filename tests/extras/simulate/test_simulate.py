"""`spool simulate`: a trace, or our own history, under one policy and another, and what is changed of it before."""

from __future__ import annotations

import gzip
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from calling import Command, asked
from spool.cli import render
from spool.core.errors import UsageError
from spool.core.model import SECOND_NS as S
from spool.core.model import Grant, Machine, Policy, Request, Result, Spec, State
from spool.extras.simulate.simulation import SimulatedJob, SimulatedPolicy
from spool.extras.simulate.whatif import (
    Scenario,
    Workload,
    imagined_gpus,
    load_of,
    of_file,
    prepare,
    simulate_policy,
    stating_limits,
)
from spool.formats.run_records import render_history

TRACE = """\
; MaxProcs: 4
1 0 -1 100 2 -1 -1 2 120 -1 1 1 1 1 1 -1 -1 -1
2 0 -1 100 4 -1 -1 4 120 -1 1 2 1 1 1 -1 -1 -1
3 10 -1 50 1 -1 -1 -1 60 -1 1 1 1 1 1 -1 -1 -1
4 10 -1 50 8 -1 -1 8 60 -1 1 1 1 1 1 -1 -1 -1
5 10 -1 -1 1 -1 -1 1 60 -1 5 1 1 1 1 -1 -1 -1
"""
T0 = 1_700_000_000 * S


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace of three jobs that fit four processors, one that never does, and one that never ran."""
    path = tmp_path / "small.swf"
    path.write_text(TRACE)
    return path


def policies(spool: Command, *words: object) -> dict[str, Any]:
    """Return the figures of each policy."""
    return {one["policy"]: one for one in asked(spool, "simulate", *words)["policies"]}


def test_figures_by_policy(spool: Command, trace: Path) -> None:
    """FIFO lets nobody overtake: 3 waits for 2, which waits for 1. EASY lets 3 start at once, and delays nobody."""
    found = policies(spool, trace)
    assert list(found) == ["fifo", "easy", "spool"]
    fifo, easy = found["fifo"], found["easy"]
    assert (fifo["mean_wait_ns"], fifo["max_queue"], fifo["makespan_ns"]) == ((100 + 190) * S // 3, 2, 250 * S)
    assert (easy["mean_wait_ns"], easy["max_queue"], easy["makespan_ns"]) == (100 * S // 3, 1, 200 * S)
    assert fifo["utilisation"] == (200 + 400 + 50) / (4 * 250)


def test_what_is_left_out_is_counted(spool: Command, trace: Path) -> None:
    """A job that is larger than the machine never fits; one without a run time never ran."""
    said = spool("simulate", trace)
    assert said.code == 0, said.err
    assert said.out.splitlines()[0] == f"{trace}: 3 jobs on 4 CPUs (left out: 1 never fit, 1 did not run)"
    found = asked(spool, "simulate", trace, "--cpus", 2)
    assert (found["jobs"], found["never_fit"], found["incomplete"], found["machine"]["cpus"]) == (2, 2, 1, 2)


def test_a_table_and_a_picture(spool: Command, trace: Path) -> None:
    """A column for each policy that was asked for, and two rows of blocks for each."""
    lines = spool("simulate", trace, "--policy", "easy,fifo").out.splitlines()
    assert lines[3].split() == ["POLICY", "easy", "fifo"]
    assert lines[4].split() == ["jobs", "3", "3"]
    assert lines[5].split() == ["mean", "wait", "33s", "1m36s"]
    assert sum("█" in line for line in lines) == 4


def test_each_figure_is_told_of_every_user_and_size(spool: Command, trace: Path) -> None:
    """As JSON all of them, with the jobs that waited longest; the sizes and the users add up to all jobs."""
    easy = policies(spool, trace)["easy"]
    keys = {"jobs", "left", "mean_wait_ns", "median_wait_ns", "wait_95_ns", "wait_99_ns", "longest_wait_ns"}
    keys |= {"mean_bounded_slowdown", "utilisation", "gpu_utilisation"}
    assert easy["longest_wait_ns"] == 100 * S
    assert [one["size"] for one in easy["sizes"]] == ["1 CPU", "2-4 CPUs"]
    assert [one["user"] for one in easy["users"]] == ["user2", "user1"]
    for groups in (easy["sizes"], easy["users"]):
        assert all(keys <= set(one) for one in groups)
        assert sum(one["jobs"] for one in groups) == 3
    assert easy["longest_waits"][0] == {
        "name": "0000002", "user": "user2", "cpus": 4, "gpus": 0, "submitted_after_ns": 0, "wait_ns": 100 * S
    }  # fmt: skip


def test_the_heaviest_users_are_shown_and_all_if_asked(spool: Command, tmp_path: Path) -> None:
    """Five users by what they used, and how many more there are; every one with --all-users."""
    path = tmp_path / "users.swf"
    lines = [f"{at} 0 -1 {100 * at} 1 -1 -1 1 2000 -1 1 {at} 1 1 1 -1 -1 -1\n" for at in range(1, 8)]
    path.write_text("; MaxProcs: 8\n" + "".join(lines))
    few = spool("simulate", path, "--policy", "easy").out
    rows = few[few.index("USER") : few.index("LONGEST WAITS")].splitlines()
    assert [row.split()[0] for row in rows[1:6]] == [f"user{at}" for at in (7, 6, 5, 4, 3)]
    assert rows[6] == "2 more users: --all-users"
    every = spool("simulate", path, "--policy", "easy", "--all-users").out
    assert "user1 " in every
    assert "more users" not in every


def test_a_csv_of_gpu_jobs(spool: Command, tmp_path: Path) -> None:
    """Without a column of processors, where all jobs ask for GPUs, --gpus says how large the machine is."""
    path = tmp_path / "gpus.csv"
    path.write_text("submit,run_time,gpus,name\n0,100,2,train\n0,50,1,eval\n")
    found = asked(spool, "simulate", path, "--gpus", 2, "--policy", "fifo")
    assert found["machine"] == {"cpus": 2, "memory_bytes": None, "gpus": 2}
    (fifo,) = found["policies"]
    assert [(one["name"], one["wait_ns"]) for one in fifo["longest_waits"]] == [("train", 50 * S), ("eval", 0)]
    assert fifo["gpu_utilisation"] == 250 / 300
    assert "specify --cpus, or --gpus" in spool("simulate", path).err
    packed = tmp_path / "gpus.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert "GPUs in use" in spool("simulate", packed, "--gpus", 2).out


def test_progress_is_shown_on_a_terminal_only(spool: Command, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bar for each policy; none in a pipe, and none with --json."""
    shown: list[str] = []

    @contextmanager
    def progress(what: str) -> Iterator[Any]:
        shown.append(what)
        yield lambda done, of: None

    assert spool("simulate", trace).err == ""
    monkeypatch.setattr(render, "progress", progress)
    asked(spool, "simulate", trace)
    assert shown == []
    spool("simulate", trace, "--policy", "fifo,easy")
    assert shown == ["simulating fifo", "simulating easy"]


def test_memory_counts_when_it_is_said_how_much_there_is(spool: Command, tmp_path: Path) -> None:
    """Two jobs of 1 MiB for each of 2 processors: beside each other, unless the machine has less than both need."""
    job = "0 -1 100 2 -1 -1 2 120 1024 1 1 1 1 1 -1 -1 -1\n"
    path = tmp_path / "m.swf"
    path.write_text(f"; MaxProcs: 8\n1 {job}2 {job}")
    assert policies(spool, path)["easy"]["makespan_ns"] == 100 * S
    assert policies(spool, path, "--memory", "3M")["easy"]["makespan_ns"] == 200 * S
    assert spool("simulate", path, "--memory", "1M").code == 2


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        ((), 2, "give either a trace or --history"),
        (("small.swf", "--history"), 2, "give either a trace or --history"),
        (("small.swf", "--policy", "random"), 2, f"the policies are {', '.join(SimulatedPolicy)}"),
        (("small.swf", "--policy", ","), 2, "--policy is empty"),
        (("gone.swf",), 1, "No such file"),
        (("bad.swf",), 4, "line 1: contains something that is not a number"),
        (("bare.swf",), 2, "specify --cpus"),
        (("cut.swf.gz",), 1, "cannot read the trace"),
        (("small.swf", "--plot", "x.png"), 2, "must be an .svg"),
        (("--history",), 4, "no run in it has both started and ended"),
        (("small.swf", "--limits", "0.5", "--no-limits"), 2, "cannot be combined"),
        (("small.swf", "--limits", "50"), 2, "--limits must be a number from 0 to 1, not 50"),
        (("small.swf", "--scale-load", "0"), 2, "--scale-load must be a number above 0, not 0"),
        (("small.swf", "--memory", "5"), 2, '--memory: "5" has no unit'),
    ],
)
def test_mistakes_are_told(spool: Command, tmp_path: Path, trace: Path, words: Any, code: int, why: str) -> None:
    """One line each, and the exit code of its class."""
    (tmp_path / "bad.swf").write_text("1 two\n")
    (tmp_path / "bare.swf").write_text(TRACE.partition("\n")[2])
    (tmp_path / "cut.swf.gz").write_bytes(gzip.compress(TRACE.encode())[:40])
    said = spool("simulate", *words)
    assert said.code == code
    assert why in said.err
    assert said.out == ""


def test_no_spool_is_needed_and_none_is_made(spool: Command, tmp_path: Path, trace: Path) -> None:
    """Without a spool the defaults of the configuration hold."""
    assert spool("--spool", tmp_path / "none", "simulate", trace).code == 0
    assert not (tmp_path / "none").exists()


def test_the_spool_s_configuration_is_simulated(spool: Command, spool_root: Path, trace: Path) -> None:
    """The policy `spool` keeps to the quotas of the spool."""
    (spool_root / "config.toml").write_text("[quotas.default_user]\nmax_running_cpus = 1\n")
    found = policies(spool, trace, "--policy", "spool")["spool"]
    assert found["left"] == 2
    assert "2 jobs never started" in spool("simulate", trace, "--policy", "spool").out


def ended(job: str, submitted: int, began: int | None, end: int, run: int = 1, **more: Any) -> bytes:
    """Return a line of history; instants in seconds after T0."""
    return render_history(
        Result(
            job, run, 1, State.FINISHED, "",
            submitted_at_ns=T0 + submitted * S,
            started_at_ns=None if began is None else T0 + began * S,
            ended_at_ns=T0 + end * S,
            user="alice",
            **({"request": Request(2), "grant": Grant(2)} | more),
        )
    )  # fmt: skip


def test_our_own_history(spool: Command, spool_root: Path) -> None:
    """Every run that began and ended is a job; a retry comes when the run before had ended; limits are job.toml's."""
    lines = [
        ended("a", 0, 5, 105, again="retry"),
        ended("never", 0, None, 50),
        ended("b", 0, 105, 205, request=Request(2, gpus=1, gpu_types=("A100",)), grant=Grant(2, gpu_uuids=("GPU-1",))),
        ended("a", 0, 205, 255, run=2),
        b'{"torn',
    ]
    (spool_root / "history.jsonl").write_bytes(b"".join(lines))
    metadir = spool_root / "jobs" / "b" / "1"
    metadir.mkdir(parents=True)
    (metadir / "job.toml").write_text('command = "true"\ntime_limit = "50s"\n')
    found = asked(spool, "simulate", "--history", "--cpus", 2, "--gpus", 1, "--policy", "fifo")
    assert (found["jobs"], found["incomplete"], found["never_fit"]) == (3, 2, 0)
    (fifo,) = found["policies"]
    # a from 0 to 100; b, cut at its limit, to 150; the second a, which came at 105, to 200.
    assert (fifo["makespan_ns"], fifo["max_queue"]) == (200 * S, 1)
    assert fifo["gpu_utilisation"] == 0.25
    assert "time limit" in spool("simulate", "--history", "--cpus", 2, "--gpus", 1).err
    assert asked(spool, "simulate", "--history", "--cpus", 2)["never_fit"] == 1


def test_resources_are_simulated(spool: Command, spool_root: Path) -> None:
    """Runs of the history wait for the resources of the configuration; what it no longer has is left out."""
    wanted = {name: Request(1, resources=((name, 1),)) for name in ("licence", "gone")}
    lines = [ended(f"j{at}", 0, 0, 100, request=wanted["licence"]) for at in range(3)]
    lines.append(ended("x", 0, 0, 100, request=wanted["gone"]))
    (spool_root / "history.jsonl").write_bytes(b"".join(lines))
    (spool_root / "config.toml").write_text("resources = { licence = 2 }\n")
    found = asked(spool, "simulate", "--history", "--cpus", 9, "--policy", "spool")
    assert (found["jobs"], found["never_fit"], found["policies"][0]["makespan_ns"]) == (3, 1, 200 * S)


def test_the_history_of_any_spool(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """Its file is a trace: with the limits of the metadirs beside it, without them where it is a copy."""
    metadir = spool_root / "jobs" / "b" / "1"
    metadir.mkdir(parents=True)
    (metadir / "job.toml").write_text('command = "true"\ntime_limit = "50s"\n')
    history = b"".join([ended("a", 0, 5, 105), ended("b", 0, 105, 205), ended("b", 0, 205, 255, run=2)])
    (spool_root / "history.jsonl").write_bytes(history)
    copy = tmp_path / "copy.jsonl.gz"
    copy.write_bytes(gzip.compress(history))
    words = ("--cpus", 2, "--policy", "fifo")
    there = asked(spool, "simulate", spool_root / "history.jsonl", *words)
    assert there["policies"] == [
        one | {"seconds": there["policies"][0]["seconds"]}
        for one in asked(spool, "simulate", "--history", *words)["policies"]
    ]
    assert there["limits_stated"] == 1
    found = asked(spool, "--spool", tmp_path / "none", "simulate", copy, *words)
    assert (found["jobs"], found["limits_stated"], found["policies"][0]["makespan_ns"]) == (3, 0, 250 * S)
    assert [one["name"] for one in found["policies"][0]["longest_waits"]] == ["b_2", "b", "a"]
    assert len({id(each.spec) for each in of_file(str(copy)).coming}) == 1  # equal requests share one


def test_waits_utilisation_and_queue_are_drawn(spool: Command, trace: Path, tmp_path: Path) -> None:
    """The distribution of waits above both curves, every policy that there is with a colour of its own."""
    path = tmp_path / "x.svg"
    said = spool("simulate", trace, "--policy", ",".join(SimulatedPolicy), "--plot", path)
    assert said.code == 0, said.err
    found = list(ET.fromstring(path.read_bytes()).iter())
    texts = {each.text for each in found if each.tag.endswith("text")}
    assert {*SimulatedPolicy, "share of jobs that waited at most"} <= texts
    lines = [each for each in found if each.get("stroke-width") == "1.3"]
    assert len(lines) == 3 * len(SimulatedPolicy)
    assert len({each.get("stroke") for each in lines}) == len(SimulatedPolicy)
    easy = lines[list(SimulatedPolicy).index(SimulatedPolicy("easy"))]
    # Two of three jobs start at once, the other after 100s: a third of the height, then all of it.
    heights = [float(point.split()[1]) for point in (easy.get("d") or "")[1:].split("L")]
    assert heights[0] > heights[-1]
    assert len(set(heights)) == 2


def test_a_share_of_the_jobs_may_be_preempted(spool: Command, tmp_path: Path) -> None:
    """How often that happens is told, how much work is done again, and what it means for those jobs and the others."""
    path = tmp_path / "long.csv"
    path.write_text("submit,run_time,cpus,time_limit\n0,36000,4,1d\n4000,1800,2,1h\n" + 8 * "99999,9,1,1m\n")
    said = spool("simulate", path, "--cpus", 4, "--policy", "easy,spool", "--preemptible", 1).out
    assert "spool: 1 preemption, " in said
    assert "easy: " not in said
    groups = policies(spool, path, "--cpus", 4, "--preemptible", 0.5)["spool"]["preemptible"]
    assert [group["group"] for group in groups] == ["others", "preemptible"]
    assert sum(group["jobs"] for group in groups) == 10
    assert policies(spool, path, "--cpus", 4)["spool"]["preemptions"] == 0


def test_gpus_of_several_types(spool: Command, tmp_path: Path) -> None:
    """A job gets the type that it names; --gpus says how many of each type there are, and how large they are."""
    path = tmp_path / "types.csv"
    path.write_text("submit,run_time,gpus,gpu_type\n0,100,1,H100\n0,100,1,\n0,100,1,A100\n")
    said = spool("simulate", path, "--gpus", "1x4090:24G,1xH100", "--policy", "spool").out
    assert "2 jobs on 2 CPUs, 2 GPUs (1 4090, 1 H100) (left out: 1 never fit)" in said
    assert "1 GPU, H100" in said
    assert asked(spool, "simulate", path, "--gpus", 2, "--policy", "spool")["jobs"] == 3
    wrong = spool("simulate", path, "--gpus", "H100")
    assert wrong.code == 2
    assert "4x4090:24G" in wrong.err


def test_a_simulation_of_the_history_needs_a_spool(spool: Command, spool_root: Path) -> None:
    """Where there is none, it has no history to read."""
    shutil.rmtree(spool_root)
    said = spool("simulate", "--history")
    assert (said.code, "no spool there" in said.err) == (5, True)


BOX = Machine(4, 1 << 40)


def job(name: str, submit: int = 0, runs: int = 100, cpus: int = 1, user: str = "ann", gpus: int = 0) -> SimulatedJob:
    """Return a job with a limit, in seconds."""
    spec = Spec("true", request=Request(cpus, gpus=gpus), time_limit_ns=500 * S)
    return SimulatedJob(name, spec, submit * S, runs * S, user)


def stating(coming: tuple[SimulatedJob, ...]) -> list[str]:
    """Return the users of the jobs that state a limit."""
    return [each.user for each in coming if each.spec.time_limit_ns is not None]


def test_a_part_of_the_users_states_limits() -> None:
    """A user states the limits of all jobs or of none, the same users each time, and as many as were asked for."""
    jobs = [job(str(at), user=f"user{at % 10}") for at in range(100)]
    half = stating(stating_limits(jobs, 0.5))
    assert (len(half), len(set(half))) == (50, 5)
    assert stating(stating_limits(jobs, 0.5)) == half
    assert stating(stating_limits(jobs, 0.0)) == []
    assert len(stating(stating_limits(jobs, 1.0))) == 100


@pytest.mark.parametrize("user", ["ann", "user"])
def test_jobs_of_one_user_or_of_nobody_known_are_drawn_one_by_one(user: str) -> None:
    """Else half of the users would be all of the jobs, or none."""
    jobs = [job(str(at), user=user) for at in range(200)]
    assert 70 < len(stating(stating_limits(jobs, 0.5))) < 130


def test_what_is_changed_makes_no_shapes() -> None:
    """Jobs that differ in memory or limits alone share one spec once that does not count, and all of them fit."""
    asked = (Request(1, memory_bytes=size << 40) for size in (0, 1, 2))
    specs = [Spec("true", request=request, time_limit_ns=request.memory_bytes) for request in asked]
    jobs = tuple(SimulatedJob(str(at), spec, 0, S) for at, spec in enumerate(specs))
    found = prepare(Workload("t", jobs), BOX, Policy(), Scenario(limits=0.0))
    assert len({id(each.spec) for each in found.coming}) == 1
    assert prepare(Workload("t", jobs), BOX, Policy(), Scenario(count_memory=True)).never_fit == 1


def test_the_load_is_work_by_room() -> None:
    """Processors times run time over processors times the span of submissions; of GPUs where that is more."""
    jobs = [job("a", 0, 100, 2), job("b", 100, 300, 1, gpus=2)]
    assert load_of(jobs, BOX) == (2 * 100 + 300) / (4 * 100)
    assert load_of(jobs, Machine(4, 1 << 40, gpus=imagined_gpus("4", jobs))) == 2 * 300 / (4 * 100)
    assert load_of(jobs[:1], BOX) is None


def test_arrivals_are_stretched_to_the_load_that_is_wanted() -> None:
    """Only the times between submissions change, from the first on."""
    jobs = (job("a", 50, 100, 2), job("b", 100, 100, 2), job("c", 150, 200, 4))
    found = prepare(Workload("t", jobs), BOX, Policy(), Scenario(load=1.5))
    assert (found.load_of_source, found.load) == (3.0, 1.5)
    assert [each.submit_at_ns for each in found.coming] == [50 * S, 150 * S, 250 * S]
    assert [(each.spec, each.duration_ns) for each in found.coming] == [(each.spec, each.duration_ns) for each in jobs]


def test_jobs_that_come_at_once_have_no_load_to_scale() -> None:
    """There is no span to stretch."""
    with pytest.raises(UsageError, match="--scale-load"):
        prepare(Workload("t", (job("a"), job("b"))), BOX, Policy(), Scenario(load=0.85))


def test_sizes_users_and_longest_waits_are_told() -> None:
    """Sizes ascend, processors before GPUs; users come by what they had; the longest waits have names."""
    box = Machine(16, 1 << 40, gpus=imagined_gpus("4", []))
    jobs = (
        job("small", 0, 10, 1, "bob"),
        job("large", 0, 100, 16),
        job("four", 1, 100, 4),
        job("five", 2, 50, 5),
        job("card", 3, 50, 1, "cem", gpus=3),
    )
    told: list[tuple[int, int]] = []
    imagined = prepare(Workload("t", jobs), box, Policy(), Scenario())
    found = simulate_policy(imagined, Policy(), SimulatedPolicy.FIFO, lambda done, of: told.append((done, of)))
    assert list(found.sizes) == ["1 CPU", "2-4 CPUs", "5-16 CPUs", "3-4 GPUs"]
    assert list(found.users) == ["ann", "cem", "bob"]
    assert sum(each.jobs for each in found.users.values()) == found.figures.jobs == 5
    assert found.longest_waits[0].waited_ns == found.figures.longest_wait_ns
    longest = {each.job.name: each.job for each in found.longest_waits}
    assert (longest["five"].spec.request.cpus, longest["five"].user) == (5, "ann")
