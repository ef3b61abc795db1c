"""A run is its wrapper's family: the wrapper outlasts what its command leaves behind, and what was reached stands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from served import Served, alive
from spool.core.model import Stop, StopKind
from spool.formats.run_records import render_stop
from support import wait_for

EXECUTORS = ("process", "sh", "tmux")

# A process that nothing ties to its run but its descent: no session, no mark, no output; its pid is in a file.
_HIDDEN = "(env -i setsid /bin/sh -c 'echo $$ > {to}; exec sleep 1000' > /dev/null 2>&1 < /dev/null &); {after}"
_STUBBORN = (
    "setsid sh -c 'trap \"\" TERM; echo $$ > {to}; exec >/dev/null 2>&1; while :; do sleep 0.05; done' & {after}"
)
_WAITS = "until [ -s {to} ]; do sleep 0.01; done; exit {code}"


def _leaving(served: Served, name: str, how: str, code: int = 0) -> tuple[str, Path]:
    """Return a command that leaves a process behind, and where that writes its pid."""
    to = served.root.parent / f"{name}.pid"
    return how.format(to=to, after=_WAITS.format(to=to, code=code)), to


def _left(served: Served, name: str) -> bool:
    """Whether the command of run 1 has ended, and its wrapper waits for what it has left behind."""
    return served.record(name, "leftovers") is not None and (served.record(name, "rc") or "").endswith("\n")


@pytest.mark.parametrize("epilog", [None, "true"])
def test_what_hides_from_everything_is_its_wrappers_child(shared: Served, epilog: str | None) -> None:
    """It is ended with its run; a wrapper with an epilog is a shell, and hands over to a reaper."""
    name = f"hidden-{epilog}"
    command, to = _leaving(shared, name, _HIDDEN, 3)
    result = shared.completes(name, command, kill_grace="300ms", **({"epilog": epilog} if epilog else {}))
    assert (result["outcome"], result["exit_code"]) == ("failed", 3)
    assert not alive(int(to.read_text()))
    assert shared.record(name, "leftovers") is None


@pytest.mark.parametrize("order", ["time", "memory", "cancel", "stop"])
def test_what_was_reached_is_overruled_by_nothing(shared: Served, order: str) -> None:
    """While what the command left behind is being ended, its limits pass, or it is cancelled: its exit code counts."""
    name = f"reached-{order}"
    keys = {"time": {"time_limit": "1h"}, "memory": {"memory": "60M"}}.get(order, {})
    how = _STUBBORN
    if order == "memory":
        grows = "import os, signal, time; signal.signal(15, lambda *_: 0); x = bytearray(150 << 20); "
        grows += "print(os.getpid(), file=open('{to}', 'w'), flush=True); time.sleep(1000)"
        how = f'setsid {sys.executable} -c "{grows}" > /dev/null 2>&1 & {{after}}'
    command, _ = _leaving(shared, name, how, 7)
    shared.drop(name, command, kill_grace="6s" if order == "time" else "3s", retry={"max": 1, "on": [7]}, **keys)
    shared.until(lambda: _left(shared, name), "the end of its command")
    if order == "time":
        shared.shorten(name)
    elif order == "cancel":
        shared.spool("cancel", name)
    elif order == "stop":  # by a user's own hand
        (shared.root / "jobs" / name / "1" / "stop").write_bytes(
            render_stop(Stop(StopKind.CANCEL, "ann", time.time_ns()))
        )
    first = shared.until(lambda: shared.result(name), "the end of its first run")
    assert (first["outcome"], first["exit_code"]) == ("failed", 7)
    if order != "cancel":  # which takes the job back before its retry
        assert first["again"] == "retry"
    shared.spool("cancel", name)
    shared.until(lambda: shared.path("done", name).exists(), "the end of the job")


def test_a_wrapper_that_is_killed_while_it_waits_leaves_its_exit_code_and_nothing_else(shared: Served) -> None:
    """The record of leftovers says that it had not outlasted them: they are searched for, and ended."""
    command, to = _leaving(shared, "shot", _STUBBORN)
    shared.drop("shot", command, kill_grace="1s")
    shared.until(lambda: _left(shared, "shot"), "the end of its command")
    os.kill(shared.pid("shot"), signal.SIGKILL)
    result = shared.wait_done("shot")
    assert (result["outcome"], result["exit_code"]) == ("finished", 0)
    assert not alive(int(to.read_text()))


def test_a_dispatcher_that_a_job_starts_lives_on(shared: Served, executor: str) -> None:
    """A submission to another spool starts one: it is nobody's leftover, and neither are its jobs."""
    other = shared.root.parent / "other"
    words = f"{sys.executable} -P -m spool --spool {other} submit --name inner -- sleep 1000"
    try:
        shared.drop("outer", f"{words}; until [ -s {other}/jobs/inner/1/jid ]; do sleep 0.02; done")
        assert shared.wait_outcome("outer") == "finished", shared.log("outer")
        inner = int((other / "jobs/inner/1/jid").read_text().split()[0])
        assert alive(inner)
        assert not (other / "jobs/inner/1/rc").exists()
        (other / "running/inner.toml").unlink()
        wait_for(lambda: (other / "done/inner.toml").exists(), what="the end of the inner job, by its dispatcher")
        assert not alive(inner)
    finally:
        said = (other / ".tmp/dispatcher.start").read_text() if other.exists() else ""
        if said:
            os.kill(int(said), signal.SIGTERM)
            wait_for(lambda: not alive(int(said)), what="the end of that dispatcher")


_TRACER = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
print(libc.ptrace(0x4206, int(sys.argv[1]), 0, 0), flush=True)  # PTRACE_SEIZE
time.sleep(1000)
"""


def test_a_zombie_that_a_tracer_holds_keeps_no_run(shared: Served) -> None:
    """Only its exit code is left, and nobody but its tracer can take that."""
    command, to = _leaving(shared, "traced", _STUBBORN)
    shared.drop("traced", command, kill_grace="1s")
    shared.until(lambda: _left(shared, "traced"), "the end of its command")
    words = [sys.executable, "-c", _TRACER, to.read_text().strip()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as tracing:
        try:
            if tracing.stdout.readline() != "0\n":
                pytest.skip("no process may be traced here")
            assert shared.wait_outcome("traced") == "finished"
            assert Path(f"/proc/{to.read_text().strip()}/stat").read_text().split()[2] == "Z"
        finally:
            tracing.kill()


def _ended_unseen(served: Served, name: str) -> Path:
    """Run a job whose command ends, and leaves a process behind, while no dispatcher lives; return the pid's file."""
    served.start()
    gate = served.root.parent / "go"
    command, to = _leaving(served, name, _STUBBORN)
    served.drop(name, f"until [ -e {gate} ]; do sleep 0.01; done; {command}", kill_grace="300ms")
    served.until(lambda: served.record(name, "jid"), "its begin")
    served.kill()
    gate.touch()
    wait_for(lambda: _left(served, name), what="the end of its command")
    return to


def test_a_run_of_an_earlier_version_is_looked_after_once(served: Served) -> None:
    """Its wrapper ended with its command, and nothing in its records says whether it had left something behind."""
    to = _ended_unseen(served, "old")
    script = served.root / "jobs/old/1/run.sh"
    script.write_text(script.read_text().replace("spool_outlast", "spool_leave"))
    os.kill(served.pid("old"), signal.SIGKILL)
    wait_for(lambda: not alive(served.pid("old")), what="the end of its wrapper")
    (served.root / "jobs/old/1/leftovers").unlink()
    served.start()
    assert served.wait_outcome("old") == "finished"
    assert not alive(int(to.read_text()))


def test_views_without_a_dispatcher_tell_of_what_was_left_behind(served: Served) -> None:
    """The run is stopping while its wrapper waits, and the next dispatcher ends it."""
    to = _ended_unseen(served, "left")
    assert "stopping" in served.spool("ls", "left").stdout
    assert alive(int(to.read_text()))
    assert served.run() == 0
    assert served.outcome("left") == "finished"
    assert not alive(int(to.read_text()))


_FORKS = """
import os, time
for _ in range(100_000):
    if os.fork():
        time.sleep(0.002)
        os._exit(0)
    os.setsid()
"""


def test_a_tree_that_forks_without_end_is_finite_work(shared: Served) -> None:
    """Orphans of killed processes come back to the wrapper, so that none of them outlives the record of its end."""
    (shared.root.parent / "forks.py").write_text(_FORKS)
    names = [f"forks-{number}" for number in range(4)]
    command = f"echo up; {sys.executable} {shared.root.parent}/forks.py & exec sleep 1000"
    for name in names:
        shared.drop(name, command, kill_grace="100ms")
    for name in names:
        shared.says(name, "up")
        shared.path("running", name).unlink()
    for name in names:
        assert shared.wait_outcome(name) == "cancelled"
    mine = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    assert [path for path in mine if f"{shared.root.parent}/forks.py".encode() in _read(path)] == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
