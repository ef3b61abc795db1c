"""Which processes of a run get a signal: the program, not its helpers, nor a shell that only waits for it."""

from __future__ import annotations

import sys

import pytest

from served import Served

SAVES = (
    "import signal, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
    "def save(*_):\n"
    "    time.sleep(0.2)\n"
    "    print('saved', 'alone' if child.poll() is None else 'without its helper', flush=True)\n"
    "    child.kill()\n"
    "    sys.exit(0)\n"
    "signal.signal(signal.SIGUSR1, save)\n"
    "print('ready', flush=True)\n"
    "time.sleep(1000)\n"
)
SCRIPT = f"cat > saves.py << 'END'\n{SAVES}END\n{sys.executable} saves.py\necho after $?\n"


def _signalled(shared: Served, name: str, *options: str) -> str:
    shared.says(name, "ready")
    done = shared.spool("signal", "USR1", name, *options)
    assert done.returncode == 0, done.stderr
    shared.wait_done(name)
    return shared.log(name).replace("\n", " ")


@pytest.mark.parametrize("shape", ["text", "list", "script", "nested", "plain"])
def test_the_program_gets_it_and_no_helper_or_shell(shared: Served, shape: str) -> None:
    """However the shell around the program is stated, and however many there are."""
    name, keys = f"saves-{shape}", {"workdir": str(shared.root.parent)}
    match shape:
        case "text":
            shared.drop(name, SCRIPT, **keys)
        case "list":
            (shared.root.parent / "list.sh").write_text(SCRIPT)
            shared.drop(name, ["sh", "list.sh"], **keys)
        case "script":
            shared.drop(name, ["job.sh"], script=f"#!/bin/sh\n{SCRIPT}", **keys)
        case "nested":
            (shared.root.parent / "inner.sh").write_text(SCRIPT)
            shared.drop(name, "(sh inner.sh) | cat; echo", **keys)
        case "plain":
            shared.drop(name, [sys.executable, "-c", SAVES], **keys)
    said = _signalled(shared, name)
    assert "saved alone" in said
    assert ("after 0" in said) == (shape != "plain")


def test_all_is_also_the_helpers(shared: Served) -> None:
    """`signal_to = "all"` is what it says, but a shell that waits is spared."""
    shared.drop("all", SCRIPT, workdir=str(shared.root.parent), signal_to="all", signal="USR1", time_limit="1h")
    assert "saved without its helper after 0" in _signalled(shared, "all")


WAITS = f"{sys.executable} -c \"import time; print('ready', flush=True); time.sleep(1000)\""
TRAP = f"trap 'echo trapped; kill $!' USR1; {WAITS} & wait; wait $!; echo $?"


def test_shell_is_the_command_alone(shared: Served) -> None:
    """`signal_to = "shell"`, or `--shell`, reaches a script, also one that does not handle it."""
    shared.drop("shell", f"{WAITS}; echo after", signal_to="shell", signal="USR1", time_limit="1h")
    shared.drop("by-option", f"{WAITS}; echo after")
    for name, options in (("shell", ()), ("by-option", ("--shell",))):
        assert "after" not in _signalled(shared, name, *options)
        assert shared.result(name)["exit_code"] == 138


def test_a_trap_in_the_shell_gets_it_unless_the_job_says_main(shared: Served) -> None:
    """A script that handles it decides for its program; `main` is as for Slurm's steps, past the batch shell."""
    shared.drop("with-trap", TRAP)
    said = _signalled(shared, "with-trap")
    assert "trapped" in said
    assert "143" in said
    shared.drop("past-trap", TRAP, signal_to="main", signal="USR1", time_limit="1h")
    said = _signalled(shared, "past-trap")
    assert "trapped" not in said
    assert "138" in said
