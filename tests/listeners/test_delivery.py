"""One listener, its thread and its cursor: what it is told, when it counts as told, and how it leaves."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spool.core.model import Event, EventName
from spool.formats.events import render_event
from spool.listeners.process import MOST_TRIES, Delivery
from spool.store.disk import Disk
from spool.store.logs import EventReader, EventWriter
from support import PATIENCE_S, wait_for


class Recorder:
    """A listener that records. *behave* is called with each event before it counts as done."""

    name = "recorder"
    wants = frozenset(EventName) - {EventName.POLLING}

    def __init__(self, behave: Callable[[Event], None] = lambda _: None) -> None:
        self.heard: list[str] = []
        self.open: list[Callable[[], None]] = []
        self.at_once = True
        self.closed = threading.Event()
        self._behave = behave

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        self.heard.append(event.id)
        self._behave(event)
        if self.at_once:
            done()
        else:
            self.open.append(done)

    def tick(self) -> float | None:
        return None

    def close(self) -> None:
        self.closed.set()


class Stand:
    """An outbox, and deliveries that read from it."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.disk = Disk(f"{root}/.tmp")
        self.outbox = EventWriter(self.root, self.disk)
        self.outbox.begin("recorder")
        self.deliveries: list[Delivery] = []

    def tell(self, *ids: str, name: EventName = EventName.FINISHED) -> None:
        for each in ids:
            self.outbox.append(render_event(_event(each, name)))

    def delivery(self, listener: Recorder, *, careful: bool = False, limit: float = math.inf) -> Delivery:
        delivery = Delivery(listener, EventReader(self.root, "recorder", self.disk), careful=careful)
        self.deliveries.append(delivery)
        delivery.more(limit)
        delivery.start()
        return delivery

    def all_read(self) -> None:
        wait_for(lambda: not self.outbox.unread(), what="all to be read")

    def end(self, delivery: Delivery, within_s: float = PATIENCE_S) -> None:
        delivery.leave(within_s)
        assert delivery.join(PATIENCE_S)


def _event(number: str, name: EventName) -> Event:
    return Event(id=number, name=name, at_ns=1, host="h", version="1", spool_dir="/s")


@pytest.fixture
def stand(spool_root: Path) -> Iterator[Stand]:
    """Give an outbox whose listener has heard of nothing."""
    made = Stand(spool_root)
    yield made
    for delivery in made.deliveries:
        made.end(delivery, 0)
    made.outbox.close()


def test_all_is_told_in_order_and_then_remembered(stand: Stand) -> None:
    """What is told is on record as told; the next delivery begins after it. What is not wanted is passed over."""
    stand.tell("a", "b")
    stand.tell("p", name=EventName.POLLING)
    first = Recorder()
    delivery = stand.delivery(first)
    stand.all_read()
    assert first.heard == ["a", "b"]
    stand.tell("c")
    delivery.more(math.inf)
    wait_for(lambda: first.heard == ["a", "b", "c"], what="c")
    stand.end(delivery)
    assert first.closed.is_set()
    second = Recorder()
    stand.tell("d")
    stand.delivery(second)
    wait_for(lambda: second.heard == ["d"], what="d alone")


def test_nothing_is_told_before_it_may_be(stand: Stand) -> None:
    """What stands after the position that the dispatcher has given is not told: its file may be half moved."""
    stand.tell("a")
    end = stand.outbox.end
    stand.tell("b")
    listener = Recorder()
    delivery = stand.delivery(listener, limit=end)
    wait_for(lambda: stand.outbox.cursor("recorder") == end, what="a to be read")
    stand.end(delivery)
    assert listener.heard == ["a"]
    assert stand.outbox.unread()


def test_what_is_not_done_is_told_again(stand: Stand) -> None:
    """A delivery that leaves before the second of three is done leaves that and the third to the next."""
    stand.tell("a", "b", "c")
    listener = Recorder()
    listener.at_once = False
    delivery = stand.delivery(listener)
    wait_for(lambda: len(listener.open) == 3, what="three to be taken in")
    listener.open[0]()
    listener.open[2]()
    stand.end(delivery, 0)
    again = Recorder()
    stand.delivery(again)
    stand.all_read()
    assert again.heard == ["b", "c"]


def test_a_feed_that_is_to_leave_waits_for_what_is_not_done(stand: Stand) -> None:
    """It leaves as soon as the last event is dealt with, in another thread."""
    stand.tell("a")
    listener = Recorder()
    listener.at_once = False
    delivery = stand.delivery(listener)
    wait_for(lambda: listener.open, what="a to be taken in")
    delivery.leave(PATIENCE_S)
    assert not delivery.join(0.05)
    listener.open[0]()
    assert delivery.join(PATIENCE_S)
    assert not stand.outbox.unread()


def test_only_so_much_is_open_at_once(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that is slow has taken in so many events and what one read gives, and all of them in the end."""
    most, line = 5, len(render_event(_event("00", EventName.FINISHED)))
    monkeypatch.setattr("spool.listeners.process.MOST_OPEN", most)
    monkeypatch.setattr("spool.store.logs._AT_ONCE", 3 * line)
    taken_in = []
    listener = Recorder(lambda _: taken_in.append(len(listener.open)))
    listener.at_once = False
    numbers = [f"{number:02}" for number in range(60)]
    stand.tell(*numbers)
    stand.delivery(listener)
    while len(listener.heard) < len(numbers) or listener.open:
        wait_for(lambda: listener.open, what="more")
        listener.open.pop(0)()
    assert listener.heard == numbers
    assert max(taken_in) < most + 3


def test_a_listener_that_raises_has_heard(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    """The error is logged and the next event is told."""

    def behave(event: Event) -> None:
        if event.id == "a":
            raise ValueError("no")

    stand.tell("a", "b")
    listener = Recorder(behave)
    stand.delivery(listener)
    stand.all_read()
    assert listener.heard == ["a", "b"]


def test_what_ends_the_process_again_and_again_is_passed_over(stand: Stand) -> None:
    """A careful delivery notes each event down before it is told: after so many ends the next event is told instead."""
    stand.tell("a", "b")
    told = []
    for _ in range(MOST_TRIES):
        hangs, go = threading.Event(), threading.Event()

        def behave(event: Event, hangs: threading.Event = hangs, go: threading.Event = go) -> None:
            told.append(event.id)
            hangs.set()
            go.wait(PATIENCE_S)

        delivery = Delivery(Recorder(behave), EventReader(stand.root, "recorder", stand.disk), careful=True)
        delivery._save = lambda: None  # type: ignore[method-assign]  # a process that ends here saves nothing more
        delivery.more(math.inf)
        delivery.start()
        assert hangs.wait(PATIENCE_S)
        delivery.leave(0)
        go.set()
        assert delivery.join(PATIENCE_S)
    assert told == ["a"] * MOST_TRIES
    last = Recorder()
    stand.delivery(last, careful=True)
    stand.all_read()
    assert last.heard == ["b"]
