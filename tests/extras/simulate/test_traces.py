"""Traces: what a line of the Standard Workload Format, and of a CSV, becomes."""

from __future__ import annotations

import pytest

from spool.core.errors import InvalidFile
from spool.core.model import SECOND_NS as S
from spool.core.model import Request
from spool.core.runtimes import stem
from spool.extras.simulate.simulation import SimulatedJob
from spool.extras.simulate.workload import parse

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
