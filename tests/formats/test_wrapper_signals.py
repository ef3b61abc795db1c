"""Signals that a wrapper reads from a record, under the shells that run it on the nodes of a cluster."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from spool.formats.wrapper import EngineSurroundings
from spool.machine import identity
from support import wait_for
from wrapper_runs import Run, Runs, runs_below, surroundings, words_of

AROUND = EngineSurroundings("cluster", "HOSTNAME", "JOB_ID", (99, 100), watches=True)
COMMAND = "for name in USR1 USR2; do trap \"echo $name\" $name; done; trap 'echo TERM; exit 9' TERM; echo up\n"
COMMAND += "while :; do sleep 0.05; done"


@pytest.fixture
def runs(wrapper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Give runs under one shell after the other, whose pauses are short."""
    pause = tmp_path / "bin" / "sleep"
    pause.parent.mkdir()
    pause.write_text(f"#!/bin/sh\nexec {shutil.which('sleep')} 0.05\n")
    pause.chmod(0o755)
    monkeypatch.setenv("PATH", f"{pause.parent}:{os.environ['PATH']}")
    with runs_below(tmp_path, words_of(wrapper)) as made:
        yield made


def watched(runs: Runs, command: str = COMMAND, *, watches: bool = True) -> Run:
    """Return a run whose wrapper watches the record."""
    return runs.make(command, replace(surroundings(), engine=replace(AROUND, watches=watches)))


def tell(run: Run, text: str) -> None:
    """Append to the record, as a dispatcher does."""
    with (run.metadir / "signals").open("a") as record:
        record.write(text)


def session_of(run: Run) -> dict[int, bytes]:
    """Return the live processes of the session of a run, with their words."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        stat = identity.read_stat(int(entry))
        if stat is not None and stat.session == run.process.pid and not stat.dead:
            with suppress(OSError):  # it has just ended
                found[stat.pid] = Path(f"/proc/{entry}/cmdline").read_bytes()
    return found


def test_each_line_is_one_signal_and_nothing_stays_behind(runs: Runs) -> None:
    """It is passed on once, in its order; the process that watches ends with the wrapper, and so does its pause.

    Ignored is another word, a word with more around it, an empty line, and a line that is not complete yet.
    """
    run = watched(runs).start()
    run.says("up")
    tell(run, "KILL\nSTOP\n; touch /tmp/x\n\n9\n -9 1\nUSR1 \nTERM TERM\nUSR2\nUS")
    run.says("USR2")
    tell(run, "R1\n")
    run.says("USR1")
    tell(run, "TERM\n")
    run.finish()
    assert session_of(run) == {}
    assert (run.log, run.rc, run.text("signal")) == ("up\nUSR2\nUSR1\nTERM\n", 9, "TERM\n")


def test_a_record_that_is_there_before_the_wrapper_counts(runs: Runs) -> None:
    """The order may have come while the job waited in its engine, or came to its node."""
    run = watched(runs)
    tell(run, "TERM\n")
    run.run()
    assert run.text("signal") == "TERM\n"
    assert run.rc in (9, 143)


def test_no_file_and_a_pipe_in_its_place_hold_up_nothing(runs: Runs) -> None:
    """A job may put anything there."""
    run = watched(runs, "exit 3")
    os.mkfifo(run.metadir / "signals")
    run.run()
    assert (run.rc, session_of(run)) == (3, {})


@pytest.mark.parametrize("code", [0, 99, 100])
def test_a_short_run_ends_at_once_and_leaves_nothing(runs: Runs, code: int) -> None:
    """An engine may run a job again whose script ends with 99, and keep it after 100: the record has the code."""
    run = watched(runs, f"exit {code}")
    assert run.run() == (code if code < 99 else 1)
    assert (run.rc, session_of(run)) == (code, {})


def test_the_watcher_ends_when_its_wrapper_is_killed(runs: Runs) -> None:
    """It is not left behind for more than a moment."""
    run = watched(runs, "echo up; exec tail -f /dev/null").start()
    run.says("up")
    run.kill(signal.SIGKILL)
    run.finish()
    command = b"tail\0-f\0/dev/null\0"
    wait_for(lambda: list(session_of(run).values()) == [command], what="the end of the watcher")


@pytest.mark.parametrize("watches", [True, False])
def test_without_need_nothing_is_watched(runs: Runs, watches: bool) -> None:
    """On an engine that signals the script, there is no further process."""
    run = watched(runs, watches=watches).start()
    run.says("up")

    def of_the_script() -> int:
        return sum(b"run.sh" in words for words in session_of(run).values())

    wait_for(lambda: of_the_script() == 1 + watches, what="the end of what the script forks for a moment")
