"""What a job without a limit is expected to take, like which runs and how long by them, and what is left of a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.planning import S
from spool.core.model import Request
from spool.core.runtimes import Basis, RunTimes, Source, TimeLeft, part_done, stem, time_left

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


SAYS = {"25 %": 0.25, "25%": 0.25, "12.5%": 0.125, "epoch 12/30": 0.4, "loss 0.3, 100 %": 1.0, "0/30": 0.0}


@pytest.mark.parametrize("text", [*SAYS, "31/30", "0/0", "", "warming up", "2026/11/25", "250%"])
def test_a_run_says_how_much_it_has_done(text: str) -> None:
    """By a percentage, or by a number of all; other texts say nothing."""
    assert part_done(text) == SAYS.get(text)


@pytest.mark.parametrize(
    ("progress", "ran", "limit", "guess", "wanted"),
    [
        ("25 %", 10, None, None, (30, Basis.PROGRESS)),
        ("25 %", 10, 60, 5, (30, Basis.PROGRESS)),
        ("25 %", 10, 30, None, (20, Basis.LIMIT)),  # it is too slow for its limit
        ("0 %", 10, 60, None, (50, Basis.LIMIT)),
        ("", 10, 60, 5, (50, Basis.LIMIT)),
        ("", 90, 60, None, (0, Basis.LIMIT)),
        ("", 10, None, 5, (5, Basis.GUESS)),
        ("warming up", 10, None, None, None),
    ],
)
def test_progress_counts_first_then_the_limit_then_a_guess(
    progress: str, ran: int, limit: int | None, guess: int | None, wanted: tuple[int, Basis] | None
) -> None:
    """No run lasts longer than its limit, whatever its progress says."""
    limit_ns, guess_ns = (None if minutes is None else minutes * MINUTE for minutes in (limit, guess))
    found = time_left(progress, ran * MINUTE, limit_ns, guess_ns)
    assert found == (None if wanted is None else TimeLeft(wanted[0] * MINUTE, wanted[1]))


def test_a_mark_says_what_the_time_rests_on() -> None:
    """A limit is the most, a guess is about right."""
    said = [TimeLeft(30_000_000_000, basis).words() for basis in Basis]
    assert [text.translate({32: None}) for text in said] == ["30s", "≤30s", "~30s"]
