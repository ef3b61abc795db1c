"""The names of jobs, what can be one and in which order they come, the words for events, and the exit codes."""

from __future__ import annotations

import inspect
import re

from hypothesis import example, given
from hypothesis import strategies as st

from spool.core import errors
from spool.core.layout import NAME_PATTERN, NaturalOrder, natural, valid_name, why_not_name
from spool.core.model import ENDS, EVENT_WORDS, JOB_WORDS, EventName, Problem, concerns

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
