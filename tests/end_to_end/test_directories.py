"""A directory of the spool that is taken away while a dispatcher serves it is made again, and nothing stands still."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from served import Served
from spool.core import layout
from support import wait_for

EVERYONE = (*layout.DIRECTORIES, layout.ROOM, layout.CURSORS)


def take_away(path: Path, how: str) -> None:
    """Remove a directory, or move it elsewhere."""
    if how == "rm -r":
        shutil.rmtree(path)
    else:
        path.rename(path.parent / "elsewhere")


@pytest.mark.parametrize("how", ["rm -r", "mv"])
@pytest.mark.parametrize("name", EVERYONE)
def test_a_directory_that_is_taken_away_is_made_again(served: Served, name: str, how: str) -> None:
    """Whichever directory goes, jobs start, end, are held and cancelled as before, by events and not by polling."""
    served.serves('look_every = "1h"\n')
    served.completes("before", "true")
    path = served.root / name
    if not path.is_dir():
        pytest.skip("it is not there until it is needed")
    mode = stat.S_IMODE(path.stat().st_mode)
    take_away(path, how)
    if name in layout.DIRECTORIES:
        served.until(path.is_dir, f"{name}/ again")
        wait_for(lambda: stat.S_IMODE(path.stat().st_mode) == mode)
    served.completes("after", "true")
    assert served.outcome("after") == "finished"
    served.drop("parked", "true", place="held")
    served.wait_place("parked", "held")
    served.move("parked", "held", "queued")
    served.wait_done("parked")
    served.begun("long", "sleep 1000")
    served.path("running", "long").unlink()
    served.wait_done("long")
    assert served.outcome("long") == "cancelled"
    served.until(lambda: not served.state()["problems"], "an end of all problems")
    assert served.lives()
    assert "network file system" not in served.said()


@pytest.mark.parametrize("name", layout.DIRECTORIES)
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_in_the_way_of_a_directory_is_told_and_never_deleted(served: Served, name: str, kind: str) -> None:
    """A file or a dangling link in the place of a directory is named as a problem; once it is moved, all goes on."""
    served.serves('look_every = "1h"\n')
    served.completes("before", "true")
    path = served.root / name
    path.rename(served.root / "elsewhere")
    aside = served.root / "aside"
    if kind == "file":
        aside.write_text("mine")
    else:
        aside.symlink_to("nowhere")
    while os.path.lexists(aside):
        try:
            os.rename(aside, path)
        except IsADirectoryError:  # the dispatcher was faster, and may have put something into it
            shutil.rmtree(path, ignore_errors=True)

    def told() -> bool:
        # Without .tmp/ state.json cannot be replaced; the log and `doctor` tell then.
        lines = served.said().splitlines() if name == layout.STAGING else served.state()["problems"]
        return any(
            f"directories of the spool: {name}: " in each and "move what is in the way" in each for each in lines
        )

    served.until(told, "the problem")
    assert "network file system" not in served.said()
    assert path.is_symlink() if kind == "link" else path.read_text() == "mine"
    path.rename(served.root / "moved")
    served.until(path.is_dir, f"{name}/ again")
    served.until(lambda: not served.state()["problems"], "the end of the problem")
    served.completes("after", "true")
    assert served.outcome("after") == "finished"


@pytest.mark.parametrize("how", ["rm -r", "mv"])
def test_running_that_is_taken_away_cancels_what_runs_with_a_record_of_each(live: Served, how: str) -> None:
    """To take `running/` away is to take each of its files away: every run is cancelled, and recorded."""
    for name in ("one", "two"):
        live.begun(name, "sleep 1000", cpus=0)
    take_away(live.root / "running", how)
    for name in ("one", "two"):
        live.wait_done(name)
        assert live.outcome(name) == "cancelled"
    assert sorted(line["job"] for line in live.history()) == ["one", "two"]


@pytest.mark.parametrize("how", ["rm -r", "mv"])
def test_jobs_that_are_taken_away_leave_a_record_of_each_run(live: Served, how: str) -> None:
    """Without `jobs/` a run has no place for its exit code: it is stopped by a cancel as any other, and recorded."""
    live.begun("one", "sleep 1000", requeue=False)
    take_away(live.root / "jobs", how)
    live.until((live.root / "jobs").is_dir, "jobs/ again")
    live.path("running", "one").unlink()
    live.until(lambda: live.history(), "a line of the history")
    assert [line["job"] for line in live.history()] == ["one"]
    assert live.places("one") in ([], ["done"])
