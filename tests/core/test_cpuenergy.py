"""What the counters of CPU packages say of the energy of a run, and what they do not say."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from spool.core.cpuenergy import EnergyMeter, EnergySample, EnergyShare
from spool.core.model import SECOND_NS as S
from spool.core.model import CpuEnergy, Suspension

RANGE_UJ = 262_143_328_850
J = 1_000_000  # in µJ


def metered(*looks: tuple[int, tuple[int, ...] | None], ranges: tuple[int, ...] = (RANGE_UJ,)) -> EnergyMeter:
    """Return the meter after looks at these moments, in seconds."""
    meter = EnergyMeter(ranges)
    for at_s, counters in looks:
        meter = meter.after(None if counters is None else EnergySample(at_s * S, at_s * S, counters))
    return meter


def known(meter: EnergyMeter) -> tuple[int, int]:
    """Return what was consumed in µJ, and in how many seconds."""
    return meter.total_uj, meter.known_ns // S


def test_energy_is_what_all_packages_consumed_between_samples() -> None:
    """The first sample begins it."""
    assert known(metered((10, (5 * J,)))) == (0, 0)
    two = metered((10, (5 * J, 0)), (40, (3005 * J, 100 * J)), (50, (3006 * J, 200 * J)), ranges=(RANGE_UJ,) * 2)
    assert known(two) == (3201 * J, 40)


def test_a_time_that_may_hide_a_second_wrap_is_unknown() -> None:
    """No run was there for long, or the dispatcher was stopped: the next interval counts again."""
    assert known(metered((0, (0,)), (263, (50 * J,)), (273, (60 * J,)))) == (10 * J, 10)


def test_a_counter_that_was_reset_is_unknown_not_a_wrap() -> None:
    """A package would have consumed more than it can."""
    assert known(metered((0, (5000 * J,)), (30, (0,)), (60, (7 * J,)))) == (7 * J, 30)


def test_counters_that_cannot_be_read_are_unknown_until_the_second_sample_after_that() -> None:
    """Nothing is interpolated."""
    assert known(metered((0, (0,)), (10, None), (20, (9 * J,)), (30, (10 * J,)))) == (1 * J, 10)


def test_the_time_in_which_the_machine_slept_does_not_count() -> None:
    """The clock since boot goes on then, and the monotonic one does not."""
    meter = EnergyMeter((RANGE_UJ,)).after(EnergySample(0, 0, (0,)))
    assert known(meter.after(EnergySample(10 * S, 3600 * S, (5 * J,)))) == (0, 0)
    assert known(meter.after(EnergySample(10 * S, 10 * S + S // 2, (5 * J,)))) == (5 * J, 10)


def test_samples_are_frequent_enough_for_the_smallest_range() -> None:
    """At 1 kW the counter of a package must not wrap around twice."""
    assert EnergyMeter((RANGE_UJ,)).every_ns == 30 * S
    assert EnergyMeter((RANGE_UJ, 20_000 * J)).every_ns == 10 * S


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 1000)), min_size=1, max_size=30))
def test_the_meter_agrees_with_a_counter_that_never_wraps(steps: list[tuple[int, int]]) -> None:
    """At any power up to 1 kW, with any intervals shorter than a wrap."""
    most, at_s, used = 100_000 * J + 7, 0, [0]
    looks: list[tuple[int, tuple[int, ...] | None]] = [(0, (0,))]
    for passed_s, watts in steps:
        at_s += passed_s
        used.append(used[-1] + watts * passed_s * J)
        looks.append((at_s, (used[-1] % most,)))
    meter = metered(*looks, ranges=(most,))
    # An interval in which the counter goes round exactly once looks like one in which nothing was consumed.
    if all(after - before < most for before, after in pairwise(used)):
        assert known(meter) == (used[-1], at_s)


def part(meter: EnergyMeter, cpus: int, of: int, suspended: Suspension | None = None) -> CpuEnergy | None:
    """Return the energy of a run that had this many CPUs all the time."""
    return EnergyShare(cpus, of, 0, 0).counted(meter, suspended or Suspension(), None)[1]


def test_a_run_has_the_part_of_the_energy_that_its_cpus_are_of_the_machine() -> None:
    """Whatever else runs; more CPUs than the machine has are all of it."""
    meter = metered((0, (0,)), (30, (600 * J,)))
    assert part(meter, 1, 4) == CpuEnergy(150_000, 30 * S)
    assert part(meter, 4, 4) == part(meter, 9, 4) == CpuEnergy(600_000, 30 * S)


def test_what_is_unknown_is_absent() -> None:
    """Without any interval that counts a run has no energy, not an energy of 0."""
    assert part(metered((0, (0,)), (10, None)), 1, 4) is None
    before = CpuEnergy(5, S)
    assert EnergyShare(1, 4, 0, 0).counted(metered((0, (0,))), Suspension(), before)[1] is before


def test_a_time_with_a_suspension_in_it_does_not_count() -> None:
    """The run is suspended at its end, has been all along, or was in between; then it counts again."""
    meter = metered((0, (0,)), (30, (600 * J,)))
    assert part(meter, 1, 4, Suspension(0, S, S)) is None
    assert part(meter, 1, 4, Suspension(5 * S)) is None
    share, none = EnergyShare(1, 4, 0, 0, Suspension(0, S, S)).counted(meter, Suspension(0, S, S), None)
    assert none is None
    share, none = share.counted(meter, Suspension(5 * S), none)
    later = meter.after(EnergySample(40 * S, 40 * S, (640 * J,)))
    assert share.counted(later, Suspension(5 * S), none)[1] == CpuEnergy(10_000, 10 * S)
