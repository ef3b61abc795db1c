"""Sizes and durations: one grammar, read and written in one place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spool.core.errors import InvalidValue
from spool.core.units import (
    LARGEST,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    show_duration,
    show_size,
    whole_words,
)

S = 1_000_000_000


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512M", 512 << 20),
        ("16G", 16 << 30),
        ("16g", 16 << 30),
        ("16GB", 16 << 30),
        ("16 GiB", 16 << 30),
        ("1.5G", 3 << 29),
        ("0.1K", 102),
        ("1T", 1 << 40),
        ("2P", 2 << 50),
        ("0B", 0),
        ("7B", 7),
    ],
)
def test_a_size_is_a_number_with_a_binary_unit(text: str, size: int) -> None:
    """Units are powers of 1024 in either case, with or without B or iB; fractions are rounded down to whole bytes."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("90s", 90 * S),
        ("30m", 1800 * S),
        ("2h", 7200 * S),
        ("1d", 86400 * S),
        ("1w", 7 * 86400 * S),
        ("1h30m", 5400 * S),
        ("1h 30m", 5400 * S),
        ("1.5h", 5400 * S),
        ("500ms", S // 2),
        ("3us", 3000),
        ("7ns", 7),
        ("0s", 0),
        ("01:30:00", 5400 * S),
        ("100:00:01", 360_001 * S),
        ("1-12:00:00", 36 * 3600 * S),
        ("0-00:00:00", 0),
    ],
)
def test_a_duration_is_units_or_a_clock(text: str, duration: int) -> None:
    """Units come largest first; clocks are HH:MM:SS or D-HH:MM:SS; "0s" is a duration."""
    assert parse_duration(text) == duration


@pytest.mark.parametrize("value", ["16", " 16 ", "1.5", 16, 1.5, "0", 0])
def test_a_bare_number_is_refused_and_the_error_says_why(value: object) -> None:
    """Neither a size nor a duration has a default unit, for schedulers disagree about it."""
    for parse in (parse_size, parse_duration):
        with pytest.raises(InvalidValue, match="has no unit, and what a bare number means differs between schedulers"):
            parse(value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "-1G",
        "1.2.3G",
        "G",
        "16X",
        "1K1M",
        "1e3M",
        "16\u212a",
        "\u0661G",
        "9" * 30 + "B",
        "9000P",
        "1" * 200,
        "0" * 200 + "B",
    ],
)
def test_what_is_no_size_raises_one_kind_of_error(value: object) -> None:
    """Signs, exponents, foreign digits, the Kelvin sign for K and absurd lengths are no sizes."""
    with pytest.raises(InvalidValue):
        parse_size(value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "-1s",
        "1m1h",
        "1h1h",
        "5:30",
        "1-30",
        "1-24:00:00",
        "00:60:00",
        "00:00:60",
        "1M",
        "1y",
        "h",
        "300w" * 9,
        "400d" * 99,
        "1h" + " " * 200,
    ],
)
def test_what_is_no_duration_raises_one_kind_of_error(value: object) -> None:
    """Units out of order, ambiguous clocks, minutes over 59 and unknown units are no durations."""
    with pytest.raises(InvalidValue):
        parse_duration(value)


@pytest.mark.parametrize("text", [" 1G", "1G ", "1G\n", "\t1G", "\u00a01G"])
def test_white_space_around_a_size_or_a_duration_is_refused(text: str) -> None:
    """What a script wrote with a stray newline was put together wrongly: the error shows how to write it."""
    with pytest.raises(InvalidValue, match=r'^has white space around it; write "1G"$'):
        parse_size(text)
    with pytest.raises(InvalidValue, match=r'^has white space around it; write "1h"$'):
        parse_duration(text.replace("G", "h"))


@pytest.mark.parametrize(
    "text", ["+1G", "1_000M", "0x10G", "1,5G", "1.G", ".5G", "\u0661G", "1e3G", "1G;", "1 000G", "1  G", "1G\0"]
)
def test_other_ways_to_write_a_number_are_refused(text: str) -> None:
    """Signs, separators, prefixes, exponents and other scripts' digits are neither sizes nor durations."""
    with pytest.raises(InvalidValue):
        parse_size(text)
    with pytest.raises(InvalidValue):
        parse_duration(text.replace("G", "h"))


@pytest.mark.parametrize("value", [None, True, [], {}, b"1G", float("inf")])
def test_other_types_raise_the_same_error(value: object) -> None:
    """Whatever stands in a file, the parsers raise InvalidValue and nothing else."""
    for parse in (parse_size, parse_duration):
        with pytest.raises(InvalidValue):
            parse(value)


@given(st.integers(0, LARGEST))
def test_what_is_written_reads_back_exactly(amount: int) -> None:
    """Formatting loses nothing: not a byte, not a nanosecond."""
    assert parse_size(format_size(amount)) == amount
    assert parse_duration(format_duration(amount)) == amount


@given(st.text(max_size=30) | st.from_regex(r"[0-9KMGTPBi.:dhms -]{0,12}", fullmatch=True))
def test_the_parsers_are_total(text: str) -> None:
    """Any text gives a number within bounds, or InvalidValue."""
    for parse in (parse_size, parse_duration):
        try:
            amount = parse(text)
        except InvalidValue:
            continue
        assert 0 <= amount <= LARGEST


def test_people_read_rounded_amounts() -> None:
    """Reasons speak of sizes and durations in the two figures that matter."""
    assert [show_size(n) for n in (24 << 30, 12025908428, 642 << 20, 3 << 39, 5)] == [
        "24 GiB",
        "11.2 GiB",
        "642 MiB",
        "1.5 TiB",
        "5 B",
    ]
    shown = [show_duration(n * S) for n in (45, 90, 3720, 270_000)]
    assert shown == ["45s", "1m30s", "1h02m", "3d03h"]
    assert show_duration(400_000_000) == "0.4s"
    assert show_duration(-90 * S) == "-1m30s"


def test_a_text_is_cut_between_words() -> None:
    """What another program said is never cut inside a word, unless it is one word."""
    assert whole_words("failed to fetch config", 22) == "failed to fetch config"
    assert whole_words("failed to fetch config scontrol", 28) == "failed to fetch config …"
    assert whole_words("x" * 30, 10) == "x" * 8 + " …"
