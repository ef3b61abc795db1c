"""The process executor starts real wrappers."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from spool.core.errors import InvalidValue, SpoolError, StartRefused
from spool.core.layout import LOCAL_EXECUTORS
from spool.executors import by_name, compiled
from spool.executors.process import ProcessExecutor
from spool.machine import host
from support import wait_for
from wrapper_runs import Shop, record_of


def test_an_executor_is_found_by_its_name() -> None:
    """Any other name is an error that names them."""
    for name in LOCAL_EXECUTORS:
        assert by_name(name).name == name
    with pytest.raises(InvalidValue, match=r"executor 'proces': .*process"):
        by_name("proces")


def test_it_is_available_here() -> None:
    """On a machine with a shell and /proc nothing is in the way."""
    assert ProcessExecutor().unavailable() is None


def test_what_the_dispatcher_ignores_or_blocks_is_not_inherited(either: Shop) -> None:
    """A dispatcher started in the background ignores INT; its jobs can be interrupted, and block no signal."""
    launch = either.launch("grep -E 'Sig(Ign|Blk)' /proc/self/status; kill -INT $$; echo survived")
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    try:
        started = either.executor.start(launch)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert either.finish(started) == 130
    masks = [int(line.split()[1], 16) for line in record_of(launch, "log").splitlines()]
    # glibc keeps two signals to itself and starts every process with these ignored; they are no valid ones.
    assert [number for mask in masks for number in signal.valid_signals() if mask >> (number - 1) & 1] == []
    assert len(masks) == 2


def test_a_wrapper_shows_its_script_and_its_own_marks_alone(either: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first moment it can be found by them, and nothing of an outer run is in it, or in its command."""
    for name, value in {"SPOOL_JOB": "outer", "SPOOL_ARRAY_INDEX": "1", "BASH_VERSION": "5"}.items():
        monkeypatch.setenv(name, value)
    os.mkfifo(gate := either.root / "gate")
    launch = either.launch(f"env; read -r x < '{gate}'")
    started = either.executor.start(launch)
    about = Path(f"/proc/{started.pid}")
    # A program that has just begun has no environment to show for a moment.
    wait_for(lambda: b"SPOOL_RUN=" in (about / "environ").read_bytes())
    marks = sorted(entry for entry in (about / "environ").read_bytes().split(b"\0") if entry.startswith(b"SPOOL_"))
    assert marks == [f"SPOOL_DIR={either.root}".encode(), b"SPOOL_JOB=job", b"SPOOL_RUN=1"]
    assert launch.script.encode() in (about / "cmdline").read_bytes().split(b"\0")
    gate.write_text("\n")
    assert either.finish(started) == 0
    found = record_of(launch, "log").splitlines()
    assert not [entry for entry in found if entry.startswith(b"SPOOL_") or entry == b"BASH_VERSION=5"]


def test_a_job_begins_with_the_environment_of_a_login(either: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that this process was started with goes on to a job."""
    launch = either.launch(("/usr/bin/env",))  # before: what it finds by PATH is remembered for the other tests
    for name in ("SECRET_TOKEN", "VIRTUAL_ENV", "LC_ALL", "PYTHONPATH", "USER", "LANG", "PATH"):
        monkeypatch.setenv(name, "of-the-starter")
    login = host.login_environment()
    assert either.finish(either.executor.start(launch)) == 0
    found = dict(line.split("=", 1) for line in record_of(launch, "log").decode().splitlines())
    assert {key: found.get(key) for key in login} == login
    assert "of-the-starter" not in found.values()
    assert found.keys() - login.keys() <= {"PWD", "OLDPWD", "SHLVL", "_", "SPOOL_DIR", "SPOOL_JOB", "SPOOL_RUN"}


@pytest.mark.parametrize("call", ["posix_spawn", "memfd_create"])
def test_a_machine_without_room_refuses_a_start(either: Shop, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Where no process can be made, the executor says that the machine refuses it, which another moment may change.

    A server that cannot be made is none, and then a shell is started.
    """
    monkeypatch.setattr(compiled, "PROGRAM", "/no/such/program")
    monkeypatch.setattr(os, call, failing(errno.ENFILE))
    with pytest.raises(StartRefused, match=rf"/bin/sh .*{os.strerror(errno.ENFILE)}"):
        either.executor.start(either.launch("true"))


def test_a_shell_that_is_not_there_is_no_shortage(either: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says something about the program will be the same in a moment, and is told in words."""
    monkeypatch.setattr(os, "posix_spawn", failing(errno.ENOENT))
    with pytest.raises(SpoolError, match=r"job job: /bin/sh: ") as raised:
        either.executor.start(either.launch("true"))
    assert not isinstance(raised.value, StartRefused)


def failing(number: int) -> Callable[..., int]:
    """Return what fails with that error."""

    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail
