"""The phases of a run, from the claim of its job file until its paperwork is done, and which leads to which.

Each phase is a value that has only what is known in it. What is so in more than one phase, such as an order to stop the
run or its suspension, is no phase and stands beside it. docs/ARCHITECTURE.md has the same table.
"""

from __future__ import annotations

from typing import TypeAlias, assert_never

from msgspec import Struct

from spool.core.lifecycle import RunEnd
from spool.core.model import Result, State


class Unread(Struct, frozen=True):
    """An earlier dispatcher started it, and its records cannot be read yet: nothing is concluded from them."""

    empty: bool = False  # no process of it is left


class Claimed(Struct, frozen=True):
    """Its job file was claimed for it, and nothing was started yet."""


class Unstartable(Struct, frozen=True):
    """It could not be started, and never will be."""

    why: str


class TakenBack(Struct, frozen=True):
    """It was not started this time, so that its job waits on."""

    refusal: str | None = None  # what the machine says


class Active(Struct, frozen=True):
    """Its wrapper is on its way or at work, here or on another machine, where it may wait."""


class Outlived(Struct, frozen=True):
    """Its wrapper has ended, and processes of the run may be left."""

    since_ns: int | None = None  # their grace counts from then, if that is known


class Gone(Struct, frozen=True):
    """No process of it is left, and how it ended is not known yet."""


class Void(Struct, frozen=True):
    """Its command has not begun and never will; nothing counts."""

    end: RunEnd
    refusal: str | None = None  # why the machine did not let it begin, so that its job waits on
    held_because: str = ""  # why its job must be held: its engine refuses it


class Ended(Struct, frozen=True):
    """It is over, and it is known how."""

    outcome: State
    reason: str
    end: RunEnd
    exit_code: int | None = None  # as its wrapper wrote it down
    unstarted: bool = False  # no wrapper was there to write anything down


class Recorded(Struct, frozen=True):
    """Its result is written."""

    ended: Ended
    result: Result
    accounted: bool = False  # the history has its line


class Filed(Struct, frozen=True):
    """Its job file is where it belongs after the result."""

    ended: Ended
    result: Result
    final: bool  # its job has ended with it


Phase: TypeAlias = (
    Unread | Claimed | Unstartable | TakenBack | Active | Outlived | Gone | Void | Ended | Recorded | Filed
)

UNREAD, CLAIMED, ACTIVE, GONE = Unread(), Claimed(), Active(), Gone()


_LEADS_TO: dict[type[Phase], frozenset[type[Phase]]] = {
    Unread: frozenset({Active}),
    Claimed: frozenset({Unstartable, TakenBack, Active, Void, Ended}),
    Unstartable: frozenset({Ended}),
    TakenBack: frozenset({Void, Ended}),
    Active: frozenset({Outlived, Gone, Void, Ended}),
    Outlived: frozenset({Gone, Void, Ended}),
    Gone: frozenset({Void, Ended}),
    Void: frozenset(),
    Ended: frozenset({Recorded}),
    Recorded: frozenset({Recorded, Filed}),  # itself once more when the history has its line
    Filed: frozenset({Filed}),  # after an error the file is moved once more
}
_OVER = frozenset({Void, Ended, Recorded, Filed})


def after(phase: Phase, seen: Phase) -> Phase:
    """Return the phase of a run that was in *phase* and was seen to be in *seen*.

    Total: what does not follow from *phase*, as an observation that comes late or twice, leaves the run where it is.
    """
    if isinstance(phase, Unread) and isinstance(seen, Gone):
        return Unread(empty=True)
    return seen if type(seen) in _LEADS_TO[type(phase)] else phase


def is_over(phase: Phase) -> bool:
    """Whether it is known how a run ended, or that it never began."""
    return type(phase) in _OVER


def holds_room(phase: Phase) -> bool:
    """Whether what a run was granted is not free: something of it may be left."""
    match phase:
        case Active() | Claimed() | Unstartable() | TakenBack() | Outlived():
            return True
        case Unread():
            return not phase.empty
        case Gone() | Void() | Ended() | Recorded() | Filed():
            return False
        case _:  # pragma: no cover
            assert_never(phase)


def known_end(phase: Phase) -> Ended | None:
    """Return how a run ended; None: that is not known yet, or it never began."""
    match phase:
        case Ended():
            return phase
        case Recorded() | Filed():
            return phase.ended
        case Unread() | Claimed() | Unstartable() | TakenBack() | Active() | Outlived() | Gone() | Void():
            return None
        case _:  # pragma: no cover
            assert_never(phase)
