"""A shell that waits for the next job, and becomes its wrapper."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from spool.executors import Launch, Started
from spool.executors.process import ProcessExecutor
from spool.formats import records
from spool.formats.wrapper import ALREADY_STARTED, Assignments, render
from spool.machine import identity
from support import wait_for


class Shop:
    """An executor, and the metadirs that it starts wrappers for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.executor = ProcessExecutor()
        self.made = 0

    def launch(self, command: str, name: str = "it's a run $x") -> Launch:
        """Write the script of a run."""
        self.made += 1
        metadir = self.root / f"{name} {self.made}"
        metadir.mkdir()
        (metadir / "run.sh").write_bytes(render(Assignments(str(metadir), command, self.executor.surroundings())))
        return Launch("job", self.made, str(self.root), str(metadir), str(metadir / "run.sh"))

    def finish(self, started: Started) -> int:
        """Wait for the wrapper's end; return its exit code."""
        assert started.pid is not None
        return os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1])


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """Give an executor that leaves nothing waiting."""
    made = Shop(tmp_path)
    yield made
    made.executor.close()


def _record(launch: Launch, name: str) -> bytes:
    return (Path(launch.metadir) / name).read_bytes()


def test_the_waiting_shell_is_the_next_wrapper(shop: Shop) -> None:
    """The run has its pid, its jid says who it is, and it leads a session of its own."""
    waiting = shop.executor.get_ready()
    assert waiting is not None
    stat = identity.read_stat(waiting)
    assert stat is not None
    assert stat.session == waiting
    launch = shop.launch("read x; echo got $x; exit 3")
    started = shop.executor.start(launch)
    assert started.pid == waiting
    assert shop.finish(started) == 3
    jid = records.parse_jid(_record(launch, "jid"))
    assert jid is not None
    assert (jid.pid, jid.start_ticks) == (waiting, stat.start_ticks)
    assert (_record(launch, "rc"), _record(launch, "log")) == (b"3\n", b"got\n")


def test_one_waits_at_a_time(shop: Shop) -> None:
    """Asked again it is the same; a second start in a row has a shell of its own, and then another may wait."""
    waiting = shop.executor.get_ready()
    assert shop.executor.get_ready() == waiting
    first, second = shop.executor.start(shop.launch("exit 1")), shop.executor.start(shop.launch("exit 2"))
    assert (first.pid == waiting, second.pid == waiting) == (True, False)
    assert (shop.finish(first), shop.finish(second)) == (1, 2)
    assert shop.executor.get_ready() not in (None, waiting)


def test_a_run_does_not_see_that_its_shell_has_waited(shop: Shop) -> None:
    """Arguments, signals, environment and descriptors are those of a wrapper that was started for it."""
    say = (
        'echo "$0" $#; grep -E "^Sig(Ign|Blk)" /proc/self/status; ls /proc/self/fd; env | grep -v METADIR | sort'
    )
    logs = []
    for ready in (False, True):
        if ready:
            shop.executor.get_ready()
        launch = shop.launch(say)
        assert shop.finish(shop.executor.start(launch)) == 0
        logs.append(_record(launch, "log").replace(launch.metadir.encode(), b"METADIR"))
    assert logs[0] == logs[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_waiting_shell_that_somebody_ended_is_no_matter(shop: Shop, number: signal.Signals) -> None:
    """The job starts in a new one."""
    waiting = shop.executor.get_ready()
    assert waiting is not None
    os.kill(waiting, number)
    os.waitpid(waiting, 0)
    started = shop.executor.start(shop.launch("exit 4"))
    assert started.pid != waiting
    assert shop.finish(started) == 4


@pytest.mark.parametrize("name", ["two\nlines", "long" * 60, "-n", "caf\udce9"])
def test_any_path_of_a_metadir_will_do(shop: Shop, name: str) -> None:
    """Those that cannot be told to a waiting shell get one of their own."""
    shop.executor.get_ready()
    assert shop.finish(shop.executor.start(shop.launch("exit 5", name))) == 5


def test_a_run_that_was_settled_meanwhile_is_not_run(shop: Shop) -> None:
    """Where a jid is, the shell leaves as any wrapper does."""
    shop.executor.get_ready()
    launch = shop.launch("echo no")
    (Path(launch.metadir) / "jid").write_bytes(records.VOID_JID)
    assert shop.finish(shop.executor.start(launch)) == ALREADY_STARTED
    assert not (Path(launch.metadir) / "log").exists()


def test_nothing_waits_once_the_executor_is_closed(shop: Shop) -> None:
    """Its shell is gone, and reaped."""
    waiting = shop.executor.get_ready()
    assert waiting is not None
    shop.executor.close()
    assert identity.read_stat(waiting) is None


def test_the_shell_leaves_with_whoever_started_it(tmp_path: Path) -> None:
    """After KILL to the dispatcher nobody holds the pipe, and the shell ends by itself."""
    child = os.fork()
    if child == 0:
        (tmp_path / "pid").write_text(str(ProcessExecutor().get_ready()))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    waiting = int((tmp_path / "pid").read_text())
    wait_for(lambda: (stat := identity.read_stat(waiting)) is None or stat.dead, what="the end of the shell")
