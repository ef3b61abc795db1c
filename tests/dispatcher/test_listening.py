"""The process of the listeners as the dispatcher sees it: one that does nothing any more makes room for another."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spool.core import layout
from spool.core.events import Event, EventName
from spool.core.model import SECOND_NS
from spool.dispatcher import listening as listening_module
from spool.dispatcher.listening import Listening
from spool.formats.listening import Hello, Reply

QUESTION = Event(
    id="x", name=EventName.SUBMITTING, at_ns=1, host="h", version="1", spool_dir="/s", job="x", reason="may it?"
)


class Ends:
    """Both ends: a `Listening`, what it has handed on, and a loop that serves it."""

    def __init__(self, root: Path) -> None:
        self.replies: list[Reply] = []
        self.greetings = 0
        self.listening = Listening(str(root), self.replies.append, self._greeted)
        self.listening.limit_ns = 0

    def _greeted(self, hello: Hello | None) -> None:
        self.greetings += hello is not None

    def serve_until(self, condition: Callable[[], object]) -> None:
        """Do what the dispatcher's loop does."""
        until = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < until
            self.listening.tick()
            if select.select([self.listening], [], [], 0.02)[0]:
                self.listening.read()

    def stop_process(self) -> int:
        """Have the process do nothing any more."""
        pid = self.listening.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        return pid


@pytest.fixture
def ends(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """Give both ends, with a hook that says yes, and not much patience."""
    script = spool_root / "hooks" / "submitting"
    script.parent.mkdir(exist_ok=True)
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)
    (spool_root / layout.CURSORS).mkdir()  # a dispatcher makes it before anybody is to listen
    monkeypatch.setattr(listening_module, "_PATIENCE_NS", 2 * SECOND_NS)
    made = Ends(spool_root)
    yield made
    made.listening.close()
    made.listening.join(20)


def test_a_process_that_hangs_is_ended_and_another_one_is_asked(ends: Ends) -> None:
    """The question is asked again, and its answer comes."""
    ends.listening.limit_ns = SECOND_NS
    ends.listening.listen(["hooks"])
    ends.serve_until(lambda: ends.greetings)
    hanging = ends.stop_process()
    number = ends.listening.ask(QUESTION)
    ends.serve_until(lambda: ends.replies)
    assert ends.replies == [Reply(number)]
    assert ends.listening.pid != hanging
    assert not Path(f"/proc/{hanging}").exists()


def test_a_process_that_never_says_who_it_is_is_ended_too(ends: Ends) -> None:
    """One that hangs before it can be asked would otherwise keep every question for ever."""
    ends.listening.listen(["hooks"])
    ends.serve_until(lambda: ends.listening.pid)
    hanging = ends.stop_process()
    number = ends.listening.ask(QUESTION)
    ends.serve_until(lambda: ends.replies)
    assert ends.replies == [Reply(number)]
    assert not Path(f"/proc/{hanging}").exists()
