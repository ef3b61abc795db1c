"""What waits for one receiver, what a command may do, and what is shown of an address."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spool.extras.notify.sending import Message, Patience, SendQueue, UndeliveredError, by_command, masked, scrubbed
from support import PATIENCE_S, left_behind, processes, wait_for

MOST = 100
QUICK = Patience(first_s=0.001, longest_s=0.001, tries=1_000_000, for_s=PATIENCE_S)


class Receiver:
    """Takes a message once it is `awake`, and refuses it while it is `broken`."""

    def __init__(self) -> None:
        self.awake = threading.Event()
        self.broken = False
        self.tries = 0
        self.taken: list[str] = []
        self.done: list[str] = []
        self.queue = SendQueue("receiver", self.send, QUICK)

    def send(self, message: Message) -> None:
        self.awake.wait(PATIENCE_S)
        self.tries += 1
        if self.broken:
            raise UndeliveredError("it is broken")
        self.taken.append(message.title)

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
    made.queue.close()


def test_a_slow_receiver_gets_everything(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """However many wait, none is given up while none has failed, and each is sent by itself and in order."""
    receiver.put(*range(5 * MOST))
    assert receiver.done == []
    receiver.awake.set()
    wait_for(lambda: len(receiver.done) == 5 * MOST)
    assert receiver.taken == [str(number) for number in range(5 * MOST)]
    assert caplog.text == ""


def test_a_failure_or_two_cost_nothing(receiver: Receiver) -> None:
    """A receiver that is started anew has missed nothing, however much came meanwhile."""
    receiver.queue = SendQueue("receiver", receiver.send, Patience(first_s=60.0))
    receiver.broken = True
    receiver.awake.set()
    receiver.put(0)
    wait_for(lambda: receiver.tries)
    receiver.put(*range(1, 5 * MOST))
    assert receiver.done == []


def test_a_command_that_fails_or_hangs_is_cut_off_and_tried_again(tmp_path: Path) -> None:
    """Its exit code and its last words are the reason; a command that hangs is killed with all its group."""
    message, before = Message("failed", "t", "b", {}), processes()
    with pytest.raises(UndeliveredError, match="is 3: no such user"):
        by_command("bob", "yes | head -c 3000000 >&2; echo no such user >&2; exit 3", message)
    mark = f"SPOOL_TEST={tmp_path}"
    with pytest.raises(UndeliveredError, match=r"within 1s"):
        by_command("bob", f"{mark} sleep 600; :", message, limit_s=1)
    wait_for(lambda: not left_behind(processes() - before, mark.encode()))


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("me", "me"),
        ("bob@example.org", "bob@example.org"),
        ("mailto:bob:pw@example.org", "mai..."),
        ("mailto://bob:pw@example.org", "mailto://..."),
        ("tgram://token/chat", "tgram://..."),
        ("https://bob:pw@example.org:8443/x?y=1", "https://example.org:8443/..."),
        ("https://bob:p/w@example.org", "https://..."),
        ("http://[bad", "http://..."),
    ],
)
def test_an_address_is_shown_without_what_could_be_a_secret(address: str, shown: str) -> None:
    """Its scheme, and of a web hook the host."""
    assert masked(address) == shown


def test_what_others_say_is_scrubbed_of_the_address() -> None:
    """Each of its parts, as it is and decoded, and control characters."""
    address = "https://bob:p%40ssword@example.org/secretpath?key=secretkey"
    said = "refused\n p@ssword, p%40ssword, secretpath and secretkey of https://bob:p%40ssword@example.org/"
    words = scrubbed(said, address)
    assert words.startswith("refused  ***, ***, *** and ***")
    assert not any(secret in words for secret in ("ssword", "secret"))
