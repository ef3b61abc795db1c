"""The process of the listeners as the dispatcher sees it: one that does nothing any more makes room for another.

The clock of the dispatcher's end is the tests', so that hours pass at once. The process and its hooks
are real, and wait for files.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from spool.core import layout
from spool.core.model import SECOND_NS, Event, EventName
from spool.dispatcher.events import ListenerClient
from spool.formats.events import AT_ONCE, Ready, Reply, render_event
from spool.store.disk import Disk
from spool.store.logs import EventWriter
from support import PATIENCE_S, ROOT, wait_for

HOUR_NS = 3600 * SECOND_NS
STEPS = [f"step-{at}" for at in range(3)]
QUESTION = Event(
    id="x", name=EventName.SUBMITTING, at_ns=1, host="h", version="1", spool_dir="/s", job="x", reason="may it?"
)


class Ends:
    """Both ends: a `ListenerClient`, what it has handed on, and a loop that serves it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.replies: list[Reply] = []
        self.greetings = 0
        self.ahead_ns = 0
        self.client = ListenerClient(str(root), self.replies.append, self._ready, self.now_ns)

    def _ready(self, _: Ready) -> None:
        self.greetings += 1

    def now_ns(self) -> int:
        """Return the time, which the test may set on."""
        return time.monotonic_ns() + self.ahead_ns

    def serve_until(self, condition: Callable[[], object]) -> None:
        """Do what the dispatcher's loop does."""

        def served() -> object:
            self.client.tick()
            if select.select([self.client.child], [], [], 0)[0]:
                self.client.read()
            return condition()

        wait_for(served, what="what the loop is to see")

    def serve_without(self, hanging: int, after_ns: int = HOUR_NS) -> None:
        """Serve that much later, until the question is answered by another process than that, which is gone."""
        self.ahead_ns += after_ns
        self.serve_until(lambda: self.replies and not Path(f"/proc/{hanging}").exists())
        assert self.replies == [Reply(1)]

    def begun(self) -> list[str]:
        """Return the steps that hooks have begun, in that order."""
        path = self.root / "begun"
        return path.read_text().split() if path.exists() else []

    def take_an_hour(self, *steps: str) -> None:
        """Have an hour pass in which the process does these steps, and end them."""
        self.client.read()  # what it said before it began them
        pid = self.client.child.pid
        self.ahead_ns += HOUR_NS
        self.client.tick()
        assert self.client.child.pid == pid
        for step in steps:
            (self.root / f"go-{step}").write_text("\n")

    def stop_process(self) -> int:
        """Have the process do nothing any more."""
        pid = self.client.child.pid
        os.kill(pid, signal.SIGSTOP)
        return pid


@pytest.fixture
def ends(spool_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """Give both ends, where hooks have an hour, and one look is enough for what a hook has left behind."""
    site = tmp_path / "site"
    site.mkdir()
    lines = ("from spool.listeners import hooks", "hooks._WALKS = 1", "hooks.LIMIT_NS = 3600 * 10**9", "")
    (site / "sitecustomize.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT / "src")]))
    (spool_root / "hooks").mkdir()
    (spool_root / layout.CURSORS).mkdir()  # a dispatcher makes it before anybody is to listen
    made = Ends(spool_root)
    yield made
    made.client.child.close()
    made.client.child.join(PATIENCE_S)


def _hook(root: Path, name: str, script: str) -> None:
    path = root / "hooks" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def _wait_in_hook(step: str) -> str:
    return f'mkfifo "go-{step}"; echo "{step}" >> begun; read -r x < "go-{step}"'


@pytest.mark.parametrize("greeted", [True, False])
def test_a_process_that_hangs_is_ended_and_another_one_is_asked(ends: Ends, greeted: bool) -> None:
    """The question is asked again, and its answer comes; also where the process never said who it is."""
    ends.client.listen(["hooks"])
    if greeted:
        ends.serve_until(lambda: ends.greetings)
    else:
        ends.client.tick()
    hanging = ends.stop_process()
    ends.client.ask(QUESTION)
    ends.serve_without(hanging)


def test_why_a_process_cannot_be_started_is_told_until_one_is(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again after a pause, as every child is."""
    client = ends.client
    client.listen(["hooks"])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/dev/null")
        client.tick()
        assert isinstance(client.trouble, PermissionError)
    ends.ahead_ns += HOUR_NS
    client.tick()
    assert (client.child.pid is not None, client.trouble) == (True, None)


def test_a_process_that_has_read_nothing_for_long_hears_of_the_last_event_all_the_same(ends: Ends) -> None:
    """What it has no room for is not piled up without end: once it has read that, it is told how far the events go."""
    _hook(ends.root, "queued", 'echo "$SPOOL_JOB" >> begun')
    writer = EventWriter(str(ends.root), Disk(str(ends.root / layout.STAGING)))
    writer.begin("hooks")
    ends.client.listen(["hooks"])
    ends.serve_until(lambda: ends.greetings)
    stopped = ends.stop_process()
    for position in range(1, 20_000):
        ends.client.more(position)
    writer.append(render_event(replace(QUESTION, name=EventName.QUEUED)))
    ends.client.more(writer.end)
    writer.close()
    os.kill(stopped, signal.SIGCONT)
    ends.serve_until(ends.begun)
    assert ends.begun() == ["x"]


def test_a_process_that_hangs_in_a_question_is_ended(ends: Ends) -> None:
    """The time of a hook that it has begun is waited for, and no more than a minute beyond that."""
    _hook(ends.root, "submitting", f"[ -e hung ] || {{ touch hung; {_wait_in_hook('step')}; }}")
    ends.client.listen(["hooks"])
    ends.client.ask(QUESTION)
    ends.serve_until(ends.begun)
    ends.take_an_hour()
    ends.serve_without(ends.stop_process(), 60 * SECOND_NS)


def test_a_process_that_works_is_not_ended_however_many_it_asks(ends: Ends) -> None:
    """Three hooks that are asked one question have each the whole of their time."""
    for step in STEPS:
        _hook(ends.root, f"submitting.d/{step}", _wait_in_hook(step))
    ends.client.listen(["hooks"])
    number = ends.client.ask(QUESTION)
    for at in range(len(STEPS)):
        ends.serve_until(lambda at=at: len(ends.begun()) > at)  # type: ignore[misc]
        ends.take_an_hour(ends.begun()[at])
    ends.serve_until(lambda: ends.replies)
    assert ends.replies == [Reply(number)]


def test_a_process_with_many_questions_is_not_ended(ends: Ends) -> None:
    """It has no more than it begins at once, forgotten ones counted, so that none is late before it is begun."""
    _hook(ends.root, "submitting", _wait_in_hook("$SPOOL_JOB"))
    ends.client.listen(["hooks"])
    ends.serve_until(lambda: ends.greetings)
    first, *others = [ends.client.ask(replace(QUESTION, job=f"job-{at}")) for at in range(AT_ONCE * 2 + 1)]
    ends.serve_until(lambda: len(ends.begun()) == AT_ONCE)
    ends.client.forget(first)
    over: list[str] = []
    for at in range(2):
        ends.serve_until(lambda at=at: len(ends.begun()) == (at + 1) * AT_ONCE)  # type: ignore[misc]
        batch = ends.begun()[len(over) :]
        ends.take_an_hour(*batch)
        over += batch
    ends.serve_until(lambda: len(ends.begun()) == len(over) + 1 and len(ends.replies) == len(others) - 1)
    ends.take_an_hour(*ends.begun()[len(over) :])
    ends.serve_until(lambda: len(ends.replies) == len(others))
    assert {reply.number for reply in ends.replies} == set(others)
    assert not any(reply.answer.no for reply in ends.replies)
