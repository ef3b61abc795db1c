"""The runs of this machine, however they were started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from served import alive
from spool.executors import local
from spool.executors.local import LocalProcesses, LocalRun
from spool.machine import identity, processes
from spool.machine.processes import Sought
from support import wait_for


class Families:
    """Wrappers without a script: subreapers that run a text, each a child of this process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proved: set[str] = set()  # jobs whose records say that the wrapper has outlasted all
        self.engine = LocalProcesses(str(root), outlasted=lambda job, run, *, exited: exited or job in self.proved)

    def start(self, job: str, text: str) -> LocalRun:
        """Start a wrapper that runs *text*, and outlasts what that leaves behind."""
        marks = {**os.environ, "SPOOL_DIR": str(self.root), "SPOOL_JOB": job, "SPOOL_RUN": "1"}
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", _WRAPPER, text], marks, setsid=True)
        run = self.engine.child(job, 1, pid)
        wait_for(lambda: (self.root / job).exists(), what="what the text of the wrapper makes")
        return run

    def end(self, run: LocalRun, *, kill: bool) -> None:
        """End the run, as the dispatcher does."""

        def gone() -> bool:
            list(self.engine.reap())
            return run in self.engine.terminate({run: kill})

        wait_for(gone, what="the end of the run")


_WRAPPER = """
import ctypes, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: None)
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
subprocess.run(["sh", "-c", sys.argv[1]])
try:
    while True:
        os.wait()
except ChildProcessError:
    os._exit(0)  # a signal at this moment must not find the handlers of Python gone
"""


@pytest.fixture
def families(tmp_path: Path) -> Iterator[Families]:
    """Give families, and leave none."""
    made = Families(tmp_path)
    yield made
    for pid, stat in processes.search([Sought(name, 1, str(tmp_path)) for name in "abc"]).members.items():
        assert not stat, pid


def test_nobody_looks_at_the_machine_for_a_wrapper_that_has_ended_by_itself(
    families: Families, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for a child nor for one that another dispatcher has started, whose records prove it."""
    child = families.start("a", f": > {families.root}/a")
    adopted = families.engine.no_child(
        "b", 1, identity.of_process(families.start("c", f": > {families.root}/c").pid or 0)
    )
    families.proved.add("b")
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_walk", None)
        for run in (child, adopted):
            wait_for(lambda run=run: list(families.engine.reap()) is not None and run.wrapper() is None)
            assert not run.left_behind()
            assert run in families.engine.terminate({run: False})


@pytest.mark.parametrize("proved", [False, True])
def test_what_a_killed_wrapper_leaves_is_searched_for_and_ended(
    families: Families, monkeypatch: pytest.MonkeyPatch, proved: bool
) -> None:
    """Unless its records prove that nothing was left by then."""
    # On a machine where processes come and go no search is certain; what it finds is never given up.
    monkeypatch.setattr(local, "SEARCH_NS", 0)
    run = families.start("a", f": > {families.root}/a; exec sleep 1000")
    (sleeper,) = run.members()
    os.kill(run.pid or 0, signal.SIGKILL)
    wait_for(lambda: [*families.engine.reap()] == [run])
    if proved:
        families.proved.add("a")
    assert run.left_behind() is not proved
    families.end(run, kill=False)
    assert alive(sleeper.pid) is proved
    families.proved.clear()
    families.end(run, kill=True)
    assert not alive(sleeper.pid)


def test_a_run_whose_wrapper_is_unknown_is_not_suspended(tmp_path: Path) -> None:
    """Its wrapper could be stopped with the rest, and tmux continues a session whose first process is stopped."""
    marks = {"SPOOL_DIR": str(tmp_path), "SPOOL_JOB": "a", "SPOOL_RUN": "1"}
    program = [sys.executable, "-c", "print(flush=True); input()"]
    read, write = os.pipe()
    held, gate = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, held, 0), (os.POSIX_SPAWN_DUP2, write, 1)]
    pid = os.posix_spawn(sys.executable, program, marks, file_actions=actions)
    try:
        assert os.read(read, 1)
        engine = LocalProcesses(str(tmp_path))
        run = engine.no_child("a", 1, None)
        assert engine.suspend({run: True}) == []
        stat = identity.read_stat(pid)
        assert stat.state != "T"
        assert engine.suspend({run: False}) == [run]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for end in (read, write, held, gate):
            os.close(end)
