"""Words and numbers: names of jobs and their order, events, errors and exit codes, sizes and durations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spool.core import errors
from spool.core.errors import InvalidValue
from spool.core.layout import NAME_PATTERN, NaturalOrder, natural, valid_name, why_not_name
from spool.core.model import ENDS, EVENT_WORDS, JOB_WORDS, EventName, Problem, concerns
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

_LONG = st.text("a", min_size=98, max_size=102)
_TEXTS = st.one_of(st.text("ab01._-\n é\udc80", max_size=6), st.text(max_size=5), _LONG)


@given(_TEXTS)
@example("a\n")
@example("")
@example("\udc80")
def test_a_name_is_what_the_pattern_says(text: str) -> None:
    """`valid_name` does without the pattern of the format page, accepts the same, and otherwise there is a reason."""
    assert valid_name(text) == (re.fullmatch(NAME_PATTERN, text, re.ASCII) is not None)
    assert (why_not_name(text) is None) == valid_name(text)


def by_character(name: str) -> list[tuple[int, int, str]]:
    """Return what to sort by, told character by character: numbers come before all else, and the end before letters."""
    parts = re.findall("[0-9]+|.", f"{name}\0", re.DOTALL)
    return [(0, int(part), "") if part.isdigit() and part.isascii() else (1, 0, part) for part in parts]


@given(st.lists(st.text("ab019-._é", max_size=6), max_size=6))
@example(["sweep_10", "sweep_2", "sweep_", "sweep_02", "sweep", "1", ""])
def test_names_come_in_natural_order(names: list[str]) -> None:
    """`sweep_2` comes before `sweep_10`, whichever of the two ways sorts."""
    expected = sorted(names, key=by_character)
    assert sorted(names, key=natural) == expected
    assert sorted(names, key=NaturalOrder) == expected


class Counted(str):
    """A name that counts how often a key is made of it."""

    asked = 0

    def __format__(self, spec: str) -> str:
        Counted.asked += 1
        return str(self)


def test_a_sort_works_out_each_name_once() -> None:
    """Jobs that a copy puts into the queue at one moment are told apart by their names alone."""
    names = [Counted(f"sweep_{number * 7 % 100}") for number in range(100)]
    assert sorted(names, key=NaturalOrder)[10] == "sweep_10"
    assert Counted.asked == 100


def test_every_error_of_the_tree_has_a_documented_exit_code() -> None:
    """The table in the module names each class that the module defines, beside its own code."""
    rows = {row.split("|")[1].strip(): row for row in errors.__doc__.splitlines() if row.startswith("| ")}
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.SpoolError) and not issubclass(kind, errors.InvalidFile):
            assert f"`{name}`" in rows[str(int(kind.exit_code))]
    for kind in (errors.InvalidJob, errors.InvalidConfig, errors.InvalidReservation):
        assert kind.exit_code == 4


def test_an_invalid_file_says_its_first_problem_and_how_many_more() -> None:
    """The one-line form of an error with many problems stays one line."""
    problems = [Problem("a", 1, "first"), Problem("b", 2, "second")]
    assert str(errors.InvalidJob("job x", problems)) == "cannot use job x: first (and 1 more)"
    assert str(errors.InvalidJob("job x", [])) == "cannot use job x: it is not valid"


def test_messages_have_one_grammar() -> None:
    """*cannot VERB THING: where: why; what to do*, the parts that are absent left out."""
    assert errors.cannot("open", "the spool", "not a directory", where="/x", remedy="remove it") == (
        "cannot open the spool: /x: not a directory; remove it"
    )
    assert errors.cannot("open", "the spool", "gone") == "cannot open the spool: gone"


def test_ended_means_every_outcome_and_nothing_else() -> None:
    """The word of the first version still means what it says, and `retried` is the event `retrying`."""
    assert {name for name in EventName if concerns(["ended"], name)} == ENDS
    assert {name for name in EventName if concerns(["retried"], name)} == {EventName.RETRYING}
    assert {name for name in EventName if concerns(["started", "held"], name)} == {EventName.STARTED, EventName.HELD}


def test_every_event_but_the_look_has_a_word() -> None:
    """All that happens can be asked for, in a job file all that happens to jobs; two are for hooks alone."""
    assert {name.value for name in EventName} - set(EVENT_WORDS) == {"polling", "queueing"}
    assert set(EVENT_WORDS) - set(JOB_WORDS) == {
        "reservation_created", "reservation_cancelled", "reservation_started", "reservation_ended",
        "gpu_taken", "gpu_free", "dispatcher_started", "dispatcher_stopped",
    }  # fmt: skip


S = 1_000_000_000


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *((text, 16 << 30) for text in ("16G", "16g", "16GB", "16 GiB", "16384M")),
        ("1.5G", 3 << 29),
        ("0.1K", 102),
        ("2P", 2 << 50),
        ("0B", 0),
    ],
)
def test_a_size_is_a_number_with_a_binary_unit(text: str, size: int) -> None:
    """Units are powers of 1024 in either case, with or without B or iB; fractions are rounded down to whole bytes."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        *((text, 5400 * S) for text in ("90m", "5400s", "1h30m", "1h 30m", "1.5h", "01:30:00")),
        ("1w1d", 8 * 86400 * S),
        ("500ms", S // 2),
        ("3us", 3000),
        ("7ns", 7),
        ("0s", 0),
        ("100:00:01", 360_001 * S),
        ("1-12:00:00", 36 * 3600 * S),
    ],
)
def test_a_duration_is_units_or_a_clock(text: str, duration: int) -> None:
    """Units come largest first; clocks are HH:MM:SS or D-HH:MM:SS; "0s" is a duration."""
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", [" 1G", "1G ", "1G\n", "\t1G", "\u00a01G", "16", " 16 ", "1.5", 16, 1.5, "0", 0])
def test_white_space_around_and_bare_numbers_are_refused(text: str | float) -> None:
    """What a script wrote with a stray newline was put together wrongly: the error shows how to write it.

    Neither has a default unit, for schedulers disagree about it, and the error says so.
    """
    for parse, unit in ((parse_size, "G"), (parse_duration, "h")):
        has_unit = isinstance(text, str) and "G" in text
        with pytest.raises(InvalidValue, match=f'write "1{unit}"$' if has_unit else "has no unit"):
            parse(text.replace("G", unit) if has_unit else text)


NEITHER = ("", " ", "1 000G", "1  G", "1G\0", "\u0661G", "1" * 200, "-1G", "+1G", "1.G", ".5G", "1,5G", "1.2.3G", "1G;")
NO_SIZES = (*NEITHER, "G", "1e3G", "1_0G", "0x1G", "16X", "1K1M", "16\u212a", "9" * 30 + "B", "9000P", "0" * 200 + "B")
CLOCKS = ("5:30", "1-30", "1-24:00:00", "00:60:00", "00:00:60")
UNITS = ("h", "1e3h", "1_0h", "0x1h", "1m1h", "1h1h", "1M", "1y", "300w" * 9, "400d" * 99)
NO_DURATIONS = (*(text.replace("G", "h") for text in NEITHER), *UNITS, *CLOCKS)


@pytest.mark.parametrize(("parse", "values"), [(parse_size, NO_SIZES), (parse_duration, NO_DURATIONS)])
def test_what_is_neither_raises_one_kind_of_error(parse: Callable[[object], int], values: tuple[str, ...]) -> None:
    """Signs, exponents, foreign digits, the Kelvin sign, absurd lengths, other types, odd units and clocks."""
    for value in (None, True, [], {}, b"1G", float("inf"), *values):
        with pytest.raises(InvalidValue):
            print(parse(value), value)


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
    sizes = (24 << 30, 12025908428, 642 << 20, 3 << 39, 5)
    assert [show_size(n) for n in sizes] == ["24 GiB", "11.2 GiB", "642 MiB", "1.5 TiB", "5 B"]
    shown = [show_duration(n * S) for n in (45, 90, 3720, 270_000)]
    assert shown == ["45s", "1m30s", "1h02m", "3d03h"]
    assert show_duration(400_000_000) == "0.4s"
    assert show_duration(-90 * S) == "-1m30s"


def test_a_text_is_cut_between_words() -> None:
    """What another program said is never cut inside a word, unless it is one word."""
    assert whole_words("failed to fetch config", 22) == "failed to fetch config"
    assert whole_words("failed to fetch config scontrol", 28) == "failed to fetch config …"
    assert whole_words("x" * 30, 10) == "x" * 8 + " …"
