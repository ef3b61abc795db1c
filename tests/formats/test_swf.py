"""The Standard Workload Format: what a line of a trace becomes."""

from __future__ import annotations

import pytest

from spool.core.errors import InvalidFile
from spool.core.model import SECOND_NS as S
from spool.formats import swf


def line(**columns: int) -> str:
    """Return a job's line: everything unknown but what is said, and a job of one processor for a minute."""
    names = ("job", "submit", "wait", "run", "processors", "cpu_time", "memory", "wanted_processors", "wanted_time",
             "wanted_memory", "status", "user", "group", "app", "queue", "partition", "before", "think")  # fmt: skip
    values = {"job": 1, "submit": 0, "run": 60, "processors": 1} | columns
    assert values.keys() <= set(names)
    return " ".join(str(values.get(name, -1)) for name in names)


def one(**columns: int) -> swf.Coming:
    """Return the job of a trace of one line."""
    (job,) = swf.parse(line(**columns).encode(), "t").coming
    return job


def test_what_was_requested_stands_above_what_was_used() -> None:
    """Processors, time and memory are the requested ones; a job runs for its run time."""
    job = one(submit=7, run=50, processors=2, memory=1, wanted_processors=4, wanted_time=600, wanted_memory=99, user=3)
    assert (job.submit_at_ns, job.duration_ns, job.user) == (7 * S, 50 * S, "user3")
    assert (job.spec.request.cpus, job.spec.time_limit_ns) == (4, 600 * S)
    assert job.spec.request.memory_bytes == 4 * 99 * 1024, "memory is in KiB for each processor"


def test_what_was_not_requested_is_what_was_used() -> None:
    """Without a request (-1) the processors, the run time and the memory that were used stand for it."""
    job = one(run=50, processors=2, memory=512)
    assert (job.spec.request.cpus, job.spec.time_limit_ns) == (2, 50 * S)
    assert job.spec.request.memory_bytes == 2 * 512 * 1024
    assert one().spec.request.memory_bytes is None


@pytest.mark.parametrize(
    "columns", [{"run": -1}, {"processors": -1}, {"processors": 0}, {"submit": -1}, {"status": 2}, {"status": 4}]
)
def test_what_says_too_little_is_counted_and_left_out(columns: dict[str, int]) -> None:
    """A job without a run time or processors never ran, and a partial execution has its job's line beside it."""
    trace = swf.parse(f"{line(**columns)}\n{line(job=2)}\n".encode(), "t")
    assert (len(trace.coming), trace.incomplete) == (1, 1)


def test_a_job_that_ran_for_no_second_still_has_a_limit() -> None:
    """Run times are rounded to seconds; 0 is a run, of at most a second."""
    job = one(run=0)
    assert (job.duration_ns, job.spec.time_limit_ns) == (0, S)


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
    assert swf.parse(f"{header}\n{line()}\n".encode(), "t").cpus == cpus


def test_names_are_in_the_order_of_the_file_and_each_once() -> None:
    """Numbers of jobs may come twice in a trace; every line is a job of its own."""
    trace = swf.parse("\n".join([line(job=5), line(job=5), line(job=1)]).encode(), "t")
    names = [job.name for job in trace.coming]
    assert names == sorted(set(names))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{line()}\n1 2 3\n", "line 2: has 3 columns; a line of the Standard Workload Format has 18"),
        (line().replace("60", "x"), "line 1: has something in it that is no number"),
        (line().replace("60", "nan"), "line 1: has something in it that is no number"),
        (line().replace("60", "9" * 30), "line 1: has a number in it that is too large"),
        ("; MaxProcs: 1\n", "it has no job that ran"),
        ("", "it has no job that ran"),
    ],
)
def test_what_is_no_trace_is_told_by_line(text: str, why: str) -> None:
    """A file of another kind is refused, with the line."""
    with pytest.raises(InvalidFile) as refused:
        swf.parse(text.encode(), "the trace t")
    assert refused.value.problems[0].message == why


def test_fractions_are_cut_off() -> None:
    """Some archives write seconds with a fraction."""
    (job,) = swf.parse(line().replace("60", "60.9").encode(), "t").coming
    assert job.duration_ns == 60 * S
