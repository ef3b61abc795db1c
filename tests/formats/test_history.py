"""Lines of history as the accounting reads them, against how they are written."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from formats.some_records import results
from spool.core.model import OUTCOMES, Result, RunAccount
from spool.formats import run_records
from spool.formats.run_records import (
    HISTORY,
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
    """Every field that is counted, instants to the microsecond and CPU time to the millisecond."""
    line = render_history(result)
    account = read_account(line)
    assert account is not None
    for name in ("job", "run", "attempt", "requeues", "again", "peak_memory_bytes"):
        assert getattr(account, name) == getattr(result, name), name
    assert account.outcome == result.outcome.value
    assert account.cpus == result.grant.cpus
    elsewhere = result.grant.gpus_elsewhere
    assert len(account.gpus) == elsewhere if elsewhere else account.gpus == result.grant.gpu_uuids
    assert (account.resources or {}) == dict(result.grant.resources)
    cpu_time = None if result.cpu_time_ns is None else result.cpu_time_ns // 10**6 * 10**6
    assert account.cpu_time_ns == cpu_time
    for name in ("submitted_at_ns", "started_at_ns", "ended_at_ns"):
        exact, read = getattr(result, name), getattr(account, name)
        assert (read is None) == (exact is None), name
        assert exact is None or abs(read - exact) <= 1000, name
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


@given(st.integers(0, 5_000_000_000 * 10**9), st.integers(0, 10**7))
def test_the_order_of_instants_stays(start: int, length: int) -> None:
    """What began when another ended does so when it is read, too: two runs in turn are never seen at once."""
    lines = [
        render_history(Result("a", 1, 1, next(iter(OUTCOMES)), "", started_at_ns=start, ended_at_ns=end))
        for end in (start, start + length)
    ]
    first, second = map(read_account, lines)
    assert first is not None
    assert second is not None
    assert first.ended_at_ns == first.started_at_ns == second.started_at_ns
    assert (second.ended_at_ns or 0) >= (second.started_at_ns or 0)


def test_the_fields_are_those_of_the_history() -> None:
    """But for those made of others, no field is read that no line has; a default, where there is one, is the same."""
    written = HISTORY.defaults()
    for field in msgspec.structs.fields(run_records._RunLine):
        if field.name.endswith("_ns") or field.name in ("gpu_percent", "gpu_energy_mj"):
            continue
        assert field.encode_name in written
        assert field.default in (msgspec.NODEFAULT, written[field.encode_name], written[field.encode_name] or None)


@given(st.binary(max_size=60))
def test_no_bytes_are_an_error(data: bytes) -> None:
    """What is no line of history is nothing, whatever it is."""
    assert read_account(data) is None
    assert read_told(data) is None
