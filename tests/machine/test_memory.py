"""What processes use: memory and CPU time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from machine.fake_proc import FakeProc
from spool.machine import memory
from support import wait_for

PAGE = os.sysconf("SC_PAGE_SIZE")
TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    """Show two processes that share half of what they have."""
    made = FakeProc(tmp_path)
    for pid in (50, 51):
        made.process(pid, times=(1, 2, 30, 40))
        (made.root / f"{pid}/statm").write_text("900 100 50 1 0 9 0\n")
        (made.root / f"{pid}/smaps_rollup").write_text(
            "00400000-7ffe ---p [rollup]\nRss: 400 kB\nPss: 300 kB\nPss_Dirty: 9 kB\n"
        )
        (made.root / f"{pid}/status").write_text("Name:\tsh\nVmPeak:\t  999 kB\nVmHWM:\t     700 kB\n")
    return made


def test_sizes_and_times_are_sums(proc: FakeProc) -> None:
    """Each figure is the sum over the processes; what a process has waited for is a part of its time."""
    both = [50, 51]
    assert memory.rss_bytes(both, proc=str(proc)) == 2 * 100 * PAGE
    assert memory.pss_bytes(both, proc=str(proc)) == 2 * 300 * 1024
    assert memory.peak_rss_bytes(both, proc=str(proc)) == 2 * 700 * 1024
    assert memory.cpu_time_ns(both, proc=str(proc)) == 2 * 73 * TICK_NS


def test_who_has_ended_uses_nothing(proc: FakeProc) -> None:
    """A process that is not there any more adds nothing, and is no error."""
    for figure in (memory.rss_bytes, memory.pss_bytes, memory.peak_rss_bytes, memory.cpu_time_ns):
        assert figure([50, 99], proc=str(proc)) == figure([50], proc=str(proc)) > 0
        assert figure([], proc=str(proc)) == 0


def test_who_does_not_show_its_share_counts_in_full(proc: FakeProc) -> None:
    """Where the proportional size cannot be read, the resident size stands for it."""
    (proc.root / "51/smaps_rollup").unlink()
    assert memory.pss_bytes([50, 51], proc=str(proc)) == 300 * 1024 + 100 * PAGE


def test_a_real_process_is_measured() -> None:
    """A process that holds 30 MB shows at least that in every figure."""
    held = 30_000_000
    program = f"x = b'x' * {held}; print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        rss, pss = memory.rss_bytes([child.pid]), memory.pss_bytes([child.pid])
        assert held <= pss <= memory.peak_rss_bytes([child.pid])
        assert held <= rss
        wait_for(lambda: memory.cpu_time_ns([child.pid]) > 0)
        child.communicate(b"\n", 20)
    assert memory.rss_bytes([child.pid]) == 0
