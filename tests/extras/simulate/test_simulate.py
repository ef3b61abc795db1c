"""`spool simulate`: a trace, or our own history, under one policy and another; and what a line of a trace becomes."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from calling import Command, asked
from spool.cli import render
from spool.core.errors import InvalidFile
from spool.core.model import SECOND_NS as S
from spool.core.model import Grant, Machine, Policy, Request, Result, Spec, State
from spool.core.runtimes import stem
from spool.extras.simulate.simulation import SimulatedJob
from spool.extras.simulate.workload import NO_LIMIT_BYTES, Workload, fitting, parse
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
    assert (fifo["mean_wait_ns"], fifo["makespan_ns"]) == ((100 + 190) * S // 3, 250 * S)
    assert (easy["mean_wait_ns"], easy["makespan_ns"]) == (100 * S // 3, 200 * S)
    assert fifo["utilisation"] == (200 + 400 + 50) / (4 * 250)


def test_what_is_left_out_is_counted(spool: Command, trace: Path) -> None:
    """A job that is larger than the machine never fits; one without a run time never ran."""
    for words, counted in (((), (3, 1, 1, 4)), (("--cpus", 2), (2, 2, 1, 2))):
        found = asked(spool, "simulate", trace, *words)
        assert (found["jobs"], found["never_fit"], found["incomplete"], found["machine"]["cpus"]) == counted


def test_each_figure_is_told_of_every_user_and_size(spool: Command, trace: Path) -> None:
    """As JSON all of them; sizes ascend, users come by what they had, and both add up to all jobs."""
    easy = policies(spool, trace)["easy"]
    keys = {"jobs", "left", "mean_wait_ns", "median_wait_ns", "wait_99_ns", "longest_wait_ns"}
    keys |= {"mean_bounded_slowdown", "utilisation", "gpu_utilisation"}
    assert easy["longest_wait_ns"] == 100 * S
    assert [one["size"] for one in easy["sizes"]] == ["1 CPU", "2-4 CPUs"]
    assert [one["user"] for one in easy["users"]] == ["user2", "user1"]
    for groups in (easy["sizes"], easy["users"]):
        assert all(keys <= set(one) for one in groups)
        assert sum(one["jobs"] for one in groups) == 3


def test_a_csv_of_gpu_jobs(spool: Command, tmp_path: Path) -> None:
    """GPUs are granted and counted as processors are; a file named .gz is unpacked."""
    path = tmp_path / "gpus.csv"
    path.write_text("submit,run_time,gpus,name\n0,100,2,train\n0,50,1,eval\n")
    words = ("--cpus", 2, "--gpus", 2, "--policy", "fifo")
    found = asked(spool, "simulate", path, *words)
    assert found["machine"] == {"cpus": 2, "memory_bytes": None, "gpus": 2}
    (fifo,) = found["policies"]
    assert (fifo["longest_wait_ns"], fifo["gpu_utilisation"]) == (50 * S, 250 / 300)
    packed = tmp_path / "gpus.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert "1 GPU " in spool("simulate", packed, *words).out


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
    found = asked(spool, "simulate", "--cpus", 2, "--gpus", 1, "--policy", "fifo")
    assert (found["jobs"], found["incomplete"], found["never_fit"]) == (3, 2, 0)
    (fifo,) = found["policies"]
    # a from 0 to 100; b, cut at its limit, to 150; the second a, which came at 105, to 200.
    assert fifo["makespan_ns"] == 200 * S
    assert fifo["gpu_utilisation"] == 0.25
    assert "time limit" in spool("simulate", "--cpus", 2, "--gpus", 1).err
    assert asked(spool, "simulate", "--cpus", 2)["never_fit"] == 1


def test_resources_are_simulated(spool: Command, spool_root: Path) -> None:
    """Runs of the history wait for the resources of the configuration; what it no longer has is left out."""
    wanted = {name: Request(1, resources=((name, 1),)) for name in ("licence", "gone")}
    lines = [ended(f"j{at}", 0, 0, 100, request=wanted["licence"]) for at in range(3)]
    lines.append(ended("x", 0, 0, 100, request=wanted["gone"]))
    (spool_root / "history.jsonl").write_bytes(b"".join(lines))
    (spool_root / "config.toml").write_text("resources = { licence = 2 }\n")
    found = asked(spool, "simulate", "--cpus", 9, "--policy", "spool")
    assert (found["jobs"], found["never_fit"], found["policies"][0]["makespan_ns"]) == (3, 1, 200 * S)


def test_gpus_of_several_types(spool: Command, tmp_path: Path) -> None:
    """A job gets the type that it names; --gpus says how many of each type there are, and how large they are."""
    path = tmp_path / "types.csv"
    path.write_text("submit,run_time,gpus,gpu_type\n0,100,1,H100\n0,100,1,\n0,100,1,A100\n")
    said = spool("simulate", path, "--cpus", 2, "--gpus", "1x4090:24G,1xH100", "--policy", "spool").out
    assert "2 jobs on 2 CPUs, 2 GPUs (1 4090, 1 H100) (left out: 1 never fit)" in said
    assert "1 GPU, H100" in said
    assert asked(spool, "simulate", path, "--cpus", 2, "--gpus", 2, "--policy", "spool")["jobs"] == 3
    wrong = spool("simulate", path, "--gpus", "H100")
    assert wrong.code == 2
    assert "4x4090:24G" in wrong.err


def test_a_preemptible_run_of_the_history_is_preempted_again(spool: Command, spool_root: Path) -> None:
    """Its job file says that it may be; how often that happens is told, and how much work is done again."""
    lines = [
        ended("long", 0, 0, 36_000, request=Request(4)),
        ended("short", 4000, 36_000, 37_800),
        *(ended(f"later{at}", 99_999, 99_999, 100_008, request=Request(1)) for at in range(8)),
    ]
    (spool_root / "history.jsonl").write_bytes(b"".join(lines))
    for name, said in (("long", "preemptible = true\ntime_limit = '1d'\n"), ("short", "time_limit = '1h'\n")):
        metadir = spool_root / "jobs" / name / "1"
        metadir.mkdir(parents=True)
        (metadir / "job.toml").write_text(f'command = "true"\n{said}')
    told = spool("simulate", "--cpus", 4, "--policy", "easy,spool").out
    assert "spool: 1 preemption, " in told
    assert "easy: " not in told


def test_what_does_not_count_makes_no_shapes() -> None:
    """Jobs that differ in memory alone share one spec where memory has no limit, and all of them fit."""
    asked_for = (Request(1, memory_bytes=size << 40) for size in (0, 1, 2))
    jobs = tuple(SimulatedJob(str(at), Spec("true", request=each), 0, S) for at, each in enumerate(asked_for))
    found = fitting(Workload("t", jobs), Machine(4, NO_LIMIT_BYTES), Policy())
    assert (len(found), len({id(each.spec) for each in found})) == (3, 1)
    assert len(fitting(Workload("t", jobs), Machine(4, 1 << 40), Policy())) == 2


# Traces: what a line of the Standard Workload Format, and of a CSV, becomes.


GIB = 1 << 30


def line(**columns: int) -> str:
    """Return a job's line: everything unknown but what is said, and a job of one processor for a minute."""
    names = ("job", "submit", "wait", "run", "processors", "cpu_time", "memory", "wanted_processors", "wanted_time",
             "wanted_memory", "status", "user", "group", "app", "queue", "partition", "before", "think")  # fmt: skip
    values = {"job": 1, "submit": 0, "run": 60, "processors": 1} | columns
    assert values.keys() <= set(names)
    return " ".join(str(values.get(name, -1)) for name in names)


def one(*lines: str, **columns: int) -> SimulatedJob:
    """Return the job of a CSV of two lines, or of a trace of one line."""
    (job,) = parse("\n".join(lines or (line(**columns),)), "t").coming
    return job


def test_what_was_requested_stands_above_what_was_used() -> None:
    """Processors, time and memory are the requested ones, else those that were used; a job runs for its run time."""
    job = one(submit=7, run=50, processors=2, memory=1, wanted_processors=4, wanted_time=600, wanted_memory=99, user=3)
    assert (job.submit_at_ns, job.duration_ns, job.user) == (7 * S, 50 * S, "user3")
    assert (job.spec.request.cpus, job.spec.time_limit_ns) == (4, 600 * S)
    assert job.spec.request.memory_bytes == 4 * 99 * 1024, "memory is in KiB for each processor"
    assert one(run=50, processors=2, memory=512).spec.request == Request(2, 2 * 512 * 1024)
    assert one().spec.request.memory_bytes is None


def test_every_column_is_read_in_any_order() -> None:
    """Numbers are seconds and bytes; memory is the whole job's."""
    names = "user, name,gpus,gpu_type,cpus,time_limit,memory,run_time,submit"
    job = one(names, "ann,train,2,H100,8,600,1073741824,50,7")
    assert (job.name, job.user, job.submit_at_ns, job.duration_ns) == ("train.0000000", "ann", 7 * S, 50 * S)
    assert job.spec.request == Request(8, GIB, 2, gpu_types=("H100",))
    assert job.spec.time_limit_ns == 600 * S


def test_what_is_not_said_is_unknown() -> None:
    """One processor, no GPU, no memory, no limit; a column that is missing, an empty field and -1 are the same."""
    bare = one("submit,run_time", "0,60")
    empty = one("submit,run_time,cpus,gpus,memory,time_limit,user,name", "0,60,,,,,,")
    negative = one("submit,run_time,cpus,gpus,memory,time_limit", "0,60,-1,-1,-1,-1")
    assert bare == empty == negative
    assert (bare.spec.request, bare.spec.time_limit_ns, bare.user) == (Request(1), None, "user")
    assert one("submit,run_time", "0.5,1.25").duration_ns == 5 * S // 4


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        *(
            (f"{line(**columns)}\n{line(job=2)}\n", 1)
            for columns in (
                {"run": -1}, {"processors": -1}, {"processors": 0}, {"submit": -1}, {"status": 2}, {"status": 4},
            )
        ),
        ("submit,run_time\n0,\n0,-1\n\n0,5\n", 2),
    ],
)  # fmt: skip
def test_what_says_too_little_is_counted_and_left_out(text: str, left_out: int) -> None:
    """A job without a run time or processors never ran, and a partial execution has its job's line beside it."""
    trace = parse(text, "t")
    assert (len(trace.coming), trace.incomplete) == (1, left_out)


@pytest.mark.parametrize("wanted_time", [-1, 0])
def test_a_limit_that_is_unknown_stays_unstated(wanted_time: int) -> None:
    """Where others state theirs, no planner may know how long a job is going to run that does not."""
    trace = parse(f"{line(wanted_time=70)}\n{line(run=50, wanted_time=wanted_time)}\n", "t")
    assert [(job.duration_ns, job.spec.time_limit_ns) for job in trace.coming] == [(60 * S, 70 * S), (50 * S, None)]
    assert trace.warnings == ()


def test_where_no_limit_is_known_the_run_times_stand_for_them() -> None:
    """So everybody takes synthetic traces who compares schedulers by them; a warning says it."""
    trace = parse(f"{line(run=50)}\n{line(run=0)}\n", "t")
    assert [job.spec.time_limit_ns for job in trace.coming] == [50 * S, S]
    (warning,) = trace.warnings
    assert "requested time" in warning


@pytest.mark.parametrize(
    "text",
    [
        "\n".join([line(wanted_time=60, run=1), line(wanted_time=60, user=2), line(wanted_time=61)]),
        "submit,run_time,cpus\n0,1,1\n0,2,1\n0,3,2\n",
    ],
)
def test_equal_requests_are_one_spec(text: str) -> None:
    """Jobs that ask for the same share one object, whoever they are and however long they run."""
    first, second, third = (job.spec for job in parse(text, "t").coming)
    assert first is second
    assert third is not first


@pytest.mark.parametrize(
    ("header", "cpus"),
    [
        ("; MaxNodes: 64\n;  MaxProcs: 128", 128),
        (";MaxNodes: 64 (32 + 32)", 64),
        ("; Computer: a\n; Note: MaxProcs: 3", None),
        ("; MaxProcs: -1", None),
        ("; MaxProcs: 8\n; MaxProcs: 9", 8),
    ],
)
def test_the_machine_is_in_the_header(header: str, cpus: int | None) -> None:
    """MaxProcs is the machine, else MaxNodes; the first line of a label counts."""
    assert parse(f"{header}\n{line()}\n", "t").cpus == cpus


def test_names_are_in_the_order_of_the_file_and_each_once() -> None:
    """A number makes the same name another, for which the same is learned; without a name the number is the name."""
    names = [job.name for job in parse("submit,run_time,name\n0,1,a\n0,2,a\n0,4,\n", "t").coming]
    assert names == ["a.0000000", "a.0000001", "0000002"]
    assert {stem(name) for name in names} == {"a", ""}


def test_an_unknown_column_is_told() -> None:
    """It may be a slip of the pen."""
    trace = parse("submit,run_time,time_limits\n0,1,7\n", "t")
    assert [warning.endswith(": time_limits") for warning in trace.warnings] == [True]


def test_a_field_of_any_size_is_read_or_refused() -> None:
    """A file of another kind may have one line."""
    with pytest.raises(InvalidFile, match="line 2: field larger than field limit"):
        parse("submit,run_time,name\n0,1," + "x" * 200_000, "t")
