"""Times on a command line: what they mean at a known moment, and which are refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spool.cli.group import understood
from spool.core.errors import InvalidValue
from spool.formats.values import moment_or_delay

NOW = datetime(2026, 11, 20, 10, 30, 15)  # a Friday


@pytest.fixture(autouse=True)
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be where summer time is told from winter time."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def read(text: str, *, past: bool = False) -> str:
    """Return what *text* means at NOW; of a moment without its zone."""
    return understood(text, int(NOW.timestamp()) * 10**9, past=past).removesuffix("+01:00")


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("16:00", "2026-11-20T16:00:00"),
        ("10:30", "2026-11-21T10:30:00"),
        ("tomorrow 8:00", "2026-11-21T08:00:00"),
        ("Tomorrow", "2026-11-21T00:00:00"),
        ("saturday", "2026-11-21T00:00:00"),
        ("friday", "2026-11-27T00:00:00"),
        ("friday 16:00", "2026-11-20T16:00:00"),
        ("fri 8:00", "2026-11-27T08:00:00"),
        ("2h", "2h"),
        ("9pm", "2026-11-20T21:00:00"),
        ("tomorrow 9:30 AM", "2026-11-21T09:30:00"),
        ("now+2h", "2h"),
        ("+90m", "90m"),
        ("1h30m", "1h30m"),
        ("2026-01-31T09:00:00+01:00", "2026-01-31T09:00:00"),
        ("2026-01-31 09:00", "2026-01-31T09:00:00"),
        ("2026-01-31", "2026-01-31T00:00:00"),
    ],
)
def test_words_mean_the_next_such_moment(text: str, means: str) -> None:
    """What comes out is what a job file takes."""
    assert read(text) == means
    moment_or_delay(understood(text, int(NOW.timestamp()) * 10**9))


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("16:00", "2026-11-19T16:00:00"),
        ("8:00", "2026-11-20T08:00:00"),
        ("0:00", "2026-11-20T00:00:00"),
        ("monday", "2026-11-16T00:00:00"),
        ("friday", "2026-11-20T00:00:00"),
        ("friday 16:00", "2026-11-13T16:00:00"),
        ("yesterday", "2026-11-19T00:00:00"),
        ("yesterday 4pm", "2026-11-19T16:00:00"),
        ("7d", "7d"),
        ("2023-11-14 12:30", "2023-11-14T12:30:00"),
        ("2023-11-14T12:30:00", "2023-11-14T12:30:00"),
    ],
)
def test_of_the_past_the_last_one_is_meant(text: str, means: str) -> None:
    """As `stats --since` needs it."""
    assert read(text, past=True) == means


@pytest.mark.parametrize(
    "text",
    ["16:00:00", "1600", "13pm", "yesterday", "now + 2 hours", "next friday", "today", "noon", "25:00", "24 dec",
     "someday 8:00", "", "30", "tomorrow 8:00 9:00", "2 hours", "-2h"],
)  # fmt: skip
def test_other_words_are_refused_with_the_forms_that_there_are(text: str) -> None:
    """A time with two meanings is not found out at the wrong hour."""
    with pytest.raises(InvalidValue, match='write "16:00", "tomorrow 8:00", "friday"'):
        read(text)


def test_a_clock_keeps_its_hour_when_summer_time_ends() -> None:
    """Tomorrow at 8:00 is that on the clock, though the day has 25 hours."""
    at = int(datetime(2026, 10, 24, 12).timestamp()) * 10**9
    assert understood("tomorrow 8:00", at) == "2026-10-25T08:00:00+01:00"
    assert understood("16:00", at) == "2026-10-24T16:00:00+02:00"


def test_a_time_that_clocks_skip_is_the_next_that_exists() -> None:
    """2:30 in the night to summer time is 3:30, also in words."""
    at = int(datetime(2027, 3, 27, 12).timestamp()) * 10**9
    for text in ("tomorrow 2:30", "2:30", "sunday 2:30", "2027-03-28 02:30", "2027-03-28T02:30:00"):
        assert understood(text, at) == "2027-03-28T03:30:00+02:00", text


def test_a_time_that_comes_twice_is_the_next_of_the_two() -> None:
    """2:30 in the night to winter time is the first, unless that has passed."""
    at = int(datetime(2026, 10, 25, 1).timestamp()) * 10**9
    assert understood("2:30", at) == understood("2026-10-25 02:30", at) == "2026-10-25T02:30:00+02:00"
    assert understood("2:30", at + 6000 * 10**9) == "2026-10-25T02:30:00+01:00"
    assert understood("2:30", at + 9000 * 10**9) == "2026-10-26T02:30:00+01:00"


_WORDS = st.sampled_from(
    ["+", "-", "16:00", "8", "friday", "fri", "tomorrow", "2", "2h", "31", "2026-02-30", "99:99", "0", "٣", "9999999d",
     "2026", "\0", ":"]
)  # fmt: skip


@given(st.lists(_WORDS, max_size=5).map(" ".join) | st.text(max_size=20), st.booleans())
def test_nonsense_is_refused_or_left_to_who_reads_durations(text: str, past: bool) -> None:
    """Whatever is typed ends as a moment, a duration or an error that says so."""
    try:
        moment_or_delay(read(text, past=past))
    except InvalidValue:
        return
