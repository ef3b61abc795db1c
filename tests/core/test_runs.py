"""The index of the runs, how long a run is expected to take by those like it, and what is left of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import GIB, NOW, S, run
from spool.core.model import Request, Running
from spool.core.resources import Runs
from spool.core.runtimes import Basis, Progress, RunTimes, Source, TimeLeft, part_done, stem, time_left

HOUR = 3600 * S
NAMES = ("a1", "a2", "b1", "b2", "c")

RUNS = st.builds(
    run,
    st.sampled_from(NAMES),
    user=st.sampled_from(["alice", "bob"]),
    ran=st.integers(0, 9000),
    on=st.sampled_from([(), (), (0,), (1, 2)]),
    cpus=st.integers(0, 3),
    memory_bytes=st.sampled_from([None, GIB]),
    time_limit_ns=st.sampled_from([None, None, 60 * S, HOUR]),
    group=st.sampled_from([None, "g", "h"]),
    group_limit=st.sampled_from([None, 1, 2]),
    task=st.sampled_from([None, ("s", 0, 1), ("s", 1, 3), ("t", 0, None)]),
    project=st.sampled_from([None, "p"]),
    stopping=st.booleans(),
    suspended=st.tuples(st.integers(0, 90), st.sampled_from([None, None, 0, 50])),
)


def sums(runs: list[Running]) -> dict[str, object]:
    """Return the sums over these runs, made anew."""
    groups = {run.spec.group for run in runs} - {None}
    arrays = {run.spec.task.array for run in runs if run.spec.task}

    def use(some: list[Running]) -> tuple[int, ...]:
        used = [(1, len(r.grant.gpu_uuids), r.grant.cpus, r.grant.memory_bytes or 0) for r in some]
        return tuple(map(sum, zip(*used, strict=True)))

    return {
        "runs": len(runs),
        "cpus": sum(run.grant.cpus for run in runs),
        "memory_bytes": sum(run.grant.memory_bytes or 0 for run in runs),
        "cpu_holders": sum(run.grant.cpus > 0 for run in runs),
        "memory_holders": sum(bool(run.grant.memory_bytes) for run in runs),
        "groups": {name: sum(run.spec.group == name for run in runs) for name in groups},
        "arrays": {name: sum(r.spec.task is not None and r.spec.task.array == name for r in runs) for name in arrays},
        "users": {name: use([run for run in runs if run.user == name]) for name in {run.user for run in runs}},
        "projects": {
            name: use([run for run in runs if run.spec.project == name]) for name in {run.spec.project for run in runs}
        },
    }


@given(st.lists(st.one_of(RUNS, st.sampled_from(NAMES)), max_size=25))
def test_the_sums_are_those_made_anew(steps):
    """Whatever runs come, change and go: counts, GPUs and the order of the ends are those of what is there."""
    kept, there = Runs(), {}
    for step in steps:
        if isinstance(step, Running):
            kept.put(step)
            there[step.name] = step
        else:
            kept.remove(step)
            there.pop(step, None)
        runs = list(there.values())
        counts = kept.counts
        assert {name: getattr(counts, name) for name in vars(counts) if name != "named"} == sums(runs)
        assert dict(kept) == there
        for name in list(there)[:1]:
            rest = [run for run in runs if run.name != name]
            with kept.without(name):
                assert {each: getattr(counts, each) for each in vars(counts) if each != "named"} == sums(rest)
                assert dict(kept) == {run.name: run for run in rest}
                assert list(kept.ends(NOW)) == list(Runs(rest).ends(NOW))
            assert list(kept) == list(there)
        assert kept.with_gpus == {name: run for name, run in there.items() if run.grant.gpu_uuids}
        assert list(kept.ends(NOW)) == sorted((ends_at(run), run.name) for run in runs)


def ends_at(run: Running) -> int:
    """Return when *run* is expected to have ended, where nothing was learnt."""
    counts_from, until = run.started_at_ns + run.suspension.before_ns, run.suspension.since_ns or NOW
    expected = run.spec.time_limit_ns or HOUR
    if run.stopping:
        graced = NOW + run.spec.kill_grace_ns
        return graced if run.spec.time_limit_ns is None else min(counts_from + expected, graced)
    while run.spec.time_limit_ns is None and expected <= until - counts_from:
        expected *= 2
    left = counts_from + expected - until
    return until + left if until == NOW and not run.suspended else NOW + max(0, left)


def test_who_is_asked_more_often_answers_alike():
    """When a run that overran its guess ends does not depend on when somebody asked before."""
    times = RunTimes()
    for seconds in (60, 60, *range(4000, 9000, 500), 60, 60, 60):
        times.add("alice", "a1", Request(), seconds * S)
    one = run("a2", ran=0)
    asked, fresh = Runs([one], times), Runs([one], times)
    for later in range(0, 9000, 300):
        list(asked.ends(NOW + later * S))
    assert list(asked.ends(NOW + 4100 * S)) == list(fresh.ends(NOW + 4100 * S)) == [(NOW + 6501 * S, "a2")]


def test_a_run_keeps_what_was_expected_when_it_began():
    """What is learnt alters the guesses of those that begin later, and of the others when the owner says so."""
    times = RunTimes()
    runs = Runs([run("a1")], times)
    times.add("alice", "a3", Request(), 100 * S)
    runs.put(replace(runs["a1"], stopping=True))
    runs.put(run("a2"))
    began = {name: each.started_at_ns for name, each in runs.items()}
    runs.put(replace(runs["a1"], stopping=False))
    assert sorted(runs.ends(0)) == sorted([(began["a1"] + HOUR, "a1"), (began["a2"] + 100 * S, "a2")])
    runs.learn_from(times)
    assert (began["a1"] + 100 * S, "a1") in runs.ends(0)


def ends(*runs: Running, at_ns: int = NOW) -> dict[str, int]:
    """Return in how many seconds from *at_ns* each run is expected to end."""
    return {name: (end_ns - at_ns) // S for end_ns, name in Runs(runs).ends(at_ns)}


def test_a_suspended_run_ends_as_if_it_went_on_now():
    """However late one asks, it has as much left as it had when it was suspended; the time is added to its end.

    One that has overrun its guess is guessed anew once, by what it had run, not by how long it stands still.
    """
    one = run("a", ran=60, time_limit_ns=100 * S, suspended=(20, 10))
    assert ends(one) == ends(one, at_ns=NOW + HOUR) == {"a": 70}
    assert ends(run("a", ran=60, time_limit_ns=100 * S, suspended=(20, None))) == {"a": 60}
    one = run("a", ran=3 * 3600, suspended=(0, 3600))
    assert ends(one) == ends(one, at_ns=NOW + HOUR) == {"a": 2 * 3600}
    assert ends(replace(one, stopping=True))["a"] <= 10


def test_a_run_that_is_being_stopped_has_ended_once_its_grace_is_over():
    """The grace counts from the order, however late one asks; neither a limit nor a guess says anything else.

    By a clock that was set back an order of tomorrow is one of now.
    """
    ordered = replace(run("a", stopping=True, kill_grace_ns=12 * S), stop_at_ns=NOW)
    limited = replace(ordered, spec=replace(ordered.spec, time_limit_ns=61 * S))
    for later in (0, 3, 10, 60):
        for one in (ordered, limited):
            assert ends(one, at_ns=NOW + later * S) == {"a": 12 - later}
    ordered = replace(run("a", stopping=True, kill_grace_ns=12 * S), stop_at_ns=NOW + HOUR)
    assert ends(ordered) == {"a": 12}


ONE = Request(cpus=1)


@pytest.mark.parametrize(
    ("name", "alike"),
    [
        ("train", "train"),
        ("train7", "train"),
        ("train-07", "train"),
        ("train_3.14:2+1", "train"),
        ("train-7b", "train-7b"),
        ("train-7-", "train-7-"),
        ("sweep_12", "sweep"),
        ("2026-01-31", ""),
        ("v\u0663", "v\u0663"),  # a digit of another script
        ("", ""),
        ("7" * 10_000 + "x", "7" * 10_000 + "x"),  # looked at once
    ],
)
def test_a_stem_is_a_name_without_its_last_numbers(name: str, alike: str) -> None:
    """All numbers at the end of a name go, with what separates them; other text stays."""
    assert stem(name) == alike


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=12))
def test_like_runs_teach_the_upper_median_of_the_last_five(seconds: list[int]) -> None:
    """Of the last five at most two were longer, and at least as many were no shorter as were shorter."""
    learned = RunTimes()
    for number, each in enumerate(seconds):
        learned.add("alice", f"sweep_{number}", ONE, each * S)
        learned.add("bob", f"sweep_{number}", ONE, S)
    found = learned.guess("alice", "sweep", ONE)
    last = [each * S for each in seconds[-5:]]
    assert (found.source, found.runs) == (Source.ALIKE, len(last))
    assert found.ns in last
    assert sum(each > found.ns for each in last) < len(last) / 2 <= sum(each <= found.ns for each in last)
    other = learned.guess("alice", "other", ONE)  # nothing like it has run, so the runs of the user count
    assert (other.ns, other.source, other.runs) == (found.ns, Source.USER, found.runs)


def test_one_like_run_is_too_few() -> None:
    """A single run of its kind counts only among the runs of its user."""
    learned = RunTimes()
    for name, seconds in (("other_1", 40), ("other_2", 40), ("sweep_1", 100)):
        learned.add("alice", name, ONE, seconds * S)
    assert learned.guess("alice", "sweep", ONE) == (40 * S, Source.USER, 3)
    learned.add("alice", "sweep_2", ONE, 20 * S)
    assert learned.guess("alice", "sweep", ONE) == (100 * S, Source.ALIKE, 2)


def test_a_user_displaces_nothing_that_is_known_of_another() -> None:
    """However many runs of however many kinds a user has, the guesses for another's jobs are as before."""
    learned = RunTimes()
    for each in (30, 40, 50):
        learned.add("alice", "train", ONE, each * S)
    learned.add("bob", "prepare", ONE, 20 * S)
    before = learned.guess("alice", "train", ONE)
    for number in range(6_000):
        learned.add("mallory", f"{number}x", ONE, S)
    assert learned.guess("alice", "train", ONE) == before
    assert learned.guess("carol", "new", ONE).ns == 20 * S  # the middle of three users, not of 6,004 runs


MINUTE = 60_000_000_000


SAYS = {"25 %": 0.25, "12.5%": 0.125, "epoch 12/30": 0.4, "epoch-3/10": 0.3, "loss 0.3, 100 %": 1.0, "0/30": 0.0}
NOT = ("31/30", "0/0", "", "warming up", "2026/11/25", "250%", "105%", "-5%", "-3/10", "5%-10%", "5-10 %")


@pytest.mark.parametrize("text", [*SAYS, *NOT])
def test_a_run_says_how_much_it_has_done(text: str) -> None:
    """By a percentage, or by a number of all; other texts say nothing."""
    assert part_done(text) == SAYS.get(text)


@pytest.mark.parametrize(
    ("progress", "ran", "limit", "guess", "wanted"),
    [
        ("25 %", 10, None, None, (30, Basis.PROGRESS)),
        ("25 %", 10, 60, 15, (30, Basis.PROGRESS)),
        ("25 %", 10, 30, 15, (20, Basis.LIMIT)),
        ("100%", 10, 30, 15, (0, Basis.PROGRESS)),
        ("25 %", 10, 30, None, (20, Basis.LIMIT)),  # it is too slow for its limit
        ("0 %", 10, 60, None, (50, Basis.LIMIT)),
        ("", 10, 60, 15, (5, Basis.GUESS)),
        ("", 10, 60, 60, (50, Basis.LIMIT)),
        ("", 10, 60, 65, (50, Basis.LIMIT)),
        ("", 90, 60, None, None),  # only its epilog goes on
        ("", 10, None, 15, (5, Basis.GUESS)),
        ("warming up", 10, None, None, None),
    ],
)
def test_progress_counts_first_then_similar_runs_then_the_limit(
    progress: str, ran: int, limit: int | None, guess: int | None, wanted: tuple[int, Basis] | None
) -> None:
    """No run lasts longer than its limit, whatever its progress says."""
    limit_ns, guess_ns = (None if minutes is None else minutes * MINUTE for minutes in (limit, guess))
    found = time_left(Progress(progress), NOW, NOW + ran * MINUTE, limit_ns, guess_ns)
    assert found == (None if wanted is None else TimeLeft(wanted[0] * MINUTE, wanted[1]))


def test_the_end_by_a_progress_stays_until_the_run_says_another() -> None:
    """What remains gets less while one looks; once the end has passed, the rest is as late as that."""
    said = Progress("epoch 1/3", NOW + 10 * MINUTE)
    lefts = [time_left(said, NOW, NOW + ran * MINUTE, 60 * MINUTE, None) for ran in (10, 15, 30, 31)]
    found = [(left.ns // MINUTE, left.basis) for left in lefts if left is not None]
    assert found == [(20, "progress"), (15, "progress"), (0, "progress"), (2, "progress")]


def test_people_are_told_what_similar_runs_took_and_the_rules_keep_the_limit() -> None:
    """Two of its kind are enough; a run that lasts longer than they did is told twice that, its limit at most."""
    learned = RunTimes()
    for seconds in (20, 20):
        learned.add("user", "job", Request(), seconds * S)
    limited = run("job", ran=5, user="user", time_limit_ns=100 * S)
    assert learned.of_job(limited).ns == 100 * S
    assert learned.likely(limited).ns == 20 * S
    assert learned.left(limited, Progress(), NOW) == TimeLeft(15 * S, Basis.GUESS)
    late, later = (run("job", ran=ran, user="user", time_limit_ns=100 * S) for ran in (30, 90))
    assert learned.left(late, Progress(), NOW) == TimeLeft(10 * S, Basis.GUESS)
    assert learned.left(later, Progress(), NOW) == TimeLeft(10 * S, Basis.LIMIT)
    other = run("other", ran=5, user="user", time_limit_ns=100 * S)
    assert learned.left(other, Progress(), NOW) == TimeLeft(95 * S, Basis.LIMIT)
    assert learned.left(replace(limited, stopping=True), Progress("50%"), NOW) is None


def test_a_mark_says_what_the_time_rests_on() -> None:
    """A limit is the most, a guess is about right."""
    said = [TimeLeft(30_000_000_000, basis).words() for basis in Basis]
    assert [text.translate({32: None}) for text in said] == ["30s", "≤30s", "~30s"]
