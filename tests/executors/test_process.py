"""The process executor starts real wrappers."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spool.core.errors import InvalidValue, SpoolError, StartRefused
from spool.core.names import EXECUTORS
from spool.executors import NAMES, Launch, by_name, compiled
from spool.executors.local import LocalRun
from spool.executors.process import ProcessExecutor
from spool.formats import run_records
from spool.formats.config import Config
from spool.formats.wrapper import Assignments, render
from spool.machine import host, identity
from support import wait_for
from wrapper_runs import use_compiled

MARKS = {"SPOOL_DIR", "SPOOL_JOB", "SPOOL_RUN"}


class Starter:
    """Starts wrappers and ends what is left of them."""

    def __init__(self, root: Path, wrapper: str) -> None:
        self.root = root
        self.executor = ProcessExecutor(config=lambda: Config(wrapper=wrapper))
        self.started: list[LocalRun] = []

    def __call__(self, command: str | tuple[str, ...]) -> LocalRun:
        """Write a wrapper and start it."""
        metadir = self.root / str(len(self.started))
        metadir.mkdir()
        script = metadir / "run.sh"
        text = render(Assignments(str(metadir), command, self.executor.surroundings()))
        script.write_bytes(text)
        launch = Launch("job", 3, str(self.root), str(metadir), str(script))
        self.started.append(self.executor.start(launch))
        return self.started[-1]

    def finish(self, started: LocalRun) -> str:
        """Wait for its end and return its log."""
        assert started.pid is not None
        os.waitpid(started.pid, 0)
        return (self.root / str(self.started.index(started)) / "log").read_text()


@pytest.fixture(params=["sh", "auto"])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give each value of the key `wrapper`."""
    value: str = request.param
    if value == "auto":
        use_compiled(monkeypatch)
    return value


@pytest.fixture
def start(tmp_path: Path, setting: str) -> Iterator[Starter]:
    """Give what starts wrappers below the test's directory."""
    starter = Starter(tmp_path, setting)
    yield starter
    for started in starter.started:
        assert started.pid is not None
        with contextlib.suppress(ChildProcessError):  # reaped by the test
            if os.waitpid(started.pid, os.WNOHANG)[0] == 0:
                os.kill(started.pid, signal.SIGTERM)
                os.waitpid(started.pid, 0)
    starter.executor.close()


def test_an_executor_is_found_by_its_name() -> None:
    """Every name that a job file may give is an executor's or kept for later; any other is an error that names them."""
    assert set(EXECUTORS) == {*NAMES, "slurm"}
    for name in NAMES:
        assert by_name(name).name == name
    with pytest.raises(InvalidValue, match=r"cannot use executor 'proces': .*process"):
        by_name("proces")


def test_it_is_available_here() -> None:
    """On a machine with a shell and /proc nothing is in the way."""
    assert ProcessExecutor().unavailable() is None


def test_a_wrapper_is_told_who_it_is(start: Starter) -> None:
    """Its jid is its identity, and the command's stdin is empty all the same."""
    started = start("cat; echo ready; exec sleep 60")
    assert started.pid is not None
    log = start.root / "0" / "log"
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    jid = run_records.parse_jid((start.root / "0" / "jid").read_bytes())
    assert jid == identity.of_process(started.pid)
    assert log.read_text() == "ready\n"


def test_a_wrapper_has_a_session_of_its_own(start: Starter) -> None:
    """The wrapper leads its session, so that no signal to the dispatcher's group reaches it, and is our child."""
    started = start("echo hello; exec sleep 60")
    assert started.pid is not None
    wait_for((start.root / "0" / "jid").exists, what="the jid")  # before, it may be in the session of its server
    stat = identity.read_stat(started.pid)
    assert stat is not None
    assert (stat.session, stat.parent) == (started.pid, os.getpid())


def test_what_the_dispatcher_ignores_or_blocks_is_not_inherited(start: Starter) -> None:
    """A dispatcher started in the background ignores INT; its jobs do not, nor do they block any signal."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    try:
        started = start(("grep", "-E", "Sig(Ign|Blk)", "/proc/self/status"))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
    masks = [int(line.split()[1], 16) for line in start.finish(started).splitlines()]
    # glibc keeps two signals to itself and starts every process with these ignored; they are no valid ones.
    assert [number for mask in masks for number in signal.valid_signals() if mask >> (number - 1) & 1] == []
    assert len(masks) == 2


def test_a_job_can_be_interrupted_although_the_dispatcher_cannot(start: Starter) -> None:
    """INT ends a command whose dispatcher ignores INT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        started = start("kill -INT $$; echo survived")
    finally:
        signal.signal(signal.SIGINT, before)
    assert start.finish(started) == ""
    assert (start.root / "0/rc").read_text() == "130\n"


def test_a_wrapper_carries_the_marks_of_its_run_alone(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first moment the wrapper can be found by its environment, and no outer run's marks are in it."""
    for name, value in {"SPOOL_JOB": "outer", "SPOOL_ARRAY_INDEX": "1", "BASH_VERSION": "5"}.items():
        monkeypatch.setenv(name, value)
    started = start("env; sleep 0.2")
    environ = Path(f"/proc/{started.pid}/environ")
    # A program that has just begun has no environment to show for a moment.
    wait_for(lambda: b"SPOOL_RUN=" in environ.read_bytes())
    marks = sorted(entry for entry in environ.read_bytes().split(b"\0") if entry.startswith(b"SPOOL_"))
    assert marks == [f"SPOOL_DIR={start.root}".encode(), b"SPOOL_JOB=job", b"SPOOL_RUN=3"]
    found = start.finish(started).splitlines()
    assert "BASH_VERSION=5" not in found
    assert not [entry for entry in found if entry.startswith("SPOOL_")]


def test_a_job_begins_with_the_environment_of_a_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Nothing that this process was started with goes on to a job."""
    for name in ("SECRET_TOKEN", "VIRTUAL_ENV", "LC_ALL", "PYTHONPATH", "USER", "LANG", "PATH"):
        monkeypatch.setenv(name, "of-the-starter")
    executor = ProcessExecutor(config=lambda: Config(wrapper=setting))
    (tmp_path / "1").mkdir()
    text = render(Assignments(str(tmp_path / "1"), ("/usr/bin/env",), executor.surroundings()))
    (tmp_path / "run.sh").write_bytes(text)
    run = executor.start(Launch("job", 1, str(tmp_path), str(tmp_path / "1"), str(tmp_path / "run.sh")))
    assert run.pid is not None
    os.waitpid(run.pid, 0)
    executor.close()
    found = dict(line.split("=", 1) for line in (tmp_path / "1/log").read_text().splitlines())
    assert {key: found.get(key) for key in host.login_environment()} == host.login_environment()
    assert "of-the-starter" not in found.values()
    assert found.keys() - host.login_environment().keys() <= {"PWD", "OLDPWD", "SHLVL", "_"} | MARKS


def test_a_wrapper_has_no_descriptor_of_the_dispatchers(start: Starter) -> None:
    """Nothing that the dispatcher has open is open in a job."""
    reading, writing = os.pipe()
    try:
        started = start(("ls", "-l", "/proc/self/fd"))
        assert f"pipe:[{os.fstat(writing).st_ino}]" not in start.finish(started)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("call", ["posix_spawn", "memfd_create"])
def test_a_machine_without_room_refuses_a_start(
    start: Starter, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Where no process can be made, the executor says that the machine refuses it, which another moment may change.

    A server that cannot be made is none, and then a shell is started.
    """
    monkeypatch.setattr(compiled, "PROGRAM", "/no/such/program")
    monkeypatch.setattr(os, call, failing(number))
    with pytest.raises(StartRefused, match=rf"^/bin/sh was not started: {os.strerror(number)}$"):
        start("true")


def test_a_shell_that_is_not_there_is_no_shortage(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says something about the program will be the same in a moment, and is told in words."""
    monkeypatch.setattr(os, "posix_spawn", failing(errno.ENOENT))
    with pytest.raises(SpoolError, match=r"^cannot start job job: /bin/sh: No such file or directory$") as raised:
        start("true")
    assert not isinstance(raised.value, StartRefused)


def failing(number: int) -> Callable[..., int]:
    """Return what fails with that error."""

    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail
