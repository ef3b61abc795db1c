"""The descriptor of the file events."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from spool.dispatcher.inotify import DirectoryWatcher, Hint, NameChange


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


def test_what_the_kernel_drops_is_counted_and_all_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where events were lost, the watch says so once, and it goes on."""
    watch = DirectoryWatcher()
    watch.start({"here": str(tmp_path)})
    with monkeypatch.context() as patch:  # to drop one takes 16,384 others
        patch.setattr(os, "read", lambda *_: struct.pack("iIII", -1, 0x4000, 0, 0))  # IN_Q_OVERFLOW
        watch.read()
    assert (watch.overflows, watch.take_lost(), watch.take_lost()) == (1, True, False)
    (tmp_path / "later").touch()
    watch.read()
    watch.close()
    assert Hint("here", "later", NameChange.CAME) in watch.take_hints()


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_directory_that_took_the_place_of_another_is_watched(tmp_path: Path, how: str) -> None:
    """That a directory is gone or elsewhere calls for a look at everything; the next one of its name is watched."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    watch = DirectoryWatcher()
    watch.start({"here": str(here)})
    if how == "moved":
        here.rename(elsewhere)
    else:
        here.rmdir()
    watch.read()
    assert watch.take_lost()
    watch.renew()
    assert str(here) in (watch.problem or "")
    here.mkdir()
    watch.renew()
    assert watch.problem is None
    if how == "moved":
        (elsewhere / "theirs").touch()
    (here / "ours").touch()
    watch.read()
    watch.close()
    assert {hint.filename for hint in watch.take_hints()} == {"ours"}


def test_a_working_directory_that_is_gone_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher that was started in a directory which is removed later, or was before, has file events."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    watch = DirectoryWatcher()
    watch.start({"here": str(tmp_path)})
    watch.close()
    assert watch.problem is None
