"""Lines of history as the accounting reads them, against how they are written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from formats.some_records import results
from spool.core.model import Result, RunAccount
from spool.formats.run_records import (
    parse_history_line,
    parse_result,
    read_ended_runs,
    read_told,
    render_history,
)


def read_account(line: bytes) -> RunAccount | None:
    """Return what one line of history says; None for one that cannot be understood."""
    return next(iter(read_ended_runs(line)[0]), None)


@given(results)
def test_what_is_written_is_read(result: Result) -> None:
    """Every field that is counted, CPU time to the millisecond."""
    line = render_history(result)
    account = read_account(line)
    assert account is not None
    for name in ("job", "run", "attempt", "requeues", "again", "peak_memory_bytes", "submitted_at_ns", "ended_at_ns"):
        assert getattr(account, name) == getattr(result, name), name
    assert account.outcome == result.outcome.value
    assert account.cpus == result.grant.cpus
    elsewhere = result.grant.gpus_elsewhere
    assert len(account.gpus) == elsewhere if elsewhere else account.gpus == result.grant.gpu_uuids
    assert (account.resources or {}) == dict(result.grant.resources)
    cpu_time = None if result.cpu_time_ns is None else result.cpu_time_ns // 10**6 * 10**6
    assert account.cpu_time_ns == cpu_time
    assert read_told(line) == account.ended_at_ns


def test_a_peak_of_nothing_is_an_unknown_one() -> None:
    """Versions that wrote 0 for runs that nobody had looked at are understood, in every reader."""
    line = b'{"job":"a","run":1,"outcome":"finished","peak_memory_bytes":0}'
    account = read_account(line)
    assert account is not None
    assert account.peak_memory_bytes is None
    assert parse_history_line(line).peak_memory_bytes is None
    record = b'job = "a"\nrun = 1\nattempt = 1\noutcome = "finished"\nreason = ""\npeak_memory_bytes = 0\n'
    assert parse_result(record).peak_memory_bytes is None


@given(st.binary(max_size=60))
def test_no_bytes_are_an_error(data: bytes) -> None:
    """What is no line of history is nothing, whatever it is."""
    assert read_account(data) is None
    assert read_told(data) is None
