"""The time that remains of a run."""

from __future__ import annotations

import pytest

from spool.core.runtimes import Basis, TimeLeft, part_done, time_left

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
