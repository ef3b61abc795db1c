"""The time that remains of a run, by its progress, its time limit or similar runs; and when a waiting job starts."""

from __future__ import annotations

import re
from enum import StrEnum

from msgspec import Struct

from spool.core.units import show_duration

_PERCENT = re.compile(r"(?<![\d.,])(100|\d{1,2})(?:[.,](\d{1,3})\d*)? ?%")
_OF_ALL = re.compile(r"(?<![\d.,/])(\d{1,12}) ?/ ?(\d{1,12})(?![\d.,/])")
_MARKS = {"progress": "", "limit": "≤", "guess": "~"}


class Basis(StrEnum):
    """What a remaining time rests on."""

    PROGRESS = "progress"  # what the run says of itself
    LIMIT = "limit"  # its time limit: it runs no longer
    GUESS = "guess"  # what similar runs took


class TimeLeft(Struct, frozen=True):
    """The time that remains of a run."""

    ns: int
    basis: Basis

    def words(self) -> str:
        """Return it with the mark of its basis: "4m10s" by progress, "≤1h00m" by a limit, "~5m00s" as a guess."""
        return f"{_MARKS[self.basis]}{show_duration(self.ns)}"


class ExpectedStart(Struct, frozen=True):
    """When a waiting job is expected to start. `is_guess`: that rests on learnt run times, or on other users."""

    at_ns: int
    is_guess: bool = False

    def words(self, now_ns: int) -> str:
        """Return it as "in 12m00s", "in ~12m00s" for a guess, or "now"."""
        wait_ns = self.at_ns - now_ns
        return f"in {'~' if self.is_guess else ''}{show_duration(wait_ns)}" if wait_ns > 0 else "now"


def part_done(progress: str) -> float | None:
    """Return the part of its work that a run says it has done: "37 %" and "epoch 12/30" say it, "warming up" does not.

    None if it says nothing, or more than all.
    """
    percent = _PERCENT.search(progress)
    if percent is not None:
        return min(1.0, float(f"{percent[1]}.{percent[2] or 0}") / 100)
    counted = _OF_ALL.search(progress)
    if counted is None or not 0 <= int(counted[1]) <= int(counted[2]) or counted[2].strip("0") == "":
        return None
    return int(counted[1]) / int(counted[2])


def time_left(progress: str, ran_ns: int, limit_ns: int | None, guess_ns: int | None) -> TimeLeft | None:
    """Return the time that remains of a run that has lasted *ran_ns*; None if nothing tells.

    *guess_ns* is what remains by similar runs. A run that goes on as it has so far ends at its limit at the latest.
    """
    until_limit_ns = None if limit_ns is None else max(0, limit_ns - ran_ns)
    done = part_done(progress)
    if done and ran_ns > 0:
        left_ns = int(ran_ns * (1 - done) / done)
        if until_limit_ns is None or left_ns <= until_limit_ns:
            return TimeLeft(left_ns, Basis.PROGRESS)
    if until_limit_ns is not None:
        return TimeLeft(until_limit_ns, Basis.LIMIT)
    return None if guess_ns is None else TimeLeft(max(0, guess_ns), Basis.GUESS)
