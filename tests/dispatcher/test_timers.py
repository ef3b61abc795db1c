"""How soon work that takes time is done again."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from spool.dispatcher import wakeup
from spool.dispatcher.loop import Dispatcher
from spool.dispatcher.wakeup import Pace
from spool.store.locked_spool import LockedSpool
from support import make_spool

MS = 1_000_000


@pytest.mark.parametrize(
    ("processor_ms", "passed_ms", "pause_ms"),
    [
        (2, 2, 400),  # what it costs
        (2, 100, 500),  # a busy machine: not two hundred times what it took
        (2, 600, 3000),  # a disk that hangs is no reason to hang for most of the time
        (0, 0, 0),
    ],
)
def test_work_is_left_for_as_long_as_it_costs(
    monkeypatch: pytest.MonkeyPatch, processor_ms: int, passed_ms: int, pause_ms: int
) -> None:
    """Waiting for a processor or a disk counts, but a fortieth as much as using one."""
    now = SimpleNamespace(processor=5 * MS, passed=7 * MS)
    clocks = SimpleNamespace(thread_time_ns=lambda: now.processor, monotonic_ns=lambda: now.passed)
    monkeypatch.setattr(wakeup, "time", clocks)
    measured = Pace(200)
    with measured:
        now.processor += processor_ms * MS
        now.passed += passed_ms * MS
    assert measured.pause_ns == pause_ms * MS


def test_one_slow_moment_does_not_keep_the_view_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write of `state.json` that had to wait for the processor is followed by the next one soon."""
    spool = LockedSpool(str(make_spool(tmp_path / "spool")))
    made = Dispatcher(spool)
    report = made.status
    moments = iter([0, 240 * MS])
    clocks = SimpleNamespace(thread_time_ns=lambda: 0, monotonic_ns=lambda: next(moments))
    monkeypatch.setattr(wakeup, "time", clocks)
    begun = time.monotonic_ns()
    report.write(None, None, paused=False)
    ended = time.monotonic_ns()
    report.changed()
    report.write(None, None, paused=False)
    due_ns = report._timer.at_ns
    assert due_ns - ended <= 1200 * MS <= due_ns - begun
    made.close()
    spool.release()
