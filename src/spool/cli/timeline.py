"""Reservations over time as a picture for a terminal: a row for each, time across, now marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from spool.cli import blocks
from spool.core.model import SECOND_NS

_HOUR_NS = 3600 * SECOND_NS
_STEPS_NS = tuple(hours * _HOUR_NS for hours in (1, 2, 3, 6, 12, 24, 48, 168, 336, 720, 8760))
_BEFORE_NS, _AFTER_NS = 12 * _HOUR_NS, 14 * 24 * _HOUR_NS
_TICK = 8  # columns that a label of the scale needs


@dataclass(frozen=True, slots=True)
class Bar:
    """From when to when, and the mark to draw it with: one of the words of MARKS, or a digit."""

    start_at_ns: int
    end_at_ns: int
    mark: str


@dataclass(frozen=True, slots=True)
class Line:
    """One row: what it is called, and its bars."""

    label: str
    bars: Sequence[Bar]


MARKS = {"active": ("█", "#"), "pending": ("░", "+"), "completed": ("·", ".")}
_NOW = ("┃", "|")


def picture(lines: Sequence[Line], now_ns: int, width: int) -> list[str]:
    """Return the rows and, below them, the scale. From 12 hours before now at most, to 14 days after at most."""
    bars = [bar for line in lines for bar in line.bars]
    start = max(min((bar.start_at_ns for bar in bars), default=now_ns), now_ns - _BEFORE_NS)
    end = min(max((bar.end_at_ns for bar in bars), default=now_ns), now_ns + _AFTER_NS)
    start = min(start, now_ns)
    end = max(end, now_ns + _HOUR_NS)
    margin = max((len(line.label) for line in lines), default=0) + 2
    columns = max(width - margin, 20)
    step = max(-(-(end - start) // columns), 1)
    plain = not blocks.can_draw()
    found = []
    for line in lines:
        row = [" "] * columns
        row[(now_ns - start) // step] = _NOW[plain]
        for bar in line.bars:
            mark = MARKS[bar.mark][plain] if bar.mark in MARKS else bar.mark
            first, last = max(bar.start_at_ns - start, 0) // step, -(-(bar.end_at_ns - start) // step)
            for at in range(first, min(max(last, first + 1), columns)):
                if row[at] == " " or bar.mark not in MARKS:
                    row[at] = mark
        found.append(f"{line.label.ljust(margin)}{''.join(row)}".rstrip())
    found.append(" " * margin + _scale(start, step, columns).rstrip())
    return found


def _scale(start_ns: int, step_ns: int, columns: int) -> str:
    """Return the labels below the columns: hours, or days where an hour is too narrow for one."""
    apart = next((each for each in _STEPS_NS if each >= step_ns * _TICK), _STEPS_NS[-1])
    row = [" "] * columns
    offset = datetime.fromtimestamp(start_ns // SECOND_NS).astimezone().utcoffset()
    shift = int(offset.total_seconds()) * SECOND_NS if offset is not None else 0
    at_ns = -(-(start_ns + shift) // apart) * apart - shift  # full hours are those of the local clock
    while at_ns < start_ns + step_ns * columns:
        at = (at_ns - start_ns) // step_ns
        moment = datetime.fromtimestamp(at_ns // SECOND_NS)
        label = f"{moment:%H:%M}" if (moment.hour or moment.minute) and apart < 24 * _HOUR_NS else f"{moment:%b %d}"
        if at + len(label) <= columns:
            row[at : at + len(label)] = label
        at_ns += apart
    return "".join(row)
