"""The phases of a run: which leads to which, for every pair of them."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import get_args

from spool.core.lifecycle import (
    Active,
    Claimed,
    Ended,
    Filed,
    Gone,
    Outlived,
    Phase,
    Recorded,
    RunEnd,
    TakenBack,
    Unread,
    Unstartable,
    Void,
    after,
    holds_room,
    is_over,
    known_end,
)
from spool.core.model import Result, State

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ARCHITECTURE.md"
ENDED = Ended(State.FAILED, "exit code 1", RunEnd(7), 1)
RESULT = Result("a", 1, 1, State.FAILED, "exit code 1")
PHASES: tuple[Phase, ...] = (
    Unread(),
    Unread(empty=True),
    Claimed(),
    Unstartable("no shell"),
    TakenBack(),
    TakenBack("no process"),
    Active(),
    Outlived(),
    Outlived(5),
    Gone(),
    Void(RunEnd(7)),
    Void(RunEnd(7), "no process", "refused"),
    ENDED,
    Recorded(ENDED, RESULT),
    Recorded(ENDED, RESULT, accounted=True),
    Filed(ENDED, RESULT, final=True),
    Filed(ENDED, RESULT, final=False),
)


@cache
def by_the_page() -> dict[str, set[str]]:
    """Return the table of docs/ARCHITECTURE.md: each phase, and those that it goes on to."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("<!-- table of phases -->\n")[2].partition("<!-- end of table -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines()[2:]]
    return {phase: {word.strip() for word in leads.split(",") if word.strip()} for phase, _, leads in rows}


def named(phase: Phase) -> str:
    """Return the name of a phase, as the page has it."""
    return type(phase).__name__


def reached(phase: Phase) -> list[Phase]:
    """Return every phase that one can lead to, itself too."""
    found = [phase]
    for each in found:
        found += [new for seen in PHASES if (new := after(each, seen)) not in found]
    return found


def test_the_page_and_these_tests_have_every_phase() -> None:
    """Each member of the union has a row on the page and a value here."""
    every = {phase.__name__ for phase in get_args(Phase)}
    assert every == set(by_the_page()) == {named(phase) for phase in PHASES}


def test_every_pair_of_phases_is_as_the_page_says() -> None:
    """What goes on from a phase is entered as it was seen; every other observation changes nothing.

    One that is repeated, as after an error, leaves a run as the first one did.
    """
    for phase, seen in product(PHASES, PHASES):
        expected = seen if named(seen) in by_the_page()[named(phase)] else phase
        if isinstance(phase, Unread) and isinstance(seen, Gone):
            expected = Unread(empty=True)
        assert after(phase, seen) == after(expected, seen) == expected, (phase, seen)


def test_no_phase_is_a_dead_end_before_the_run_is_over() -> None:
    """From every phase a run can come to its end or be found void, and never back from there."""
    for phase in PHASES:
        later = reached(phase)
        assert any(isinstance(each, Void | Filed) for each in later), phase
        assert not is_over(phase) or all(is_over(each) for each in later), phase


def test_room_that_is_free_is_never_held_again_once_the_records_are_read() -> None:
    """What a run was granted goes to the next run for good: no later observation takes it back."""
    for phase in PHASES:
        if not holds_room(phase) and not isinstance(phase, Unread):
            assert not any(map(holds_room, reached(phase))), phase


def test_how_a_run_ended_does_not_change_any_more() -> None:
    """Its result and the move of its file are made from one end; a void run and one that goes on have none."""
    for phase in PHASES:
        ends = {known_end(each) for each in reached(phase)} - {None}
        assert ends <= {ENDED}
        assert (known_end(phase) is not None) == (is_over(phase) and not isinstance(phase, Void))
