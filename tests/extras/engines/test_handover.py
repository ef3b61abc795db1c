"""Which runs are handed over together, and when: arrays in portions, and no flood of a cluster that is full."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spool.core.model import SECOND_NS, ArrayTask, Request, Spec
from spool.executors import Launch
from spool.extras.engines.language import EngineConfig
from spool.extras.engines.run import HandOver, Portion

FULL = "no more for now"


class _Limits:
    array_tasks = None

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def policy(self) -> EngineConfig:
        return self._desk.policy

    @property
    def array_width(self) -> int | None:
        return self._desk.width


class Desk:
    """A hand-over whose clock stands still, with an engine that keeps what it accepts until `end`."""

    def __init__(self, width: int | None = 1000, **policy: float) -> None:
        self.now_ns = 1000 * SECOND_NS
        self.policy = EngineConfig(**{"submit_per_second": 1000, "max_in_flight": 1000, **policy})  # type: ignore[arg-type]
        self.width = width
        self.there: list[str] = []
        self.running: set[str] = set()
        self.handover = HandOver(_Limits(self), self.siblings, lambda: self.now_ns)

    def siblings(self, array: str) -> tuple[int, int]:
        mine = [name for name in self.there if name.rpartition("_")[0] == array]
        return (len(mine), sum(name not in self.running for name in mine))

    def add(self, *names: str, **keys: object) -> None:
        for name in names:
            at_once = keys["task"].max_running if "task" in keys else None  # type: ignore[attr-defined]
            metadir, spec = f"/s/jobs/{name}/1", Spec("true", **keys)  # type: ignore[arg-type]
            self.handover.add(Launch(name, 1, "/s", metadir, f"{metadir}/run.sh", spec=spec, at_once=at_once))

    def add_tasks(
        self, indices: Iterable[int], array: str = "sweep", at_once: int | None = None, **keys: object
    ) -> None:
        for index in indices:
            self.add(f"{array}_{index}", task=ArrayTask(array, index, at_once), **keys)

    def take(self, sending: int = 0, later_s: float = 2) -> Portion | None:
        self.now_ns += int(later_s * SECOND_NS)
        return self.handover.take(sending)

    def accept(self, portion: Portion) -> list[str]:
        names = [launch.job for launch in portion.launches]
        self.there += names
        self.handover.accepted(portion)
        return names

    def take_all(self) -> list[list[str]]:
        """Accept portions until there is none."""
        found = []
        while (portion := self.take()) is not None:
            found.append(self.accept(portion))
        return found

    def refuse(self, portion: Portion) -> None:
        self.handover.refused(portion, portion.keys, FULL)

    def end(self, *names: str) -> None:
        for name in names:
            self.there.remove(name)
            self.running.discard(name)
            self.handover.run_ended()


def test_the_tasks_of_an_array_go_together() -> None:
    """One submission has all of them, in ascending order, whatever the order in which they came."""
    desk = Desk()
    desk.add_tasks([3, 1, 2, 7])
    portion = desk.take()
    assert (list(portion.array.elements), portion.array.first, portion.array.at_once) == ([1, 2, 3, 7], 0, None)
    assert [f"sweep_{element}" for element in portion.array.elements] == desk.accept(portion)
    assert desk.take() is None


def test_tasks_that_come_one_after_the_other_are_waited_for() -> None:
    """The array is expanded in many passes, and the first tasks do not go alone; the wait is short."""
    desk = Desk()
    for index in range(5):
        desk.add_tasks([index])
        assert desk.take(later_s=0.05) is None
    due_ns = desk.handover.due_ns()
    assert due_ns is not None
    assert desk.now_ns < due_ns <= desk.now_ns + SECOND_NS
    desk.now_ns = due_ns
    portion = desk.take(later_s=0)
    assert len(portion.launches) == 5


def test_a_stream_of_tasks_is_not_waited_for_for_ever() -> None:
    """After a second, what is there goes."""
    desk = Desk()
    sent = 0
    for index in range(100):
        desk.add_tasks([index])
        sent += (portion := desk.take(later_s=0.05)) is not None and len(desk.accept(portion)) > 0
    assert 1 <= sent <= 10


def test_jobs_of_their_own_go_one_by_one_and_the_urgent_one_first() -> None:
    """In their order; an urgent job does not wait behind the others that the engine could not take yet."""
    desk = Desk()
    desk.add("b", "a", "c_1", priority=10)
    desk.add("urgent", priority=100)
    assert desk.take_all() == [["urgent"], ["b"], ["a"], ["c_1"]]


@pytest.mark.parametrize(
    "keys", [{"request": Request(cpus=2)}, {"time_limit_ns": 9}, {"parts": (("engines", ("-x",)),)}]
)
def test_only_tasks_of_one_request_and_name_share_an_array(keys: dict[str, object]) -> None:
    """A task whose file was edited has options of its own; the name of an element's run follows from its index."""
    desk = Desk()
    desk.add_tasks([0, 1])
    desk.add_tasks([2], **keys)
    desk.add("other", task=ArrayTask("sweep", 4))
    assert desk.take_all() == [["sweep_0", "sweep_1"], ["sweep_2"], ["other"]]


def test_an_engine_without_arrays_gets_every_task_alone() -> None:
    """The same queue serves it."""
    desk = Desk(width=None)
    desk.add_tasks(range(3))
    assert desk.take_all() == [["sweep_0"], ["sweep_1"], ["sweep_2"]]


def test_ten_thousand_tasks_are_at_most_twenty_submissions() -> None:
    """The planner lets as many be there as `max_in_flight`; as they end one by one, the rest follows in portions."""
    desk = Desk(max_in_flight=2000)
    left = list(range(1, 10_001))
    portions = 0

    def plan() -> None:
        queued = 10_000 - len(left) - ended - len(desk.there)
        room = 2000 - len(desk.there) - queued
        desk.add_tasks(left[:room])
        del left[:room]

    ended = 0
    plan()
    while ended < 10_000:
        while (portion := desk.take(later_s=1)) is not None:
            portions += 1
            desk.accept(portion)
        desk.running = set(desk.there[:32])
        done = desk.there[:32]
        desk.end(*done)
        ended += len(done)
        plan()
    assert portions <= 20


# `max_running`.


def test_the_engine_keeps_the_limit_of_an_array() -> None:
    """All tasks go at once, with the limit; what follows waits until all of them have ended: it cannot share that."""
    desk = Desk()
    desk.add_tasks(range(10), at_once=4)
    portion = desk.take()
    assert portion.array.at_once == 4
    desk.accept(portion)
    desk.add_tasks(range(10, 20), at_once=4)
    assert desk.take() is None
    desk.end(*[f"sweep_{index}" for index in range(7)])
    portion = desk.take()  # three are left
    assert portion is not None
    assert desk.accept(portion) == ["sweep_10"]
    desk.end("sweep_7", "sweep_8", "sweep_9", "sweep_10")
    portion = desk.take()
    assert (len(portion.launches), portion.array.at_once) == (9, 4)


@given(st.integers(1, 5), st.lists(st.integers(0, 3), max_size=60), st.integers(1, 30), st.sampled_from([10, 100]))
def test_no_more_tasks_of_an_array_run_than_it_allows(limit: int, lengths: list[int], count: int, width: int) -> None:
    """Whatever the portions are, an engine that keeps the limit of each array runs no more of one array of spool."""
    desk = Desk(width=width)
    desk.add_tasks(range(count), at_once=limit)
    arrays: list[tuple[list[str], int]] = []  # their tasks, and their limits
    ended = 0
    for step in range(10 * count):
        while (portion := desk.take()) is not None:
            allowed = portion.array.at_once if portion.array is not None else None
            arrays.append((desk.accept(portion), allowed or len(portion.launches)))
        running = [
            name for names, allowed in arrays for name in [each for each in names if each in desk.there][:allowed]
        ]
        assert len(running) <= limit
        for name in running[: lengths[step % len(lengths)] if lengths else 1]:
            desk.end(name)
            ended += 1
        if lengths and not any(lengths):
            break
    assert ended == count or (lengths and not all(lengths))


# A full engine.


def test_a_full_engine_is_asked_again_after_a_while_with_one_job() -> None:
    """Nothing of ours has ended: the limit may be another user's affair."""
    desk = Desk()
    desk.add("a", "b", "c")
    portion = desk.take()
    assert portion is not None
    desk.refuse(portion)
    assert desk.handover.full == FULL
    assert desk.take(later_s=29) is None
    portion = desk.take(later_s=1)
    assert portion.launches[0].job == "a"
    assert desk.take(sending=1) is None  # one at a time
    desk.accept(portion)
    assert desk.handover.full == ""
    assert desk.take_all() == [["b"], ["c"]]


def test_a_full_engine_gets_one_job_for_each_that_has_ended() -> None:
    """An end of ours makes room at once, and for one."""
    desk = Desk()
    desk.there = ["x", "y"]
    desk.add("a", "b", "c")
    portion = desk.take()
    assert portion is not None
    desk.refuse(portion)
    assert desk.take() is None
    desk.end("x")
    assert desk.take_all() == [["a"]]
    desk.end("y", "a")
    assert desk.take_all() == [["b"], ["c"]]


def test_an_end_that_the_engine_has_not_counted_yet_is_tried_again_soon() -> None:
    """The exit code is there a moment before the engine frees the place."""
    desk = Desk()
    desk.there = ["x"]
    desk.add("a")
    portion = desk.take()
    assert portion is not None
    desk.refuse(portion)
    desk.end("x")
    portion = desk.take(later_s=0)
    assert portion is not None
    desk.refuse(portion)
    assert desk.take(later_s=0.5) is None
    assert desk.take(later_s=0.5) is not None


@pytest.mark.parametrize("limit", [1, 7, 30, 64, 99])
def test_an_array_that_does_not_fit_goes_in_parts(limit: int) -> None:
    """A hundred tasks under any limit all go, and the engine refuses few submissions."""
    desk = Desk()
    desk.add_tasks(range(100))
    ended = refused = steps = 0
    while ended < 100:
        steps += 1
        assert steps < 2000
        while (portion := desk.take(later_s=0.2)) is not None:
            if len(desk.there) + len(portion.launches) > limit:
                refused += 1
                desk.refuse(portion)
            else:
                desk.accept(portion)
        done = desk.there[:8]
        desk.end(*done)
        ended += len(done)
    assert refused <= 20 + 100 // limit


def test_what_was_withdrawn_meanwhile_is_not_queued_again() -> None:
    """A refusal concerns those that are still wanted."""
    desk = Desk()
    desk.add_tasks(range(3))
    portion = desk.take()
    desk.handover.refused(portion, [("sweep_1", 1)], FULL)
    assert desk.take_all() == [["sweep_1"]]
    assert not desk.handover


def test_a_withdrawn_run_is_not_handed_over() -> None:
    """It is known whether it was still here."""
    desk = Desk()
    desk.add("a")
    desk.add_tasks([1, 2])
    assert desk.handover.withdraw(("a", 1))
    assert desk.handover.withdraw(("sweep_1", 1))
    assert not desk.handover.withdraw(("a", 1))
    assert desk.take_all() == [["sweep_2"]]


def test_submissions_keep_to_the_rate() -> None:
    """More of them may go in a burst; then they follow each other as configured, and the moment is known."""
    desk = Desk(submit_per_second=2)
    desk.add(*[f"j{number}" for number in range(40)])
    desk.now_ns += 100 * SECOND_NS
    burst = 0
    while (portion := desk.take(later_s=0)) is not None:
        burst += len(desk.accept(portion))
    assert burst == 20
    assert desk.handover.due_ns() == desk.now_ns + SECOND_NS // 2
