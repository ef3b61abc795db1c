"""How busy the GPUs were in the last half hour, in steps."""

from __future__ import annotations

from spool.core.gpuuse import STEP_NS, STEPS, RecentRecorder, RecentUse, in_cells


def test_a_step_has_the_mean_of_the_looks() -> None:
    """Steps without a look are unknown."""
    recorder = RecentRecorder()
    recorder.note(10 * STEP_NS + 3, {"a": 20, "b": None})
    recorder.note(10 * STEP_NS + 4, {"a": 41, "b": None})
    assert recorder.noted() == RecentUse(until_ns=11 * STEP_NS, gpus={"a": (30,)})
    recorder.note(13 * STEP_NS, {"a": 90, "b": 7})
    assert recorder.noted().gpus == {"a": (30, None, None, 90), "b": (7,)}


def test_it_is_bounded_and_forgets_a_gpu_without_looks() -> None:
    """However long it goes on, there are no more than the steps of half an hour."""
    recorder = RecentRecorder()
    recorder.note(0, {"b": 50})
    for at in range(3 * STEPS):
        recorder.note(at * STEP_NS, {"a": at})
    assert recorder.noted().gpus == {"a": tuple(range(2 * STEPS, 3 * STEPS))}


def test_the_next_dispatcher_goes_on_and_the_time_between_is_unknown() -> None:
    """What was noted before stays; a record of other steps is not continued."""
    recorder = RecentRecorder()
    recorder.resume(RecentUse(until_ns=5 * STEP_NS, gpus={"a": (80, 90)}))
    recorder.note(7 * STEP_NS, {"a": 6})
    assert recorder.noted() == RecentUse(until_ns=8 * STEP_NS, gpus={"a": (80, 90, None, None, 6)})
    other = RecentRecorder()
    other.resume(RecentUse(step_ns=7, until_ns=5 * STEP_NS, gpus={"a": (3, 4)}))
    assert other.noted() == RecentUse()


def test_a_clock_that_is_set_back_begins_anew() -> None:
    """Nothing is kept that would lie in the future; a little does not matter."""
    recorder = RecentRecorder()
    recorder.note(1000 * STEP_NS, {"a": 1})
    recorder.note(999 * STEP_NS, {"a": 3})
    assert recorder.noted().gpus == {"a": (2,)}
    recorder.note(10 * STEP_NS, {"a": 5})
    assert recorder.noted() == RecentUse(until_ns=11 * STEP_NS, gpus={"a": (5,)})


def test_a_reader_adds_the_steps_since() -> None:
    """Of these nothing is known."""
    noted = RecentUse(until_ns=5 * STEP_NS, gpus={"a": (80,)})
    assert noted.as_of(5 * STEP_NS - 1) == noted
    found = noted.as_of(6 * STEP_NS + 1)
    assert (found.gpus, found.until_ns) == ({"a": (80, None, None)}, 7 * STEP_NS)
    assert len(noted.as_of(10_000 * STEP_NS).gpus["a"]) == STEPS


def test_cells_end_with_the_newest_step() -> None:
    """Each cell has as many steps; what is unknown in all of them is unknown."""
    assert in_cells((1, 2, 3), 60) == [None] * 57 + [1, 2, 3]
    assert in_cells((0, 4, None, 6), 30) == [None] * 28 + [2, 6]
    assert in_cells((), 7) == [None] * 7
