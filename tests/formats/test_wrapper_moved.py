"""The wrapper of a spool that is moved, or removed, while it works."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
from msgspec.structs import replace

from support import wait_for
from wrapper_runs import NOBODY, Run, Runs, become_poor, poor_directory, runs_below, surroundings, words_of

WAIT = "echo ready; until [ -e go ]; do sleep 0.01; done; "


def _moved(run: Run) -> Run:
    """Return the run at another place of the same file system."""
    elsewhere = run.metadir.parent / "elsewhere" / "1"
    elsewhere.parent.mkdir()
    run.metadir.rename(elsewhere)
    return Run(elsewhere, run.shell, run.process)


@pytest.mark.parametrize("code", [0, 7])
def test_the_records_follow_a_metadir_that_is_moved(runs: Runs, code: int) -> None:
    """After a move, all records and the output of the epilog are in the directory itself, and none at its old place."""
    run = runs.make(f"{WAIT} exit {code}", workdir=str(runs.root), epilog="echo after $SPOOL_EXIT_CODE").start()
    run.says("ready")
    moved = _moved(run)
    (runs.root / "go").touch()
    assert moved.finish() == code
    assert (moved.rc, moved.text("status")) == (code, "failed\n" if code else "finished\n")
    assert "cpu_time_ns" in (moved.text("usage") or "")
    assert moved.log == f"ready\nafter {code}\n"
    assert not run.metadir.exists()


def test_a_signal_after_a_move_is_on_record(runs: Runs) -> None:
    """What the wrapper was sent, and what a stop left there before, counts at the new place too."""
    run = runs.make(f"{WAIT}").start()
    run.says("ready")
    moved = _moved(run)
    moved.kill(signal.SIGTERM)
    assert moved.finish() == moved.rc == 143
    assert moved.text("signal") == "TERM\n"


def test_a_link_in_the_place_of_the_metadir_gets_no_record(runs: Runs) -> None:
    """The directory itself has the records, wherever it is; what a link at its old place leads to is another's."""
    theirs = runs.root / "theirs"
    theirs.mkdir()
    run = runs.make(f"{WAIT} exit 3", workdir=str(runs.root)).start()
    run.says("ready")
    moved = _moved(run)
    run.metadir.symlink_to(theirs)
    (runs.root / "go").touch()
    assert moved.finish() == moved.rc == 3
    assert list(theirs.iterdir()) == []


@pytest.mark.parametrize("made_again", [False, True])
def test_a_wrapper_whose_metadir_is_removed_ends(runs: Runs, made_again: bool) -> None:
    """There is no place for its exit code any more, though the wrapper holds the directory that was there."""
    run = runs.make(f"{WAIT} exit 3", workdir=str(runs.root)).start()
    run.says("ready")
    shutil.rmtree(run.metadir)
    if made_again:
        run.metadir.mkdir()
    (runs.root / "go").touch()
    assert run.finish() == 3
    assert not run.metadir.exists() or list(run.metadir.iterdir()) == []


@pytest.mark.parametrize("command", ["ls -l /proc/self/fd", ("ls", "-l", "/proc/self/fd")])
@pytest.mark.parametrize("odd", ["a b", "A"])
def test_no_command_inherits_the_metadir(runs: Runs, command: str | tuple[str, ...], odd: str) -> None:
    """A job, and what runs around it, has the descriptors that it would have without spool."""
    texts = {"prolog": "ls -l /proc/self/fd", "epilog": "ls -l /proc/self/fd"}
    for around in ({}, texts):
        run = runs.make(command, replace(surroundings(), become=""), environment={odd: "1"}, **around)
        assert run.run() == 0
        targets = [line.partition(" -> ")[2] for line in (run.log or "").splitlines()]
        assert str(run.metadir / "log") in targets
        assert str(run.metadir) not in targets


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody to whom a mode means something")
def test_a_metadir_that_cannot_be_held_is_used_by_its_path(wrapper: str) -> None:
    """Where the directory cannot be opened, the wrapper does what it can: a run that is not moved is as any other."""
    with poor_directory() as root, runs_below(root, words_of(wrapper)) as runs:
        run = runs.make("echo done; exit 3")
        os.chown(run.metadir, NOBODY, NOBODY)
        run.metadir.chmod(0o300)
        assert run.run(preexec_fn=lambda: become_poor(later=True)) == 3
        assert (run.rc, run.text("status"), run.log) == (3, "failed\n", "done\n")


def test_a_full_disk_after_a_move_keeps_the_exit_code(runs: Runs) -> None:
    """What is in the place of the exit code is waited for in the directory itself, until it is gone."""
    run = runs.make(f"{WAIT} exit 7", workdir=str(runs.root)).start()
    run.says("ready")
    moved = _moved(run)
    (moved.metadir / "rc").mkdir()
    (runs.root / "go").touch()
    wait_for(lambda: moved.text("status") == "failed\n", what="the end of the command")
    (moved.metadir / "rc").rmdir()
    assert moved.finish() == moved.rc == 7
