"""Children that may hang or die, and commands run for a process that never waits: each answered once."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from served import alive
from spool.core.model import SECOND_NS
from spool.machine.commands import AT_ONCE, ChildProcess, Command, CommandEnd, CommandRunner, Workers, import_path
from support import PATIENCE_S, wait_for


@pytest.fixture
def runner() -> Iterator[CommandRunner]:
    """Give a runner, and end its helper after the test."""
    made = CommandRunner()
    yield made
    made.close()


def collect(runner: CommandRunner, ended: dict[int, CommandEnd]) -> dict[int, CommandEnd]:
    """Take in what there is."""
    ended |= dict(runner.work())
    return ended


def wait(runner: CommandRunner, *numbers: int) -> list[CommandEnd]:
    """Wait for the answers of these numbers."""
    ended: dict[int, CommandEnd] = {}
    wait_for(lambda: set(numbers) <= collect(runner, ended).keys(), what="the answers")
    return [ended[number] for number in numbers]


def sh(text: str, within_s: float = PATIENCE_S, *, urgent: bool = False, **environment: str) -> Command:
    """Make a command of a shell's text."""
    return Command(("/bin/sh", "-c", text), environment or None, within_s, urgent=urgent)


def until(go: Path, before: str = ":", after: str = ":") -> Command:
    """Make a command that does not end before there is that file."""
    return sh(f"{before}; until [ -e {go} ]; do sleep 0.02; done; {after}")


def test_a_command_answers_with_all_that_it_said(runner: CommandRunner) -> None:
    """Its exit status, both outputs whatever bytes they hold, and no input; of no program 127, as a shell tells it."""
    orders = (
        sh(r"printf 'a\tb\nc\377'; echo wrong >&2; cat; exit 3"),
        sh("echo $X", X="\u00e9 and 'quotes'\n"),
        sh("kill -9 $$"),
        Command(("/nonexistent/sbatch",)),
    )
    said, other, killed, absent = wait(runner, *map(runner.order, orders))
    assert said == CommandEnd(3, "a\tb\nc\ufffd", "wrong\n")
    assert other.out == "\u00e9 and 'quotes'\n"
    assert (killed.status, absent.status) == (-9, 127)
    assert "No such file" in absent.err


def test_a_command_that_hangs_is_ended_with_its_children_and_nobody_knows_what_it_did(runner: CommandRunner) -> None:
    """The time limit holds though something else has its output open; others are answered meanwhile."""
    hangs, quick = runner.order(sh("sleep 60 & sleep 60", 0.3)), runner.order(sh("echo hi"))
    (end,) = wait(runner, quick)
    assert end.out == "hi\n"
    (end,) = wait(runner, hangs)
    assert end.status is None
    assert "without an answer" in end.err


def test_a_command_that_says_the_words_is_ended_with_its_children(runner: CommandRunner, tmp_path: Path) -> None:
    """A script around sbatch leaves no sbatch behind that submits later."""
    child = tmp_path / "child"
    text = f"sleep 600 & echo $! > {child}; echo sleeping and retrying >&2; wait"
    (end,) = wait(runner, runner.order(Command(("/bin/sh", "-c", text), ends_on="retrying")))
    assert (end.status, end.err) == (-signal.SIGTERM, "sleeping and retrying\n")
    wait_for(lambda: not alive(int(child.read_text())), what="the end of its child")


def test_what_is_urgent_waits_for_nothing_slow(runner: CommandRunner, tmp_path: Path) -> None:
    """As many slow commands as run at once keep no urgent one waiting."""
    go = tmp_path / "go"
    slow = [runner.order(until(go)) for _ in range(2 * AT_ONCE)]
    ended: dict[int, CommandEnd] = {}
    urgent = runner.order(sh("echo now", urgent=True))
    wait_for(lambda: urgent in collect(runner, ended), what="the urgent one")
    assert ended.keys() == {urgent}
    go.touch()
    wait_for(lambda: set(slow) <= collect(runner, ended).keys(), what="the slow ones")


def _killed(runner: CommandRunner) -> None:
    os.kill(runner.pid, signal.SIGKILL)


@pytest.mark.parametrize("end", [_killed, CommandRunner.close])
def test_a_command_outlives_the_helper_and_the_dispatcher(
    runner: CommandRunner, tmp_path: Path, end: Callable[[CommandRunner], None]
) -> None:
    """What it is in the middle of it finishes: a submission is never cut off."""
    begun, go, done = (tmp_path / name for name in ("begun", "go", "done"))
    runner.order(until(go, f"touch {begun}", f"touch {done}"))
    wait_for(begun.exists, what="its begin")
    end(runner)
    go.touch()
    wait_for(done.exists, what="its end")


def test_after_the_death_of_the_helper_every_order_is_answered_and_new_ones_are_done(
    runner: CommandRunner, tmp_path: Path
) -> None:
    """Nobody knows what became of those that it had; the next helper does what comes after."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    numbers = [runner.order(until(go, f"touch {begun}")) for _ in range(AT_ONCE + 1)]
    wait_for(begun.exists, what="the first of them")
    _killed(runner)
    go.touch()
    assert [end.status for end in wait(runner, *numbers)] == [None] * len(numbers)
    (end,) = wait(runner, runner.order(sh("echo again")))
    assert end.out == "again\n"


def test_a_helper_that_hangs_is_given_up(runner: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped helper answers nothing: its orders count as unanswered when their time is over."""
    monkeypatch.setattr("spool.machine.commands._PATIENCE_NS", 0)
    wait(runner, runner.order(sh("true")))
    os.kill(runner.pid, signal.SIGSTOP)
    number = runner.order(sh("true", 0.2))
    assert [end.status for end in wait(runner, number)] == [None]


def test_a_helper_that_cannot_be_started_is_told_of(runner: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """An urgent question is answered with the reason; what is to be done waits, and is done once there is a helper."""
    with monkeypatch.context() as without:
        without.setattr("spool.machine.commands.sys.executable", "/nonexistent/python")
        waits, asks = runner.order(sh("echo done")), runner.order(sh("echo done", urgent=True))
        assert runner.due_ns() <= time.monotonic_ns()
        ended = dict(runner.work())
        assert set(ended) == {asks}
        assert ended[asks].status is None
        assert os.strerror(errno.ENOENT) in ended[asks].err
        assert dict(runner.work()) == {}
    (end,) = wait(runner, waits)
    assert end.out == "done\n"


def test_without_a_thread_to_spare_work_is_done_by_the_caller_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is carried out, in order, and a thread that there is later finds nothing of it."""
    done: list[int] = []

    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = Workers(2)
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", none)
        for number in (1, 2):
            workers.put(done.append, number)
    assert done == [1, 2]
    over = threading.Event()
    workers.put(over.set)
    assert over.wait(60)
    assert done == [1, 2]


ECHO = "import os\nwhile data := os.read(0, 1 << 16):\n    os.write(1, data)\n"
DEAF = "import time\ntime.sleep(3600)\n"
FORKS = (
    "import os, subprocess, sys\n"
    "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'], stdin=0)\n"
    "os.write(1, f'{other.pid}\\n'.encode())\n"
    "sys.exit(3)\n"
)


@pytest.fixture
def child_of(tmp_path: Path) -> Iterator[Callable[..., ChildProcess]]:
    """Return a function that starts a child with that text, and hands out its parent's end."""
    made: list[ChildProcess] = []

    def make(text: str, clock: Callable[[], int] | None = None) -> ChildProcess:
        (tmp_path / "child_of_test.py").write_text(text)
        child = ChildProcess(
            ("child_of_test",),
            lambda: os.environ | {"PYTHONPATH": str(tmp_path)},
            answers_on_stdout=True,
            **({} if clock is None else {"clock": clock}),
        )
        made.append(child)
        return child

    yield make
    for child in made:
        child.give_up(kill=True)
        assert not child.lingers(PATIENCE_S)
        child.close()


def lines_of(child: ChildProcess, count: int) -> list[bytes]:
    """Return so many lines of the child's."""
    lines: list[bytes] = []
    while len(lines) < count:
        assert child.wait(PATIENCE_S)
        lines += child.read()
    return lines


def test_what_is_said_comes_back_in_whole_lines(child_of: Callable[..., ChildProcess]) -> None:
    """However much it is: what the child has no room for waits."""
    child = child_of(ECHO)
    child.start()
    wanted = [b"x" * at for at in range(2000)]
    child.send(b"".join(line + b"\n" for line in wanted))
    assert child.backlog
    assert lines_of(child, len(wanted)) == wanted
    assert not child.backlog


def test_a_child_that_reads_nothing_keeps_nobody_waiting(child_of: Callable[..., ChildProcess]) -> None:
    """All that is said to it waits here, and goes with it."""
    child = child_of(DEAF)
    child.start()
    for _ in range(100):
        child.send(b"x" * (1 << 16))
    assert child.backlog
    assert child.read() == []
    assert child.is_alive
    child.give_up(kill=True)
    assert child.pid is None
    assert not child.lingers(PATIENCE_S)


def test_the_end_of_a_child_shows_though_others_hold_its_socket(child_of: Callable[..., ChildProcess]) -> None:
    """What a child has started may outlive it, with all that it had open."""
    child = child_of(FORKS)
    child.start()
    (other,) = lines_of(child, 1)
    try:
        while child.is_alive:
            assert child.wait(PATIENCE_S)
            child.read()
        assert child.exit_code() == 3
        assert not child.has_hung_up
    finally:
        os.kill(int(other), 9)


def test_a_child_that_is_not_watched_wakes_nobody_by_its_end(child_of: Callable[..., ChildProcess]) -> None:
    """As long as nothing that it does matters; then its end shows."""
    child = child_of("")
    child.watch(False)
    child.start()
    end = os.pidfd_open(child.pid)
    select.select([end], [], [], PATIENCE_S)
    os.close(end)
    assert not child.wait(0)
    child.watch()
    assert child.wait(PATIENCE_S)
    assert not child.is_alive
    assert child.has_hung_up


def test_a_child_that_dies_young_is_started_after_growing_pauses(
    child_of: Callable[..., ChildProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that could not be started counts as one that has died; one that lived for long was well."""
    now_ns = [SECOND_NS]
    child = child_of(DEAF, lambda: now_ns[0])
    pauses = []
    for lived_ns in (0, 0, 0, 3600 * SECOND_NS, 0):
        child.start()
        now_ns[0] += lived_ns
        child.give_up(kill=True)
        pauses.append(child.start_due_ns - now_ns[0])
    monkeypatch.setattr(sys, "executable", "/dev/null")
    with pytest.raises(PermissionError):
        child.start()
    pauses.append(child.start_due_ns - now_ns[0])
    assert pauses == [pauses[0] << at for at in (0, 1, 2, 0, 1, 2)]


def test_a_child_finds_the_standard_library_first_and_no_dots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever path this process has: at a prompt the current directory is the first of it."""
    monkeypatch.chdir(tmp_path)  # the one where the tests were begun may be on the path
    library = os.path.dirname(os.__file__)
    monkeypatch.setattr(sys, "path", ["", ".", "/own", *sys.path])
    found = import_path().split(os.pathsep)
    assert all(map(os.path.isabs, found))
    assert found.index(library) < found.index("/own")
    assert os.getcwd() not in found
