"""The descriptor of the file events."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spool.dispatcher.watch import Watch


@pytest.mark.parametrize("events", [0, 1])
def test_a_watch_that_is_closed_leaves_nothing_open(tmp_path: Path, events: int) -> None:
    """A user may have few of the kernel's descriptors for file events; also one that had nothing to tell goes back."""
    before = os.listdir("/proc/self/fd")
    watch = Watch()
    watch.start({"here": str(tmp_path)})
    assert watch.problem is None
    for number in range(events):
        (tmp_path / str(number)).touch()
        watch.read()
        assert watch.hints
    watch.close()
    assert os.listdir("/proc/self/fd") == before
