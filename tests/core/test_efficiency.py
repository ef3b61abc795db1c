"""What was asked for against what was used, and the advice that follows from it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spool.core.model import SECOND_NS as S
from spool.core.model import GpuUse, Result, State
from spool.core.sizes import Advice, MeasuredRun, efficiency, rounded_size, rounded_time, summary
from spool.core.units import format_duration, format_size, parse_duration, parse_size

G = 1 << 30
M = 1 << 20
MINUTE, HOUR = 60 * S, 3600 * S


def measured(run: MeasuredRun, **changes: Any) -> MeasuredRun:
    """Return *run* with these changes, of its grant, of its record or of itself."""
    grant = {key: changes.pop(key) for key in run.grant.__struct_fields__ if key in changes}
    record = {key: changes.pop(key) for key in run.record.__struct_fields__ if key in changes}
    return replace(run, record=replace(run.record, grant=replace(run.grant, **grant), **record), **changes)


JOB = MeasuredRun(Result("job", 1, 1, State.FINISHED, ""))
TRAIN = measured(
    JOB, job="train", cpus=8, memory_bytes=16 * G, gpu_uuids=("GPU-a", "GPU-b"), time_limit_ns=8 * HOUR,
    run_time_ns=2 * HOUR, cpu_time_ns=5 * HOUR, peak_memory_bytes=4 * G,
)  # fmt: skip


def test_what_a_run_used_of_what_it_was_given() -> None:
    """Five CPU hours in two hours are 2.5 CPUs, of 8 given; two GPUs for two hours are four GPU hours.

    The advice is some more in numbers that one would write: 4.8 GiB become 5G, three hours stay three.
    """
    found = efficiency(TRAIN)
    assert (found.cpus_used, found.cpu_efficiency) == (2.5, 2.5 / 8)
    assert (found.memory_efficiency, found.time_limit_used, found.gpu_hours) == (0.25, 0.25, 4)
    assert found.advice == Advice(cpus=3, memory_bytes=5 * G, time_limit_ns=3 * HOUR)


def test_what_is_unknown_is_unknown_and_never_nothing() -> None:
    """A run that outlived its dispatcher: no CPU time, no efficiency, no advice on CPUs; the reason is told.

    Where the clock was set, or nobody has filed the end yet, what does not need the time is told.
    """
    found = efficiency(measured(TRAIN, cpu_time_ns=None, peak_memory_bytes=None))
    assert (found.cpus_used, found.cpu_efficiency, found.memory_efficiency) == (None, None, None)
    assert replace(found.advice, notes=()) == Advice(time_limit_ns=3 * HOUR)
    assert [[word in note for note in found.advice.notes].count(True) for word in ("CPU time", "peak memory")] == [1, 1]
    found = efficiency(measured(TRAIN, run_time_ns=None))
    assert (found.memory_efficiency, found.cpus_used, found.gpu_hours) == (0.25, None, None)
    assert replace(found.advice, notes=()) == Advice(memory_bytes=5 * G)
    assert any("run time" in note for note in found.advice.notes)


def test_what_was_not_asked_for_has_no_part() -> None:
    """No limit, no percentage; a job of no CPUs divides by nothing; unwatched, only one process is known."""
    found = efficiency(measured(JOB, run_time_ns=HOUR, cpu_time_ns=HOUR, peak_memory_bytes=G))
    assert (found.cpus_used, found.cpu_efficiency, found.memory_efficiency, found.time_limit_used) == (
        1, None, None, None,
    )  # fmt: skip
    assert any("largest process only" in note for note in found.advice.notes)
    assert found.advice.cpus is None


def test_a_short_run_says_nothing_of_its_cpus() -> None:
    """Most of nine seconds is beginning and ending; one that took more CPUs than given is told to ask for them."""
    assert efficiency(measured(TRAIN, run_time_ns=9 * S, cpu_time_ns=9 * S)).advice.cpus is None
    assert efficiency(measured(TRAIN, run_time_ns=10 * S, cpu_time_ns=10 * S)).advice.cpus == 1
    assert efficiency(measured(TRAIN, run_time_ns=0, cpu_time_ns=0)).cpus_used is None
    found = efficiency(measured(TRAIN, cpus=2, cpu_time_ns=15 * HOUR))
    assert found.cpu_efficiency == 3.75
    assert found.advice.cpus == 8


@pytest.mark.parametrize(("peak_mib", "twice", "of"), [(None, 400, "200 MiB"), (150, 400, "200 MiB"),
                                                       (320, 640, "320 MiB")])  # fmt: skip
def test_a_run_that_met_a_limit_is_told_to_double_it(peak_mib: int | None, twice: int, of: str) -> None:
    """How much would have been enough, nobody knows; the words beside the advice name what it is twice of."""
    peak = None if peak_mib is None else peak_mib * M
    full = measured(TRAIN, outcome=State.OUT_OF_MEMORY, memory_bytes=200 * M, peak_memory_bytes=peak)
    advice = efficiency(full).advice
    assert (advice.memory_bytes, advice.time_limit_ns, of in advice.notes[0]) == (twice * M, None, True)
    late = measured(TRAIN, outcome=State.TIMEOUT, time_limit_ns=7 * MINUTE, run_time_ns=7 * MINUTE + 5)
    advice = efficiency(late).advice
    assert (advice.time_limit_ns, advice.memory_bytes) == (14 * MINUTE, None)
    assert "7m00s" in advice.notes[0]


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED, State.LOST, State.RUNNING, State.STOPPING])
def test_a_run_that_did_not_come_to_its_end_gives_no_advice(state: State) -> None:
    """What it used so far is shown all the same."""
    found = efficiency(measured(TRAIN, outcome=state))
    advice = found.advice
    assert (advice.cpus, advice.memory_bytes, advice.time_limit_ns) == (None, None, None)
    assert len(advice.notes) == 1
    assert found.cpus_used == 2.5


def test_a_run_that_never_started_used_nothing() -> None:
    """It has no numbers at all, nor has an array of which nothing ran: nothing is divided by nothing."""
    found = efficiency(measured(JOB, outcome=State.CANCELLED, started=False))
    assert (found.gpu_hours, found.cpus_used, found.advice.notes) == (None, None, ("it never started",))
    found = summary([], waiting=3)
    assert (found.tasks, found.states, found.cpus_used, found.run_time_ns.median) == (3, {"queued": 3}, None, None)
    assert found.advice.cpus is None


def test_the_tasks_of_an_array_together() -> None:
    """The busy CPUs are weighed by time, the advice is that of the neediest, and unknown is counted apart."""
    tasks = [
        TRAIN,
        measured(TRAIN, job="b", run_time_ns=HOUR, cpu_time_ns=HOUR, peak_memory_bytes=8 * G),
        measured(TRAIN, job="c", outcome=State.FAILED, run_time_ns=HOUR, cpu_time_ns=None, peak_memory_bytes=None),
        measured(TRAIN, job="d", outcome=State.RUNNING, run_time_ns=HOUR, cpu_time_ns=None, peak_memory_bytes=None),
    ]
    found = summary(tasks, waiting=6)
    assert (found.tasks, found.states) == (10, {"queued": 6, "running": 1, "finished": 2, "failed": 1})
    assert (found.cpus_used, found.cpu_efficiency) == (2, 0.25)
    assert (found.peak_memory_bytes.known, found.peak_memory_bytes.median, found.peak_memory_bytes.most) == (
        2, 4 * G, 8 * G,
    )  # fmt: skip
    assert (found.run_time_ns.known, found.run_time_ns.most, found.gpu_hours) == (3, 2 * HOUR, 10)
    advice = found.advice
    assert (advice.cpus, advice.memory_bytes, advice.time_limit_ns) == (3, 10 * G, 3 * HOUR)
    assert [note[:6] for note in advice.notes] == ["1 of 4"]


@pytest.mark.parametrize(
    ("used", "written"),
    [("1B", "64M"), ("65M", "128M"), ("1G", "1G"), ("1025M", "1280M"), ("5G", "5G"), ("5121M", "5632M"),
     ("17G", "17G"), ("66G", "68G")],
)  # fmt: skip
def test_sizes_are_rounded_up(used: str, written: str) -> None:
    """To 64 MiB below a GiB, and in larger steps above."""
    assert format_size(rounded_size(parse_size(used))) == written


@pytest.mark.parametrize(
    ("took", "written"),
    [("1s", "1m"), ("61s", "2m"), ("11m", "15m"), ("1h58m", "2h"), ("2h01m", "2h30m"), ("13h30m", "14h"),
     ("73h", "3d6h")],
)  # fmt: skip
def test_times_are_rounded_up(took: str, written: str) -> None:
    """To a minute below ten, and in larger steps above."""
    assert format_duration(rounded_time(parse_duration(took))) == written


_BORDERS = [*(2**power * G for power in range(0, 7, 2)), 10 * MINUTE, 2 * HOUR, 12 * HOUR, 72 * HOUR]


@pytest.mark.parametrize("border", _BORDERS)
@given(st.integers(1, 1 << 49), st.integers(-2, 2))
def test_rounding_never_goes_down_and_keeps_the_order(border: int, one: int, beside: int) -> None:
    """What is rounded is no less, by a half and a minute at most (sizes: a quarter, 64 MiB), and more stays no less."""
    other = border + beside
    for rounded, most in ((rounded_size, 64 * M), (rounded_time, MINUTE)):
        part = 4 if rounded is rounded_size else 2
        for number in (one, other):
            assert number <= rounded(number) <= number + number // part + most
        assert (one <= other) <= (rounded(one) <= rounded(other))
        assert (other <= one) <= (rounded(other) <= rounded(one))


def test_the_use_of_gpus_is_compared_with_what_was_given() -> None:
    """The mean of both, a note on the one that was never busy, and of a share its peak and a fifth."""
    use = (GpuUse(HOUR, 90.0, 100, HOUR, G, 10 * G), GpuUse(HOUR, 0.0, 0, HOUR, 0, 0))
    found = efficiency(measured(TRAIN, gpu_use=use, gpu_memory_bytes=40 * G))
    assert (found.gpu_efficiency, found.advice.gpu_memory_bytes) == (0.45, 12 * G)
    assert [note[:8] for note in found.advice.notes] == ["1 of its"]
    alone = efficiency(measured(TRAIN, gpu_uuids=("GPU-a",), gpu_use=use[1:])).advice
    assert (len(alone.notes), alone.gpu_memory_bytes) == (1, None)
    unknown = efficiency(measured(TRAIN, gpu_use=(GpuUse(), GpuUse())))
    assert (unknown.gpu_efficiency, unknown.advice.notes) == (None, ())
    together = summary([measured(TRAIN, gpu_use=use), TRAIN])
    assert together.gpu_efficiency == 0.45
