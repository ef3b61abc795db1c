"""What a run does with its GPUs, when they are idle for too long, and how busy they were in the last half hour."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import NOW, spec
from spool.core.gpuuse import STEP_NS, STEPS, GpuWatch, RecentRecorder, RecentUse, in_cells, mean_part, unused
from spool.core.model import SECOND_NS as S
from spool.core.model import GpuUse, GpuWork

G = 1 << 30
MINUTE = 60 * S
PATIENT = spec(gpu_idle_ns=30 * MINUTE)


def did(percent: int | None, memory: int | None = None) -> GpuWork:
    """Return what one look shows."""
    return GpuWork("job", percent, memory)


def watched(*looks: tuple[int, list[GpuWork | None]], most_ns: int = MINUTE) -> GpuWatch:
    """Return the watch on a run that began at NOW, after looks so many nanoseconds later."""
    watch = GpuWatch.since(NOW, len(looks[0][1]) if looks else 1)
    for after_ns, work in looks:
        watch = watch.looked(NOW + after_ns, work, most_ns)
    return watch


def test_a_look_stands_for_the_time_since_the_one_before() -> None:
    """Ten seconds at 100 % and thirty at 20 % are 40 % on average, and likewise the memory.

    A dispatcher that was away for an hour: the look after it stands for no more than it may. Looks without an answer
    leave no trace, as do those without a utilisation; if all are so nothing is known.
    """
    watch = watched((10 * S, [did(100, 4 * G)]), (40 * S, [did(20, 8 * G)]))
    assert watch.known == (GpuUse(40 * S, 40.0, 100, 40 * S, 7 * G, 8 * G),)
    watch = watched((10 * S, [did(100)]), (3600 * S, [did(0)]), most_ns=10 * S)
    assert (watch.gpus[0].watched_ns, watch.gpus[0].mean_percent) == (20 * S, 50.0)
    watch = watched((10 * S, [did(80, G)]), (20 * S, [None]), (30 * S, [did(None, 3 * G)]))
    assert watch.known == (GpuUse(10 * S, 80.0, 80, 20 * S, 2 * G, 3 * G),)
    assert watched((10 * S, [None, did(None)])).known == ()


def consumed(counter_mj: int | None, sharers: int = 1) -> GpuWork:
    """Return what one look shows at the counter of the energy."""
    return GpuWork("job", None, None, counter_mj, sharers)


@pytest.mark.parametrize(
    ("looks", "energy_mj", "known_s"),
    [
        ([(10, consumed(1000))], None, 0),
        ([(10, consumed(1000)), (20, consumed(1500))], 500, 10),
        # A time in which nobody looked counts, because the counter does.
        ([(10, consumed(1000)), (3610, consumed(901_000))], 900_000, 3600),
        # Each run has an equal part of what the GPU consumed while they shared it.
        ([(1, consumed(0)), (2, consumed(900, 3)), (3, consumed(1000))], 400, 2),
        # The driver was loaded again, or did not tell: that time is unknown, not nothing.
        ([(1, consumed(500)), (2, consumed(700)), (3, consumed(10)), (4, consumed(60))], 250, 2),
        ([(1, consumed(500)), (2, None), (3, consumed(900)), (4, consumed(950))], 50, 1),
        ([(1, did(50)), (2, did(50))], None, 0),
    ],
)
def test_energy_is_what_the_counter_went_on_between_looks(looks, energy_mj, known_s) -> None:
    """The first look begins it."""
    (use,) = watched(*((after_s * S, [done]) for after_s, done in looks)).gpus
    assert (use.energy_mj, use.energy_watched_ns) == (energy_mj, known_s * S)


def test_energy_while_a_run_is_suspended_is_not_its_own() -> None:
    """The look after it begins anew."""
    watch = GpuWatch.since(NOW, 1).looked(NOW + S, [consumed(100)], MINUTE)
    watch = watch.passed_over(NOW + 9 * S).looked(NOW + 10 * S, [consumed(900)], MINUTE)
    assert watch.gpus[0].energy_mj is None
    assert watch.looked(NOW + 11 * S, [consumed(950)], MINUTE).gpus[0].energy_mj == 50


def test_a_clock_that_was_set_back_adds_nothing_and_goes_on_from_there() -> None:
    """The next look counts from the new time."""
    watch = watched((100 * S, [did(10)]), (40 * S, [did(90)]), (50 * S, [did(10)]), most_ns=200 * S)
    assert (watch.gpus[0].watched_ns, watch.gpus[0].peak_percent) == (110 * S, 10)


@pytest.mark.parametrize(
    ("looks", "idle_s"),
    [
        ([[0, 1], [0, 1]], 20),  # 1 % is idle
        ([[0, 1], [0, 2]], 0),  # one GPU of two that computes is work
        ([[0, 2], [0, 1]], 10),
        ([[0], None, [0]], 20),  # NVML hangs: the time of that look is left out, and what was is kept
        ([[0, None]], 0),
        ([[0, 0], [None, 50]], 0),
    ],
)
def test_a_run_is_idle_while_all_its_gpus_are(looks, idle_s) -> None:
    """Work ends the idleness; what is unknown neither prolongs nor ends it."""
    seen = [[None] if percents is None else [did(each) for each in percents] for percents in looks]
    assert watched(*((at * 10 * S, work) for at, work in enumerate(seen, 1))).idle_ns == idle_s * S


def test_it_is_told_once_in_each_stretch() -> None:
    """After the limit, and again only after some work and the same time; a stop that was refused after that time."""
    watch = watched((30 * MINUTE - 1, [did(0)]), most_ns=60 * MINUTE)
    assert not watch.is_due(PATIENT)
    watch = watch.looked(NOW + 30 * MINUTE, [did(0)], MINUTE)
    assert watch.is_due(PATIENT)
    told = watch.telling(again=False)
    assert not told.looked(NOW + 31 * MINUTE, [did(0)], MINUTE).is_due(PATIENT)
    worked = told.looked(NOW + 31 * MINUTE, [did(50)], MINUTE)
    assert worked.looked(NOW + 61 * MINUTE, [did(0)], 60 * MINUTE).is_due(PATIENT)
    refused = watch.telling(again=True)
    assert not refused.looked(NOW + 59 * MINUTE, [did(0)], 60 * MINUTE).is_due(PATIENT)
    assert refused.looked(NOW + 60 * MINUTE, [did(0)], 60 * MINUTE).is_due(PATIENT)


def test_the_reason_says_for_how_long_and_why_that_is_too_long() -> None:
    """Nothing is said of a run that may be idle for ever, or not for that long yet."""
    watch = replace(GpuWatch.since(NOW, 2), idle_ns=42 * MINUTE)
    assert "42m00s (gpu_idle = 30m)" in watch.words(PATIENT)
    assert watch.words(spec()) == replace(watch, idle_ns=29 * MINUTE).words(PATIENT) == ""


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100), st.integers(0, 80 * G)), min_size=1, max_size=40))
def test_the_mean_is_that_of_all_looks_at_once(looks: list[tuple[int, int, int]]) -> None:
    """Added up one by one, the means come out as from the whole list, but for what rounding takes."""
    watch, at_ns = GpuWatch.since(NOW, 1), NOW
    for seconds, percent, memory in looks:
        at_ns += seconds * S
        watch = watch.looked(at_ns, [did(percent, memory)], 1000 * S)
    use, whole = watch.gpus[0], sum(seconds for seconds, _, _ in looks)
    assert use.mean_percent == pytest.approx(sum(each[0] * each[1] for each in looks) / whole)
    assert use.mean_memory_bytes == pytest.approx(sum(each[0] * each[2] for each in looks) / whole, abs=len(looks))
    assert (use.peak_percent, use.peak_memory_bytes) == (max(p for _, p, _ in looks), max(m for _, _, m in looks))


def test_several_gpus_have_one_mean_and_those_never_busy_are_counted() -> None:
    """Each counts as long as it was watched; one of which nothing is known neither counts nor is called unused."""
    gpus = (GpuUse(10 * S, 90.0, 100), GpuUse(30 * S, 0.0, 0), GpuUse())
    assert mean_part(gpus) == 0.225
    assert unused(gpus) == 1
    assert mean_part((GpuUse(),)) is None


def test_a_step_has_the_mean_of_the_looks() -> None:
    """Steps without a look are unknown."""
    recorder = RecentRecorder()
    recorder.note(10 * STEP_NS + 3, {"a": 20, "b": None})
    recorder.note(10 * STEP_NS + 4, {"a": 41, "b": None})
    assert recorder.use == RecentUse(until_ns=11 * STEP_NS, gpus={"a": (30,)})
    recorder.note(13 * STEP_NS, {"a": 90, "b": 7})
    assert recorder.use.gpus == {"a": (30, None, None, 90), "b": (7,)}


def test_it_is_bounded_and_forgets_a_gpu_without_looks() -> None:
    """However long it goes on, there are no more than the steps of half an hour."""
    recorder = RecentRecorder()
    recorder.note(0, {"b": 50})
    for at in range(3 * STEPS):
        recorder.note(at * STEP_NS, {"a": at})
    assert recorder.use.gpus == {"a": tuple(range(2 * STEPS, 3 * STEPS))}


def test_the_next_dispatcher_goes_on_and_the_time_between_is_unknown() -> None:
    """What was noted before stays; a record of other steps is not continued."""
    recorder = RecentRecorder()
    recorder.resume(RecentUse(until_ns=5 * STEP_NS, gpus={"a": (80, 90)}))
    recorder.note(7 * STEP_NS, {"a": 6})
    assert recorder.use == RecentUse(until_ns=8 * STEP_NS, gpus={"a": (80, 90, None, None, 6)})
    other = RecentRecorder()
    other.resume(RecentUse(step_ns=7, until_ns=5 * STEP_NS, gpus={"a": (3, 4)}))
    assert other.use == RecentUse()


def test_a_clock_that_is_set_back_begins_anew() -> None:
    """Nothing is kept that would lie in the future; a little does not matter."""
    recorder = RecentRecorder()
    recorder.note(1000 * STEP_NS, {"a": 1})
    recorder.note(999 * STEP_NS, {"a": 3})
    assert recorder.use.gpus == {"a": (2,)}
    recorder.note(10 * STEP_NS, {"a": 5})
    assert recorder.use == RecentUse(until_ns=11 * STEP_NS, gpus={"a": (5,)})


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
