"""The sums of the accounting, against runs few enough to add up by hand, and an oracle that asks each moment."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spool.core.accounting import MJ_PER_KWH, By, Days, Intervals, Ledger, Peak, RunFilter, Statistics, Totals, utc_day
from spool.core.model import SECOND_NS as S
from spool.core.model import GpuUse, Grant, Result, State

HOUR = 3600 * S
DAY = 24 * HOUR
T0 = 20_000 * DAY  # a midnight in UTC


def ran(job: str, submit: int | None, start: int | None, end: int | None, cpus: int = 1, **more: Any) -> Result:
    """Return a run by hand; instants in seconds after T0. *gpu_percent* and *gpu_energy_mj* are of its first GPU."""
    submitted, started, ended = (None if at is None else T0 + at * S for at in (submit, start, end))
    times = {"submitted_at_ns": submitted, "started_at_ns": started, "ended_at_ns": ended}
    grant = Grant(cpus, gpu_uuids=more.pop("gpus", ()), resources=tuple(more.pop("resources", {}).items()))
    use = GpuUse(mean_percent=more.pop("gpu_percent", None), energy_mj=more.pop("gpu_energy_mj", None))
    known: dict[str, Any] = {"run": 1, "attempt": 1, "reason": "", **times, **more}
    outcome = State(known.pop("outcome", "finished"))
    return Result(job, outcome=outcome, grant=grant, gpu_use=(use,), **known)


def added(*runs: Result, by: By | None = None, **wanted: Any) -> Statistics:
    """Return what the runs add up to."""
    ledger = Ledger(RunFilter(**wanted), by)
    ledger.add(runs)
    return ledger.statistics()


def total(*runs: Result, **wanted: Any) -> Totals:
    """Return what all the runs together add up to."""
    return added(*runs, **wanted).total


def test_resources_add_up_to_hours():
    """Named resources count times how long, cut at the edges of the period, in each group and in all."""
    runs = [
        ran("a", 0, 0, 3600, user="alice", resources={"licence": 2}),
        ran("b", 0, 1800, 5400, 0, user="bob", resources={"licence": 1, "tpu": 1}),
        ran("c", 0, 0, 3600),
    ]
    found = added(*runs, by=By.USER)
    assert found.total.resource_hours == {"licence": 3, "tpu": 1}
    assert {key: totals.resource_hours for key, totals in found.groups} == {
        "alice": {"licence": 2}, "bob": {"licence": 1, "tpu": 1}, None: {},
    }  # fmt: skip
    cut = added(*runs, since_at_ns=T0 + 3600 * S).total
    assert cut.resource_hours == {"licence": 0.5, "tpu": 0.5}
    by_day = added(*runs, by=By.DAY)
    assert sum(totals.resource_hours.get("tpu", 0) for _, totals in by_day.groups) == 1


def test_three_runs_added_up_by_hand() -> None:
    """Waits 10, 20 and 90s; run times 1800, 3600 and 7200s; 1800 + 2 x 3600 + 4 x 7200 CPU seconds."""
    found = total(
        ran("a", 0, 10, 1810, 1, cpu_time_ns=900 * S, peak_memory_bytes=5),
        ran("b", 0, 20, 3620, 2, outcome="failed", peak_memory_bytes=7, gpus=("G0", "G1")),
        ran("c", 10, 100, 7300, 4, cpu_time_ns=14_400 * S),
    )
    assert (found.runs, found.jobs, found.success_rate) == (3, 3, 2 / 3)
    assert {word: count for word, count in found.outcomes.items() if count} == {"finished": 2, "failed": 1}
    assert (found.wait_median_ns, found.wait_p90_ns, found.wait_mean_ns) == (20 * S, 90 * S, 40 * S)
    assert (found.run_time_median_ns, found.run_time_p90_ns, found.run_time_sum_ns) == (HOUR, 2 * HOUR, 12_600 * S)
    assert (found.cpu_hours, found.gpu_hours) == (0.5 + 2 + 8, 2)
    assert (found.cpu_used_hours, found.cpu_used_runs, found.cpu_efficiency) == (4.25, 2, 4.25 / 8.5)
    assert (found.peak_cpus, found.peak_cpus_at_ns) == (7, T0 + 100 * S)
    assert (found.peak_gpus, found.peak_gpus_at_ns) == (2, T0 + 20 * S)
    assert (found.peak_memory_bytes, found.peak_memory_job) == (7, "b")


def test_nothing_adds_up_to_nothing_and_not_to_numbers() -> None:
    """Of no runs there is no wait, no success rate, no peak and no moment of one."""
    found = added()
    assert (found.total.runs, found.total.cpu_hours, found.total.peak_cpus, found.groups) == (0, 0, 0, ())
    unknown = [
        "success_rate",
        "wait_mean_ns",
        "run_time_p90_ns",
        "cpu_used_hours",
        "cpu_efficiency",
        "peak_memory_bytes",
    ]
    assert {found.first_at_ns, *(getattr(found.total, name) for name in unknown)} == {None}


def test_success_is_of_jobs_and_a_cancel_is_no_failure() -> None:
    """A job that finishes at its second try is one success; one that the user cancels counts neither way."""
    found = total(
        ran("a", 0, 0, 10, outcome="failed", again="retry"),
        ran("a", 0, 10, 20, run=2, attempt=2),
        ran("b", 0, 0, 10, outcome="lost", again="requeue"),
        ran("b", 0, 10, 20, run=2, outcome="timeout", requeues=1),
        ran("c", 0, None, 20, outcome="cancelled"),
    )
    assert (found.runs, found.jobs, found.retries, found.requeues, found.success_rate) == (5, 3, 1, 1, 0.5)


def test_a_later_run_has_waited_since_the_run_before() -> None:
    """The first waited 10s for its start, the retry 5s after it; one whose predecessor is not known, nobody knows."""
    runs = (ran("a", 0, 10, 100, again="retry"), ran("a", 0, 105, 200, run=2, attempt=2))
    assert total(*runs).wait_mean_ns == (10 + 5) * S // 2
    assert total(runs[1]).wait_mean_ns is None
    assert total(ran("a", 0, 105, 200, run=2, requeues=1)).wait_mean_ns is None
    taken_back = (ran("b", 0, 10, 100, again="requeue"), ran("b", 0, 130, 200, run=2))
    assert total(*taken_back).wait_p90_ns == 30 * S


def test_a_run_without_a_start_or_an_end_waited_for_nothing_and_used_nothing() -> None:
    """It is counted by its outcome alone, and without an end it is in no period."""
    found = total(ran("a", 0, None, 50, outcome="unschedulable"))
    assert (found.runs, found.outcomes["unschedulable"], found.success_rate) == (1, 1, 0)
    assert (found.wait_median_ns, found.run_time_median_ns, found.cpu_hours, found.peak_cpus) == (None, None, 0, 0)
    odd = ran("a", 0, 10, None)
    assert (total(odd).runs, total(odd).run_time_sum_ns, total(odd, since_at_ns=T0).runs) == (1, 0, 0)
    assert added(odd, by=By.DAY).groups[0][0] is None


THEN, SINCE = -17_000 * 11 * DAY // S, 5 * 365 * DAY // S  # from T0: 512 years ago, and 5 years on


@pytest.mark.parametrize("by", [None, By.DAY, By.USER])
@pytest.mark.parametrize("wanted", [{}, {"since_at_ns": T0 - DAY}])
@pytest.mark.parametrize(
    ("runs", "timed", "wait", "seconds", "cpus"),
    [
        ((ran("a", 0, 100, 50, 4), ran("b", 60, 50, 150, 2)), 1, 100, 100, 2),
        ((ran("a", THEN, THEN, SINCE), ran("b", THEN, 0, SINCE), ran("c", 0, 0, 10)), 2, 0, SINCE + 10, 2),
    ],
    ids=["negative", "centuries"],
)
def test_a_clock_that_was_set_makes_no_odd_times(runs, timed, wait, seconds, cpus, wanted, by) -> None:
    """A run that ended before it began, or from 1700 to 2240, is counted, and has neither a run time nor a wait."""
    found = added(*runs, by=by, **wanted)
    assert (found.clock_set, found.total.runs, found.total.timed_runs) == (1, len(runs), timed)
    assert (found.total.wait_mean_ns, found.total.run_time_sum_ns) == (wait * S, seconds * S)
    assert found.total.peak_cpus == cpus


def test_a_line_that_stands_twice_counts_once() -> None:
    """The same run of the same job, begun at the same moment; a run number that began anew is another run."""
    again = ran("a", 500, 510, 600)
    found = added(ran("a", 0, 10, 100), ran("a", 0, 10, 100), ran("b", 0, 10, 100), again)
    assert (found.total.runs, found.duplicates) == (3, 1)
    assert found.total.cpu_hours == (90 + 90 + 90) / 3600


def test_a_period_counts_ends_and_cuts_what_was_used() -> None:
    """From 100 to 200s: of a run from 50 to 150 its count and half of it; of one from 190 to 300, 10s, no count."""
    runs = (ran("a", 0, 50, 150, 2), ran("b", 0, 150, 160, 3), ran("c", 0, 190, 300, 4), ran("d", 0, 10, 99, 50))
    found = total(*runs, since_at_ns=T0 + 100 * S, until_at_ns=T0 + 200 * S)
    assert (found.runs, found.run_time_sum_ns) == (2, 110 * S)
    assert found.cpu_hours == (2 * 50 + 3 * 10 + 4 * 10) / 3600
    assert (found.peak_cpus, found.peak_cpus_at_ns) == (4, T0 + 190 * S)
    assert total(ran("e", 0, 0, 100), until_at_ns=T0 + 100 * S).runs == 0
    assert total(ran("e", 0, 0, 100), since_at_ns=T0 + 100 * S).runs == 1


def test_who_ran_only_outside_a_period_has_no_row_in_it() -> None:
    """Nor has a run that begins as the period ends, or one of before that had no resources."""
    runs = (ran("late", 0, 100, 200, user="bob"), ran("early", 0, 0, 50, 0, user="carol"))
    assert added(*runs, by=By.USER, since_at_ns=T0 + 60 * S, until_at_ns=T0 + 100 * S).groups == ()


def test_only_what_is_wanted_counts() -> None:
    """Another user's and another project's runs are in no sum, and at no peak."""
    runs = [
        ran(f"{user}{project}", 0, 0, 10, user=user, project=project) for user in ("u", "v") for project in ("p", None)
    ]
    assert total(*runs, user="u").runs == 2
    assert total(*runs, user="u", project="p").peak_cpus == 1
    assert total(*runs, user="w").runs == 0


@pytest.mark.parametrize(
    ("by", "runs", "groups", "all_of_them"),
    [
        # GPU hours first, then CPU hours; runs without a user are a group of their own.
        (By.USER, (ran("a", 0, 0, 100, 1, user="few"), ran("b", 0, 0, 100, 9, user="many"),
                   ran("c", 0, 0, 100, 1, user="gpu", gpus=("G",)), ran("d", 0, 0, 1, 1)),
         [("gpu", 1), ("many", 1), ("few", 1), (None, 1)], (4, 12, 1)),
        # A run with two tags is in two groups, and in the total once.
        (By.TAG, (ran("a", 0, 0, 100, tags=("x", "y", "x")), ran("b", 0, 0, 10)),
         [("x", 1), ("y", 1), (None, 1)], (2, 2, 0)),
        # States come in the order of the states.
        (By.STATE, (ran("a", 0, 0, 10, outcome="lost"), ran("b", 0, 0, 10)),
         [("finished", 1), ("lost", 1)], (2, 2, 0)),
    ],
)  # fmt: skip
def test_groups_are_ranked_by_what_they_used(by, runs, groups, all_of_them) -> None:
    """Those that used most come first, and the total counts each run once."""
    found = added(*runs, by=by)
    assert [(key, totals.runs) for key, totals in found.groups] == groups
    assert (found.total.runs, found.total.peak_cpus, found.total.peak_gpus) == all_of_them


def test_a_run_over_midnight_is_used_on_both_days_and_ended_on_one() -> None:
    """From 23h of the first day to 2h of the third: 1, 24 and 2 hours, and a count on the third."""
    found = added(ran("a", 0, 23 * 3600, 50 * 3600, 2), by=By.DAY)
    assert [key for key, _ in found.groups] == [utc_day(T0 + n * DAY)[0] for n in range(3)]
    assert [(totals.runs, totals.cpu_hours, totals.peak_cpus) for _, totals in found.groups] == [
        (0, 2, 2), (0, 48, 2), (1, 4, 2),
    ]  # fmt: skip
    assert (found.total.runs, found.total.cpu_hours, found.total.peak_cpus) == (1, 54, 2)


def test_a_shared_gpu_is_one_gpu() -> None:
    """Two runs on one GPU at once are a peak of one, and two GPU hours; a third on another host's makes two."""
    found = total(
        ran("a", 0, 0, 3600, gpus=("G0",)), ran("b", 0, 0, 3600, gpus=("G0",)), ran("c", 0, 1800, 3600, gpus=("H0",))
    )
    assert (found.peak_gpus, found.peak_gpus_at_ns, found.gpu_hours) == (2, T0 + 1800 * S, 2.5)


INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(-3, 12), st.integers(0, 5), st.sets(st.sampled_from("ABC"))), max_size=25
)


@given(INTERVALS)
def test_peaks_are_what_asking_each_moment_finds(drawn: list[tuple[int, int, int, set[str]]]) -> None:
    """The oracle asks at each moment who is there."""
    kept = Intervals()
    for start, length, cpus, gpus in drawn:
        kept.add(start, start + length, cpus, tuple(sorted(gpus)))
    cpu_levels, gpu_levels = [], []
    for now in range(45):
        there = [each for each in drawn if each[0] <= now < each[0] + each[1]]
        cpu_levels.append(sum(cpus for _, _, cpus, _ in there))
        gpu_levels.append(len(set().union(*(gpus for _, _, _, gpus in there))))
    expected = tuple(
        Peak(max(levels), levels.index(max(levels))) if max(levels) else Peak() for levels in (cpu_levels, gpu_levels)
    )
    assert kept.peaks() == expected


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40))
def test_quantiles_are_times_that_so_many_did_not_exceed(times: list[int]) -> None:
    """At least half, or nine in ten, took no longer than the quantile, and it is the least such time of all."""
    found = total(*(ran(f"j{at}", 0, each, each + 2 * each) for at, each in enumerate(times)))
    for part, wait, run_time in (
        (0.5, found.wait_median_ns, found.run_time_median_ns),
        (0.9, found.wait_p90_ns, found.run_time_p90_ns),
    ):
        enough = math.ceil(part * len(times) - 1e-9)
        least = min(each for each in times if sum(other <= each for other in times) >= enough)
        assert (wait, run_time) == (least * S, 2 * least * S)


RUNS = st.lists(
    st.builds(
        ran,
        st.sampled_from("abcdefgh"),
        st.integers(0, 200_000),
        st.integers(0, 200_000),
        st.integers(0, 400_000),
        st.integers(0, 3),
        run=st.integers(1, 9),
        user=st.sampled_from(["u", "v", None]),
        gpus=st.sampled_from([(), ("A",), ("A", "B")]),
        tags=st.sampled_from([(), ("x",), ("x", "y")]),
        outcome=st.sampled_from([state.value for state in State if state.ended]),
        again=st.sampled_from([None, None, "retry", "requeue", "hold"]),
        cpu_time_ns=st.sampled_from([None, 5 * S]),
        peak_memory_bytes=st.sampled_from([None, 1, 2]),
    ),
    max_size=15,
)


@given(RUNS, st.sampled_from(By), st.one_of(st.none(), st.integers(0, 300_000)))
def test_the_total_does_not_depend_on_the_groups(runs: list[Result], by: By, since: int | None) -> None:
    """However runs are grouped, all of them together are the same; and unless they have tags, groups add up to it."""
    wanted = {"since_at_ns": None if since is None else T0 + since * S}
    grouped, plain = added(*runs, by=by, **wanted), added(*runs, **wanted)
    different = ("peak_memory_job", "cpu_hours", "gpu_hours")
    for name in set(Totals.__slots__) - set(different):
        assert getattr(grouped.total, name) == getattr(plain.total, name), name
    assert math.isclose(grouped.total.cpu_hours, plain.total.cpu_hours)
    if by is not By.TAG:
        assert sum(totals.runs for _, totals in grouped.groups) == plain.total.runs
        assert math.isclose(sum(totals.gpu_hours for _, totals in grouped.groups), plain.total.gpu_hours)


@given(st.integers(0, 10 * DAY), st.integers(0, 5 * DAY))
def test_parts_of_an_interval_lie_in_their_days_and_make_it_whole(start: int, length: int) -> None:
    """They follow each other without a gap, and none crosses a midnight."""
    parts = list(Days(utc_day).parts(start, start + length))
    assert sum(end - begin for _, begin, end in parts) == length
    for name, begin, end in parts:
        assert begin < end
        assert utc_day(begin)[0] == utc_day(end - 1)[0] == name
    assert all(one[2] == other[1] for one, other in pairwise(parts))


def test_a_day_without_a_midnight_is_still_a_day() -> None:
    """Where the clock is put forward at midnight, a calendar may give an odd begin: the parts go on all the same."""
    days = Days(lambda at: ("odd", at + 5, at - 5))
    assert [end - begin for _, begin, end in days.parts(100, 103)] == [1, 1, 1]


def test_hours_in_which_gpus_computed_are_those_of_the_runs_where_that_is_known() -> None:
    """Half busy for an hour on two GPUs is one hour of two; the run of which nothing is known counts as given only.

    A suspended run is still given all of that time; a suspension beyond its length leaves nothing.
    """
    known = ran("a", 0, 0, 3600, gpus=("g", "h"), gpu_percent=50.0, user="alice")
    other = ran("b", 0, 0, 3600, gpus=("i",), gpu_percent=0.0, user="bob")
    unknown = ran("c", 0, 0, 3600, gpus=("k",), user="bob")
    found = added(known, other, unknown, by=By.USER)
    assert (found.total.gpu_hours, found.total.gpu_used_hours, found.total.gpu_used_runs) == (4, 1, 2)
    assert found.total.gpu_efficiency == 1 / 3
    groups = dict(found.groups)
    assert (groups["alice"].gpu_efficiency, groups["bob"].gpu_efficiency) == (0.5, 0)
    assert added(unknown).total.gpu_used_hours is None
    found = total(
        ran("a", 0, 0, 4 * 3600, gpus=("g",), gpu_percent=100.0, cpu_time_ns=3600 * S, suspended_ns=10800 * S)
    )
    assert (found.gpu_hours, found.gpu_used_hours, found.gpu_efficiency, found.cpu_efficiency) == (4, 1, 1, 1)
    assert (found.cpu_hours, found.run_time_median_ns) == (4, 3600 * S)
    assert total(ran("a", 0, 0, 60, suspended_ns=61 * S)).run_time_median_ns == 0


def test_energy_is_summed_where_it_is_known():
    """A run without it is not a run of zero."""
    known = (("a", MJ_PER_KWH // 2, "llm"), ("b", MJ_PER_KWH, "llm"), ("c", None, None))
    runs = [ran(job, 0, 0, 60, gpus=(job,), gpu_energy_mj=mj, project=project) for job, mj, project in known]
    found = added(*runs, by=By.PROJECT)
    assert {key: (totals.gpu_kwh, totals.gpu_kwh_runs) for key, totals in found.groups} == {
        "llm": (1.5, 2), None: (None, 0),
    }  # fmt: skip
    assert found.total.gpu_kwh == 1.5
