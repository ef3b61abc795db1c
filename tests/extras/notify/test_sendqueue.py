"""What waits for one receiver: all of it is sent to one that takes it, and not all of it kept for one that does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from spool.listeners.message import Message, UndeliveredError
from spool.listeners.sendqueue import Patience, SendQueue
from support import PATIENCE_S, wait_for

MOST = 100
QUICK = Patience(first_s=0.001, longest_s=0.001, tries=1_000_000, for_s=PATIENCE_S, most_waiting=MOST)


class Receiver:
    """Takes a message once it is `awake`, and refuses it while it is `broken`."""

    shown = "receiver"
    for_programs = True

    def __init__(self) -> None:
        self.awake = threading.Event()
        self.broken = False
        self.tries = 0
        self.taken: list[str] = []
        self.queues: list[SendQueue] = []

    def send(self, message: Message) -> None:
        self.awake.wait(PATIENCE_S)
        self.tries += 1
        if self.broken:
            raise UndeliveredError("it is broken")
        self.taken.append(message.title)


class Sender:
    """A queue to that receiver, and what is done of what was put into it."""

    def __init__(self, receiver: Receiver, patience: Patience) -> None:
        self.queue = SendQueue(receiver, patience)
        receiver.queues.append(self.queue)
        self.done: list[str] = []

    def put(self, *numbers: int) -> None:
        for title in map(str, numbers):
            self.queue.put(Message("finished", title, "", {}), lambda title=title: self.done.append(title))  # type: ignore[misc]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Give a receiver that is asleep, and wakes up in the end."""
    made = Receiver()
    yield made
    made.broken = False
    made.awake.set()
    for queue in made.queues:
        queue.close()


def test_a_slow_receiver_gets_everything(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """However many wait, none is given up while none has failed."""
    sender = Sender(receiver, QUICK)
    sender.put(*range(5 * MOST))
    assert sender.done == []
    receiver.awake.set()
    wait_for(lambda: len(sender.done) == 5 * MOST)
    assert receiver.taken == [str(number) for number in range(5 * MOST)]
    assert caplog.text == ""


def test_time_counts_against_a_receiver_only_while_it_fails(receiver: Receiver) -> None:
    """What has waited for too long behind others is sent all the same."""
    sender = Sender(receiver, Patience(for_s=0.0))
    sender.put(*range(3))
    receiver.awake.set()
    wait_for(lambda: len(sender.done) == 3)
    assert receiver.taken == ["0", "1", "2"]


def test_of_what_waits_for_a_receiver_that_is_away_the_newest_is_kept(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of what came while it was only slow; the log says so, and what was kept arrives when it is back."""
    sender = Sender(receiver, QUICK)
    sender.put(*range(5 * MOST))
    receiver.broken = True
    receiver.awake.set()
    wait_for(lambda: len(sender.done) >= 4 * MOST)
    assert receiver.taken == []
    assert "it keeps failing and too many messages are waiting" in caplog.text
    sender.put(*range(5 * MOST, 8 * MOST))
    assert len(sender.done) >= 6 * MOST
    receiver.broken = False
    wait_for(lambda: len(sender.done) == 8 * MOST)
    assert set(receiver.taken) >= {str(number) for number in range(8 * MOST - MOST * 9 // 10, 8 * MOST)}


def test_a_failure_or_two_cost_nothing(receiver: Receiver) -> None:
    """A receiver that is started anew has missed nothing, however much came meanwhile."""
    sender = Sender(receiver, Patience(first_s=60.0, most_waiting=MOST))
    receiver.broken = True
    receiver.awake.set()
    sender.put(0)
    wait_for(lambda: receiver.tries)
    sender.put(*range(1, 5 * MOST))
    assert sender.done == []
