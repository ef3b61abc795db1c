"""The phases of a run, from the claim of its job file until its paperwork is done, and their transitions.

Each phase is a value with only the facts that are known in it. A fact of several phases, such as an order to stop the
run or its suspension, is not a phase and is kept beside it. docs/ARCHITECTURE.md has the same table.
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
    """Its job file was claimed for it, and no process was started yet."""


class Unstartable(Struct, frozen=True):
    """It could not be started, and never will be."""

    why: str


class TakenBack(Struct, frozen=True):
    """It was not started this time, so its job keeps waiting."""

    refusal: str | None = None  # the machine's reason


class Active(Struct, frozen=True):
    """Its wrapper is being started or at work, here or on another machine, where it may wait."""


class Outlived(Struct, frozen=True):
    """Its command has ended, or its wrapper was killed, and other processes of the run may be left."""

    since_ns: int | None = None  # the start of their grace, if known


class Gone(Struct, frozen=True):
    """No process of it is left, and its end is not known yet."""


class Void(Struct, frozen=True):
    """Its command has not begun and never will; nothing counts."""

    end: RunEnd
    refusal: str | None = None  # why the machine did not let it begin, so that its job keeps waiting
    held_because: str = ""  # why its job must be held: its engine refuses it


class Ended(Struct, frozen=True):
    """It is over, with a known end."""

    outcome: State
    reason: str
    end: RunEnd
    exit_code: int | None = None  # as recorded by its wrapper
    unstarted: bool = False  # there was no wrapper to record anything


class Recorded(Struct, frozen=True):
    """Its result is written."""

    ended: Ended
    result: Result
    accounted: bool = False  # the history has its line


class Filed(Struct, frozen=True):
    """Its job file is in its place after the result."""

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
    Recorded: frozenset({Recorded, Filed}),  # again when the history has its line
    Filed: frozenset({Filed}),  # after an error the file is moved again
}
_OVER = frozenset({Void, Ended, Recorded, Filed})


def after(phase: Phase, seen: Phase) -> Phase:
    """Return the phase of a run that was in *phase* and was seen to be in *seen*.

    Total: an observation that does not follow from *phase*, because it comes late or twice, leaves the phase unchanged.
    """
    if isinstance(phase, Unread) and isinstance(seen, Gone):
        return Unread(empty=True)
    return seen if type(seen) in _LEADS_TO[type(phase)] else phase


def is_over(phase: Phase) -> bool:
    """Whether the end of a run is known, or that it never began."""
    return type(phase) in _OVER


def holds_room(phase: Phase) -> bool:
    """Whether a run's grant is still in use: a process of it may be left."""
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
    """Return the end of a run; None: not known yet, or it never began."""
    match phase:
        case Ended():
            return phase
        case Recorded() | Filed():
            return phase.ended
        case Unread() | Claimed() | Unstartable() | TakenBack() | Active() | Outlived() | Gone() | Void():
            return None
        case _:  # pragma: no cover
            assert_never(phase)
