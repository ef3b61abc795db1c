"""The descriptor of the file events."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spool.dispatcher.inotify import DirectoryWatcher, Hint


@pytest.mark.parametrize("events", [0, 1])
def test_a_watch_that_is_closed_leaves_nothing_open(tmp_path: Path, events: int) -> None:
    """A user may have few of the kernel's descriptors for file events; also one that had nothing to tell goes back."""
    before = os.listdir("/proc/self/fd")
    watch = DirectoryWatcher()
    watch.start({"here": str(tmp_path)})
    assert watch.problem is None
    for number in range(events):
        (tmp_path / str(number)).touch()
        watch.read()
        assert watch.take_hints()
    watch.close()
    assert os.listdir("/proc/self/fd") == before


def test_a_mode_is_news_where_somebody_wants_to_know_and_a_link_is_none(tmp_path: Path) -> None:
    """What is made readable is heard of in such a directory; a second name elsewhere, which moves make, is not."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    watch = DirectoryWatcher()
    watch.start({name: str(tmp_path / name) for name in ("here", "there")}, modes_of=("here",))
    for name in ("here", "there"):
        os.link(tmp_path / name / "file", tmp_path / "link")
        (tmp_path / "link").unlink()
        (tmp_path / name / "file").chmod(0o640)
    watch.read()
    watch.close()
    assert watch.take_hints() == [Hint("here", "file")]
