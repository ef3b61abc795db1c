"""Moments in words: what they mean at a known moment, and which are refused because they could mean two."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spool.cli.moments import understood
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
        ("4:30 PM", "2026-11-20T16:30:00"),
        ("noon", "2026-11-20T12:00:00"),
        ("midnight", "2026-11-21T00:00:00"),
        ("tomorrow 8:00", "2026-11-21T08:00:00"),
        ("Tomorrow, at 8 am", "2026-11-21T08:00:00"),
        ("today 17:00", "2026-11-20T17:00:00"),
        ("today", "2026-11-20T10:30:15"),
        ("saturday", "2026-11-21T00:00:00"),
        ("friday", "2026-11-27T00:00:00"),
        ("thu 9:00:30", "2026-11-26T09:00:30"),
        ("friday 16:00", "2026-11-20T16:00:00"),
        ("friday 8:00", "2026-11-27T08:00:00"),
        ("on Monday at 9:00", "2026-11-23T09:00:00"),
        ("24 dec", "2026-12-24T00:00:00"),
        ("January 5 16:00", "2027-01-05T16:00:00"),
        ("5 jan 2028", "2028-01-05T00:00:00"),
        ("now", "2026-11-20T10:30:15"),
        ("now + 2 hours", "2026-11-20T12:30:15"),
        ("+90m", "2026-11-20T12:00:15"),
        ("in 1 day and 2 hours", "2026-11-21T12:30:15"),
        ("now + 1 week", "2026-11-27T10:30:15"),
        ("2 hours 30 minutes", "2h30m"),
        ("2 hours", "2h"),
        ("1h30m", "1h30m"),
        ("2026-01-31T09:00:00+01:00", "2026-01-31T09:00:00"),
        ("2026-01-31 09:00", "2026-01-31T09:00:00"),
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
        ("monday", "2026-11-16T00:00:00"),
        ("friday", "2026-11-20T00:00:00"),
        ("yesterday 8:00", "2026-11-19T08:00:00"),
        ("2 hours ago", "2026-11-20T08:30:15"),
        ("now - 1d", "2026-11-19T10:30:15"),
        ("24 dec", "2025-12-24T00:00:00"),
        ("7d", "7d"),
    ],
)
def test_of_the_past_the_last_one_is_meant(text: str, means: str) -> None:
    """As `stats --since` needs it."""
    assert read(text, past=True) == means


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("16:00:00", '"16:00", or "now + 16 hours"'),
        ("1600", '"16:00"'),
        ("now + 30", '"now + 30 minutes"'),
        ("1/2/2026", '"2026-01-31 16:00"'),
        ("next friday", '"friday" or a date'),
        ("next week", '"now + 1 week"'),
        ("tomorrow midnight", '"tomorrow 0:00"'),
        ("today 8:00", '"tomorrow 08:00"'),
        ("25:00", '"23:59"'),
        ("30 feb", "does not exist"),
        ("yesterday 8:00", "tomorrow 8:00"),
        ("now - 2h", "is in the past"),
        ("someday 8:00", "tomorrow 8:00"),
        ("friday tomorrow", "tomorrow 8:00"),
        ("", "tomorrow 8:00"),
        ("in 3 months", "now + 2 hours"),
        ("tomorrow 8:00 9:00", "tomorrow 8:00"),
    ],
)
def test_what_could_mean_two_moments_is_refused_with_what_to_write(text: str, instead: str) -> None:
    """Nobody finds out at the wrong hour."""
    with pytest.raises(InvalidValue) as error:
        read(text)
    assert instead in str(error.value)


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


def test_hours_from_now_are_hours_that_pass() -> None:
    """Two hours after 1:30 it is 4:30 in the night to summer time, and a day later an hour later."""
    at = int(datetime(2027, 3, 28, 1, 30).timestamp()) * 10**9
    assert understood("now + 2 hours", at) == "2027-03-28T04:30:00+02:00"
    assert understood("2 hours ago", at + 7200 * 10**9, past=True) == "2027-03-28T01:30:00+01:00"


_WORDS = st.sampled_from(
    ["now", "+", "-", "16:00", "8", "friday", "fri", "tomorrow", "today", "in", "ago", "2", "hours", "h", "dec", "31",
     "2026-02-30", "pm", "am", "noon", "midnight", "next", "99:99", "0", "٣", "week", "9999999", "2026", "\0", ":"]
)  # fmt: skip


@given(st.lists(_WORDS, max_size=5).map(" ".join) | st.text(max_size=20), st.booleans())
def test_nonsense_is_refused_or_left_to_who_reads_durations(text: str, past: bool) -> None:
    """Whatever is typed ends as a moment, a duration or an error that says so."""
    try:
        moment_or_delay(read(text, past=past))
    except InvalidValue:
        return
