"""The holder of a command that belongs into a terminal, with a test as the other side of its socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from spool.executors import holder
from support import PATIENCE_S, wait_for

_QUICK = """
import sys
from spool.executors import holder
holder.GRACE_S, holder._PATIENCE_S = 0.2, float(sys.argv[1])
sys.exit(holder.main(sys.argv[2], "KEPT,OTHER", sys.argv[3:]))
"""


class Side:
    """The other side of a holder's socket."""

    def __init__(self, tmp_path: Path) -> None:
        self.name = f"spool-test-{os.getpid()}-{os.urandom(4).hex()}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(holder.address(self.name))
        self.listener.listen(1)
        self.listener.settimeout(PATIENCE_S)
        self.log = tmp_path / "log"
        self.environment = {"SPOOL_JOB": "a", "SPOOL_RUN": "1", "SPOOL_METADIR": str(tmp_path)}
        self.variables: dict[str, str] = {}  # of the terminal
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *words: str, patience_s: float = PATIENCE_S) -> subprocess.Popen[bytes]:
        """Start a holder of a command; its grace is short."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _QUICK, str(patience_s), self.name, *words],
                env={**os.environ, **self.environment, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self.process

    def answer(self, *, nohup: bool = False) -> socket.socket:
        """Accept the holder, give the command the test's log in the place of a terminal, and wait for its begin."""
        connection, _ = self.listener.accept()
        connection.settimeout(PATIENCE_S)
        told, fds = holder.received(connection, 1)
        assert told == b"a/1"
        environment = os.memfd_create("environment")
        os.write(environment, json.dumps({"PATH": os.environ["PATH"], "ODD": "\udcff", **self.variables}).encode())
        terms = {"nohup": nohup, "direct": [0, 1, 2], "umask": 0o27}
        socket.send_fds(connection, [json.dumps(terms).encode()], [environment, fds[0], fds[0], fds[0]])
        for fd in (environment, *fds):
            os.close(fd)
        assert connection.recv(holder.LONGEST) == holder.BEGUN
        return connection

    def says(self, text: str) -> None:
        """Wait until the log has *text*."""
        wait_for(lambda: text in self.log.read_text(errors="replace"), what=text)


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    """Give the other side; its holder does not outlive the test."""
    made = Side(tmp_path)
    yield made
    made.listener.close()
    if made.process is not None:
        with suppress(ProcessLookupError):
            made.process.kill()
        made.process.wait()


def test_a_command_gets_the_environment_and_the_umask(side: Side) -> None:
    """Also what is no text in it; its exit code comes back, and is the holder's."""
    process = side.start("sh", "-c", 'umask; printf %s "$ODD" | od -An -tx1; exit 9')
    with side.answer() as connection:
        assert connection.recv(holder.LONGEST) == holder.EXITED + bytes([9])
    assert process.wait(PATIENCE_S) == 9
    assert side.log.read_text().split() == ["0027", "ff"]


def test_what_belongs_to_the_run_is_not_the_terminal_s(side: Side, tmp_path: Path) -> None:
    """What a prolog has appended to `$SPOOL_ENV`, and what the dispatcher names; the rest is the terminal's."""
    (tmp_path / "env").write_text("# TERMINAL=x\nADDED=a=b\n")
    side.environment |= {"ADDED": "run's", "KEPT": "run's", "OTHER": "run's", "REST": "run's"}
    side.variables = dict.fromkeys(("ADDED", "KEPT", "OTHER", "REST"), "terminal's")
    side.start("sh", "-c", "echo $ADDED $KEPT $OTHER $REST")
    with side.answer() as connection:
        assert connection.recv(holder.LONGEST) == holder.EXITED + bytes([0])
    assert side.log.read_text() == "run's run's run's terminal's\n"


def test_a_program_that_is_not_there_is_named(side: Side) -> None:
    """The exit code is 127, as a shell's."""
    process = side.start("no-such-program")
    with side.answer() as connection:
        assert connection.recv(holder.LONGEST) == holder.EXITED + bytes([127])
    assert process.wait(PATIENCE_S) == 127
    assert "spool: cannot execute no-such-program: No such file or directory" in side.log.read_text()


def test_a_command_that_ignores_the_hang_up_is_killed(side: Side) -> None:
    """HUP, then KILL after the grace."""
    process = side.start("sh", "-c", "trap 'echo hung up' HUP; echo ready; while :; do sleep 0.02; done")
    connection = side.answer()
    side.says("ready")
    connection.close()
    assert process.wait(PATIENCE_S) == 128 + signal.SIGKILL
    assert "hung up" in side.log.read_text()


def test_only_what_the_wrapper_passes_on_is_passed_on(side: Side) -> None:
    """A signal of the parent goes to the command; one of another process does not, as it signals the command itself."""
    process = side.start(
        "sh", "-c", "trap 'echo told' USR1; trap 'exit 3' TERM; echo ready; while :; do sleep 0.02; done"
    )
    with side.answer() as connection:
        side.says("ready")
        subprocess.run(["sh", "-c", f"kill -s USR1 {process.pid}"], check=True)
        process.terminate()
        assert connection.recv(holder.LONGEST) == holder.EXITED + bytes([3])
    assert process.wait(PATIENCE_S) == 3
    assert "told" not in side.log.read_text()


def test_a_terminal_that_does_not_answer_is_not_waited_for(side: Side) -> None:
    """The room of the run is not kept for a caller that is stopped, or gone."""
    assert side.start("true", patience_s=0.2).wait(PATIENCE_S) == 129
    assert "the terminal of this job does not answer" in side.log.read_text()
    side.listener.close()
    assert side.start("true").wait(PATIENCE_S) == 129
    assert "the terminal of this job is gone" in side.log.read_text()


def test_another_user_is_not_answered(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name can be taken and a socket connected to by any user, so both sides ask the kernel."""
    side.start("true")
    connection, _ = side.listener.accept()
    assert holder.is_ours(connection)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert not holder.is_ours(connection)
    connection.close()
