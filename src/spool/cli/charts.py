"""A picture of what ran when: a row for each job, time from left to right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spool.core.model import SECOND_NS, Result, State

_COLOURS = {
    State.FINISHED: "32",
    State.FAILED: "31",
    State.TIMEOUT: "33",
    State.OUT_OF_MEMORY: "31",
    State.LOST: "31",
    State.CANCELLED: "35",
    State.UNSCHEDULABLE: "35",
}


@dataclass(frozen=True, slots=True)
class Look:
    """What the picture is drawn with: how wide, in colour or not, with which signs."""

    width: int = 80
    colour: bool = False
    blocks: bool = True  # False: only what ASCII has


def chart(runs: Mapping[str, Sequence[Result]], begin_ns: int, end_ns: int, look: Look) -> list[str]:
    """Return the lines of the picture: for each job its runs, oldest first, between *begin_ns* and *end_ns*."""
    names = max((len(name) for name in runs), default=0)
    words = max((len(_words(results)) for results in runs.values()), default=0)
    room = max(20, look.width - names - words - 4)
    span = max(1, end_ns - begin_ns)

    def column(at_ns: int) -> int:
        return min(room - 1, max(0, (at_ns - begin_ns) * room // span))

    lines = [
        f"{name.ljust(names)}  {_row(results, column, room, look)}  {_words(results)}" for name, results in runs.items()
    ]
    return [*lines, f"{'':{names}}  {_scale(span, room, look)}"]


def _row(results: Sequence[Result], column: Callable[[int], int], room: int, look: Look) -> str:
    """Return the cells of one job: waiting, running, and at the end of each run how it ended."""
    wait, full, bad = ("·", "█", "✗") if look.blocks else (".", "#", "x")
    cells: list[tuple[str, State | None]] = [(" ", None)] * room
    for result in results:
        ended = column(result.ended_at_ns or 0)
        started = column(result.started_at_ns) if result.started_at_ns is not None else ended
        if result.submitted_at_ns is not None:
            for at in range(column(result.submitted_at_ns), started):
                if cells[at][0] == " ":
                    cells[at] = (wait, None)
        for at in range(started, ended + 1):
            cells[at] = (full, result.outcome)
        if result.outcome is not State.FINISHED:
            cells[ended] = (bad, result.outcome)
    if not look.colour:
        return "".join(sign for sign, _ in cells)
    out, last = "", None
    for sign, outcome in cells:
        if outcome is not last:
            out += "\x1b[0m" + (f"\x1b[{_COLOURS[outcome]}m" if outcome is not None else "")
            last = outcome
        out += sign
    return out + "\x1b[0m"


def _words(results: Sequence[Result]) -> str:
    """Return how a job ended, and at which run if it took several."""
    if not results:
        return ""
    last = results[-1]
    return f"{last.outcome.value} (run {last.run})" if last.run > 1 else last.outcome.value


def _scale(span_ns: int, room: int, look: Look) -> str:
    """Return the axis: a mark at whole seconds, as many as have room."""
    seconds = span_ns / SECOND_NS
    step = next((each for each in (1, 2, 5, 10, 30, 60, 300, 600, 3600) if room / max(seconds / each, 1) >= 8), 3600)
    cells = ["─" if look.blocks else "-"] * room
    at = 0
    while at <= seconds:
        place = int(at / seconds * room) if seconds else 0
        label = f"{at} s"
        if place + len(label) < room:
            cells[place : place + len(label) + 1] = [("┴" if look.blocks else "+"), *label]
        at += step
    return "".join(cells)
