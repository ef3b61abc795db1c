"""The numbers at the end of a name make no difference to what a job is expected to take."""

from __future__ import annotations

import pytest

from spool.core.runtimes import stem


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
    ],
)
def test_a_stem_is_a_name_without_its_last_numbers(name: str, alike: str) -> None:
    """All numbers at the end of a name go, with what separates them; other text stays."""
    assert stem(name) == alike


def test_digits_before_other_text_take_no_time() -> None:
    """A long run of digits that is not at the end is looked at once."""
    name = "7" * 10_000 + "x"
    assert stem(name) == name
