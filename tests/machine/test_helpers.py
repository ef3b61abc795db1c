"""Children that may hang or die, and threads for their work."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spool.core.model import SECOND_NS
from spool.machine.helpers import ChildProcess, Workers, import_path
from support import PATIENCE_S


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
