"""The last half hour of a spool, in steps."""

from __future__ import annotations

from spool.core.gpuuse import STEP_NS, STEPS, RecentRecorder, RecentUse, in_cells


def test_a_step_has_the_longest_queue_and_the_mean_of_the_looks() -> None:
    """Steps that nobody noted have the queue as it was noted last, and an unknown utilisation."""
    recorder = RecentRecorder()
    recorder.note_queue(10 * STEP_NS, 2)
    recorder.note_queue(10 * STEP_NS + 1, 5)
    recorder.note_queue(10 * STEP_NS + 2, 1)
    recorder.note_gpus(10 * STEP_NS + 3, {"a": 20, "b": None})
    recorder.note_gpus(10 * STEP_NS + 4, {"a": 41, "b": None})
    assert recorder.noted() == RecentUse(until_ns=11 * STEP_NS, queued=(5,), gpus={"a": (30,)})
    recorder.note_gpus(13 * STEP_NS, {"a": 90, "b": 7})
    found = recorder.noted()
    assert found.queued == (5, 1, 1, 1)
    assert found.gpus == {"a": (30, None, None, 90), "b": (7,)}


def test_it_is_bounded_and_forgets_a_gpu_without_looks() -> None:
    """However long it goes on, there are no more than the steps of half an hour."""
    recorder = RecentRecorder()
    recorder.note_gpus(0, {"a": 50})
    for at in range(3 * STEPS):
        recorder.note_queue(at * STEP_NS, at)
    found = recorder.noted()
    assert found.queued == tuple(range(2 * STEPS, 3 * STEPS))
    assert found.gpus == {}
    recorder.note_queue(1_000_000 * STEP_NS, 4)
    assert len(recorder.noted().queued) == STEPS


def test_the_next_dispatcher_goes_on_and_the_time_between_is_unknown() -> None:
    """What was noted before stays; a record of other steps is not continued."""
    recorder = RecentRecorder()
    recorder.resume(RecentUse(until_ns=5 * STEP_NS, queued=(3, 4), gpus={"a": (80, 90)}))
    recorder.note_queue(7 * STEP_NS, 6)
    assert recorder.noted() == RecentUse(
        until_ns=8 * STEP_NS, queued=(3, 4, None, None, 6), gpus={"a": (80, 90) + (None,) * 3}
    )
    other = RecentRecorder()
    other.resume(RecentUse(step_ns=7, until_ns=5 * STEP_NS, queued=(3, 4)))
    assert other.noted() == RecentUse()


def test_a_clock_that_is_set_back_begins_anew() -> None:
    """Nothing is kept that would lie in the future; a little does not matter."""
    recorder = RecentRecorder()
    recorder.note_queue(1000 * STEP_NS, 1)
    recorder.note_queue(999 * STEP_NS, 2)
    assert recorder.noted().queued == (2,)
    recorder.note_queue(10 * STEP_NS, 3)
    assert recorder.noted() == RecentUse(until_ns=11 * STEP_NS, queued=(3,))


def test_a_reader_adds_the_steps_since() -> None:
    """The queue is as now in steps that nobody noted, the GPUs are unknown; without a dispatcher both are."""
    noted = RecentUse(until_ns=5 * STEP_NS, queued=(3,), gpus={"a": (80,)})
    assert noted.as_of(5 * STEP_NS - 1, 2) == noted
    found = noted.as_of(6 * STEP_NS + 1, 2)
    assert (found.queued, found.gpus, found.until_ns) == ((3, 2, 2), {"a": (80, None, None)}, 7 * STEP_NS)
    assert noted.as_of(6 * STEP_NS + 1, None).queued == (3, None, None)
    assert len(noted.as_of(10_000 * STEP_NS, 1).queued) == STEPS


def test_cells_end_with_the_newest_step() -> None:
    """Each cell has as many steps; what is unknown in all of them is unknown."""
    assert in_cells((1, 2, 3), 60) == [None] * 57 + [1, 2, 3]
    assert in_cells((0, 4, None, 6), 30) == [None] * 28 + [2, 6]
    assert in_cells((), 7) == [None] * 7
