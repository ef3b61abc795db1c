"""The wrapper as the first process of a terminal: what it passes on, how it is cut off, and whom it waits for."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
from msgspec.structs import replace

from support import ROOT, wait_for
from wrapper_runs import COMPILED, Run, Runs, surroundings, words_of


class Terminal:
    """A terminal of which we are the program that shows it."""

    def __init__(self, run: Run) -> None:
        """Start the wrapper of *run* as the first process of the terminal's session."""
        self.pid, self.ours = os.forkpty()
        if self.pid == 0:
            os.execvp(run.shell[0], [*run.shell, str(run.metadir / "run.sh")])
        self.ended: int | None = None

    def close(self) -> None:
        """Take the terminal away, as a server does that dies."""
        if self.ours >= 0:
            os.close(self.ours)
            self.ours = -1

    def wait(self) -> int:
        """Wait for the end of the wrapper and return its exit code, or a signal as a negative number."""
        if self.ended is None:
            self.ended = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.ended


@pytest.fixture
def started(runs: Runs) -> Iterator[list[Terminal]]:
    """Give a place for terminals, all of which are closed and waited for in the end."""
    made: list[Terminal] = []
    yield made
    for terminal in made:
        terminal.close()
        if terminal.ended is None:
            with suppress(ProcessLookupError):
                os.kill(terminal.pid, signal.SIGKILL)
            terminal.wait()


def _start(runs: Runs, started: list[Terminal], command: str, **values: str) -> tuple[Run, Terminal]:
    run = runs.make(command, replace(surroundings(), stdin=None, terminal="own"), **values)
    started.append(Terminal(run))
    return run, started[-1]


def test_the_command_reads_from_the_terminal(runs: Runs, started: list[Terminal]) -> None:
    """What is typed arrives, the echo stays on the terminal, and the exit code is the command's."""
    run, terminal = _start(runs, started, "read -r x; echo got $x; exit 5")
    os.write(terminal.ours, b"this\n")
    assert terminal.wait() == 5
    assert (run.log, run.rc) == ("got this\n", 5)


@pytest.mark.parametrize("command", ["exec sleep 1000", "trap 'exit 0' HUP; echo up; while :; do sleep 0.05; done"])
def test_a_run_without_its_terminal_leaves_no_exit_code(runs: Runs, started: list[Terminal], command: str) -> None:
    """When the terminal is taken away the wrapper ends at once, and nothing says that the command has ended."""
    run, terminal = _start(runs, started, f"echo up; {command}", epilog="echo epilog")
    run.says("up")
    wait_for(lambda: run.text("status") == "running\n")  # written beside the command, which may have said "up" before
    terminal.close()
    assert terminal.wait() == 129
    assert run.rc is None
    assert run.text("status") == "running\n"


@pytest.mark.parametrize(("key", "code"), [(b"\x03", 130), (b"\x1c", 131), (None, 129)])
def test_keys_and_a_hangup_that_somebody_sends_end_the_command(
    runs: Runs, started: list[Terminal], key: bytes | None, code: int
) -> None:
    """INT and QUIT by key, and HUP while the terminal is there, end a command that has nothing against it."""
    run, terminal = _start(runs, started, "echo up; ulimit -c 0; exec sleep 1000")
    run.says("up")
    if key is None:
        os.kill(terminal.pid, signal.SIGHUP)
    else:
        wait_for(lambda: os.write(terminal.ours, key) and run.rc is not None)
    assert terminal.wait() == run.rc == code


def test_the_end_waits_for_the_viewer(runs: Runs, started: list[Terminal]) -> None:
    """The wrapper tells its viewer by closing a descriptor, and ends when the viewer has closed the other."""
    run = runs.make("true", replace(surroundings(), stdin=None, terminal="own"))
    told, to_viewer = os.pipe()
    from_viewer, shown = os.pipe()
    ends = fcntl.fcntl(to_viewer, fcntl.F_DUPFD, 20), fcntl.fcntl(from_viewer, fcntl.F_DUPFD, 20)
    moved = f"import os, sys; os.dup2({ends[0]}, 6); os.dup2({ends[1]}, 7); os.closerange(8, 4096); "
    run.start(sys.executable, "-c", f"{moved}os.execvp(sys.argv[1], sys.argv[1:])", pass_fds=ends)
    for fd in (to_viewer, from_viewer, *ends):
        os.close(fd)
    wait_for(lambda: run.rc == 0)
    assert os.read(told, 1) == b""
    assert run.process.poll() is None
    os.close(shown)
    os.close(told)
    assert run.finish() == 0


_BUSY = """
spool_terminal=shared spool_starting='' spool_child='' spool_before='' turns=0
spool_record() { :; }
trap 'spool_signal HUP 129' HUP
echo up
while [ "$turns" -lt 100000 ]; do turns=$((turns + 1)); done
echo whole
"""


def test_a_second_hangup_in_the_midst_of_the_first_cuts_nothing_off(wrapper: str) -> None:
    """A caller that ends hangs up by the terminal and by the kernel: dash runs one trap in the middle of another."""
    if wrapper == COMPILED:
        pytest.skip("it becomes a shell here")
    shell = words_of(wrapper)
    function = re.findall(
        r"^spool_signal\(\) \{\n.*?^\}\n", (ROOT / "src/spool/formats/wrapper.sh").read_text(), re.MULTILINE | re.DOTALL
    )
    words = [*shell, "-c", function[0] + _BUSY]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "up\n"
        while process.poll() is None:
            process.send_signal(signal.SIGHUP)
        assert process.stdout.read() == "whole\n"
