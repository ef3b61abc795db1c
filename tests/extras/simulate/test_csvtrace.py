"""Traces as CSV: what a line becomes."""

from __future__ import annotations

import pytest

from spool.core.errors import InvalidFile
from spool.core.model import SECOND_NS as S
from spool.core.model import Request
from spool.extras.simulate.simulation import SimulatedJob
from spool.extras.simulate.traces import parse

GIB = 1 << 30


def one(header: str, line: str) -> SimulatedJob:
    """Return the job of a trace of one line."""
    (job,) = parse(f"{header}\n{line}\n", "t").coming
    return job


def test_every_column_is_read_in_any_order() -> None:
    """Numbers are seconds and bytes; memory is the whole job's."""
    names = "user, name,gpus,gpu_type,cpus,time_limit,memory,run_time,submit"
    job = one(names, "ann,train,2,H100,8,600,1073741824,50,7")
    assert (job.name, job.user, job.submit_at_ns, job.duration_ns) == ("train", "ann", 7 * S, 50 * S)
    assert job.spec.request == Request(8, GIB, 2, gpu_types=("H100",))
    assert job.spec.time_limit_ns == 600 * S


def test_what_is_not_said_is_unknown() -> None:
    """One processor, no GPU, no memory, no limit; a column that is missing, an empty field and -1 are the same."""
    bare = one("submit,run_time", "0,60")
    empty = one("submit,run_time,cpus,gpus,memory,time_limit,user,name", "0,60,,,,,,")
    negative = one("submit,run_time,cpus,gpus,memory,time_limit", "0,60,-1,-1,-1,-1")
    assert bare == empty == negative
    assert (bare.spec.request, bare.spec.time_limit_ns, bare.user) == (Request(1), None, "user")
    assert parse("submit,run_time\n0,1\n", "t").counts_cpus is False


def test_units_and_times_are_those_of_job_files() -> None:
    """A duration or a size with a unit, a date and time for the submission, and fractions of a second."""
    job = one("submit,run_time,time_limit,memory", "1970-01-01T00:01:00Z,1h30m,02:00:00,16G")
    assert (job.submit_at_ns, job.duration_ns) == (60 * S, 5400 * S)
    assert (job.spec.time_limit_ns, job.spec.request.memory_bytes) == (7200 * S, 16 * GIB)
    assert one("submit,run_time", "0.5,1.25").duration_ns == 5 * S // 4


def test_names_are_each_once_and_equal_requests_one_spec() -> None:
    """A name that comes again gets a number, and jobs that ask for the same share one object."""
    trace = parse("submit,run_time,name\n0,1,a\n0,2,a\n0,3,a_2\n0,4,\n", "t")
    assert [job.name for job in trace.coming] == ["a", "a_2", "a_2_2", "0000004"]
    assert len({id(job.spec) for job in trace.coming}) == 1


def test_a_job_that_never_ran_is_left_out() -> None:
    """Without a run time there is nothing to simulate."""
    trace = parse("submit,run_time\n0,\n0,-1\n\n0,5\n", "t")
    assert (len(trace.coming), trace.incomplete, trace.warnings) == (1, 2, ())


def test_odd_columns_and_lines_are_told_once() -> None:
    """A column that nobody knows may be a slip; a line of another length is read as far as it goes."""
    trace = parse("submit,run_time,time_limits\n0,1\n0,1,2,3\n", "t")
    assert len(trace.coming) == 2
    column, lines = trace.warnings
    assert column == "columns that mean nothing here are ignored: time_limits (did you mean time_limit?)"
    assert lines.startswith("2 lines have more or fewer than 3 columns, line 2 first")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("submit,cpus\n0,1\n", "line 1: has no column run_time"),
        ("submit,run_time,submit\n0,1,0\n", "line 1: names the column submit twice"),
        ("submit,run_time\n0,1\n0,soon\n", "line 3: run_time: "),
        ("submit,run_time,cpus\n0,1,two\n", "line 2: cpus: 'two' is not a number"),
        ("submit,run_time\n1e99,1\n", "too large"),
        ("submit,run_time\nnow!,1\n", "neither a number of seconds nor a time"),
        ("submit,run_time,memory\n0,1,3X\n", "line 2: memory: "),
        ("submit,run_time,name\n0,1," + "x" * 200_000, "line 2: field larger than field limit"),
        ("submit,run_time\n", "it has no job that ran"),
    ],
)
def test_what_is_wrong_is_told_by_line_and_column(text: str, why: str) -> None:
    """The line, the column and what would be right."""
    with pytest.raises(InvalidFile) as refused:
        parse(text, "the trace t")
    assert why in refused.value.problems[0].message
