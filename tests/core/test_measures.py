"""The figures of a schedule, against schedules small enough to reckon by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spool.core.measures import curve, distribution, figures, grouped, longest_waits
from spool.core.model import SECOND_NS as S
from spool.core.model import Grant, Machine, Policy, Request, Spec, State
from spool.core.simulation import Coming, Discipline, Outcome, simulate


def ran(submit: int, start: int | None, end: int | None, cpus: int = 1, gpus: int = 0) -> Outcome:
    """Return a job's outcome, in seconds."""
    state = State.QUEUED if start is None else State.FINISHED
    grant = Grant(cpus, gpu_uuids=tuple(f"GPU-{index}" for index in range(gpus)))
    return Outcome(str(submit), submit * S, start and start * S, end and end * S, state, grant)


def test_figures_of_a_schedule_of_three() -> None:
    """Waits 0, 90 and 40 s; slowdowns 1, 100/10 (a second counts as ten) and 1.4; 320 of 4 x 150 s are used."""
    found = figures([ran(100, 100, 200, 2), ran(110, 200, 201, 20), ran(110, 150, 250)], 4)
    assert (found.jobs, found.left) == (3, 0)
    assert (found.mean_wait_ns, found.median_wait_ns, found.wait_95_ns) == (130 * S // 3, 40 * S, 90 * S)
    assert found.mean_bounded_slowdown is not None
    assert abs(found.mean_bounded_slowdown - (1 + 9.1 + 1.4) / 3) < 1e-9
    assert found.makespan_ns == 150 * S
    assert found.utilisation == (2 * 100 + 20 * 1 + 100) / (4 * 150)
    assert found.max_queue == 2
    assert found.mean_queue == (90 + 40) / 150


def test_percentiles_are_waits_that_somebody_had() -> None:
    """Nearest rank: of 1 to 100 seconds the 50th, the 95th and the 99th; and the longest."""
    found = figures([ran(1, 1 + wait, 200) for wait in range(1, 101)], 1)
    assert (found.median_wait_ns, found.wait_95_ns, found.wait_99_ns) == (50 * S, 95 * S, 99 * S)
    assert found.longest_wait_ns == 100 * S


def test_groups_share_the_machine() -> None:
    """Each group has its own waits; what the groups used is measured against the machine and the makespan of all."""
    outcomes = [ran(0, 0, 100, 2), ran(0, 50, 100, 2), ran(50, 100, 200, 1), ran(60, None, None, 3)]
    found = grouped(outcomes, lambda each: each.submit_at_ns == 0, 4)
    assert list(found) == [True, False]
    assert (found[True].jobs, found[True].left, found[True].mean_wait_ns) == (2, 0, 25 * S)
    assert (found[False].jobs, found[False].left, found[False].longest_wait_ns) == (2, 1, 50 * S)
    assert (found[True].utilisation, found[False].utilisation) == (300 / 800, 100 / 800)
    assert figures(outcomes, 4).utilisation == 400 / 800


def test_the_longest_waits_come_first() -> None:
    """Of equal waits the one submitted first; a job that never starts has no wait to compare."""
    outcomes = [ran(1, 11, 20), ran(2, 32, 40), ran(0, 10, 20), ran(3, None, None), ran(4, 5, 6)]
    assert [each.name for each in longest_waits(outcomes, 3)] == ["2", "0", "1"]
    assert len(longest_waits(outcomes, 9)) == 4


def test_the_distribution_says_what_part_waited_no_longer() -> None:
    """Equal waits are one point, the part is of all jobs, and however many there are the points are few."""
    outcomes = [ran(1, 1, 9), ran(1, 1, 9), ran(1, 4, 9), ran(1, None, None)]
    assert distribution(outcomes, 100) == [(0, 0.5), (3 * S, 0.75)]
    many = distribution([ran(1, 1 + wait, 9999) for wait in range(1, 1001)], 10)
    assert many == [(100 * S * at, at / 10) for at in range(1, 11)]
    assert distribution([], 10) == []


def test_a_job_that_never_starts_is_counted_and_waits_to_the_end() -> None:
    """It is in the queue for all of the time, and in no mean of waits."""
    found = figures([ran(1, 1, 101), ran(1, None, None)], 1)
    assert (found.left, found.mean_wait_ns, found.max_queue, found.mean_queue) == (1, 0, 1, 1.0)


def test_nothing_has_no_means() -> None:
    """Of no jobs there is no mean, and nothing is divided by nothing."""
    found = figures([], 4)
    assert (found.jobs, found.mean_wait_ns, found.utilisation, found.mean_bounded_slowdown) == (0, None, None, None)
    assert curve([], 4, 10).queue == (0.0,) * 10


def test_gpus_are_used_apart_from_processors() -> None:
    """Two of four GPUs for half of the time are a quarter."""
    found = figures([ran(1, 1, 51, 1, gpus=2), ran(1, 1, 101, 1)], 4, gpus=4)
    assert found.gpu_utilisation == 0.25
    assert curve([ran(1, 1, 51, 1, gpus=2), ran(1, 1, 101, 1)], 4, 2, gpus=4).gpu_utilisation == (0.5, 0.0)
    assert curve([ran(1, 1, 51)], 4, 2).gpu_utilisation is None
    assert figures([ran(1, 1, 51)], 4).gpu_utilisation is None


JOBS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 4), st.integers(0, 30)), min_size=1, max_size=25
)  # submission, processors, run time


def schedule(drawn: list[tuple[int, int, int]], discipline: Discipline) -> list[Outcome]:
    """Return what becomes of jobs on four processors."""
    coming = [
        Coming(f"{at:03}", Spec("true", request=Request(cpus), time_limit_ns=max(runs, 1) * S), submit * S, runs * S)
        for at, (submit, cpus, runs) in enumerate(drawn)
    ]
    return list(simulate(coming, Machine(4, 1 << 40), Policy(), discipline))


@given(JOBS, st.sampled_from(Discipline), st.integers(1, 40))
def test_a_curve_has_the_areas_of_the_figures(drawn, discipline, points):
    """However many points it has, a curve's mean is the mean of the figures, on its own stretch of time."""
    outcomes = schedule(drawn, discipline)
    found, drawn_curve = figures(outcomes, 4), curve(outcomes, 4, points)
    length = drawn_curve.step_ns * points
    assert abs(sum(drawn_curve.queue) * drawn_curve.step_ns - (found.mean_queue or 0) * found.makespan_ns) < 1e-3 * S
    used = (found.utilisation or 0) * found.makespan_ns
    assert abs(sum(drawn_curve.utilisation) * drawn_curve.step_ns - used) < 1e-3 * S
    assert length >= found.makespan_ns
    assert all(0 <= part <= 1 + 1e-9 for part in drawn_curve.utilisation)
    assert max(drawn_curve.queue) <= found.max_queue


@given(JOBS)
def test_fifo_is_what_the_book_says(drawn):
    """First come, first served: each starts once all before it have and its processors are free, and not later."""
    began: dict[str, int] = {}
    ends: list[tuple[int, int]] = []  # when, processors
    last = 0
    for at, (submit, cpus, runs) in sorted(enumerate(drawn), key=lambda each: (each[1][0], each[0])):
        now = max(submit, last)
        while sum(held for end, held in ends if end > now) + cpus > 4:
            now = min(end for end, _ in ends if end > now)
        began[f"{at:03}"] = last = now
        ends.append((now + runs, cpus))
    assert {each.name: each.started_at_ns for each in schedule(drawn, Discipline.FIFO)} == {
        name: start * S for name, start in began.items()
    }
