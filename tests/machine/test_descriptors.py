"""What must work without a descriptor left."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
from collections.abc import Iterator

import pytest

from spool.core.lifecycle import Liveness
from spool.machine import identity, processes
from spool.machine.processes import Process, Sought


@pytest.fixture
def put_by() -> Iterator[None]:
    """Have this process be one that took all that it may have, and give that back."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    identity.take_all()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    identity._before.clear()
    while identity._reserve:
        os.close(identity._reserve.pop())


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that carries the mark of a run."""
    environment = {"SPOOL_DIR": "/spool", "SPOOL_JOB": "x", "SPOOL_RUN": "1", "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        yield process
        process.kill()


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    """Use up every descriptor of this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("put_by")
def test_a_run_is_found_and_ended_without_a_descriptor_left(child: subprocess.Popen[bytes]) -> None:
    """The look at /proc and the signal have the descriptors that were put by, over and over."""
    jid = identity.of_process(child.pid)
    with none_left():
        for _ in range(3):
            assert identity.liveness(jid) is Liveness.ALIVE
            members = processes.search([Sought("x", 1, "/spool")]).members["x", 1]
            assert Process(child.pid, jid.start_ticks) in members
        assert processes.send(members, signal.SIGKILL).signalled == members.keys()
    assert child.wait() == -signal.SIGKILL


def test_what_cannot_be_looked_at_is_not_gone(child: subprocess.Popen[bytes]) -> None:
    """Without a reserve either, a look fails, where it called a live run gone before: it would have run twice."""
    jid = identity.of_process(child.pid)
    with none_left():
        with pytest.raises(OSError, match="Too many open files"):
            identity.liveness(jid)
        with pytest.raises(OSError, match="Too many open files"):
            processes.search([Sought("x", 1, "/spool", jid)])
        sent = processes.send([Process(child.pid, jid.start_ticks)], signal.SIGTERM)
        assert sent.refused
        assert not sent.signalled


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_signal_needs_no_pidfd(monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes], number: int) -> None:
    """Whatever keeps the kernel from giving one, the process that was meant is signalled by its pid."""

    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    meant = Process(child.pid, identity.start_ticks(child.pid) or 0)
    assert not processes.send([meant._replace(start_ticks=1)], signal.SIGKILL).signalled
    assert processes.send([meant], signal.SIGKILL).signalled == {meant}
    assert child.wait() == -signal.SIGKILL


@pytest.mark.usefixtures("put_by")
def test_this_process_has_all_and_its_children_what_it_was_given(child: subprocess.Popen[bytes]) -> None:
    """The soft limit is raised to the hard one here alone."""
    soft, hard = identity._before[0]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert identity.limit_for_jobs() == soft
    identity.give_limit_to(child.pid)
    assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (soft, hard)
