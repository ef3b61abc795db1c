"""Lines of history as the accounting reads them, against how they are written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spool.core.model import Grant, Result, State
from spool.formats.run_records import (
    parse_history_line,
    parse_result,
    read_ended_runs,
    read_told,
)


def read_run(line: bytes) -> Result | None:
    """Return the run in one line of history; None for one that cannot be understood."""
    return next(iter(read_ended_runs(line)[0]), None)


def test_only_the_engine_knows_the_gpus_of_a_run_elsewhere() -> None:
    """Each counts as one that no other run had; an edited line may claim any number."""
    run = Result("a", 2, 1, State.FINISHED, "", grant=Grant(gpus_elsewhere=2))
    assert run.gpus == ("a:2:0", "a:2:1")
    assert len(replace(run, grant=Grant(gpus_elsewhere=10**9)).gpus) == 1024


def test_a_peak_of_nothing_is_an_unknown_one() -> None:
    """Versions that wrote 0 for runs that nobody had looked at are understood, in every reader."""
    line = b'{"job":"a","run":1,"outcome":"finished","peak_memory_bytes":0}'
    run = read_run(line)
    assert run is not None
    assert run.peak_memory_bytes is None
    assert parse_history_line(line).peak_memory_bytes is None
    record = b'job = "a"\nrun = 1\nattempt = 1\noutcome = "finished"\nreason = ""\npeak_memory_bytes = 0\n'
    assert parse_result(record).peak_memory_bytes is None


@given(st.binary(max_size=60))
def test_no_bytes_are_an_error(data: bytes) -> None:
    """What is no line of history is nothing, whatever it is."""
    assert read_run(data) is None
    assert read_told(data) is None
