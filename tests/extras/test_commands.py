"""Commands run for a process that never waits: each answered once."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from served import alive
from spool.extras.commands import AT_ONCE, Command, CommandEnd, CommandRunner
from support import PATIENCE_S, wait_for


class Orders(CommandRunner):
    """A runner that keeps the ends of its commands, by the numbers of their orders."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: dict[int, CommandEnd] = {}
        self.given = 0

    def give(self, command: Command) -> int:
        """Order a command, and return its number."""
        self.given += 1
        number = self.given
        self.order(command, lambda end: self.ended.update({number: end}))
        return number

    def has(self, *numbers: int) -> bool:
        """Take in what there is; return whether it has these."""
        self.work()
        return set(numbers) <= self.ended.keys()


@pytest.fixture
def runner() -> Iterator[Orders]:
    """Give a runner, and end its helper after the test."""
    made = Orders()
    yield made
    made.close()


def wait(runner: Orders, *numbers: int) -> list[CommandEnd]:
    """Wait for the answers of these numbers."""
    wait_for(lambda: runner.has(*numbers), what="the answers")
    return [runner.ended[number] for number in numbers]


def sh(text: str, within_s: float = PATIENCE_S, *, urgent: bool = False, **environment: str) -> Command:
    """Make a command of a shell's text."""
    return Command(("/bin/sh", "-c", text), environment or None, within_s, urgent=urgent)


def until(go: Path, before: str = ":", after: str = ":") -> Command:
    """Make a command that does not end before there is that file."""
    return sh(f"{before}; until [ -e {go} ]; do sleep 0.02; done; {after}")


def test_a_command_answers_with_all_that_it_said(runner: Orders) -> None:
    """Its exit status, both outputs whatever bytes they hold, and no input; of no program 127, as a shell tells it."""
    orders = (
        sh(r"printf 'a\tb\nc\377'; echo wrong >&2; cat; exit 3"),
        sh("echo $X", X="\u00e9 and 'quotes'\n"),
        sh("kill -9 $$"),
        Command(("/nonexistent/sbatch",)),
    )
    said, other, killed, absent = wait(runner, *map(runner.give, orders))
    assert said == CommandEnd(3, "a\tb\nc\ufffd", "wrong\n")
    assert other.out == "\u00e9 and 'quotes'\n"
    assert (killed.status, absent.status) == (-9, 127)
    assert "No such file" in absent.err


def test_a_command_that_hangs_is_ended_with_its_children_and_nobody_knows_what_it_did(runner: Orders) -> None:
    """The time limit holds though something else has its output open; others are answered meanwhile."""
    hangs, quick = runner.give(sh("sleep 60 & sleep 60", 0.3)), runner.give(sh("echo hi"))
    (end,) = wait(runner, quick)
    assert end.out == "hi\n"
    (end,) = wait(runner, hangs)
    assert end.status is None
    assert "without an answer" in end.err


def test_a_command_that_says_the_words_is_ended_with_its_children(runner: Orders, tmp_path: Path) -> None:
    """A script around sbatch leaves no sbatch behind that submits later."""
    child = tmp_path / "child"
    text = f"sleep 600 & echo $! > {child}; echo sleeping and retrying >&2; wait"
    (end,) = wait(runner, runner.give(Command(("/bin/sh", "-c", text), ends_on="retrying")))
    assert (end.status, end.err) == (-signal.SIGTERM, "sleeping and retrying\n")
    wait_for(lambda: not alive(int(child.read_text())), what="the end of its child")


def test_what_is_urgent_waits_for_nothing_slow(runner: Orders, tmp_path: Path) -> None:
    """As many slow commands as run at once keep no urgent one waiting."""
    go = tmp_path / "go"
    slow = [runner.give(until(go)) for _ in range(2 * AT_ONCE)]
    urgent = runner.give(sh("echo now", urgent=True))
    wait(runner, urgent)
    assert runner.ended.keys() == {urgent}
    go.touch()
    wait(runner, *slow)


def _killed(runner: Orders) -> None:
    os.kill(runner.pid, signal.SIGKILL)


@pytest.mark.parametrize("end", [_killed, Orders.close])
def test_a_command_outlives_the_helper_and_the_dispatcher(
    runner: Orders, tmp_path: Path, end: Callable[[Orders], None]
) -> None:
    """What it is in the middle of it finishes: a submission is never cut off."""
    begun, go, done = (tmp_path / name for name in ("begun", "go", "done"))
    runner.give(until(go, f"touch {begun}", f"touch {done}"))
    wait_for(begun.exists, what="its begin")
    end(runner)
    go.touch()
    wait_for(done.exists, what="its end")


def test_after_the_death_of_the_helper_every_order_is_answered_and_new_ones_are_done(
    runner: Orders, tmp_path: Path
) -> None:
    """Nobody knows what became of those that it had; the next helper does what comes after."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    numbers = [runner.give(until(go, f"touch {begun}")) for _ in range(AT_ONCE + 1)]
    wait_for(begun.exists, what="the first of them")
    _killed(runner)
    go.touch()
    assert [end.status for end in wait(runner, *numbers)] == [None] * len(numbers)
    (end,) = wait(runner, runner.give(sh("echo again")))
    assert end.out == "again\n"


def test_a_helper_that_hangs_is_given_up(runner: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped helper answers nothing: its orders count as unanswered when their time is over."""
    monkeypatch.setattr("spool.extras.commands._PATIENCE_NS", 0)
    wait(runner, runner.give(sh("true")))
    os.kill(runner.pid, signal.SIGSTOP)
    number = runner.give(sh("true", 0.2))
    assert [end.status for end in wait(runner, number)] == [None]


def test_a_helper_that_cannot_be_started_is_told_of(runner: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """An urgent question is answered with the reason; what is to be done waits, and is done once there is a helper."""
    with monkeypatch.context() as without:
        without.setattr("spool.machine.helpers.sys.executable", "/nonexistent/python")
        waits, asks = runner.give(sh("echo done")), runner.give(sh("echo done", urgent=True))
        assert runner.due_ns() <= time.monotonic_ns()
        assert runner.work()
        assert runner.ended.keys() == {asks}
        assert runner.ended[asks].status is None
        assert os.strerror(errno.ENOENT) in runner.ended[asks].err
        assert not runner.work()
    (end,) = wait(runner, waits)
    assert end.out == "done\n"
