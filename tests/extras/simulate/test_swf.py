"""The Standard Workload Format: what a line of a trace becomes."""

from __future__ import annotations

import pytest

from spool.core.errors import InvalidFile
from spool.core.model import SECOND_NS as S
from spool.extras.simulate.simulation import SimulatedJob
from spool.extras.simulate.traces import parse


def line(**columns: int) -> str:
    """Return a job's line: everything unknown but what is said, and a job of one processor for a minute."""
    names = ("job", "submit", "wait", "run", "processors", "cpu_time", "memory", "wanted_processors", "wanted_time",
             "wanted_memory", "status", "user", "group", "app", "queue", "partition", "before", "think")  # fmt: skip
    values = {"job": 1, "submit": 0, "run": 60, "processors": 1} | columns
    assert values.keys() <= set(names)
    return " ".join(str(values.get(name, -1)) for name in names)


def one(**columns: int) -> SimulatedJob:
    """Return the job of a trace of one line."""
    (job,) = parse(line(**columns), "t").coming
    return job


def test_what_was_requested_stands_above_what_was_used() -> None:
    """Processors, time and memory are the requested ones; a job runs for its run time."""
    job = one(submit=7, run=50, processors=2, memory=1, wanted_processors=4, wanted_time=600, wanted_memory=99, user=3)
    assert (job.submit_at_ns, job.duration_ns, job.user) == (7 * S, 50 * S, "user3")
    assert (job.spec.request.cpus, job.spec.time_limit_ns) == (4, 600 * S)
    assert job.spec.request.memory_bytes == 4 * 99 * 1024, "memory is in KiB for each processor"


def test_what_was_not_requested_is_what_was_used() -> None:
    """Without a request (-1) the processors and the memory that were used stand for it."""
    job = one(run=50, processors=2, memory=512)
    assert job.spec.request.cpus == 2
    assert job.spec.request.memory_bytes == 2 * 512 * 1024
    assert one().spec.request.memory_bytes is None


@pytest.mark.parametrize(
    "columns", [{"run": -1}, {"processors": -1}, {"processors": 0}, {"submit": -1}, {"status": 2}, {"status": 4}]
)
def test_what_says_too_little_is_counted_and_left_out(columns: dict[str, int]) -> None:
    """A job without a run time or processors never ran, and a partial execution has its job's line beside it."""
    trace = parse(f"{line(**columns)}\n{line(job=2)}\n", "t")
    assert (len(trace.coming), trace.incomplete) == (1, 1)


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
    assert trace.warnings == (
        "no job states a requested time; the run times serve as limits, more exact than real ones",
    )


def test_equal_requests_are_one_spec() -> None:
    """Jobs that ask for the same share one object, whoever they are and however long they run."""
    trace = parse("\n".join([line(wanted_time=60, run=1), line(wanted_time=60, user=2), line(wanted_time=61)]), "t")
    first, second, third = (job.spec for job in trace.coming)
    assert first is second
    assert third is not first


@pytest.mark.parametrize("text", [" ".join(line().split()[:5]), f"{line()} 7 x"])
def test_lines_of_another_length_are_read_with_one_warning(text: str) -> None:
    """What is missing is unknown, what is too many is ignored, and however many there are it is told once."""
    trace = parse(f"{line()}\n{text}\n{text}\n", "t")
    assert [(job.duration_ns, job.spec, job.user) for job in trace.coming] == [(60 * S, one().spec, "user")] * 3
    warning, *_ = trace.warnings
    assert warning.startswith("2 lines have more or fewer than 18 columns, line 2 first")
    assert parse(line(wanted_time=9), "t").warnings == ()


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


@pytest.mark.parametrize(
    ("numbers", "names"),
    [((3, 5, 12), ["0000003", "0000005", "0000012"]), ((5, 5, 1), ["0000001", "0000002", "0000003"])],
)
def test_names_are_in_the_order_of_the_file_and_each_once(numbers: tuple[int, ...], names: list[str]) -> None:
    """A job is called by its number; by its place where numbers come twice or do not ascend."""
    trace = parse("\n".join(line(job=number) for number in numbers), "t")
    assert [job.name for job in trace.coming] == names


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{line()}\n1 two 3\n", "line 2: contains something that is not a number"),
        (
            "1 2 3",
            "it has no job that ran; 1 line has more or fewer than 18 columns, line 1 first; "
            "missing columns count as unknown, extra ones are ignored",
        ),
        (line().replace("60", "x"), "line 1: contains something that is not a number"),
        (line().replace("60", "nan"), "line 1: contains something that is not a number"),
        (line().replace("60", "9" * 30), "line 1: contains a number that is too large"),
        ("; MaxProcs: 1\n", "it has no job that ran"),
        ("", "it has no job that ran"),
    ],
)
def test_what_is_no_trace_is_told_by_line(text: str, why: str) -> None:
    """A file of another kind is refused, with the line."""
    with pytest.raises(InvalidFile) as refused:
        parse(text, "the trace t")
    assert refused.value.problems[0].message == why
